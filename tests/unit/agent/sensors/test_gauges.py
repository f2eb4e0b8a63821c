from __future__ import annotations

import msgspec

from everstep.wire.v1.agent import UNKNOWN_MODES, GpuGauges, GpuModes, NetworkAdapter
from everstep_agent.drivers.gpu_samples import GpuSample
from everstep_agent.drivers.samples import PortRole, PortSample
from everstep_agent.sensors.gauges import MAX_POLL_AGE_S, fresh_report, gpu_gauges, gpu_modes, network_adapters
from everstep_agent.sensors.sensor_messages import PollResult, SensorReport
from tests.support.agents.sensors import gpu, with_values

SAMPLE = gpu(
    index=3,
    pci_bus_id="0000:1b:00.0",
    uuid="GPU-3",
    temperature_c=61,
    power_w=644.4567,
    gpu_utilization=0.98765,
    throttle_reasons=0x4 | 0x40,
    ecc_corrected=2,
)


def report(*samples: GpuSample) -> SensorReport:
    return SensorReport(poll=PollResult(is_full=True, gpus=samples), polled_at=100.0)


def test_gauges_are_rounded_and_name_throttling() -> None:
    assert gpu_gauges(report(SAMPLE), 101.0) == (
        GpuGauges(
            index=3,
            temperature_c=61,
            power_w=644.5,
            utilization=0.988,
            throttled_by=("power_cap", "hardware_thermal"),
            ecc_corrected=2,
        ),
    )


def test_gauges_of_a_hanging_sensor_are_not_sent() -> None:
    assert gpu_gauges(report(SAMPLE), 100.0 + MAX_POLL_AGE_S)
    assert gpu_gauges(report(SAMPLE), 100.1 + MAX_POLL_AGE_S) == ()
    assert gpu_gauges(SensorReport(), 1e9) == ()


def test_samples_of_a_hanging_sensor_are_not_exported() -> None:
    fresh = report(SAMPLE)
    assert fresh_report(fresh, 100.0 + MAX_POLL_AGE_S) is fresh
    old = fresh_report(fresh, 100.1 + MAX_POLL_AGE_S)
    (sample,) = old.poll.gpus
    assert (sample.index, sample.uuid, sample.temperatures.temperature_c) == (3, "GPU-3", None)
    assert sample.error
    assert old.polled_at == 100.0


def test_number_that_no_heartbeat_may_have_is_left_out() -> None:
    """A broken GPU may answer with all bits set, and must not make the controller refuse its node's heartbeats."""
    broken = with_values(SAMPLE, ecc_corrected=(1 << 64) - 1, memory_used_bytes=(1 << 64) - 1)
    (gauges,) = gpu_gauges(report(broken), 101.0)
    assert (gauges.ecc_corrected, gauges.memory_used_bytes, gauges.temperature_c) == (None, None, 61)
    assert msgspec.json.decode(msgspec.json.encode(gauges), type=GpuGauges) == gauges


def test_modes_join_those_of_readable_gpus() -> None:
    on = with_values(SAMPLE, ecc_mode=1, mig_mode=0)
    off = with_values(SAMPLE, ecc_mode=0)
    assert gpu_modes([on, off, SAMPLE]) == GpuModes(ecc="off, on", mig="off")
    assert gpu_modes([SAMPLE]) == UNKNOWN_MODES


def test_adapters_are_known_rdma_boards_of_the_fabric() -> None:
    identity = {"board": "MT_0000000838", "firmware": "28.39.1002", "pci_bus_id": "0000:1a:00.0"}
    port = PortSample(
        name="mlx5_0/1", kind="infiniband", up=True, was_up=True, role=PortRole.COMPUTE, identity=identity
    )
    others = (
        msgspec.structs.replace(port, name="mlx5_1/1"),
        msgspec.structs.replace(port, role=PortRole.VIRTUAL, identity=identity | {"firmware": "1"}),
        msgspec.structs.replace(port, identity={"board": "MT_0000000838"}),
    )
    assert network_adapters([port, *others]) == (NetworkAdapter(board="MT_0000000838", firmware="28.39.1002"),)
