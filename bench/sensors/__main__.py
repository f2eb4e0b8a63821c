"""Harmless events and faults through the real sensors, a month of ordinary life, and what sensing costs.

    python -m bench.sensors [--only TEXT] [--json FILE]   rows of bench/sensor_events on virtual machines
    python -m bench.sensors --noise [--quick]             30 simulated days of 1,000 healthy nodes
    python -m bench.sensors --latency                     from a fault to the controller's event stream
    python -m bench.sensors --cost                        CPU and memory of an agent, and memory over a month

Rows: the exit status is 1 if one fails, that is, a fault without its finding, a finding above info that the row does
not expect, or one that does not clear. ``--quick`` takes a sixth of the rows, 20 nodes for 10 days, 5 faults, or 5 s.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.progress import track

from bench.sensors import cost, latency, noise
from bench.sensors.events import EventRow, Outcome, load_rows, run_row
from bench.table import Row, finish, parser_of
from everstep_agent.policy.rules import load_policy

KINDS: dict[str, Callable[[EventRow], bool]] = {
    "harmless events": lambda row: not row.fault,
    "faults": lambda row: row.fault and not row.at_start,
    "faults from before the start": lambda row: row.fault and row.at_start,
}
QUICK_EVERY = 6


def run_events(only: str, is_quick: bool, json_path: Path | None) -> int:
    """Run the rows whose name has the text ``only``, print what is wrong and the figures; return the exit status."""
    policy = load_policy()
    rows = [row for row in load_rows() if only in row.name][:: QUICK_EVERY if is_quick else 1]
    outcomes = [run_row(row, policy) for row in track(rows, description="events", transient=True)]
    for outcome in outcomes:
        if not outcome.is_right:
            print(f"{outcome.row.name}: {outcome.problems}")
    status = finish("Events through the real sensors", figures(outcomes), json_path)
    return int(status or any(not outcome.is_right for outcome in outcomes))


def figures(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return the figures, by kind of event."""
    rows = []
    for name, belongs in KINDS.items():
        of_kind = [outcome for outcome in outcomes if belongs(outcome.row)]
        most_others = 2 if name == "harmless events" else None
        rows += [
            Row(name, len(of_kind), "events"),
            Row(f"{name} whose findings are missing", sum(bool(each.missing) for each in of_kind), "events", 0, 0),
            Row(f"{name} with a wrong subject", sum(bool(each.wrong_subject) for each in of_kind), "events", 0, 0),
            Row(f"{name} with a wrong action", sum(bool(each.wrong_action) for each in of_kind), "events", 0, 0),
            Row(f"{name} with others above info", sum(bool(each.others) for each in of_kind), "events", most_others, 0),
            Row(f"{name} whose findings do not clear", sum(bool(each.lasting) for each in of_kind), "events", 0, 0),
        ]
    evicting = sum(bool(outcome.evicting) for outcome in outcomes if not outcome.row.fault)
    return [*rows, Row("harmless events that evict", evicting, "events", 0, 0)]


def run_noise(is_quick: bool, json_path: Path | None) -> int:
    """Simulate the month, print its findings, and return the exit status."""
    nodes, days, every = (20, 10.0, 12) if is_quick else (1000, 30.0, 1)
    totals = noise.simulate(nodes, days, load_policy(), every)
    for cause, count in totals.above_info.most_common():
        print(f"{count} times {cause}")
    return finish("Ordinary life", noise.figures(totals, nodes, days), json_path)


def main(argv: list[str]) -> int:
    parser = parser_of("sensors", __doc__)
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--noise", action="store_true", help="simulate a month of a healthy fleet")
    parser.add_argument("--latency", action="store_true", help="measure from a fault to the controller")
    parser.add_argument("--cost", action="store_true", help="measure CPU and memory")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    if options.noise:
        return run_noise(options.quick, options.json)
    if options.latency:
        rows = latency.measure(5 if options.quick else 20)
        return finish("From a fault to the controller", rows, options.json)
    if options.cost:
        rows = [*cost.measure_processes(5.0 if options.quick else 60.0), *cost.measure_month()]
        return finish("What sensing costs", rows, options.json)
    return run_events(options.only, options.quick, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
