"""The runner of bench.gpu's steps: time limits, failing and hanging steps, table, JSON and document."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from bench import gpu
from bench.gpu import STEPS, Step
from bench.gpu_steps import gpu_page
from bench.gpu_steps.bounded_program import ROOT, run

LONG_S = 60.0
SHORT_S = 2.0
"""Long enough for a shell to start what is to be ended."""
HANG = "sleep 600"


def shell(name: str, script: str, limit_s: float = LONG_S) -> Step:
    """A step that runs ``script``; the file for its rows is ``$4``."""
    return Step(name, limit_s, ("/bin/bash", "-c", script, name))


def exists(pid: int) -> bool:
    """Tell if the process runs; a killed process that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_hanging_program_is_ended_with_its_descendants(tmp_path: Path) -> None:
    """A process in a session of its own, whose parent is gone, ends too."""
    script = f"(setsid sleep 600 & echo $! > {tmp_path}/orphan); sleep 600 & echo $! > {tmp_path}/child; {HANG}"
    outcome = run(["/bin/bash", "-c", script], SHORT_S, tmp_path / "log")
    assert outcome.status is None
    assert not any(exists(int((tmp_path / name).read_text())) for name in ("orphan", "child"))


def document(tmp_path: Path) -> Path:
    path = tmp_path / "gpu.md"
    path.write_text(f"Before.\n\n{gpu_page.BEGIN}\n\nOld figures.\n\n{gpu_page.END}\n\nAfter.\n")
    return path


def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *steps: Step) -> tuple[int, Path, Path]:
    """The exit status, the JSON and the document of a run of these steps."""
    monkeypatch.setattr(gpu, "STEPS", steps)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    path, docs = tmp_path / "gpu.json", document(tmp_path)
    arguments = ["--device", "cpu", "--json", str(path), "--docs", str(docs), "--folder", str(tmp_path / "logs")]
    return gpu.main(arguments), path, docs


def test_docs_name_every_step_and_hold_the_markers() -> None:
    text = (ROOT / "docs" / "how-to" / "gpu.md").read_text()
    assert [text.count(marker) for marker in (gpu_page.BEGIN, gpu_page.END)] == [1, 1]
    assert [step.name for step in STEPS if f"| `{step.name}` |" not in text] == []
    assert sum(step.limit_s >= gpu.LIMIT_S for step in STEPS) == 0
