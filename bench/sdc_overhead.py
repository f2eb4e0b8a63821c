"""What audits cost a step: training without them, under ``light`` and under ``standard`` in turns on the same ranks.

    python -m bench.sdc_overhead [--quick] [--minutes 6] [--ranks 2] [--json FILE]

How the presets take turns: `bench.sdc.overhead`. The machine must be quiet, with a core for each rank.
"""

from __future__ import annotations

import sys

from bench.sdc.models import Config
from bench.sdc.overhead import rows_of
from bench.sdc.ranks import Ranks
from bench.table import Row, finish, parser_of

QUICK_MINUTES = 0.2
STEPS_MS = (40.0, 80.0)
"""Lengths of a step."""


def main() -> int:
    parser = parser_of("sdc-overhead", __doc__)
    parser.add_argument("--minutes", type=float, default=6.0, help="for presets and lengths, and as long for audits")
    parser.add_argument("--ranks", type=int, default=2, help="each with one thread")
    given = parser.parse_args()
    seconds = 60 * (QUICK_MINUTES if given.quick else given.minutes) / len(STEPS_MS)
    rows: list[Row] = []
    with Ranks(given.ranks, warm_steps=2) as ranks:
        for step_ms in STEPS_MS:
            timings = ranks.call(Config("gpt"), "time_presets", step_ms / 1000, seconds)
            rows += rows_of(timings[0])
    return finish("Audits: time added to a step", rows, given.json)


if __name__ == "__main__":
    sys.exit(main())
