"""``python -m bench.goodput``: effective training time of large fleets, with the real core deciding.

Plays 54 days of 16,384 and of 131,072 GPUs under the failure model of ``bench.failures``. Recovery times come from
``bench.goodput.recovery_model``, whose text states each assumption; rows for some say what another value would cost.

The larger fleet takes the better part of an hour of one core: ``--large-days`` shortens it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from bench.goodput.picture import draw
from bench.goodput.recovery_model import GPUS_PER_NODE, RecoveryModel
from bench.goodput.restart_all import RestartAll
from bench.goodput.runs import Assumptions, Outcome, play, replays, repricings
from bench.table import Row, finish, parser_of

PUBLISHED = {"Llama 3, 16,384 GPUs: over 90 %": 0.90, "ByteRobust, 9,600 GPUs: 97 %": 0.97}
SMALL, LARGE = 16_384 // GPUS_PER_NODE, 131_072 // GPUS_PER_NODE
MARKS = {SMALL: (0.97, 0.99), LARGE: (0.95, 0.97)}
CAUSES_SHOWN = 8


def main() -> int:
    parser = parser_of("goodput", __doc__)
    parser.add_argument("--days", type=float, default=54.0, help="of the smaller fleet (default: 54)")
    parser.add_argument("--large-days", type=float, default=54.0, help="of the larger fleet (default: 54)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the outcome")
    arguments = parser.parse_args()
    sizes = {SMALL: arguments.days, LARGE: arguments.large_days}
    if arguments.quick:
        sizes = {SMALL: 2.0}
    model = RecoveryModel()
    rows: list[Row] = []
    outcomes: list[Outcome] = []
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        for nodes, days in sizes.items():
            assumptions = Assumptions(days=days, model=model)
            outcome = _play(progress, f"{nodes * GPUS_PER_NODE:,} GPUs", nodes, assumptions)
            outcomes.append(outcome)
            rows += _rows(outcome)
            rows += _repriced(outcome, assumptions)
        if not arguments.quick:
            rows += _replayed(progress, SMALL, Assumptions(days=arguments.days / 4, model=model))
    if arguments.plot is not None:
        draw(arguments.plot, outcomes, {o.nodes: _restart_all(o) for o in outcomes}, PUBLISHED)
    return finish("Effective training time", rows, arguments.json)


def _play(progress: Progress, name: str, nodes: int, assumptions: Assumptions) -> Outcome:
    task = progress.add_task(name, total=1.0)
    outcome = play(nodes, assumptions, lambda share: progress.update(task, completed=share))
    progress.update(task, completed=1.0)
    return outcome


def _restart_all(outcome: Outcome) -> float:
    return RestartAll().ratio(outcome.nodes, outcome.days * 24, outcome.failures)


def _rows(outcome: Outcome) -> list[Row]:
    floor, aim = MARKS[outcome.nodes]
    name = f"{outcome.nodes * GPUS_PER_NODE:,} GPUs, {outcome.days:g} days: effective training time"
    against = "Llama 3: over 90 %" if outcome.nodes == SMALL else "ByteRobust, 9,600 GPUs: 97 %"
    counts, wrong = outcome.fleet.counts, len(outcome.fleet.false_evictions)
    absences = counts["agent_restart"] + counts["network_blip"]
    rows = [
        Row(name, 100 * outcome.ratio, "%", 100 * floor, 100 * aim, against, smaller_is_better=False),
        Row("  restart all, checkpoint every 30 min", 100 * _restart_all(outcome), "%", against="same failures"),
        Row("  failures", len(outcome.failures), "", against="Llama 3: 419 in 54 days"),
        Row("  times the job stood still", outcome.stops, ""),
        Row("  nodes evicted", counts["verdict.evict"], ""),
        Row("  false evictions", wrong, "", 0.0, 0.0, f"{absences} short absences"),
        Row("  breaker reset by a person", counts["breaker resets"], ""),
        Row("  spares needed", outcome.spares_used, "nodes", against=f"{outcome.spares} there"),
    ]
    for cause, hours in list(outcome.lost.items())[:CAUSES_SHOWN]:
        rows.append(Row(f"  lost to: {cause.replace('_', ' ')}", hours, "GPU h"))
    return rows


def _repriced(outcome: Outcome, assumptions: Assumptions) -> list[Row]:
    """Return the cost of the same decisions under other assumptions."""
    return [
        Row(f"  with {name}", 100 * outcome.repriced(assumptions.model, model), "%")
        for name, model in repricings(assumptions.model).items()
    ]


def _replayed(progress: Progress, nodes: int, assumptions: Assumptions) -> list[Row]:
    """Play the fleet again under other assumptions, with other decisions, and return the rows."""
    gpus = f"{nodes * GPUS_PER_NODE:,} GPUs, {assumptions.days:g} days"
    base = _play(progress, "as above", nodes, assumptions)
    rows = [Row(f"{gpus}: played again as above", 100 * base.ratio, "%")]
    for name, changed in replays(assumptions).items():
        outcome = _play(progress, name, nodes, replace(changed))
        wrong, used = len(outcome.fleet.false_evictions), f"{outcome.spares_used} of {outcome.spares}"
        words = f"{wrong} false evictions; {used} spares needed"
        rows.append(Row(f"  with {name}", 100 * outcome.ratio, "%", against=words))
    return rows


if __name__ == "__main__":
    sys.exit(main())
