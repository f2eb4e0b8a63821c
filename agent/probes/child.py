"""The probe process: the only part of the agent that imports torch. Started at the first probe, warm after it.

Started as ``python -m agent.probes.child SOCKET_FD PARENT_PID``. It answers one ``Ask`` after another. Once a probe
has used CUDA the process ends with its answer, so that no context holds memory or stands in the way of a GPU reset.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
import xxhash

from agent.probes.arithmetic import row, store_address
from agent.probes.frames import MAX_FRAME_BYTES, Ask, Stage
from everstep.errors import ConfigurationError
from everstep.framing import FrameDecoder, encode_frame
from everstep.lineage import die_with_parent
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import ProbeFinished

dist: Any = torch.distributed
"""Its stubs do not export what its documentation does."""

LISTEN_BACKLOG = 64
MATMUL_SIZE_CPU = 512
MATMUL_SIZE_CUDA = 8192
MATMUL_SEED = 20_240_607
LEAST_TIMEOUT_S = 0.1

Rows = tuple[tuple[int, float, float], ...]
Doing = Callable[[str], None]


class ProbeFault(Exception):
    """A probe found something wrong; the message says what."""


def run_probe(ask: Ask, doing: Doing) -> ProbeFinished:
    """Takes part; a failure is an answer too."""
    probe = ask.probe
    try:
        rows = compute(probe, doing) if len(probe.nodes) == 1 else all_reduce(ask, doing)
        return ProbeFinished(probe=probe.probe, ok=True, rows=rows)
    except (ProbeFault, ConfigurationError, ValueError, OSError, RuntimeError) as error:
        # torch reports a peer that vanished, a time-out or a CUDA fault as RuntimeError or one of its children.
        return ProbeFinished(probe=probe.probe, ok=False, detail=f"{type(error).__name__}: {error}"[:2000])


# --- between nodes ---


def all_reduce(ask: Ask, doing: Doing) -> Rows:
    """Median times of a sum over all nodes, for each size; every sum is checked. Raises what torch raises."""
    probe, rank, left = ask.probe, ask.probe.nodes.index(ask.node), _left(ask)
    doing("meeting the others at the store")
    store = dist.PrefixStore(probe.probe, _store(probe, rank, left))
    device = _device(probe.backend)
    doing("connecting to the others")
    group = _group(probe, store, rank, left, device)
    rows = []
    for size in probe.sizes:
        doing(f"all-reduce of {size} bytes")
        rows.append(row(len(probe.nodes), size, _times(group, probe, size, rank, device)))
    doing("waiting for the others to finish")
    # The first node hosts the store: it must not leave while others still read from it.
    store.set(f"done/{rank}", "1")
    if rank == 0:
        store.wait([f"done/{other}" for other in range(len(probe.nodes))])
    return tuple(rows)


def _left(ask: Ask) -> timedelta:
    return timedelta(seconds=max(LEAST_TIMEOUT_S, ask.deadline - SYSTEM_CLOCK.monotonic()))


def _store(probe: RunProbe, rank: int, left: timedelta) -> Any:
    host, port = store_address(probe)
    if rank:
        return dist.TCPStore(host, port, len(probe.nodes), False, timeout=left, wait_for_workers=False)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise ProbeFault(f"cannot host the store at {host}:{port}: {error.strerror}; probe again") from error
    return dist.TCPStore(
        host,
        port,
        len(probe.nodes),
        True,
        timeout=left,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _device(backend: str) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    if backend != "nccl":
        raise ProbeFault(f"no backend {backend!r}: probes know gloo and nccl")
    if not torch.cuda.is_available():
        raise ProbeFault("the nccl backend needs CUDA, and torch finds none here; probe with gloo")
    return torch.device("cuda", 0)


def _group(probe: RunProbe, store: Any, rank: int, left: timedelta, device: torch.device) -> Any:
    world = len(probe.nodes)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = left
        torch.cuda.set_device(device)
        return dist.ProcessGroupNCCL(store, rank, world, options)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(*store_address(probe)))]
    gloo._timeout = left
    return dist.ProcessGroupGloo(store, rank, world, gloo)


def _own_address(host: str, port: int) -> str:
    """This node's address on the way to the store: the network that the nodes share."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _times(group: Any, probe: RunProbe, size: int, rank: int, device: torch.device) -> list[float]:
    members = len(probe.nodes)
    tensor = torch.empty(max(1, size // 4), dtype=torch.float32, device=device)
    times = []
    for attempt in range(probe.repeats + 1):
        tensor.fill_(float(rank + 1))
        _synchronize(device)
        begun = time.perf_counter()
        group.allreduce([tensor]).wait()
        _synchronize(device)
        if attempt:  # the first one opens connections
            times.append(time.perf_counter() - begun)
        wrong = int((tensor != members * (members + 1) / 2).sum())
        if wrong:
            raise ProbeFault(f"the sum of {size} bytes is wrong in {wrong} of {tensor.numel()} places")
    return times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- one node ---


def compute(probe: RunProbe, doing: Doing) -> Rows:
    """The same product again and again, on every GPU (or the CPU): equal inputs must give equal bytes.

    Rows: bytes of the product, median seconds, and 0 for the bandwidth. Raises ProbeFault for unequal digests.
    """
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]
    digests: dict[str, int] = {}
    rows = []
    for device in devices:
        doing(f"matrix products on {device}")
        seen, times, size = _products(device, max(2, probe.repeats))
        if len(seen) > 1:
            raise ProbeFault(
                f"{device} computes differently from one time to the next: {len(seen)} results of one product"
            )
        digests[str(device)] = seen.pop()
        rows.append(row(1, size, times))
    if len(set(digests.values())) > 1:
        raise ProbeFault(f"GPUs of this node disagree about one product: {_groups(digests)}")
    return tuple(rows)


def _products(device: torch.device, repeats: int) -> tuple[set[int], list[float], int]:
    size = MATMUL_SIZE_CUDA if device.type == "cuda" else MATMUL_SIZE_CPU
    generator = torch.Generator().manual_seed(MATMUL_SEED)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    digests, times, product = set(), [], left
    for _ in range(repeats):
        begun = time.perf_counter()
        product = left @ right
        _synchronize(device)
        times.append(time.perf_counter() - begun)
        digests.add(xxhash.xxh3_64_intdigest(product.cpu().view(torch.uint8).numpy().data))
    return digests, times, product.numel() * product.element_size()


def _groups(digests: dict[str, int]) -> str:
    return ", ".join(f"{device}: {digest:016x}" for device, digest in digests.items())


# --- the process ---


def serve(channel: socket.socket) -> None:
    """Answers until the supervisor hangs up, or CUDA has been used."""
    decoder: FrameDecoder[Ask] = FrameDecoder(Ask, MAX_FRAME_BYTES)

    def doing(what: str) -> None:
        channel.sendall(encode_frame(Stage(doing=what)))

    while data := channel.recv(1 << 16):
        for ask in decoder.feed(data):
            channel.sendall(encode_frame(run_probe(ask, doing)))
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                return


def main() -> None:
    descriptor, parent = map(int, sys.argv[1:3])
    die_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor decides
    os.nice(5)
    torch.set_num_threads(1)
    try:
        serve(socket.socket(fileno=descriptor))
    except (BrokenPipeError, ConnectionResetError):
        return


if __name__ == "__main__":
    main()
