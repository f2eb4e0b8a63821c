"""What the steps of bench.gpu make of what they find, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from everstep_agent.sensors.samples import GpuSample

from bench.gpu_steps import digest, marked_tests, sensors, training
from bench.gpu_steps.gpt import Shape, Training
from bench.gpu_steps.sheet import NotRun, Sheet
from everstep.vocabulary import ProbeKind
from everstep.wire.v1.training import ProbeFinished

REPORT = """<testsuites><testsuite>
<testcase name="test_a" time="1"/><testcase name="test_b"><failure message="x">x</failure></testcase>
<testcase name="test_c"><error message="x">x</error></testcase>
<testcase name="test_d"><skipped message="fewer than two CUDA devices">x</skipped></testcase>
</testsuite></testsuites>"""


def sample(**values: Any) -> GpuSample:
    return GpuSample(index=0, pci_bus_id="0000:1b:00", uuid="GPU-1", **values)


def test_marked_tests_report_failed_and_skipped_tests() -> None:
    judged, skipped = marked_tests.rows(REPORT)
    assert (judged.value, judged.floor, judged.met) == (1, 3, "no")
    assert judged.against == "of 3; failed: test_b, test_c"
    assert (skipped.name, skipped.against) == ("test_d", "not run: fewer than two CUDA devices")


def test_skipped_marked_tests_are_not_judged() -> None:
    only_skipped = "<testsuite><testcase name='test_d'><skipped message='no GPU'/></testcase></testsuite>"
    assert [row.value for row in marked_tests.rows(only_skipped)] == [None]


def test_unreadable_gpu_misses_the_floor() -> None:
    whole, offered, *_ = sensors.sample_rows((sample(power_w=70.0), sample(error="power: timed out (NVML error 10)")))
    assert (whole.value, whole.floor, whole.met) == (1, 2, "no")
    assert "NVML error 10" in whole.against
    assert offered.value == 1
    assert "temperature_c" in offered.against


def test_machine_without_nvml_misses_the_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(sheet: Sheet, device: str) -> None:
        return

    monkeypatch.setattr(sensors, "probes", none)
    monkeypatch.setattr(sensors.GpuSensor, "poll", lambda sensor: ())
    sensors.step(sheet := Sheet(tmp_path / "rows.json"), "cuda")
    assert [(row.name, row.met) for row in sheet.rows] == [("NVML: GPUs read whole", "no")]


def test_failed_probe_is_an_unmet_row() -> None:
    answer = ProbeFinished(probe="p", ok=False, detail="CUDA out of memory")
    (row,) = sensors.alone_rows(ProbeKind.COMPUTE, answer, "cuda")
    assert (row.met, row.against) == ("no", "CUDA out of memory")


def test_differing_digest_on_device_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(digest.WeightedDigest):
        made = 0

        def value(self) -> int:
            Wrong.made += 1
            return Wrong.made

    tensors = [torch.ones(64, dtype=torch.bfloat16)]
    digest.require_equal(tensors)
    monkeypatch.setattr(digest, "WeightedDigest", Wrong)
    with pytest.raises(AssertionError, match="on the host"):
        digest.require_equal(tensors)


def test_block_size_is_restored_after_timing() -> None:
    usual = digest.digests.BLOCK_ROWS
    rows = digest.rate_rows([torch.ones(64, dtype=torch.bfloat16)], torch.device("cpu"), 1e9)
    assert usual == digest.digests.BLOCK_ROWS
    assert len(rows) == 4 + len(digest.BLOCKS)


def test_training_shape_has_a_billion_parameters() -> None:
    assert 1.0e9 < training.SHAPES[0].parameters < 1.1e9
    tiny = Training(training.TINY, torch.device("cpu"))
    tiny.gradients()
    tiny.update()
    counted = sum(p.numel() for p in tiny.model.parameters())
    assert counted >= training.TINY.parameters
    assert sum(tensor.nbytes for tensor in tiny.state()) == training.TINY.dtype.itemsize * 3 * counted


def test_training_falls_back_to_a_smaller_shape() -> None:
    huge = Shape("huge", layers=10_000, width=65536, heads=16)
    assert training.fitting((huge, training.TINY)) is training.TINY
    with pytest.raises(NotRun, match="too little for huge"):
        training.fitting((huge,))


class Sealing:
    """A snapshotter whose first snapshots are given up, and who hears of the others."""

    def __init__(self, given_up: int) -> None:
        self.given_up = given_up
        self.at: dict[int, float] = {}
        self.begun: list[int] = []

    def begin(self, step: int) -> None:
        self.begun.append(step)
        if len(self.begun) > self.given_up:
            self.at[step] = 0.0

    def wait(self, step: int = 0, timeout_s: float = 0.0) -> bool:
        return step in self.at

    def update_versions(self, committed: None, candidate: int) -> None:
        return


def test_warm_up_continues_after_abandoned_snapshots() -> None:
    """As those are that begin while the slots are being page-locked."""
    sealing: Any = Sealing(given_up=3)
    loop = training.Loop(Training(training.TINY, torch.device("cpu")), sealing, torch.device("cpu"))
    loop.warm_up(sealing)
    assert sealing.begun == list(range(1, 4 + training.WARM_UPS))


def test_unsealed_measured_snapshot_raises() -> None:
    sealing: Any = Sealing(given_up=1)
    loop = training.Loop(Training(training.TINY, torch.device("cpu")), sealing, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="step 1 was not sealed"):
        loop.alone(sealing, training.Figures(0))
