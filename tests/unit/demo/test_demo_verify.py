"""The demonstration's conclusions from the ranks' logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.demo.report import write_report
from examples.demo.story import FaultRecord, Run
from examples.demo.verify import verify

WORLD = 2


def log(
    folder: Path, name: str, rank: int, steps: list[tuple[int, int]], *, loss: float = 1.0, world: int = WORLD
) -> None:
    """A rank's log: (generation, step) pairs, two samples a step."""
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.jsonl").open("a") as file:
        for generation, step in steps:
            row = {
                "generation": generation,
                "step": step,
                "rank": rank,
                "world": world,
                "at": generation * 1000.0 + step,
            }
            samples = [step * 4 + rank * 2, step * 4 + rank * 2 + 1]
            file.write(json.dumps({**row, "event": "samples", "loss": loss, "samples": samples}) + "\n")
            file.write(json.dumps({**row, "event": "finished"}) + "\n")


def whole(folder: Path, generation: int, steps: range, loss: float = 1.0) -> None:
    for rank in range(WORLD):
        log(folder, f"r{rank}-{generation}", rank, [(generation, step) for step in steps], loss=loss)


@pytest.fixture
def reference(tmp_path: Path) -> Run:
    whole(tmp_path / "reference", 1, range(1, 7))
    return Run.read(tmp_path / "reference")


def test_repeated_steps_count_every_sample_once(tmp_path: Path, reference: Run) -> None:
    whole(tmp_path / "run", 1, range(1, 5))
    whole(tmp_path / "run", 2, range(3, 7))
    run = Run.read(tmp_path / "run")
    verified = verify(run, reference, 6)
    assert (verified.seen, verified.repeated, verified.skipped) == (24, 0, 0)
    assert verified.problems == []
    assert run.lost() == {2: 2}
    assert verified.exact_through == 6


def test_report_shows_problems_and_escapes_html(tmp_path: Path, reference: Run) -> None:
    fault = FaultRecord("rank_killed", "SIGKILL <to> a rank", "n1", step=2, injected_at=10.0, found_at=10.5)
    write_report(
        tmp_path / "report.html",
        layout="ddp",
        run=reference,
        reference=reference,
        faults=[fault],
        verified=None,
        timeline=[(0.5, "rank.lost", "rank 1 & more")],
        problems=["it hung"],
        wall_s=3.0,
    )
    page = (tmp_path / "report.html").read_text()
    assert "it hung" in page
    assert "SIGKILL &lt;to&gt; a rank" in page
    assert "500 ms" in page
    assert "http" not in page.replace("<!doctype html>", "")
