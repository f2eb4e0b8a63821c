from __future__ import annotations

from typing import Any

import pytest

from everstep.vocabulary import Action, Mode, Severity
from everstep.wire.v1.agent import Gpu
from everstep_agent.drivers.gpu_samples import GpuSample
from everstep_agent.findings.gpu_peers import compare_gpus
from tests.support.agents.sensors import TimedAssessor, gpu

LOADED: dict[str, Any] = {
    "gpu_utilization": 1.0,
    "sm_clock_mhz": 1980,
    "throttle_reasons": 0,
    "power_w": 500.0,
    "power_limit_w": 700.0,
}
SLOW = {"sm_clock_mhz": 1200}
ODD = "0000:03:00"


def bus_of(index: int) -> str:
    return f"0000:{index:02x}:00"


def node(count: int = 8, odd: dict[str, Any] | None = None, **common: Any) -> list[GpuSample]:
    """Return loaded GPUs with ``common`` values, of which number 3 has the values of ``odd``, too."""
    return [
        gpu(
            index=index,
            pci_bus_id=bus_of(index),
            uuid=f"GPU-{index}",
            **{**LOADED, **common, **(odd if odd is not None and index == 3 else {})},
        )
        for index in range(count)
    ]


def models(samples: list[GpuSample], **others: str) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            index=each.index,
            uuid=each.uuid,
            pci_bus_id=each.pci_bus_id,
            name=others.get(each.uuid.replace("-", ""), "H100"),
            memory_bytes=0,
        )
        for each in samples
    )


def findings_after(seconds: int, samples: list[GpuSample]) -> set[str]:
    return TimedAssessor().polls(seconds, *samples, known_gpus=models(samples))


def test_clock_far_below_peers_under_load_warns_and_clears() -> None:
    judge, slow, healthy = TimedAssessor(), node(odd=SLOW), node()
    assert judge.polls(179, *slow, known_gpus=models(slow)) == set()
    assert judge.polls(1, *slow, known_gpus=models(slow)) == {f"gpu.throttled/{ODD}"}
    (finding,) = judge.assessor.findings
    assert (finding.severity, finding.action, finding.mode) == (Severity.WARNING, Action.NONE, Mode.RECOMMEND)
    assert "at 61% of the SM clock" in finding.message
    assert finding.evidence == {"uuid": "GPU-3"}
    assert judge.polls(301, *healthy, known_gpus=models(healthy)) == set()


@pytest.mark.parametrize(
    ("common", "odd"),
    [
        ({}, {"sm_clock_mhz": 1700}),
        ({}, SLOW | {"throttle_reasons": 0x4}),
        ({}, SLOW | {"power_w": 690.0}),
        ({}, SLOW | {"power_w": None}),
        ({}, SLOW | {"gpu_utilization": 0.3}),
        ({"gpu_utilization": 0.5}, SLOW | {"gpu_utilization": 1.0}),
        ({"gpu_utilization": None}, SLOW | {"gpu_utilization": 1.0}),
        ({"throttle_reasons": None}, SLOW),
        ({"throttle_reasons": 0x2, "sm_clock_mhz": 1200}, {}),
        ({"sm_clock_mhz": 345, "gpu_utilization": 0.0, "throttle_reasons": 0x1}, {"sm_clock_mhz": 210}),
    ],
    ids=[
        "silicon",
        "power cap",
        "power cap between two reads",
        "power unknown",
        "idle beside loaded",
        "validation rank",
        "MIG",
        "reasons unsupported",
        "application clocks on all",
        "idle clocks",
    ],
)
def test_lower_clock_with_a_reason_is_no_finding(common: dict[str, Any], odd: dict[str, Any]) -> None:
    assert findings_after(300, node(odd=odd, **common)) == set()


def test_clock_that_somebody_set_is_information_only() -> None:
    samples = node(odd=SLOW | {"throttle_reasons": 0x2})
    judge = TimedAssessor()
    judge.polls(180, *samples, known_gpus=models(samples))
    (finding,) = judge.assessor.findings
    assert (finding.severity, finding.rule) == (Severity.INFO, "gpu-clocks-set-low")


def test_too_few_or_different_gpus_are_not_compared() -> None:
    few = node(count=3)
    assert compare_gpus(few, {each.uuid: "H100" for each in few}) == {}
    samples = node(odd=SLOW)
    assert compare_gpus(samples, {}) == {}
    mixed = models(samples, GPU3="A30")
    assert TimedAssessor().polls(300, *samples, known_gpus=mixed) == set()


def test_lost_peer_ends_no_comparison_of_the_others() -> None:
    samples = node(odd=SLOW)
    samples[0] = gpu(index=0, pci_bus_id=bus_of(0), uuid="GPU-0", lost=True, error="GPU is lost")
    assert f"gpu.throttled/{ODD}" in findings_after(200, samples)


def test_power_limits_below_peers_or_default_are_information() -> None:
    lower = node(odd={"power_limit_w": 500.0}, power_limit_default_w=700.0)
    assert findings_after(60, lower) == {f"gpu.setting/{ODD}", "gpu.setting/power-limits"}
    capped = node(power_limit_w=550.0, power_limit_default_w=700.0)
    judge = TimedAssessor()
    assert judge.polls(60, *capped, known_gpus=models(capped)) == {"gpu.setting/power-limits"}
    assert judge.assessor.findings[0].severity is Severity.INFO
    assert "150 W below" in judge.assessor.findings[0].message
    assert findings_after(120, node(power_limit_default_w=None)) == set()


def test_ecc_off_on_one_gpu_warns_and_off_on_all_does_not() -> None:
    assert findings_after(60, node(ecc_mode=1, odd={"ecc_mode": 0})) == {f"gpu.setting/{ODD}"}
    assert findings_after(120, node(ecc_mode=0)) == set()
    assert findings_after(120, node(ecc_mode=None, odd={"ecc_mode": 0})) == set()


@pytest.mark.parametrize(("field", "rate"), [("ecc_dram_corrected", 1), ("ecc_sram_corrected", 0.1)])
@pytest.mark.parametrize(("usual", "found"), [(0, True), (0.01, True), (0.5, False)])
def test_corrected_errors_count_beside_the_peers(field: str, rate: float, usual: float, found: bool) -> None:
    judge, keys = TimedAssessor(), set[str]()
    for minute in range(40):
        others = int(minute * 60 * rate * usual)
        samples = node(**{field: others}, odd={field: 5000 + int(minute * 60 * rate)} if found else {field: others * 2})
        judge.clock.advance(59.0)
        keys = judge.polls(1, *samples, known_gpus=models(samples))
    assert keys == ({f"gpu.ecc_correctable/{ODD}"} if found else set())


def test_old_corrected_errors_are_no_finding() -> None:
    assert findings_after(100, node(odd={"ecc_dram_corrected": 1_000_000}, ecc_dram_corrected=0)) == set()
