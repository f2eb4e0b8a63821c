"""The complete training scripts that README.md and the pages of docs show; those of the pages make few steps."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest

from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.launcher import ROOT, launched

pytestmark = pytest.mark.slow


def scripts(page: str) -> list[str]:
    """The Python blocks of a page that are complete: they end by calling ``everstep.main``."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return [block for block in blocks if 'if __name__ == "__main__":' in block]


PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
SHOWN = [(page, number) for page in PAGES for number in range(len(scripts(page)))]
RANKS = {"docs/how-to/hsdp.md": 4, "docs/how-to/tensor-pipeline-parallel.md": 4}
"""Ranks for the scripts of a page, where two do not show what the page is about."""
LAUNCHED = [shown for shown in SHOWN if shown[0] != "README.md"]
AT_NIGHT = {*RANKS}
"""Pages whose scripts take four ranks; test_three_dimensions.py and test_restore_ranks.py train in their layouts."""


@pytest.fixture
def script(short_path: Path, request: pytest.FixtureRequest) -> Path:
    """``train.py``, extracted from the page."""
    page, number = getattr(request, "param", ("README.md", 0))
    path = short_path / "train.py"
    shown = scripts(page)[number]
    path.write_text(shown if page == "README.md" else re.sub(r"until=\d+", "until=8", shown))
    return path


def last_loss(output: str) -> float:
    """The loss at step 200, which the script in README.md prints."""
    (printed,) = re.findall(r"step 200: loss ([0-9.]+)", output)
    return float(printed)


def test_readme_script_trains_on_two_ranks(script: Path) -> None:
    argv = ["--nproc-per-node", "2", "--state-dir", str(script.parent / "state"), "train.py"]
    with launched(script.parent, *argv, GLOO_SOCKET_IFNAME="lo") as launcher:
        assert launcher.wait() == 0, launcher.err
    assert last_loss(launcher.out) < 5.0, "it began at about 16"
    assert "nothing is tracked" not in launcher.err


def run_alone(script: str) -> str:
    """What ``python script`` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def test_readme_script_runs_under_plain_python(forks: ForkPool, script: Path) -> None:
    assert last_loss(forks.start(run_alone, str(script)).result()) < 5.0


def test_pages_show_complete_scripts() -> None:
    """The test below would pass on pages that it cannot read."""
    assert {page for page, _ in LAUNCHED} >= {"docs/start/tutorial.md", *RANKS}


@pytest.mark.parametrize(
    ("script", "page"),
    [pytest.param(shown, shown[0], marks=[pytest.mark.nightly] if shown[0] in AT_NIGHT else []) for shown in LAUNCHED],
    indirect=["script"],
)
def test_script_on_page_trains(script: Path, page: str) -> None:
    argv = ["--nproc-per-node", str(RANKS.get(page, 2)), "--state-dir", str(script.parent / "state"), "train.py"]
    with launched(script.parent, *argv, GLOO_SOCKET_IFNAME="lo", STEPS="8") as launcher:
        assert launcher.wait() == 0, launcher.err
    if page != "docs/start/tutorial.md":
        assert "finished at step" in launcher.out
    assert "nothing is tracked" not in launcher.err


KILL = """
    if run.rank == 1 and run.generation == 1:
        import os, time
        time.sleep(0.5)  # rank 0 has finished its last step, too
        os.kill(os.getpid(), 9)
"""
FINAL_SAVE = """
    if run.rank == 0:
        import os, time
        open("began", "a").write(".")
        torch.save(model.state_dict(), "model.tmp")
        if run.generation == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), 9)
        os.replace("model.tmp", "model.pt")
    torch.distributed.barrier()
"""
UNBOUND = KILL + "    print(float(loss))\n"


def end_with(shown: str, work: str) -> str:
    """The script of a page, with work after its last step."""
    before, end, after = shown.rpartition('    if run.rank == 0:\n        print(f"finished')
    return re.sub(r"until=\d+", "until=8", before) + work.lstrip("\n") + end + after


@pytest.mark.parametrize(
    ("page", "number", "work"),
    [
        pytest.param("ddp", 0, KILL, id="ddp"),
        pytest.param("ddp", 0, FINAL_SAVE, id="save"),
        pytest.param("fsdp2", 0, KILL, id="fsdp2"),
        pytest.param("hsdp", 0, KILL, id="hsdp"),
        pytest.param("tensor-pipeline-parallel", 0, KILL, id="tensor", marks=pytest.mark.nightly),
        pytest.param("tensor-pipeline-parallel", 1, KILL, id="pipeline", marks=pytest.mark.nightly),
    ],
)
def test_script_survives_a_loss_after_its_last_step(short_path: Path, page: str, number: int, work: str) -> None:
    path = f"docs/how-to/{page}.md"
    (short_path / "train.py").write_text(end_with(scripts(path)[number], work))
    ranks = str(RANKS.get(path, 2))
    argv = ["--nproc-per-node", ranks, "--state-dir", str(short_path / "state"), "train.py"]
    with launched(short_path, *argv, GLOO_SOCKET_IFNAME="lo") as launcher:
        assert launcher.wait() == 0, launcher.err
    assert "finished at step 8" in launcher.out
    assert "generation 2" in launcher.err, "a rank was lost"
    if work is FINAL_SAVE:
        assert (short_path / "began").read_text() == "..", "the save was made again"
        assert (short_path / "model.pt").exists()


def test_variable_of_the_finished_loop_is_explained(short_path: Path) -> None:
    """After a second loss there, no version before the last step is left."""
    (shown,) = scripts("docs/how-to/ddp.md")
    (short_path / "train.py").write_text(end_with(shown, UNBOUND.replace("generation == 1", "generation < 3")))
    argv = ["--nproc-per-node", "2", "--state-dir", str(short_path / "state"), "train.py"]
    with launched(short_path, *argv, GLOO_SOCKET_IFNAME="lo") as launcher:
        assert launcher.wait() == 1, launcher.err
    assert "No step was left when this generation began" in launcher.err
    assert "Set the variable before the loop" in launcher.err
