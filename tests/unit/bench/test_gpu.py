"""What runs the steps of bench.gpu: time limits, steps that fail or hang, the table, the JSON and the document."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest

from bench import gpu
from bench.gpu import STEPS, Step
from bench.gpu_steps import gpu_page, sheet
from bench.gpu_steps.bounded_program import ROOT, run
from bench.gpu_steps.sheet import NotRun, Sheet, not_run
from bench.table import Row

LONG_S = 60.0
SHORT_S = 2.0
"""Long enough for a shell to start what is to be ended."""
HANG = "sleep 600"


def shell(name: str, script: str, limit_s: float = LONG_S) -> Step:
    """A step that runs ``script``; the file for its rows is ``$4``."""
    return Step(name, limit_s, ("/bin/bash", "-c", script, name))


def rows_of(tmp_path: Path, name: str, *rows: Row) -> str:
    """A command that hands these rows over, as a step does."""
    made = Sheet(tmp_path / f"prepared-{name}.json")
    made.add(*rows)
    return f"cp {made.path} $4"


def exists(pid: int) -> bool:
    """Whether the process runs; one that was killed and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_hanging_program_is_ended_with_its_descendants(tmp_path: Path) -> None:
    """Also with a process in a session of its own, whose parent is gone."""
    script = f"(setsid sleep 600 & echo $! > {tmp_path}/orphan); sleep 600 & echo $! > {tmp_path}/child; {HANG}"
    outcome = run(["/bin/bash", "-c", script], SHORT_S, tmp_path / "log")
    assert outcome.status is None
    assert not any(exists(int((tmp_path / name).read_text())) for name in ("orphan", "child"))


def test_processes_left_by_a_program_are_ended(tmp_path: Path) -> None:
    outcome = run(["/bin/bash", "-c", f"setsid sleep 600 & echo $! > {tmp_path}/left"], LONG_S, tmp_path / "log")
    assert outcome.status == 0
    assert not exists(int((tmp_path / "left").read_text()))


@pytest.mark.slow
def test_shared_memory_of_killed_step_is_removed(tmp_path: Path) -> None:
    script = f"mkdir /dev/shm/everstep-bench-$$-1 && echo $$ > {tmp_path}/pid; {HANG}"
    run(["/bin/bash", "-c", script], SHORT_S, tmp_path / "log")
    assert not Path(f"/dev/shm/everstep-bench-{(tmp_path / 'pid').read_text().strip()}-1").exists()


@pytest.mark.slow
def test_steps_continue_after_failure_or_timeout(tmp_path: Path) -> None:
    good = Row("good", 3.0, "s", 5.0, 1.0)
    steps = (
        shell("broken", "echo 'no such device' >&2; exit 7"),
        shell("slow", rows_of(tmp_path, "slow", Row("so far", 1.0, "s")) + f"; {HANG}", SHORT_S),
        shell("good", rows_of(tmp_path, "good", good)),
    )
    whole, done = gpu.run_all(steps, "cpu", tmp_path / "logs", LONG_S)
    assert [(each.name, each.outcome) for each in done] == [
        ("broken", "failed"),
        ("slow", "timed out"),
        ("good", "done"),
    ]
    assert [(row.name, row.value, row.met) for row in whole.rows] == [
        ("broken: failed", None, "no"),
        ("so far", 1.0, "aim"),
        ("slow: timed out", None, "no"),
        ("good", 3.0, "floor"),
    ]
    assert whole.rows[0].against == "exit status 7: no such device"


def test_steps_without_time_left_are_not_started(tmp_path: Path) -> None:
    steps = (shell("never", f"touch {tmp_path}/begun"),)
    whole, done = gpu.run_all(steps, "cpu", tmp_path / "logs", gpu.LEAST_S / 2)
    assert [(row.value, row.met) for row in whole.rows] == [(None, "aim")]
    assert whole.rows[0].against.startswith("not run: the 2 s")
    assert done[0].outcome == "not begun"
    assert not (tmp_path / "begun").exists()


def test_step_time_limit_is_capped_by_remaining_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def kept(command: object, limit_s: float, log: Path, environment: object) -> object:
        limits.append(limit_s)
        log.touch()
        return gpu.Outcome(0, 1.0)

    monkeypatch.setattr(gpu, "run", kept)
    gpu.run_all((Step("one", 10.0), Step("two", 1000.0)), "cpu", tmp_path / "logs", 100.0)
    assert limits[0] == 10.0
    assert limits[1] <= 100.0


def document(tmp_path: Path) -> Path:
    path = tmp_path / "gpu.md"
    path.write_text(f"Before.\n\n{gpu_page.BEGIN}\n\nOld figures.\n\n{gpu_page.END}\n\nAfter.\n")
    return path


def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *steps: Step) -> tuple[int, Path, Path]:
    """The exit status, the JSON and the document of a run of these steps."""
    monkeypatch.setattr(gpu, "STEPS", steps)
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    path, docs = tmp_path / "gpu.json", document(tmp_path)
    arguments = ["--device", "cpu", "--json", str(path), "--docs", str(docs), "--folder", str(tmp_path / "logs")]
    return gpu.main(arguments), path, docs


def test_results_are_written_as_table_json_and_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = Row("digest", 50.0, "%", 20.0, 60.0, "a copy | of it", smaller_is_better=False), not_run("NCCL", "one GPU")
    step = shell("digest", rows_of(tmp_path, "digest", *rows))
    status, path, docs = bench(tmp_path, monkeypatch, step)
    assert status == 0
    said = capsys.readouterr()
    assert "not run: one GPU" in said.out
    assert "[1/1] digest: done" in said.err
    written = json.loads(path.read_text())
    assert [(row["name"], row["met"]) for row in written["rows"]] == [("digest", "floor"), ("NCCL", "aim")]
    assert [(one["name"], one["outcome"]) for one in written["steps"]] == [("digest", "done")]
    text = docs.read_text()
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert "| digest | 50 | % | 20 | 60 | a copy \\| of it | floor |" in text
    assert "* NCCL: one GPU" in text
    assert "Old figures" not in text


def test_missed_floor_sets_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missed = Row("digest", 10.0, "%", 20.0, 60.0, smaller_is_better=False)
    assert bench(tmp_path, monkeypatch, shell("digest", rows_of(tmp_path, "one", missed)))[0] == 1


def test_run_without_measurement_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = shell("digest", rows_of(tmp_path, "one", not_run("digest", "no CUDA device")))
    status, _, docs = bench(tmp_path, monkeypatch, nothing)
    assert status == 2
    assert "Old figures" in docs.read_text()


def test_document_is_written_from_saved_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path, docs = bench(tmp_path, monkeypatch, shell("a", rows_of(tmp_path, "a", Row("once", 1.0, "s"))))
    first = docs.read_text()
    docs.write_text(first.replace("| once |", "| stale |"))
    assert gpu.main(["--from-json", str(path), "--docs", str(docs)]) == 0
    assert docs.read_text() == first


@pytest.mark.parametrize(
    "text", ["no markers", f"{gpu_page.END}\n{gpu_page.BEGIN}", f"{gpu_page.BEGIN}\n{gpu_page.END}" * 2]
)
def test_document_without_markers_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gpu.md"
    path.write_text(text)
    with pytest.raises(ValueError, match="once each"):
        gpu_page.write(path, {})
    assert path.read_text() == text


def test_missing_requirement_is_a_row_and_error_a_status(tmp_path: Path) -> None:
    def lacks(found: Sheet, device: str) -> None:
        found.add(Row("first", 1.0, "s"))
        raise NotRun("there is one GPU")

    def breaks(found: Sheet, device: str) -> None:
        raise AssertionError("other bytes came back")

    path = tmp_path / "rows.json"
    assert sheet.run("nccl", lacks, Sheet(path), "cpu") == 0
    assert [(row.name, row.against) for row in sheet.read(path).rows] == [
        ("first", ""),
        ("nccl", "not run: there is one GPU"),
    ]
    assert sheet.run("restore", breaks, Sheet(tmp_path / "none.json"), "cpu") == 1


def test_step_runs_as_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its module's name to its rows, in the environment that steps have."""
    module = tmp_path / "said_step.py"
    module.write_text(
        textwrap.dedent("""
        import os
        from bench.table import Row
        def step(sheet, device):
            sheet.note(gpus=["one"])
            sheet.add(Row(f"{device} {os.environ['GLOO_SOCKET_IFNAME']}", 1.0, ""))
        """)
    )
    code = "import sys, bench.gpu_steps as p; p.__path__.append(sys.argv.pop(1)); import bench.gpu_steps.__main__ as m"
    command = (sys.executable, "-c", f"{code}; sys.exit(m.main(sys.argv[1:]))", str(tmp_path), "said_step")
    monkeypatch.setenv("PYTHONPATH", os.fspath(ROOT))
    whole, _ = gpu.run_all((Step("said_step", LONG_S, command),), "cpu", tmp_path / "logs", LONG_S)
    assert [row.name for row in whole.rows] == ["cpu lo"]
    assert whole.machine == {"gpus": ["one"]}


def test_docs_name_every_step_and_hold_the_markers() -> None:
    text = (ROOT / "docs" / "how-to" / "gpu.md").read_text()
    assert [text.count(marker) for marker in (gpu_page.BEGIN, gpu_page.END)] == [1, 1]
    assert [step.name for step in STEPS if f"| `{step.name}` |" not in text] == []
    assert sum(step.limit_s >= gpu.LIMIT_S for step in STEPS) == 0
