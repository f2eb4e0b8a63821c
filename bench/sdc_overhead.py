"""What audits cost a step: training without them, under ``light`` and under ``standard`` in turns on the same ranks.

    python -m bench.sdc_overhead [--quick] [--step-ms 40 80] [--minutes 6] [--ranks 2] [--json FILE]

How the presets take turns: `bench.sdc.overhead`. The machine must be quiet, with a core for each rank.
"""

from __future__ import annotations

import sys

from bench.sdc.models import Config
from bench.sdc.overhead import rows_of
from bench.sdc.ranks import Ranks
from bench.table import Row, finish, parser_of

QUICK_MINUTES = 0.2


def main() -> int:
    parser = parser_of("sdc-overhead", __doc__)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[40.0, 80.0], metavar="MS", help="of a step")
    parser.add_argument("--minutes", type=float, default=6.0, help="for all presets and lengths, and as long for links")
    parser.add_argument("--ranks", type=int, default=2, help="each with one thread")
    given = parser.parse_args()
    seconds = 60 * (QUICK_MINUTES if given.quick else given.minutes) / len(given.step_ms)
    rows: list[Row] = []
    with Ranks(given.ranks, warm_steps=2) as ranks:
        for step_ms in given.step_ms:
            timings = ranks.call(Config("gpt"), "time_presets", step_ms / 1000, seconds)
            rows += rows_of(timings[0])
    return finish("Audits: time added to a step", rows, given.json)


if __name__ == "__main__":
    sys.exit(main())
