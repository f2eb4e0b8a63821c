"""The script of a rank: ``everstep-launch -m bench.kills.rank STYLE --steps 100 --pace 0.05``."""

from __future__ import annotations

import argparse

import torch

import everstep
from bench.kills import loaders, loops, sharded, trainers
from bench.kills.style import STYLES, Work

__all__ = ["loaders", "loops", "main", "sharded", "trainers"]


def main() -> None:
    """Train the style that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("style", choices=STYLES)
    parser.add_argument("--steps", type=int, required=True, help="updates in all")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to sleep in each step")
    given = parser.parse_args()

    def train(run: everstep.Run) -> None:
        torch.set_num_threads(1)
        STYLES[given.style].train(Work(run, given.steps, given.pace))

    everstep.main(train)


if __name__ == "__main__":
    main()
