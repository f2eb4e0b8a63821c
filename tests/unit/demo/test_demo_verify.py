"""What the demonstration concludes from the ranks' logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.demo.report import difference_picture, loss_picture, mark_rows, write_report
from examples.demo.story import FaultRecord, Run
from examples.demo.verify import LOSS_TOLERANCE, verify

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


def test_step_of_killed_rank_counts_without_its_last_line(tmp_path: Path, reference: Run) -> None:
    whole(tmp_path / "run", 1, range(1, 3))
    log(tmp_path / "run", "r0-1", 0, [(1, 3)])
    lines = (tmp_path / "run" / "r1-1.jsonl").read_text().splitlines()
    row = json.loads(lines[-2]) | {"step": 3, "samples": [14, 15]}
    (tmp_path / "run" / "r1-1.jsonl").write_text("\n".join([*lines, json.dumps(row), '{"generation": 1, "st']))
    whole(tmp_path / "run", 2, range(4, 7))
    run = Run.read(tmp_path / "run")
    assert verify(run, reference, 6).problems == []
    assert run.lost() == {}
    first = run.first_after(2)
    assert first is not None
    assert first.step == 4


def test_duplicate_sample_is_reported(tmp_path: Path, reference: Run) -> None:
    whole(tmp_path / "run", 1, range(1, 7))
    path = tmp_path / "run" / "r0-1.jsonl"
    path.write_text(path.read_text().replace("[24, 25]", "[24, 24]"))
    verified = verify(Run.read(tmp_path / "run"), reference, 6)
    assert (verified.repeated, verified.skipped) == (1, 1)
    assert any("repeated" in problem for problem in verified.problems)


def test_loss_difference_at_same_world_size_is_reported(tmp_path: Path, reference: Run) -> None:
    whole(tmp_path / "run", 1, range(1, 4))
    whole(tmp_path / "run", 2, range(4, 7), loss=1.0 + 1e-9)
    verified = verify(Run.read(tmp_path / "run"), reference, 6)
    assert verified.exact_through == 3
    assert verified.exact_due == 6
    assert any("bit" in problem for problem in verified.problems)


def test_loss_tolerance_at_smaller_world_size_is_bounded(tmp_path: Path, reference: Run) -> None:
    whole(tmp_path / "run", 1, range(1, 4))
    for step in range(4, 7):
        log(tmp_path / "run", "alone", 0, [(2, step)], loss=1.0 + 2 * LOSS_TOLERANCE, world=1)
    verified = verify(Run.read(tmp_path / "run"), reference, 6)
    assert verified.exact_due == 3
    assert any("differs" in problem for problem in verified.problems)


def test_missing_steps_are_named(tmp_path: Path, reference: Run) -> None:
    whole(tmp_path / "run", 1, range(1, 4))
    with pytest.raises(ValueError, match=r"never finished steps \[4, 5, 6\]"):
        verify(Run.read(tmp_path / "run"), reference, 6)


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


def test_marks_of_close_faults_lie_in_different_rows() -> None:
    assert mark_rows([100.0, 104.0, 108.0, 300.0]) == [0, 1, 2, 0]
    assert len(mark_rows([float(x) for x in range(20)])) == 20


def test_pictures_name_their_axes(tmp_path: Path, reference: Run) -> None:
    whole(tmp_path / "run", 1, range(1, 7))
    run = Run.read(tmp_path / "run")
    loss, difference = loss_picture(run, reference, []), difference_picture(run, reference)
    assert ">loss (nats)<" in loss
    assert ">step<" in loss
    assert ">difference<" in difference
    assert loss.index('class="ours"') < loss.index('class="theirs"'), "the reference would be hidden"
