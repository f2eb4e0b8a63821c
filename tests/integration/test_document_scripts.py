"""The complete training scripts that README.md and the pages of docs show, run as they are shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launched import ROOT, launched

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
    path.write_text(scripts(page)[number])
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


def test_readme_script_runs_under_plain_python(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=script.parent,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert last_loss(done.stdout) < 5.0


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
