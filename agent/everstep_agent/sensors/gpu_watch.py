"""Read GPUs in a thread of their own, so that one hung call stops neither the host's samples nor the other GPUs.

One thread reads all GPUs, one after the other. When a call of one GPU does not return, its thread is left with it, and
a new thread reads the others. There is never more than one thread for each hung GPU and one for the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import msgspec

from everstep.clock import Clock
from everstep.wire.v1.agent import Gpu
from everstep_agent.drivers.gpu_samples import GpuSample, XidEvent
from everstep_agent.drivers.samples import NvmlState
from everstep_agent.sensors.gpu import Absence, GpuSensor

HANDOVER_S = 1.0
"""Seconds after which another thread reads the other GPUs. A healthy call takes milliseconds. A busy driver may hold
its lock for seconds, and two threads do no harm then."""

IDENTITY_S = 10.0
"""Seconds that the first calls of a GPU may take: without persistence mode, the driver starts the GPU for them."""

PATIENCE_S = 0.5
"""Seconds that a poll waits for the GPUs. Later samples are sent with the next poll."""

FIRST_PATIENCE_S = 10.0
"""Seconds that polls wait until NVML was opened once: a report without the node's GPUs is of little use."""

EVENTS = -1
"""Stands for the wait for events where the index of a GPU is expected."""


class _Worker:
    """A thread that does one piece of work at a time. ``subject`` is the index of the GPU that it is at."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self.is_superseded = False
        self.subject: int | None = None
        self.since = clock.monotonic()
        threading.Thread(target=self._run, name="nvml", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        return self._idle.is_set()

    def start(self, work: Callable[[], None]) -> None:
        self._idle.clear()
        self.begin(None)
        self._work.put(work)

    def wait(self, timeout_s: float) -> bool:
        return self._idle.wait(timeout_s)

    def begin(self, subject: int | None, allowed_s: float = 0.0) -> None:
        """Note that the work on ``subject`` begins, which may take ``allowed_s`` before it counts as late."""
        self.since, self.subject = self._clock.monotonic() + allowed_s, subject

    def _run(self) -> None:
        while not self.is_superseded:
            work = self._work.get()
            try:
                work()
            finally:
                self._idle.set()


class GpuWatch:
    """The GPUs of a sensor, read in threads: a ``GpuDriver``. Its methods are for one thread, and return soon."""

    def __init__(
        self,
        sensor: GpuSensor,
        clock: Clock,
        hang_s: float,
        opening_s: float,
        handover_s: float = HANDOVER_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Watch the GPUs of ``sensor``.

        Args:
            sensor: Reads one GPU at a time; nothing else may use it.
            clock: The clock.
            hang_s: Seconds after which a call that has not returned is a hang, and its GPU's older values are void.
            opening_s: Seconds that opening NVML may take.
            handover_s: Seconds after which another thread reads the other GPUs.
            patience_s: Seconds that a poll waits for the GPUs.
        """
        self._sensor = sensor
        self._clock = clock
        self._hang_s = hang_s
        self._opening_s = opening_s
        self._handover_s = min(handover_s, hang_s)
        self._patience_s = patience_s
        self._worker = _Worker(clock)
        self._stuck: dict[int, _Worker] = {}
        self._samples: dict[str, tuple[float, GpuSample]] = {}
        self._subjects: tuple[str, ...] = ()
        self._events: list[XidEvent] = []
        self._offers_events = True
        self._was_read = False
        self._devices: tuple[Gpu, ...] = ()

    @property
    def devices(self) -> tuple[Gpu, ...]:
        return self._devices

    @property
    def version(self) -> str:
        return self._sensor.driver_version

    @property
    def state(self) -> NvmlState:
        return NvmlState(
            is_open=self._sensor.is_open,
            error=self._sensor.error,
            error_code=self._sensor.error_code,
            busy_with=self.busy_with,
            hung_s=self.hung_s,
        )

    def poll(self) -> tuple[GpuSample, ...]:
        """Return the newest sample of every GPU; see ``GpuSensor.poll``. A hung GPU's sample names the call."""
        patience_s = self._patience_s if self._was_read else max(self._patience_s, FIRST_PATIENCE_S)
        deadline = self._clock.monotonic() + patience_s
        started: _Worker | None = None
        while self._wait_idle(deadline) and started is not self._worker:
            started = self._worker
            self._forget_returned()
            started.start(partial(self._read_all, started))
        now = self._clock.monotonic()
        samples = (self._sample(subject, now) for subject in self._subjects)
        return tuple(sample for sample in samples if sample is not None)

    def close(self) -> tuple[GpuSample, ...]:
        """Close NVML, so that a GPU can be reset or the driver be replaced. Returns samples without values.

        The next poll opens it again. A call that does not return keeps it open.
        """
        deadline = self._clock.monotonic() + self._patience_s
        if self._wait_idle(deadline):
            self._forget_returned()
            if not self._stuck:
                self._samples = {}
                self._worker.start(self._sensor.close)
                self._wait_idle(deadline)
        return tuple(
            GpuSample(
                index=gpu.index,
                pci_bus_id=gpu.pci_bus_id,
                uuid=gpu.uuid,
                error="NVML was let go by order",
                is_closed=True,
            )
            for gpu in self._devices
        )

    def events(self, timeout_s: float) -> list[XidEvent] | None:
        """Wait for NVML events. Returns None, without waiting, if none can be waited for."""
        worker = self._worker
        if EVENTS in self._stuck or not self._offers_events:
            return None
        if worker.is_idle:
            worker.start(partial(self._wait_events, worker, timeout_s))
        worker.wait(timeout_s)
        events, self._events = self._events, []
        return events

    @property
    def busy_with(self) -> str:
        """The work on NVML as a whole that has not ended, or nothing."""
        worker = self._worker
        return "" if worker.is_idle or worker.subject is not None else "nvml initialization"

    @property
    def hung_s(self) -> float:
        """Seconds that NVML as a whole takes longer than it may, 0 if it does not."""
        late_s = self._clock.monotonic() - self._worker.since - self._opening_s
        return max(0.0, late_s) if self.busy_with else 0.0

    # In the watching thread

    def _wait_idle(self, deadline: float) -> bool:
        """Wait until a thread is free, or until the deadline. Returns whether one is."""
        while not self._worker.wait(max(0.0, min(deadline - self._clock.monotonic(), self._handover_s))):
            self._hand_over()
            if self._clock.monotonic() >= deadline:
                return self._worker.is_idle
        return True

    def _hand_over(self) -> None:
        """Leave a thread with the call that does not return, and let a new one go on."""
        worker = self._worker
        subject, late_s = worker.subject, self._clock.monotonic() - worker.since
        if worker.is_idle or subject is None or late_s < self._handover_s:
            return
        worker.is_superseded = True
        self._stuck[subject] = worker
        self._worker = _Worker(self._clock)

    def _forget_returned(self) -> None:
        """Forget the threads whose calls have returned after all."""
        self._stuck = {subject: worker for subject, worker in self._stuck.items() if not worker.is_idle}

    def _sample(self, subject: str, now: float) -> GpuSample | None:
        """Return the newest sample of a GPU, without values if they are too old."""
        if subject not in self._samples:
            return None
        at, sample = self._samples[subject]
        stuck = self._stuck.get(sample.index)
        is_out = stuck is not None and not stuck.is_idle
        late_s = now - stuck.since if stuck is not None and is_out else 0.0
        empty = GpuSample(index=sample.index, pci_bus_id=sample.pci_bus_id, uuid=sample.uuid)
        if late_s >= self._hang_s:
            reason = f"NVML has not answered for {late_s:.0f} s about gpu {sample.index} at {sample.pci_bus_id}"
            return msgspec.structs.replace(empty, error=reason, hung_s=late_s)
        if (is_out and sample.error) or now - at >= 2 * self._hang_s:
            return msgspec.structs.replace(empty, error="NVML has not answered yet", is_closed=True)
        return sample

    # In a worker's thread

    def _read_all(self, worker: _Worker) -> None:
        sensor = self._sensor
        sensor.open_if_due()
        for index in sensor.unidentified:
            if index in self._stuck:
                sensor.accept(index, Absence(index, "NVML does not answer about this GPU", is_silent=True))
                continue
            worker.begin(index, min(IDENTITY_S, self._opening_s / 4))
            found = sensor.identify(index)
            if worker.is_superseded:
                return
            sensor.accept(index, found)
        worker.begin(None)
        sensor.finish_opening()
        self._subjects = sensor.subjects
        self._devices = tuple(sensor.known_gpus.values())
        self._offers_events = True
        samples = []
        for subject in self._subjects:
            asked = sensor.index_of(subject)
            if asked in self._stuck:
                continue
            worker.begin(asked)
            sample = sensor.read(subject)
            if worker.is_superseded:
                return
            self._samples[subject] = self._clock.monotonic(), sample
            samples.append(sample)
        worker.begin(None)
        self._samples = {subject: self._samples[subject] for subject in self._subjects if subject in self._samples}
        self._was_read = True
        if not self._stuck:
            # Closing while a call is out would pull the library away under it.
            sensor.close_if_broken(tuple(samples))

    def _wait_events(self, worker: _Worker, timeout_s: float) -> None:
        worker.begin(EVENTS, timeout_s)
        events = self._sensor.wait_xid_events(timeout_s)
        if worker.is_superseded:
            return
        self._offers_events = events is not None
        self._events += events or []
