"""The script of a rank: ``everstep-launch -m bench.calm.rank PROGRAM``."""

from __future__ import annotations

import sys

import everstep
from bench.calm.hang_programs import HANGS
from bench.calm.program import Diary
from bench.calm.programs import PROGRAMS


def main() -> None:
    """Train the program that the command line names."""
    name = sys.argv[1]
    program = PROGRAMS[name] if name in PROGRAMS else HANGS[name].program

    def train(run: everstep.Run) -> None:
        diary = Diary(run)
        diary.note("began")
        program.train(run, diary)
        diary.note("ended")

    everstep.main(train)


if __name__ == "__main__":
    main()
