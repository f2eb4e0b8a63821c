"""Simulated GPUs: host tensors that report a CUDA device, and a CUDA runtime that keeps the order of streams.

Work on a stream runs only when a thread waits for it, so a missing wait shows as missing data. The test sets the GPU's
clock. A read that blocks the calling thread fails.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

_WAITING = {"item", "cpu", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "equal"}


class OnGpu(torch.Tensor):
    """A host tensor that reports device GPU 1. Non-blocking copies to the host are enqueued on the stream."""

    runtime: SimulatedCuda

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _WAITING:
            raise AssertionError(f"{name} makes the thread wait for the GPU")
        if name == "to" and args[1:] == ("cpu",):
            source, host = args[0], torch.full(args[0].shape, 77, dtype=args[0].dtype)
            assert kwargs.get("non_blocking"), "the thread waits for the GPU"
            cls.runtime.stream().enqueue(lambda: host.copy_(on_host(source)))
            return host
        if name == "_foreach_copy_":
            pairs = [(on_host(target), on_host(source)) for target, source in zip(*args, strict=True)]
            cls.runtime.stream().enqueue(lambda: [target.copy_(source) for target, source in pairs])
            return None
        if name == "copy_" and not isinstance(args[0], OnGpu):
            target, source = args
            assert kwargs.get("non_blocking"), "the thread waits for the GPU"
            cls.runtime.stream().enqueue(lambda: target.copy_(on_host(source)))
            return target
        return super().__torch_function__(func, types, args, kwargs)


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor on the simulated GPU."""
    return tensor.detach().as_subclass(OnGpu)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory as a host tensor, for assertions. Writes to it do not change torch's version counter."""
    return tensor.detach().as_subclass(torch.Tensor).data


def move_to_gpu(module: torch.nn.Module) -> torch.nn.Module:
    """Move all parameters and buffers of ``module`` to the simulated GPU."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            part._parameters[name] = None if parameter is None else torch.nn.Parameter(on_gpu(parameter))
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else on_gpu(buffer)
    return module


class Stream:
    """A queue of work in order. Two streams are equal only if they are the same object."""

    def __init__(self, runtime: SimulatedCuda) -> None:
        self._runtime = runtime
        self._work: deque[Callable[[], object]] = deque()
        self._lock = threading.RLock()

    def enqueue(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def drain(self, done: Callable[[], bool] = lambda: False) -> None:
        """Run the enqueued work until ``done`` returns true."""
        with self._lock:
            while self._work and not done():
                self._work.popleft()()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        stream, number = event.stream, event.number
        self.enqueue(lambda: event.run_until(stream, number))


class Event:
    """A CUDA event. It has happened when its stream has run up to it, and then holds the runtime's time."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timing = enable_timing
        self.stream: Stream | None = None
        self.number = 0
        self.times: dict[int, float] = {}

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or OnGpu.runtime.stream()
        self.number += 1
        number, runtime = self.number, OnGpu.runtime
        self.stream.enqueue(lambda: self.times.setdefault(number, runtime.now))

    def run_until(self, stream: Stream | None, number: int) -> None:
        if stream is not None:
            stream.drain(lambda: number in self.times)

    def query(self) -> bool:
        return self.stream is None or self.number in self.times

    def synchronize(self) -> None:
        OnGpu.runtime.waited.add(threading.current_thread().name)
        self.run_until(self.stream, self.number)

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds between two events."""
        assert self.timing
        assert end.timing
        return (end.times[end.number] - self.times[self.number]) * 1000.0


class SimulatedCuda:
    """The simulated CUDA runtime.

    ``registered``: the thread's GPU at registration, by the address of the page-locked memory. ``waited``: names of the
    threads that waited for a stream.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.code = 0
        self.registered: dict[int, int] = {}
        self.waited: set[str] = set()
        self._of_thread = threading.local()
        self._default: dict[object, Stream] = {}

    def current_device(self) -> int:
        return getattr(self._of_thread, "device", 0)

    def set_device(self, device: torch.device) -> None:
        self._of_thread.device = device.index

    def stream(self) -> Stream:
        """Return the current stream of the calling thread."""
        return getattr(self._of_thread, "stream", None) or self.training

    @property
    def training(self) -> Stream:
        """The default stream of every thread."""
        return self._default.setdefault(None, Stream(self))

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before, self._of_thread.stream = getattr(self._of_thread, "stream", None), stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        assert flags == 1
        if self.code == 0:
            assert address not in self.registered, "cudaErrorHostMemoryAlreadyRegistered"
            self.registered[address] = self.current_device()
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) is not None else 713


def simulate_cuda(monkeypatch: pytest.MonkeyPatch) -> SimulatedCuda:
    """Replace torch's CUDA functions by a simulated runtime until the test ends, with the calling thread on GPU 1."""
    runtime = SimulatedCuda()
    for name, value in {
        "Stream": lambda device: Stream(runtime),
        "Event": Event,
        "current_stream": lambda device=None: runtime.stream(),
        "stream": runtime.on_stream,
        "cudart": lambda: runtime,
        "set_device": runtime.set_device,
        "current_device": runtime.current_device,
        "is_initialized": lambda: True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(OnGpu, "runtime", runtime, raising=False)
    runtime.set_device(torch.device("cuda", 1))
    return runtime
