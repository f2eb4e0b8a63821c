"""Training scripts in many styles: a run with kills of random ranks ends as an undisturbed one."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest

from tests.integration.training.training_styles import rank
from tests.integration.training.training_styles.style import PACE_S, STYLES, Kill
from tests.support.processes.launcher import SLOW_RANKS, launched

SEED = int(os.environ.get("EVERSTEP_STYLES_SEED") or 1)
KILLS, STEPS_APART, LAST_STEPS = 6, (4, 11), 6
EVERY_SUITE = "replicate"
"""The style that every suite trains; all styles are for the night."""


def random_kills(style: str, kills: int) -> list[Kill]:
    """Return kills of random ranks at random moments of steps."""
    chance, step, found = random.Random(f"{SEED}:{style}"), 1, []
    for _ in range(kills):
        step += chance.randint(*STEPS_APART)
        found.append(Kill(chance.randrange(STYLES[style].ranks), step, round(chance.uniform(0.0, 1.5 * PACE_S), 4)))
    return found


def final_line(folder: Path, style: str, steps: int, kills: list[Kill]) -> str:
    """Return the line with a digest of the final state of all ranks."""
    folder.mkdir()
    argv = ["--nproc-per-node", str(STYLES[style].ranks), "--preload", STYLES[style].preload, "--max-restarts", "100"]
    argv += ["--standby-delay-s", "0.1", "--state-dir", str(folder / "s"), "-m", rank.__name__]
    argv += [style, str(steps), str(folder), ",".join(map(str, kills))]
    with launched(folder, *argv, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", **SLOW_RANKS) as launcher:  # type: ignore[arg-type]
        assert launcher.wait() == 0, launcher.err
    assert {path.name for path in folder.glob("struck-*")} == {f"struck-{kill}" for kill in kills}
    (line,) = re.findall(rf"^final step={steps} .*$", launcher.out, re.MULTILINE)
    return str(line)


def check_style(folder: Path, style: str, kills: list[Kill]) -> None:
    print(f"seed {SEED}, kills {','.join(map(str, kills))}")
    steps = kills[-1].step + LAST_STEPS
    undisturbed = final_line(folder / "u", style, steps, [])
    assert final_line(folder / "k", style, steps, kills) == undisturbed


@pytest.mark.slow
def test_killed_run_ends_as_the_undisturbed_one(short_path: Path) -> None:
    check_style(short_path, EVERY_SUITE, random_kills(EVERY_SUITE, 2))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "style",
    [
        pytest.param(name, marks=[pytest.mark.frameworks(style.package)] if style.package else [])
        for name, style in STYLES.items()
    ],
)
def test_killed_style_ends_as_undisturbed(short_path: Path, style: str) -> None:
    check_style(short_path, style, random_kills(style, KILLS))
