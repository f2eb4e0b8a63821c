"""``everstep-controller replay``: shows a recorded incident again, as it was decided and as it would be today."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from controller.journal import segments
from controller.replay import Recording, Step, replay
from everstep import __version__
from everstep.errors import NotFound


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("log", type=Path, metavar="LOG", help="a journal's directory, or one of its segments")
    parser.add_argument("--node", default="", help="only what the node said, or what names it")
    parser.add_argument("--job", default="", help="only what was said of the job, or what names it")
    parser.add_argument("--trace", default="", help="only one stimulus and what it led to")
    parser.add_argument("--since", type=_wall, default=float("-inf"), metavar="TIME", help="ISO 8601, or wall seconds")
    parser.add_argument("--until", type=_wall, default=float("inf"), metavar="TIME")
    parser.add_argument("--differences", action="store_true", help="only what would be decided otherwise today")
    parser.add_argument("--json", action="store_true", help="one object per event, for scripts")


def _wall(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def run(options: argparse.Namespace) -> int:
    """Prints the incident; 1 where something would be decided otherwise, else 0. Raises NotFound, MalformedMessage."""
    paths = segments(options.log) if options.log.is_dir() else [options.log]
    if not paths or not paths[0].exists():
        raise NotFound(f"no journal in {options.log}: give the directory that journal_dir names, or a *.journal file")
    events = differences = 0
    for path in paths:
        recording = replay(path)
        _announce(path, recording, options)
        for step in recording.steps:
            events += 1
            differences += step.differs
            if _wanted(step, options):
                _show(step, options)
    if not options.json:
        _conclude(events, differences)
    return 1 if differences else 0


def _announce(path: Path, recording: Recording, options: argparse.Namespace) -> None:
    if not options.json:
        other = "" if recording.is_of_this_release else f", replayed by {__version__}"
        print(f"{path.name}: from {_when(recording.begins_at)}, written by everstep {recording.version}{other}")


def _wanted(step: Step, options: argparse.Namespace) -> bool:
    if not options.since <= step.at <= options.until or (options.differences and not step.differs):
        return False
    if options.trace and step.trace != options.trace:
        return False
    lines = (*step.then, *step.now)
    return all(
        not name or name == subject or any(_names(line, name) for line in lines)
        for name, subject in ((options.node, step.node), (options.job, step.job))
    )


def _names(line: str, name: str) -> bool:
    return name in line.replace(",", " ").replace(":", " ").replace(";", " ").split()


def _show(step: Step, options: argparse.Namespace) -> None:
    if options.json:
        sys.stdout.write(msgspec.json.encode(step).decode() + "\n")
    elif step.differs or step.now:
        print(f"{_when(step.at)}  {step.what}  [{step.trace}]")
        _print_lines(step.difference() if step.differs else step.now)


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"    {line}")


def _conclude(events: int, differences: int) -> None:
    if differences:
        print(f"{events} events; {differences} would be decided otherwise by this core (- then, + now)")
    else:
        print(f"{events} events, each decided as it was then")


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
