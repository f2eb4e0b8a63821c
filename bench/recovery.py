"""From a fault to the next finished step of all survivors, beside torchft and torchrun in the same run.

    python -m bench.recovery [--quick] [--repeats 10] [--no-peers] [--json FILE]
    python -m bench.recovery --scripts ddp,hsdp,lightning,transformers,compile [--repeats 5]
    python -m bench.recovery --sizes 2.1M,25M,100M [--repeats 30]

Four ranks on this machine train 2.1 M parameters (`bench.recovery_rows.workload`); the victim signals itself and notes
the time just before. Rows ``... abort``, ``... rendezvous`` and so on are the slowest rank's share of the median
recovery, as the controller's log tells it. Rows ``SIGKILL with ...`` are of `bench.recovery_rows.deaths` (``--only
deaths``). ``--scripts`` measures these kinds of scripts instead, with rank 3 killed between steps. ``--sizes`` measures
DDP with models of these numbers of parameters instead. There rank 3 is killed as soon as it has finished a step, so
that it has stored nothing of it. 100M takes 13 GiB of memory.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import partial

from bench.peers import run as peers
from bench.recovery_rows import deaths
from bench.recovery_rows import everstep_runs as ours
from bench.recovery_rows.recoveries import Recovered
from bench.table import Row, finish, parser_of, run_parts

KILL_FLOOR_S, KILL_AIM_S = 0.5, 0.15
STOP_FLOOR_S, STOP_AIM_S = 1.5, 1.2
CASES = (
    *((*case, "KILL") for case in itertools.product(("ddp", "fsdp2"), (3, 0), ("between", "backward"))),
    ("ddp", 2, "between", "STOP"),
)
SCRIPTS = ("ddp", "hsdp", "lightning", "transformers", "compile")
SIZES = {
    "2.1M": ours.Place(apart=30),  # a node that loses 30 ranks within 60 s fails its job
    "25M": ours.Place(layers=6, width=2048, first=10, apart=5),
    "100M": ours.Place(layers=24, width=2048, first=8, apart=3),
}
SIZE_PATIENCE_S = 390.0
SCRIPT_APART, SCRIPT_PATIENCE_S = 150, 900.0
"""Steps from one fault to the next: standbys of these scripts import for seconds. A compilation takes up to minutes."""


def spread(
    name: str, recovered: Iterable[Recovered], *, floor: float | None, aim: float | None, against: str
) -> list[Row]:
    """Minimum, median and maximum of one case; only the median is judged. A fault never recovered from counts as no."""
    seconds = [recovery.seconds for recovery in recovered]
    known = [value for value in seconds if value is not None]
    median = statistics.median(known) if known and len(known) == len(seconds) else None
    return [
        Row(f"{name}, minimum", min(known, default=None), "s", against=against),
        Row(f"{name}, median of {len(seconds)}", median, "s", floor, aim, against),
        Row(f"{name}, maximum", max(known, default=None), "s", against=against),
    ]


def case(layout: str, victim: int, where: str, signal_name: str, repeats: int) -> list[Row]:
    """One kind of fault under Everstep, with phases and steps lost."""
    outcome = ours.faults(layout, victim, where, signal_name, repeats)
    name = f"{layout} SIG{signal_name} rank {victim} {where}"
    stop = signal_name == "STOP"
    floor, aim = (STOP_FLOOR_S, STOP_AIM_S) if stop else (KILL_FLOOR_S, KILL_AIM_S)
    rows = spread(name, outcome.recovered, floor=floor, aim=aim, against="torchft tuned 0.19-0.34 s (facts), below")
    lost = max((recovery.steps_lost for recovery in outcome.recovered), default=0)
    rows.append(Row(f"{name}, finished steps lost (most)", lost, "steps", 0, 0))
    return rows + phases(name, outcome)


def phases(name: str, outcome: ours.Outcome) -> list[Row]:
    """The slowest rank's share of each phase, median over the recoveries; generation 1 recovers from nothing."""
    accounts = [account for account in outcome.accounts if account.phases_s and account.generation > 1]
    return [
        Row(
            f"{name}, {phase}",
            statistics.median(account.phases_s[phase] for account in accounts if phase in account.phases_s),
            "s",
        )
        for phase in dict.fromkeys(phase for account in accounts for phase in account.phases_s)
    ]


def script(layout: str, repeats: int) -> list[Row]:
    """Recoveries of one kind of script, with their phases."""
    outcome = ours.faults(layout, 3, "between", "KILL", repeats, ours.Place(apart=SCRIPT_APART), SCRIPT_PATIENCE_S)
    return spread(layout, outcome.recovered, floor=None, aim=None, against="") + phases(layout, outcome)


def size(label: str, repeats: int) -> list[Row]:
    """Recoveries with a model of this size beside an ordinary step, their phases, and the finished steps lost."""
    outcome = ours.faults("ddp", 3, "between", "KILL", repeats, SIZES[label], SIZE_PATIENCE_S)
    rows = spread(f"ddp {label}", outcome.recovered, floor=None, aim=None, against="")
    rows.append(Row(f"ddp {label}, ordinary step, median", outcome.step_s, "s"))
    lost = sum(recovery.steps_lost for recovery in outcome.recovered)
    rows.append(Row(f"ddp {label}, finished steps lost in {repeats} kills", lost, "steps", 0, 0))
    return rows + phases(f"ddp {label}", outcome)


def controller(away_s: float) -> list[Row]:
    """The controller dead, with and without a rank that dies meanwhile."""
    calm = ours.controller_away(away_s, kill_rank=False)
    struck = ours.controller_away(away_s, kill_rank=True)
    pause = calm.longest_step_s / calm.median_step_s
    return [
        Row(
            f"controller dead {away_s:.0f} s: longest step over the median step",
            pause,
            "x",
            5,
            3,
            "its own steps before",
        ),
        Row(
            "rank killed meanwhile: first step after the controller's return",
            struck.recovery_after_return_s,
            "s",
            1,
            0.3,
        ),
    ]


def peer_rows(repeats: int) -> list[Row]:
    """The peers, in the same run on the same machine."""
    rows = []
    for victim, where in ((3, "between"), (3, "backward"), (0, "between")):
        found = [recovery for _ in range(repeats) for recovery in peers.torchft(victim, where)]
        rows += spread(f"torchft 0.2.0 tuned, rank {victim} {where}", found, floor=None, aim=None, against="peer")
    found = [recovery for _ in range(max(1, repeats // 3)) for recovery in peers.torchrun(3, "between")]
    rows += spread("torchrun, restart all, torch.save every 10", found, floor=None, aim=None, against="peer")
    lost = max(recovery.steps_lost for recovery in found)
    return [*rows, Row("torchrun, finished steps lost (most)", lost, "steps", against="peer")]


def main(argv: list[str]) -> int:
    parser = parser_of("recovery", __doc__)
    parser.add_argument("--repeats", type=int, default=10, help="faults of each kind")
    parser.add_argument("--no-peers", action="store_true", help="leave torchft and torchrun out")
    parser.add_argument("--only", help="run the parts whose name contains this")
    parser.add_argument(
        "--scripts",
        type=lambda text: text.split(","),
        help=f"measure these kinds of scripts alone: {','.join(SCRIPTS)}",
    )
    parser.add_argument(
        "--sizes", type=lambda text: text.split(","), help=f"measure these sizes of a model alone: {','.join(SIZES)}"
    )
    options = parser.parse_args(argv)
    if unknown := set(options.sizes or ()) - set(SIZES):
        parser.error(f"--sizes {','.join(sorted(unknown))}: known are {', '.join(SIZES)}")
    if unknown := set(options.scripts or ()) - set(SCRIPTS):
        parser.error(f"--scripts {','.join(sorted(unknown))}: known are {', '.join(SCRIPTS)}")
    repeats = 3 if options.quick else options.repeats
    parts: list[tuple[str, Callable[[], list[Row]]]] = [
        (f"{layout} SIG{name} rank {victim} {where}", partial(case, layout, victim, where, name, repeats))
        for layout, victim, where, name in (CASES[:2] + CASES[5:6] if options.quick else CASES)
    ]
    parts.append(("deaths", lambda: deaths.rows(repeats)))
    parts.append(("controller", lambda: controller(4 if options.quick else 10)))
    if not options.no_peers:
        parts.append(("peers", lambda: peer_rows(repeats)))
    if options.scripts:
        parts = [(layout, lambda layout=layout: script(layout, repeats)) for layout in options.scripts]  # type: ignore[misc]
    if options.sizes:
        parts = [(label, lambda label=label: size(label, repeats)) for label in options.sizes]  # type: ignore[misc]
    parts = [part for part in parts if not options.only or options.only in part[0]]
    rows = run_parts(parts, options.json)
    return finish("From a fault to the next finished step", rows, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
