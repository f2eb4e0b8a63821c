"""The script of a rank.

everstep-launch -m tests.integration.training.training_styles.rank STYLE 78 FOLDER KILLS
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import everstep
from tests.integration.training.training_styles import loaders, loops, sharded, trainers
from tests.integration.training.training_styles.style import STYLES, Kill, Work

__all__ = ["loaders", "loops", "main", "sharded", "trainers"]


def main(style: str, steps: str, folder: str, kills: str) -> None:
    """Train a style for some steps. KILLS has commas between them; FOLDER records those that have struck."""

    def train(run: everstep.Run) -> None:
        torch.set_num_threads(1)
        own = [kill for kill in map(Kill.parse, filter(None, kills.split(","))) if kill.rank == run.rank]
        STYLES[style].train(Work(run, int(steps), {kill.step: kill for kill in own}, Path(folder)))

    everstep.main(train)


if __name__ == "__main__":
    main(*sys.argv[1:])
