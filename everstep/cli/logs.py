"""``everstep logs``: what the ranks of a job printed, as everstep-launch keeps it on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.context import ConnectionOptions, error_console, reporting_errors, state_dir
from everstep.client import Client
from everstep.errors import ConfigurationError, EverstepError
from everstep.layout.kept_output import LAUNCHER_FILE, FollowedFile, KeptLine, KeptOutput, kept_outputs, last_lines
from everstep.printable_text import plain_line
from everstep.wire.v1.operator import JobDetail

FOLLOW_S = 0.5
"""Seconds between two looks for new lines."""
MAX_NAMED_NODES = 8

StateDirectory = Annotated[
    Path | None, typer.Option("--state-dir", help="Folder that everstep-launch was given as --state-dir.")
]
Rank = Annotated[int | None, typer.Option(min=0, help="Only this rank; without it every line begins with its rank.")]
OfLauncher = Annotated[bool, typer.Option("--launcher", help="The launcher's own log instead of the ranks' output.")]


def logs(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job, such as one from `everstep runs`.")],
    rank: Rank = None,
    lines: Annotated[int, typer.Option(min=0, help="Number of lines, the newest ones.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the launcher ends.")] = False,
    launcher: OfLauncher = False,
    state_directory: StateDirectory = None,
) -> None:
    """Print the newest output of a job's ranks, present or past, that was started on this machine.

    Ranks of other nodes are named with their node: everstep-launch keeps their output there.
    """
    with reporting_errors():
        folder = state_directory if state_directory is not None else state_dir(os.environ)
        outputs = _newest(kept_outputs(folder, job))
        files = _files(outputs, rank, launcher=launcher)
        if not files:
            raise ConfigurationError(_where_else(context.obj, folder, job, rank, outputs))
        has_labels = rank is None and not launcher
        followed = [FollowedFile(label, path) for label, path in files] if follow else []
        newest = last_lines(files, lines)
        _print(newest, has_labels=has_labels)
        if not newest and lines and not follow:
            error_console.print("nothing was printed yet", style="dim")
        try:
            for found in _follow(outputs, followed):
                _print(found, has_labels=has_labels)
        except KeyboardInterrupt:
            return


def _newest(outputs: list[KeptOutput]) -> list[KeptOutput]:
    """Return those of launchers that run, or else the newest: this machine may have several nodes of a job."""
    return [each for each in outputs if each.is_running] or outputs[:1]


def _files(outputs: list[KeptOutput], rank: int | None, *, launcher: bool) -> list[tuple[str, Path]]:
    if launcher:
        return [("launcher", path) for each in outputs if (path := each.path / LAUNCHER_FILE).exists()]
    found = ((number, path) for each in outputs for number, path in each.files().items())
    return [(f"rank {number}", path) for number, path in sorted(found) if rank in (None, number)]


def _follow(outputs: list[KeptOutput], files: list[FollowedFile]) -> Iterator[list[KeptLine]]:
    """Yield new lines until the launchers have ended and everything is read."""
    is_running = bool(files)
    while is_running:
        is_running = any(each.is_running for each in outputs)
        yield sorted((line for file in files for line in file.read()), key=lambda line: line.at)
        if is_running:
            time.sleep(FOLLOW_S)


def _print(found: Iterable[KeptLine], *, has_labels: bool) -> None:
    """Print lines without colours and control characters, which may be a progress bar's."""
    for line in found:
        label = f"[{line.label}] " if has_labels else ""
        sys.stdout.write(f"{label}{plain_line(line.text)}\n")
    sys.stdout.flush()


def _where_else(options: ConnectionOptions, folder: Path, job: str, rank: int | None, outputs: list[KeptOutput]) -> str:
    """Return the sentence that says where the output is that this machine does not have."""
    what = f"output of job {job}" if rank is None else f"output of rank {rank} of job {job}"
    missing = f"{folder} has no {what}"
    if any(not each.about.keeps_ranks for each in outputs):
        return f"{missing}: its launcher has --no-keep-output"
    detail = _ask(options, job)
    nodes = sorted({member.node for member in detail.roster if rank in (None, member.rank)}) if detail else []
    if nodes:
        named = ", ".join(nodes[:MAX_NAMED_NODES]) + (", ..." if len(nodes) > MAX_NAMED_NODES else "")
        return f"{missing}: it is kept on {named}; run this command there, as the user who started everstep-launch"
    known = sorted(number for each in outputs for number in each.files())
    if known:
        return f"{missing}, but of rank {', '.join(map(str, known))}"
    return f"{missing}: everstep-launch keeps it on the node of the rank, unless it has --log-dir or --no-keep-output"


def _ask(options: ConnectionOptions, job: str) -> JobDetail | None:
    """Return the job as a controller knows it; None if none answers or knows it."""
    try:
        access = options.resolved(os.environ)
        with Client(access.controller, access.token(), tls=access.tls()) as client:
            return client.job(job)
    except EverstepError:
        return None
