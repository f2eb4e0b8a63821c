"""The soak's own checks find what they are there to find."""

from __future__ import annotations

import json
from pathlib import Path

from bench.soak import checks
from everstep.wire.v1.operator import Event
from examples.demo.story import Run


def event(kind: str, **more: object) -> Event:
    return Event(**{"id": 1, "at": 0.0, "kind": kind, "sentence": kind, **more})  # type: ignore[arg-type]


def log(folder: Path, name: str, *steps: tuple[int, int], loss: float = 1.0) -> None:
    """(generation, step) pairs of the only rank of a world of one."""
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.jsonl").open("a") as file:
        for generation, step in steps:
            row = {"generation": generation, "step": step, "rank": 0, "world": 1, "at": generation * 10.0 + step}
            file.write(json.dumps({**row, "event": "samples", "loss": loss, "samples": [step]}) + "\n")
            file.write(json.dumps({**row, "event": "finished"}) + "\n")


def test_check_finds_generation_number_not_rising() -> None:
    rising = [event("generation", generation=1), event("node.lost"), event("generation", generation=2)]
    assert checks.generations_rise(rising) == []
    assert checks.generations_rise([*rising, event("generation", generation=2)]) == ["generation 2 came after 2"]


def test_check_finds_process_in_old_generation_or_skipping_step(tmp_path: Path) -> None:
    log(tmp_path, "n1-7", (1, 1), (1, 2), (2, 2), (2, 3))
    assert checks.processes_go_forward(tmp_path) == []
    log(tmp_path, "n1-7", (1, 4))
    log(tmp_path, "n2-8", (2, 3), (2, 5))
    assert checks.processes_go_forward(tmp_path) == [
        "n1-7 went back from generation 2 to 1",
        "n2-8 finished step 5 after 3 in one generation",
    ]


def test_check_finds_eviction_without_cause() -> None:
    evictions = [event("verdict.evict", node="n1"), event("verdict.recommend", node="n2")]
    assert checks.evictions_have_a_cause(evictions, {"n1"}) == []
    assert checks.evictions_have_a_cause(evictions, {"n2"}) == ["verdict.evict"]


def test_check_finds_traceback_in_logs(tmp_path: Path) -> None:
    (tmp_path / "n1-train.log").write_text("generation 2\nall is well\n")
    assert checks.logs_are_calm(tmp_path) == []
    (tmp_path / "n2-agent.log").write_text("beat\nTraceback (most recent call last):\nKeyError: 'n1'\n")
    (found,) = checks.logs_are_calm(tmp_path)
    assert found.startswith("n2-agent.log:")
    assert found.endswith("KeyError: 'n1'")


def test_check_finds_wrong_loss_and_missing_step(tmp_path: Path) -> None:
    log(tmp_path / "reference", "r", (1, 1), (1, 2))
    log(tmp_path / "run", "r", (1, 1))
    log(tmp_path / "run", "r", (1, 2), loss=1.001)
    reference, run = Run.read(tmp_path / "reference"), Run.read(tmp_path / "run")
    assert any("the loss of step 2 is off" in problem for problem in checks.as_undisturbed(run, reference, 2)[1])
    assert checks.as_undisturbed(reference, reference, 2)[1] == []
    assert "never finished steps [3]" in checks.as_undisturbed(run, reference, 3)[1][0]


def test_recovery_time_spans_steps_of_two_generations(tmp_path: Path) -> None:
    log(tmp_path, "r", (1, 1), (1, 2), (3, 3))
    assert checks.recoveries_s(Run.read(tmp_path)) == [21.0]
