"""A fleet's load on one controller process, over real sockets: what it costs, who is made to wait, what gets lost.

    python -m bench.fleet_load --nodes 12500 --seconds 30 [--interval 1] [--database URL] [--rounds N] [--fail K]
        [--forming-seconds 20] [--storm] [--failover] [--loss P --jitter S --pause S] [--curve FILE.png]
        [--quick] [--json FILE]

Every agent is a session of its own with real messages: a registration with eight GPUs, a picture, heartbeats with the
progress of eight ranks; every 1,250 nodes run a job of 10,000 ranks, whose launchers joined and whose ranks stepped.
Beats are measured in two windows: while nothing happens, and while one job after the other ends and forms again.
The agents live in processes of their own, and say how late they were themselves; a latency ends where the kernel has
the answer, as on a machine of the agent's own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from bench.load import messages, trials
from bench.load.cost_curves import draw
from bench.load.events import Follower
from bench.load.fleet import Controller, Fleet
from bench.load.postgres import own_postgres
from bench.table import Row, finish, parser_of

MOST_JOBS = 10
STORMING = 100
POSTGRESQL = "postgresql"
FAILING_NODES, FAILING = 1500, 750
CURVE = (500, 2500, 5000, 7500, 10_000, 12_500)
GIANT_NODES = 20_000
"""From here on agents are more than a process may have files: they hang up between beats."""
console = Console(stderr=True)


@contextmanager
def fleet_of(
    nodes: int, interval_s: float, database: str, apart: int = 0, *, two: bool = False
) -> Iterator[tuple[Fleet, Follower]]:
    """A new controller (and another one that stands by) and its fleet, registered, with its jobs running."""
    jobs = min(MOST_JOBS, max(1, nodes // messages.NODES_OF_A_JOB))
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="everstep-load-")))
        if database == POSTGRESQL:
            database = stack.enter_context(own_postgres())
        controller = Controller(directory, database, _settings(interval_s))
        stack.callback(controller.end)
        standby = _standby(directory, database, controller, interval_s) if two else None
        if standby is not None:
            stack.callback(standby.end)
        fleet = Fleet(controller, nodes, jobs=jobs, apart=apart, spread=nodes > GIANT_NODES, standby=standby)
        stack.callback(fleet.end)
        console.log(f"{nodes} nodes register")
        giant = nodes > GIANT_NODES  # each of its beats is a connection too: while jobs form there is no time for all
        fleet.all("beat", interval_s=2 * interval_s if giant else interval_s)
        fleet.open()
        console.log(f"{jobs} job{'s' if jobs > 1 else ''} of {fleet.nodes_of_a_job} nodes form")
        fleet.join()
        if giant:
            trials.begin(fleet, interval_s)  # all agents reach their new time before one counts as late
        yield fleet, Follower(controller)
        status = fleet.status()
        if status["refusals"]:
            console.log(f"refused: {dict(status['refusals'])}")


def _standby(directory: Path, database: str, leader: Controller, interval_s: float) -> Controller:
    own = directory / "standby"
    own.mkdir()
    return Controller(own, database, _settings(interval_s), leader.secret_file.read_text())


def _settings(interval_s: float) -> str:
    """The production preset, its waits stretched where beats are rarer than every second."""
    if interval_s <= 1.0:
        return f"heartbeat_interval_s = {interval_s}\n"
    return (
        f"heartbeat_interval_s = {interval_s}\n[policy.liveness]\nsuspect_after_s = {2.5 * interval_s}\n"
        f"suspect_after_max_s = {4 * interval_s}\nlost_after_s = {5 * interval_s}\n"
    )


def load(options: argparse.Namespace) -> list[Row]:
    """The fleet as the options have it."""
    apart = min(STORMING, options.nodes // 10) if options.storm else 0
    with fleet_of(options.nodes, options.interval, options.database, apart, two=options.failover) as (fleet, follower):
        trials.begin(fleet, options.interval)
        console.log(f"{options.seconds:g} s of beats")
        rows = trials.steady(fleet, options.seconds, options.interval)
        if options.nodes <= GIANT_NODES:
            console.log(f"{options.forming_seconds:g} s in which jobs form")
            quiet_us = next(row.value for row in rows if row.name == trials.CPU_PER_BEAT)
            rows += trials.forming(fleet, options.forming_seconds, quiet_us or 0.0)
        console.log("ranks are lost")
        rows += trials.one_failure(fleet, options.rounds)
        if options.nodes > GIANT_NODES:
            rows += trials.lateness(fleet, follower, options.seconds, options.interval)
        if options.storm:
            rows += _storms(fleet, apart, options.storm_seconds)
        if options.loss or options.jitter or options.pause:
            console.log(f"{options.chaos_seconds:g} s of trouble")
            chaos = {"loss": options.loss, "jitter_s": options.jitter, "pause_s": options.pause}
            rows += trials.false_evictions(fleet, follower, options.chaos_seconds, options.interval, chaos)
        if options.fail:
            console.log(f"{options.fail} nodes fail")
            rows += trials.mass_failure(fleet, follower, options.fail)
        if fleet.standby is not None:
            console.log("the leader is killed")
            rows += trials.failover(fleet, fleet.standby)
    return rows


def _storms(fleet: Fleet, apart: int, seconds: float) -> list[Row]:
    fleet.sample()
    console.log(f"{seconds:g} s of calm, then storms")
    trials.begin(fleet, 1.0)
    calm = trials.calm(fleet, seconds)
    one = trials.storm(fleet, 1, 200.0, seconds, calm)
    many = trials.storm(fleet, apart, 20.0, seconds, calm)
    return one + many


def curve(options: argparse.Namespace) -> list[Row]:
    """CPU and memory of fleets of several sizes, drawn."""
    rows: list[Row] = []
    points = []
    for nodes in [size for size in CURVE if size <= options.nodes]:
        with fleet_of(nodes, options.interval, options.database) as (fleet, _):
            trials.begin(fleet, options.interval)
            measured = trials.steady(fleet, options.seconds, options.interval)
            values = {row.name.split(",")[0]: row.value for row in measured}
            points.append((nodes, values))
            kept = ("controller CPU", "controller CPU per heartbeat", "resident memory")
            rows += [Row(f"{name}, {nodes} nodes", values[name], unit) for name, unit in zip(kept, UNITS, strict=True)]
    draw(options.curve, points, options.interval)
    return rows


UNITS = ("cores", "us", "MiB")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = parser_of("fleet_load", __doc__)
    parser.add_argument("--nodes", type=int, default=12_500)
    parser.add_argument("--seconds", type=float, default=30.0, help="of undisturbed beats (default 30)")
    parser.add_argument("--forming-seconds", type=float, default=20.0, help="of beats while jobs form (default 20)")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between a node's beats")
    parser.add_argument(
        "--database",
        default="",
        metavar="URL",
        help=f"default: an SQLite file in a temporary directory; {POSTGRESQL!r}: a PostgreSQL of its own",
    )
    parser.add_argument("--rounds", type=int, default=20, help="ranks that are lost, one after the other")
    parser.add_argument("--fail", type=int, default=0, metavar="K", help="nodes that fail at once, at the end")
    parser.add_argument("--storm", action="store_true", help="XIDs at 200/s from one node, at 20/s from a hundred")
    parser.add_argument("--storm-seconds", type=float, default=60.0)
    parser.add_argument("--failover", action="store_true", help="the leader dies at the end (--database postgresql)")
    parser.add_argument("--loss", type=float, default=0.0, metavar="P", help="share of beats that are lost")
    parser.add_argument("--jitter", type=float, default=0.0, metavar="S", help="most seconds that a beat is late")
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="seconds the controller is stopped for")
    parser.add_argument("--chaos-seconds", type=float, default=120.0, help="of loss, jitter and pause")
    parser.add_argument("--curve", type=Path, metavar="PNG", help="measure fleets up to --nodes, and draw")
    options = parser.parse_args(argv)
    if options.failover and not options.database.startswith(POSTGRESQL):
        parser.error("--failover needs a database that two controllers share: --database postgresql")
    if options.quick:
        options.nodes = min(options.nodes, FAILING_NODES)
        options.fail = options.fail or (0 if options.failover else FAILING)  # an eviction there is a mistake
        options.seconds, options.rounds = min(options.seconds, 5.0), 5
        options.forming_seconds = 5.0
        options.storm_seconds, options.chaos_seconds = 5.0, 10.0
    return options


def main(argv: list[str]) -> int:
    options = parse(argv)
    rows = curve(options) if options.curve else load(options)
    return finish(f"One controller and {options.nodes} nodes", rows, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
