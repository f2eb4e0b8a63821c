from __future__ import annotations

from typing import Any

import pytest

from everstep_agent.drivers.gpu_samples import GpuSample, LinkSample
from everstep_agent.sensors.gpu import REOPEN_EVERY, GpuSensor
from everstep_agent.sensors.nvlinks import decode_ber
from everstep_agent.virtual.scenario import VirtualMachine
from tests.support.agents.sensors import BUS, Control, TimedAssessor, gpu, with_values


def sample_of(machine: VirtualMachine, control: Control, **change: Any) -> GpuSample:
    control.write(gpus={"0": change})
    machine.reload_control()
    return GpuSensor(slow_every=1, set_activity=lambda activity: None).poll()[0]


def test_counters_of_hopper_are_read_for_each_link(machine: VirtualMachine, control: Control) -> None:
    sample = sample_of(machine, control, links={"7": {"errors": 5, "recoveries": 2}, "17": {"recovery_failures": 1}})
    assert [link.link for link in sample.nvlink.links] == list(range(18))
    assert {link.link: link.errors for link in sample.nvlink.links if link.errors} == {7: 7}
    assert [link.recovery_failures for link in sample.nvlink.links] == [0] * 17 + [1]
    assert (sample.nvlink.nvlinks, sample.nvlink.nvlink_errors, sample.nvlink.nvlink_recovery_failures) == (18, 7, 1)
    assert sample.nvlink.links[7].symbol_ber is None
    assert sample.nvlink.links[7].discards is None
    assert sample.failed_values == 0


def test_counters_of_blackwell_take_the_place_of_the_old(machine: VirtualMachine, control: Control) -> None:
    counts = {"errors": 5, "recoveries": 2, "recovery_failures": 1, "discards": 4, "symbol_errors": 3}
    link = {**counts, "raw_errors": 900, "ber": [3, -9], "repaired_symbols": 6}
    sample = sample_of(machine, control, nvlink_version=5, links={"7": link})
    rate = decode_ber(0x309)
    assert rate == pytest.approx(3e-9)
    assert sample.nvlink.links[7] == LinkSample(
        link=7,
        up=True,
        was_up=True,
        errors=5,
        recoveries=3,
        recovery_failures=1,
        discards=4,
        effective_errors=0,
        symbol_errors=3,
        raw_errors=900,
        effective_ber=rate,
        symbol_ber=rate,
        raw_ber=rate,
        repaired_symbols=6,
        far_end="NVSwitch 0000:08:00 link 1",
    )
    assert sample.nvlink.links[6].errors == 0


def test_gpu_without_links_has_no_zeros(machine: VirtualMachine, control: Control) -> None:
    sample = sample_of(machine, control, nvlinks=0)
    assert sample.nvlink.links == ()
    assert (sample.nvlink.nvlinks, sample.nvlink.nvlinks_down, sample.nvlink.nvlink_errors) == (None, None, None)


def test_links_up_to_the_maximum_of_nvml_are_read(machine: VirtualMachine, control: Control) -> None:
    sample = sample_of(machine, control, nvlink_version=5, nvlinks=36, links={"35": {"errors": 2}})
    assert len(sample.nvlink.links) == 36
    assert sample.nvlink.links[35].errors == 2


def test_link_whose_state_fails_is_not_down(machine: VirtualMachine, control: Control) -> None:
    sensor = GpuSensor(slow_every=1, set_activity=lambda activity: None)
    assert sensor.poll()[0].nvlink.nvlinks_down == 0
    control.write(gpus={"0": {"calls": {"nvmlDeviceGetNvLinkState": {"error": 999}}}})
    machine.reload_control()
    assert (sensor.poll()[0].nvlink.nvlinks, sensor.poll()[0].nvlink.nvlinks_down) == (18, 0)
    control.write(gpus={"0": {"links": {"3": {"up": False}}}})
    machine.reload_control()
    sensor.close()
    assert [sensor.poll()[0].nvlink.nvlinks_down_at for _ in range(REOPEN_EVERY)][-1] == (3,)


@pytest.mark.parametrize(("encoded", "rate"), [(None, None), (0, 0.0), (0x10F, 1e-15), (0xF08, 15e-8)])
def test_bit_error_rate_is_decoded(encoded: int | None, rate: float | None) -> None:
    assert decode_ber(encoded) == pytest.approx(rate)


def linked(errors: int = 0, failures: int = 0, down: tuple[int, ...] = ()) -> GpuSample:
    links = (
        LinkSample(link=6, errors=0, recovery_failures=0),
        LinkSample(link=7, errors=errors, recovery_failures=failures, far_end="0000:08:00 link 9"),
    )
    ends = ("", "", "", "0000:05:00 link 1", "", "", "", "0000:08:00 link 9")
    return gpu(
        links=links, links_were_read=True, nvlinks=8, nvlinks_down=len(down), nvlinks_down_at=down, nvlink_far_ends=ends
    )


def test_finding_names_the_link_and_its_far_end() -> None:
    judge = TimedAssessor()
    judge.polls(2, linked())
    assert judge.polls(1, linked(errors=100)) == {f"gpu.nvlink/{BUS}"}
    (finding,) = judge.assessor.findings
    assert "100 errors" in finding.message
    assert "links 7, which lead to 0000:08:00 link 9" in finding.message
    assert (finding.subject, finding.evidence["links"], finding.evidence["uuid"]) == (BUS, "7", "GPU-a")


def test_links_that_are_down_are_named() -> None:
    judge = TimedAssessor()
    judge.polls(1, linked())
    judge.polls(3, linked(down=(3, 7)))
    (finding,) = judge.assessor.findings
    assert "links 3, 7, which lead to 0000:05:00 link 1, 0000:08:00 link 9" in finding.message


def test_failed_recovery_of_a_link_lasts_until_the_reset() -> None:
    judge = TimedAssessor()
    judge.polls(1, linked())
    assert judge.polls(1, linked(failures=1)) == {f"gpu.nvlink/{BUS}"}
    later = TimedAssessor(memory=judge.assessor.export_state())
    later.clock.advance(100.0)  # the energy counter goes on
    assert later.polls(20, linked(failures=1)) == {f"gpu.nvlink/{BUS}"}
    assert later.polls(1, with_values(linked(), energy_j=0.5)) == set()


def test_errors_on_a_link_name_both_of_its_ends(machine: VirtualMachine) -> None:
    judge = TimedAssessor()
    judge.polls(1, *GpuSensor(slow_every=1, set_activity=lambda activity: None).poll())
    judge.lines("nvidia-nvswitch3: SXid (PCI:0000:08:00.0): 24007, Fatal, Link 19 sourcetrack timeout error (First)")
    (switch,) = judge.assessor.findings
    assert switch.evidence["gpus"] == "0000:52:00 link 7"
    other = TimedAssessor()
    other.polls(1, *GpuSensor(slow_every=1, set_activity=lambda activity: None).poll())
    other.polls(1, gpu(lost=True))  # a GPU that falls off the bus keeps its far ends
    nvlink = "NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)"
    other.lines(f"NVRM: Xid (PCI:{BUS}): 74, pid=1, name=python, {nvlink}")
    xid = next(finding for finding in other.assessor.findings if finding.xid == 74)
    assert xid.evidence["far_end"] == "NVSwitch 0000:07:00 link 3"
    assert "on link 14" in xid.message
    assert xid.message.endswith(f"GPU {BUS}; the link leads to NVSwitch 0000:07:00 link 3")


def test_far_end_without_an_address_is_named_by_its_kind(machine: VirtualMachine, control: Control) -> None:
    unknown = {"nvmlDeviceGetNvLinkRemotePciInfo_v2": {"error": 3}}
    assert sample_of(machine, control, calls=unknown).nvlink.nvlink_far_ends[7] == "NVSwitch link 1"
    unknown |= {"nvmlDeviceGetNvLinkRemoteDeviceType": {"error": 3}}
    assert not any(sample_of(machine, control, calls=unknown).nvlink.nvlink_far_ends)
