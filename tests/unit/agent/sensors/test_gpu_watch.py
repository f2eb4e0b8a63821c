from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pynvml
import pytest

from everstep.system_clock import SYSTEM_CLOCK
from everstep_agent.drivers.gpu_samples import GpuSample, XidEvent
from everstep_agent.sensors.gpu import GpuSensor
from everstep_agent.sensors.gpu_driver import GpuDriver
from everstep_agent.sensors.gpu_watch import GpuWatch
from everstep_agent.virtual.scenario import VirtualMachine
from tests.support.agents.sensors import Control

DEADLINE_S = 60.0
Samples = tuple[GpuSample, ...]


@pytest.fixture(autouse=True)
def calls_end(machine: VirtualMachine, control: Control) -> Iterator[None]:
    """End hung calls after the test, and wait for the threads that made them."""
    yield
    control.write()
    machine.reload_control()


def watch_of(machine: VirtualMachine, hang_s: float = 0.2) -> GpuWatch:
    sensor = GpuSensor(slow_every=1, set_activity=lambda activity: None, on_bus=machine.pci_gpus)
    return GpuWatch(sensor, SYSTEM_CLOCK, hang_s=hang_s, opening_s=0.4, handover_s=0.05, patience_s=0.05)


def until(watch: GpuWatch, condition: Callable[[Samples], bool]) -> Samples:
    """Poll until the samples meet the condition."""
    give_up_at = SYSTEM_CLOCK.monotonic() + DEADLINE_S
    while not condition(samples := watch.poll()):
        assert SYSTEM_CLOCK.monotonic() < give_up_at, samples
    return samples


def nvml_threads() -> int:
    return sum(thread.name == "nvml" for thread in threading.enumerate())


def test_hung_gpu_costs_one_thread_and_no_other_gpu(machine: VirtualMachine, control: Control) -> None:
    before = nvml_threads()
    watch = watch_of(machine)
    until(watch, lambda samples: len(samples) == 8 and nvml_threads() == before + 1)
    control.write(gpus={"1": {"hang": True}, "2": {"calls": {"nvmlDeviceGetPowerUsage": {"hang": True}}}})
    machine.reload_control()
    samples = until(watch, lambda samples: sum(sample.hung_s > 0 for sample in samples) == 2)
    for sample in samples[1:3]:
        assert (sample.temperatures.temperature_c, sample.unreadable, sample.lost) == (None, 0, False)
        assert f"about gpu {sample.index} at {sample.pci_bus_id}" in sample.error
    others = {str(index): {"temperature_c": 77} for index in (0, 3, 4, 5, 6, 7)}
    control.write(gpus=others | {"1": {"hang": True}, "2": {"hang": True}})
    machine.reload_control()
    until(watch, lambda samples: sum(sample.temperatures.temperature_c == 77 for sample in samples) == 6)
    until(watch, lambda samples: nvml_threads() == before + 3)
    control.write()
    machine.reload_control()
    samples = until(watch, lambda samples: not any(sample.error for sample in samples))
    assert {sample.hung_s for sample in samples} == {0.0}
    until(watch, lambda samples: nvml_threads() == before + 1)


def test_gpu_that_hangs_at_the_start_is_named(machine: VirtualMachine, control: Control) -> None:
    control.write(gpus={"3": {"hang": True}})
    machine.reload_control()
    watch = watch_of(machine)

    def fourth_alone_is_named(samples: Samples) -> bool:  # a busy machine may delay the others for a moment
        hung = [sample.pci_bus_id for sample in samples if sample.error and sample.hung_s > 0]
        return len(samples) == 8 and hung == ["0000:61:00"]

    until(watch, fourth_alone_is_named)
    control.write()
    machine.reload_control()
    until(watch, lambda samples: not any(sample.error for sample in samples))
    assert len(watch.devices) == 8


def test_nvml_is_let_go_and_opened_again(machine: VirtualMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: closed.append(True))
    watch = watch_of(machine)
    watch.poll()
    samples = watch.close()
    assert closed == [True]
    values = [(sample.temperatures.temperature_c, sample.unreadable, sample.lost) for sample in samples]
    assert values == [(None, 0, False)] * 8
    watch.close()
    until(watch, lambda samples: not any(sample.error for sample in samples))


def test_nvml_stays_open_while_a_call_is_out(
    machine: VirtualMachine, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: closed.append(True))
    watch = watch_of(machine)
    watch.poll()
    control.write(gpus={"1": {"hang": True}})
    machine.reload_control()
    until(watch, lambda samples: samples[1].hung_s > 0)
    watch.close()
    assert not closed


def test_slow_call_is_no_hang(machine: VirtualMachine, control: Control) -> None:
    watch = watch_of(machine, hang_s=DEADLINE_S)
    watch.poll()
    control.write(gpus={"1": {"calls": {"nvmlDeviceGetUUID": {"delay_s": 0.01}}}})
    machine.reload_control()
    for _ in range(5):
        assert not any(sample.error for sample in watch.poll())


def test_events_are_waited_for_beside_a_hung_gpu(machine: VirtualMachine, control: Control) -> None:
    watch = watch_of(machine)
    watch.poll()
    control.write(gpus={"1": {"hang": True}})
    machine.reload_control()
    until(watch, lambda samples: samples[1].hung_s > 0)
    control.write(gpus={"1": {"hang": True}, "0": {"xid": 48}})
    events: list[XidEvent] = []
    give_up_at = SYSTEM_CLOCK.monotonic() + DEADLINE_S
    while not events:
        assert SYSTEM_CLOCK.monotonic() < give_up_at
        watch.poll()
        events = watch.events(1.0) or []
    assert [(event.pci_bus_id, event.xid) for event in events] == [("0000:1b:00", 48)]


def test_nvml_is_a_gpu_driver(machine: VirtualMachine) -> None:
    watch = watch_of(machine)
    driver: GpuDriver = watch
    assert (driver.devices, driver.version) == ((), "")
    until(watch, lambda samples: len(samples) == 8)
    assert ([gpu.uuid for gpu in driver.devices], driver.version) == ([g.uuid for g in machine.gpus], "570.133.20")
    assert (driver.state.is_open, driver.state.error, driver.state.error_code) == (True, "", 0)
