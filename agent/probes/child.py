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
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from agent.probes.arithmetic import row, store_address
from agent.probes.checks import Doing, ProbeFault, Rows, WrongResult, compute, memory, synchronize
from agent.probes.frames import MAX_FRAME_BYTES, Ask, Ready, Stage
from everstep.errors import ConfigurationError
from everstep.framing import FrameDecoder, encode_frame
from everstep.lineage import die_with_parent
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import ProbeKind
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import ProbeFinished

dist: Any = torch.distributed
"""Its stubs do not export what its documentation does."""

LISTEN_BACKLOG = 64
LEAST_TIMEOUT_S = 0.1


def run_probe(ask: Ask, doing: Doing) -> ProbeFinished:
    """Takes part; a failure is an answer too. What fails before the first word of what it is doing could not be run."""
    probe, began = ask.probe, False

    def begun(what: str) -> None:
        nonlocal began
        began = True
        doing(what)

    try:
        return ProbeFinished(probe=probe.probe, ok=True, rows=_work(ask, begun), began=True)
    except (ProbeFault, ConfigurationError, ValueError, OSError, RuntimeError) as error:
        # torch reports a peer that vanished, a time-out or a CUDA fault as RuntimeError or one of its children.
        detail = f"{type(error).__name__}: {error}"[:2000]
        wrong = isinstance(error, WrongResult)
        return ProbeFinished(probe=probe.probe, ok=False, detail=detail, wrong=wrong, began=began)


def _work(ask: Ask, doing: Doing) -> Rows:
    """What the probe's kind asks for. A controller from before there were kinds means a product by one node."""
    probe = ask.probe
    if probe.kind is ProbeKind.MEMORY:
        return memory(probe, doing)
    if probe.kind is ProbeKind.COMPUTE or len(probe.nodes) == 1:
        return compute(probe, doing)
    return all_reduce(ask, doing)


# --- between nodes ---


def all_reduce(ask: Ask, doing: Doing) -> Rows:
    """Median times of a sum over all nodes, for each size; every sum is checked. Raises what torch raises."""
    probe, rank, left = ask.probe, ask.probe.nodes.index(ask.node), _left(ask)
    device = _device(probe.backend)
    listener = None if rank else _listener(probe)
    doing("meeting the others at the store")
    store = dist.PrefixStore(probe.probe, _store(probe, listener, left))
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


def _listener(probe: RunProbe) -> socket.socket:
    host, port = store_address(probe)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise ProbeFault(f"cannot host the store at {host}:{port}: {error.strerror}; probe again") from error
    return listener


def _store(probe: RunProbe, listener: socket.socket | None, left: timedelta) -> Any:
    host, port = store_address(probe)
    if listener is None:
        return dist.TCPStore(host, port, len(probe.nodes), False, timeout=left, wait_for_workers=False)
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
        synchronize(device)
        begun = time.perf_counter()
        group.allreduce([tensor]).wait()
        synchronize(device)
        if attempt:  # the first one opens connections
            times.append(time.perf_counter() - begun)
        wrong = int((tensor != members * (members + 1) / 2).sum())
        if wrong:
            raise WrongResult(f"the sum of {size} bytes is wrong in {wrong} of {tensor.numel()} places")
    return times


# --- the process ---


def serve(channel: socket.socket) -> None:
    """Answers until the supervisor hangs up, or CUDA has been used."""
    decoder: FrameDecoder[Ask] = FrameDecoder(Ask, MAX_FRAME_BYTES)

    def doing(what: str) -> None:
        channel.sendall(encode_frame(Stage(doing=what)))

    channel.sendall(encode_frame(Ready()))
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
