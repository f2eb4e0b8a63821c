"""The probe process: the only part of the agent that imports torch.

Started at the first probe as ``python -m everstep_agent.probes.child SOCKET_FD PARENT_PID``, and kept for later ones.
It answers one ``ProbeRequest`` after another. A process that has used CUDA ends after its answer, so that no context
holds memory or prevents a GPU reset.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from everstep.errors import ConfigurationError
from everstep.host.parent_process import die_with_parent
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import ProbeKind
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.local import WrongProduct
from everstep.wire.v1.training import ProbeFinished
from everstep_agent.probes.probe_messages import (
    MAX_FRAME_BYTES,
    ProbeRequest,
    ProbeStage,
    TorchLoaded,
    result_row,
    store_address,
)

# Checks on one node with known results: matrix products, and patterns in memory.
#
# The products are exact in any order of summation: small integers, whose sums stay below 2**24, the last integer that a
# single-precision float counts to. So the result does not depend on the kernel, the library or the number of partial
# sums, and one wrong element is a wrong computation. Tensor cores take such operands in TF32 without rounding.

TILE = 64
MAX_OPERAND = 8
"""Largest absolute value of an operand: 64 * 8 * 8192 is 2**22."""
MATMUL_SIZE_CPU = 512
MATMUL_SIZE_CUDA = 8192
MATMUL_SEED = 20_240_607
RETRIES = 2
"""How often each device tries a product again that training got wrong."""
SPARE_S = 5.0
"""Seconds before a probe's deadline in which no product is begun any more."""
REPETITIONS_AT_ONCE = 256
"""Repetitions of a small product that are compared at once, in float64: this bounds the memory of a comparison."""

MEMORY_CPU_BYTES = 64 << 20
"""Bytes of host memory to test: enough to leave its caches, little enough beside a job."""
MEMORY_CUDA_SHARE = 0.5
"""Share of a GPU's free memory to test."""
MEMORY_CHUNK_BYTES = 256 << 20
PATTERNS = (0, -1, 0x5555555555555555, -0x5555555555555556)
"""All zeros, all ones, and every second bit either way; addresses follow."""

ProbeRows = tuple[tuple[int, float, float], ...]
SetStage = Callable[[str], None]


class ProbeError(Exception):
    """A probe could not be done; the message gives the reason."""


class WrongResult(ProbeError):
    """A probe was done with a wrong result; the message gives the place."""


def devices() -> list[torch.device]:
    """Return every GPU, or the CPU if there is none."""
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [torch.device("cpu")]


def synchronize(device: torch.device) -> None:
    """Wait for the work started on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Matrix products


def check_matmul(probe: RunProbe, set_stage: SetStage) -> ProbeRows:
    """Compute the same product several times on each device: bytes of the product, median seconds, no bandwidth."""
    return tuple(_check_device_matmul(device, max(2, probe.repeats), set_stage) for device in devices())


def _check_device_matmul(device: torch.device, repeats: int, set_stage: SetStage) -> tuple[int, float, float]:
    size = MATMUL_SIZE_CUDA if device.type == "cuda" else MATMUL_SIZE_CPU
    set_stage(f"matrix products on {device}")
    left, right, known = known_product(size, device)
    torch.backends.cuda.matmul.allow_tf32 = True
    times = []
    for attempt in range(repeats):
        started_at = time.perf_counter()
        product = left @ right
        synchronize(device)
        times.append(time.perf_counter() - started_at)
        _compare(product, known, f"product {attempt + 1} of {repeats} on {device}")
    return result_row(1, known.numel() * known.element_size(), times)


def known_product(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two matrices and their product, computed in integers by the CPU from one tile of each. Each row and column
    has its own sign, so that no two tiles are equal."""
    generator = torch.Generator().manual_seed(MATMUL_SEED)
    one, other = (torch.randint(-MAX_OPERAND, MAX_OPERAND + 1, (TILE, TILE), generator=generator) for _ in range(2))
    signs = (torch.randint(0, 2, (size,), generator=generator) * 2 - 1 for _ in range(2))
    rows, columns = (sign.to(device, torch.float32) for sign in signs)
    times = size // TILE
    left, right, known = (
        tile.to(device, torch.float32).repeat(times, times) for tile in (one, other, one @ other * times)
    )
    return left * rows[:, None], right * columns[None, :], known * rows[:, None] * columns[None, :]


def _compare(found: torch.Tensor, known: torch.Tensor, description: str) -> None:
    if torch.equal(found, known):
        return
    wrong = (found != known).nonzero()
    place = wrong[0].tolist()
    raise WrongResult(
        f"{description} is wrong in {len(wrong)} of {known.numel()} places, first at {place}: "
        f"{found[tuple(place)].item():.9g} instead of {known[tuple(place)].item():.9g}"
    )


# Products that training computed wrongly
#
# The operands that went wrong are repeated until the product is as large as a known one, so that each part of the
# device multiplies them. The right result comes from the host, in float64.


def retry_wrong_products(products: Sequence[WrongProduct], deadline: float, set_stage: SetStage) -> None:
    """Compute products on each device that ranks of this node computed wrongly, the newest first.

    Stops before the probe's deadline, and leaves out what does not fit into a device's memory: neither is an error of
    the device. Raises WrongResult.
    """
    for product, device in itertools.product(reversed(products), devices()):
        for _ in range(RETRIES):
            if SYSTEM_CLOCK.monotonic() > deadline - SPARE_S:
                return
            with contextlib.suppress(torch.OutOfMemoryError):
                retry_wrong_product(product, device, set_stage)


def retry_wrong_product(product: WrongProduct, device: torch.device, set_stage: SetStage) -> None:
    """Compute a product on a device that a rank of this node computed wrongly. Raises WrongResult."""
    dtype: torch.dtype = getattr(torch, product.dtype)
    left = torch.frombuffer(bytearray(product.left), dtype=dtype).view(product.rows, product.inner)
    right = torch.frombuffer(bytearray(product.right), dtype=dtype).view(product.inner, product.columns)
    expected = left.double() @ right.double()
    allowed = _rounding_bound(product, left, right, expected)
    if allowed is None:
        return
    set_stage(f"{product.work} again on {device}")
    torch.backends.cuda.matmul.allow_tf32 = product.allows_tf32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    size = MATMUL_SIZE_CUDA if device.type == "cuda" else MATMUL_SIZE_CPU
    size = min(size, math.isqrt(size**3 // product.inner))  # no more operations than for a known product
    down, across = max(1, size // product.rows), max(1, size // product.columns)
    repetitions = _multiply(left.to(device).repeat(down, 1), right.to(device).repeat(1, across))
    low, high = (bound.to(device).repeat(1, across) for bound in (expected - allowed, expected + allowed))
    _check_repeated(repetitions.view(down, product.rows, -1), low, high, product.work, device)


def _rounding_bound(
    product: WrongProduct, left: torch.Tensor, right: torch.Tensor, expected: torch.Tensor
) -> torch.Tensor | None:
    """Return the largest error of each element that rounding explains, or None if a partial sum may overflow.

    It is (K u + u') sum |a| |b| for the sum, ``u`` for the result, and the smallest normal number for each operand that
    a device may take for zero. ``u'``: operands cut off to TF32. Source: Higham, Accuracy and Stability of Numerical
    Algorithms, section 3.1.
    """
    is_tf32 = product.allows_tf32 and product.dtype == "float32"
    wide = torch.finfo(torch.float64 if product.dtype == "float64" else torch.float32)
    own = torch.finfo(left.dtype)
    a, b = left.double().abs(), right.double().abs()
    terms = a @ b
    flushed = own.tiny * (a.sum(1, keepdim=True) + b.sum(0, keepdim=True) + product.inner)
    share = product.inner * wide.eps + (2.0**-9 if is_tf32 else 0.0)
    allowed = share * terms + own.eps * expected.abs() + flushed
    fits = (terms + allowed < wide.max).all() & (expected.abs() + allowed < own.max).all()
    return allowed if bool(fits) and max(a.max(), b.max()) < own.max / 2 else None


def _multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left @ right


def _check_repeated(
    found: torch.Tensor, low: torch.Tensor, high: torch.Tensor, work: str, device: torch.device
) -> None:
    """Compare each repetition of a product with its limits.

    Args:
        found: Repetitions x rows x columns.
        low: Rows x columns.
        high: Rows x columns.
        work: The product, in words.
        device: Where it was computed.
    """
    parts = torch.split(found, REPETITIONS_AT_ONCE)
    wrong = sum(int((~((part >= low) & (part <= high))).sum()) for part in parts)
    if wrong:
        raise WrongResult(
            f"{work}, which training got wrong on this node, is wrong again in {wrong} of {found.numel()} places on "
            f"{device}"
        )


# Memory


def check_memory(_probe: RunProbe, set_stage: SetStage) -> ProbeRows:
    """Write patterns to each device's memory and read them back: bytes, seconds, bytes per second moved."""
    return tuple(_check_device_memory(device, set_stage) for device in devices())


def _check_device_memory(device: torch.device, set_stage: SetStage) -> tuple[int, float, float]:
    on_gpu = device.type == "cuda"
    size = int(torch.cuda.mem_get_info(device)[0] * MEMORY_CUDA_SHARE) if on_gpu else MEMORY_CPU_BYTES
    set_stage(f"patterns in {size >> 20} MiB of {device}")
    parts = [max(8, min(size - at, MEMORY_CHUNK_BYTES)) for at in range(0, size, MEMORY_CHUNK_BYTES)]
    chunks = [torch.empty(part // 8, dtype=torch.int64, device=device) for part in parts]
    started_at = time.perf_counter()
    for pattern in PATTERNS:
        for chunk in chunks:
            chunk.fill_(pattern)
        for chunk in chunks:
            _check_words(chunk, pattern, device, f"pattern {pattern & (1 << 64) - 1:#018x}")
    _check_addresses(chunks, device)
    synchronize(device)
    seconds = time.perf_counter() - started_at
    moved = 2 * (len(PATTERNS) + 1) * size
    return size, seconds, moved / seconds


def _check_words(chunk: torch.Tensor, written: int | torch.Tensor, device: torch.device, description: str) -> None:
    if wrong := int((chunk != written).sum()):
        raise WrongResult(f"{wrong} words of {device}'s memory do not hold {description}")


def _check_addresses(chunks: list[torch.Tensor], device: torch.device) -> None:
    """Write each word's own number into it, to find addresses that coincide."""
    ends = list(itertools.accumulate(chunk.numel() for chunk in chunks))
    for chunk, end in zip(chunks, ends, strict=True):
        torch.arange(end - chunk.numel(), end, out=chunk)
    for chunk, end in zip(chunks, ends, strict=True):
        _check_words(chunk, torch.arange(end - chunk.numel(), end, device=device), device, "their own number")


dist: Any = torch.distributed
"""torch.distributed; its stubs do not export what its documentation does."""

LISTEN_BACKLOG = 64
MIN_TIMEOUT_S = 0.1


def run_probe(request: ProbeRequest, set_stage: SetStage) -> ProbeFinished:
    """Take part in a probe. A failure is an answer too; one before the first stage means that the probe could not
    run."""
    probe, has_started = request.probe, False

    def report_stage(stage: str) -> None:
        nonlocal has_started
        has_started = True
        set_stage(stage)

    try:
        return ProbeFinished(probe=probe.probe, ok=True, rows=_run(request, report_stage), started=True)
    except (ProbeError, ConfigurationError, ValueError, OSError, RuntimeError) as error:
        # torch reports a vanished peer, a time-out or a CUDA fault as RuntimeError or a subclass.
        detail = f"{type(error).__name__}: {error}"[:2000]
        wrong = isinstance(error, WrongResult)
        return ProbeFinished(probe=probe.probe, ok=False, detail=detail, wrong_result=wrong, started=has_started)


def _run(request: ProbeRequest, set_stage: SetStage) -> ProbeRows:
    """Run the check for the probe's kind; one node alone computes a product."""
    probe = request.probe
    if probe.kind is ProbeKind.MEMORY:
        return check_memory(probe, set_stage)
    if probe.kind is ProbeKind.COMPUTE or len(probe.nodes) == 1:
        rows = check_matmul(probe, set_stage)
        retry_wrong_products(request.products, request.deadline, set_stage)
        return rows
    return check_all_reduce(request, set_stage)


# Checks between nodes


def check_all_reduce(request: ProbeRequest, set_stage: SetStage) -> ProbeRows:
    """Return the median times of a sum over all nodes, for each size; every sum is checked. Raises torch's errors."""
    probe, rank = request.probe, request.probe.nodes.index(request.node)
    left = timedelta(seconds=max(MIN_TIMEOUT_S, request.deadline - SYSTEM_CLOCK.monotonic()))
    device = _backend_device(probe.backend)
    listener = None if rank else _open_store_listener(probe)
    set_stage("connecting to the store")
    store = dist.PrefixStore(probe.probe, _open_store(probe, listener, left))
    set_stage("connecting to the other nodes")
    group = _create_process_group(probe, store, rank, left, device)
    rows = []
    for size in probe.sizes:
        set_stage(f"all-reduce of {size} bytes")
        rows.append(result_row(len(probe.nodes), size, _time_all_reduce(group, probe, size, rank, device)))
    set_stage("waiting for the other nodes to finish")
    # The first node hosts the store: it must not leave while others still read from it.
    store.set(f"done/{rank}", "1")
    if rank == 0:
        store.wait([f"done/{other}" for other in range(len(probe.nodes))])
    return tuple(rows)


def _open_store_listener(probe: RunProbe) -> socket.socket:
    host, port = store_address(probe)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise ProbeError(f"cannot host the store at {host}:{port}: {error.strerror}; start the probe again") from error
    return listener


def _open_store(probe: RunProbe, listener: socket.socket | None, timeout: timedelta) -> Any:
    host, port = store_address(probe)
    hosting = {} if listener is None else {"master_listen_fd": listener.detach()}
    world = len(probe.nodes)
    return dist.TCPStore(host, port, world, bool(hosting), timeout=timeout, wait_for_workers=False, **hosting)


def _backend_device(backend: str) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    if backend != "nccl":
        raise ProbeError(f"unknown backend {backend!r}: probes support gloo and nccl")
    if not torch.cuda.is_available():
        raise ProbeError("the nccl backend needs CUDA, which torch does not find on this node; use gloo")
    return torch.device("cuda", 0)


def _create_process_group(probe: RunProbe, store: Any, rank: int, timeout: timedelta, device: torch.device) -> Any:
    world = len(probe.nodes)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        torch.cuda.set_device(device)
        return dist.ProcessGroupNCCL(store, rank, world, options)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(*store_address(probe)))]
    gloo._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, world, gloo)


def _own_address(host: str, port: int) -> str:
    """Return this node's address on the route to the store: the network that the nodes share."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _time_all_reduce(group: Any, probe: RunProbe, size: int, rank: int, device: torch.device) -> list[float]:
    members = len(probe.nodes)
    tensor = torch.empty(max(1, size // 4), dtype=torch.float32, device=device)
    times = []
    for attempt in range(probe.repeats + 1):
        tensor.fill_(float(rank + 1))
        synchronize(device)
        started_at = time.perf_counter()
        group.allreduce([tensor]).wait()
        synchronize(device)
        if attempt:  # the first attempt opens connections
            times.append(time.perf_counter() - started_at)
        wrong = int((tensor != members * (members + 1) / 2).sum())
        if wrong:
            raise WrongResult(f"the sum of {size} bytes is wrong in {wrong} of {tensor.numel()} places")
    return times


# Process


def serve(channel: socket.socket) -> None:
    """Answer requests until the supervisor disconnects or CUDA has been used."""
    decoder: FrameDecoder[ProbeRequest] = FrameDecoder(ProbeRequest, MAX_FRAME_BYTES)

    def report_stage(stage: str) -> None:
        channel.sendall(encode_frame(ProbeStage(description=stage)))

    channel.sendall(encode_frame(TorchLoaded()))
    while data := channel.recv(1 << 16):
        for request in decoder.feed(data):
            channel.sendall(encode_frame(run_probe(request, report_stage)))
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
