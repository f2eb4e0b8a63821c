"""GPUs that are not there: host memory that says it lies on one, and a CUDA runtime that keeps streams' order.

Work on a stream is done when somebody waits for it, and not before: so what a thread does not wait for has not come to
pass yet. The GPUs' time is told by the test. A read that would make the calling thread wait is refused.
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
    """Host memory that says it lies on GPU 1. Copies to the host that need not be waited for are left to the stream."""

    runtime: PretendedCuda

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
    """The same memory, on the GPU from here on."""
    return tensor.detach().as_subclass(OnGpu)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """What is really in it, for assertions. A write to it is not counted: torch counts one when it is enqueued."""
    return tensor.detach().as_subclass(torch.Tensor).data


def move(module: torch.nn.Module) -> torch.nn.Module:
    """``module`` with all its parameters and buffers on the GPU."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            part._parameters[name] = None if parameter is None else torch.nn.Parameter(on_gpu(parameter))
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else on_gpu(buffer)
    return module


class Stream:
    """Work in order. Tells itself from another only by identity."""

    def __init__(self, runtime: PretendedCuda) -> None:
        self._runtime = runtime
        self._work: deque[Callable[[], object]] = deque()
        self._lock = threading.RLock()

    def enqueue(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def drain(self, done: Callable[[], bool] = lambda: False) -> None:
        """Does what was enqueued, until ``done``."""
        with self._lock:
            while self._work and not done():
                self._work.popleft()()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        stream, number = event.stream, event.number
        self.enqueue(lambda: event.come(stream, number))


class Event:
    """Has come to pass when its stream has got there; then it knows the runtime's time."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timing = enable_timing
        self.stream: Stream | None = None
        self.number = 0
        self.came: dict[int, float] = {}

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or OnGpu.runtime.stream()
        self.number += 1
        number, runtime = self.number, OnGpu.runtime
        self.stream.enqueue(lambda: self.came.setdefault(number, runtime.now))

    def come(self, stream: Stream | None, number: int) -> None:
        if stream is not None:
            stream.drain(lambda: number in self.came)

    def query(self) -> bool:
        return self.stream is None or self.number in self.came

    def synchronize(self) -> None:
        OnGpu.runtime.waited.add(threading.current_thread().name)
        self.come(self.stream, self.number)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        assert self.timing
        assert end.timing
        return (end.came[end.number] - self.came[self.number]) * 1000.0


class PretendedCuda:
    """``current``: the GPU that each thread acts on, by the thread's name; ``registered``: locked memory, by address,
    and the thread's GPU at that moment; ``waited``: the threads that waited for a stream."""

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
        """What the calling thread enqueues to."""
        return getattr(self._of_thread, "stream", None) or self.training

    @property
    def training(self) -> Stream:
        """The stream that is current where nobody said otherwise."""
        return self._default.setdefault(None, Stream(self))

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before, self._of_thread.stream = getattr(self._of_thread, "stream", None), stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    # --- cudart

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        assert flags == 1
        if self.code == 0:
            assert address not in self.registered, "cudaErrorHostMemoryAlreadyRegistered"
            self.registered[address] = self.current_device()
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) is not None else 713


def pretend(monkeypatch: pytest.MonkeyPatch) -> PretendedCuda:
    """Puts the runtime into torch's place, with the calling thread on GPU 1, until the test is over."""
    runtime = PretendedCuda()
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
