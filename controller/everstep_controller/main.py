"""The command ``everstep-controller``."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from everstep.bearer_tokens import TokenRole, mint
from everstep.command_line import Flags, Version, make_app, takes_settings
from everstep.errors import ConfigurationError, EverstepError, exit_on_errors
from everstep.host.parent_process import die_with_parent, parent_pid
from everstep.log_lines import JsonLineFormatter, PlainLineFormatter, StderrHandler
from everstep_controller.config import PROGRAM, ControllerSettings, load_settings, read_secrets


def _log_to_stderr() -> None:
    """Log plain lines to a terminal, and JSON lines elsewhere."""
    handler = StderrHandler()
    handler.setFormatter(PlainLineFormatter() if sys.stderr.isatty() else JsonLineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for chatty in ("alembic", "uvicorn.error"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


app = make_app("Run the controller of a fleet, and work with its database, tokens and journal.")


@app.callback()
def everstep_controller(_version: Version = False) -> None:
    pass


@app.command()
@takes_settings(PROGRAM)
def serve(context: typer.Context, flags: Flags) -> None:
    """Run a controller until SIGTERM or SIGINT."""
    with _exit_on_errors():
        _log_to_stderr()
        settings = load_settings(flags, os.environ)
        if settings.process.die_with_parent:
            die_with_parent(context.obj)
        from everstep_controller.app import serve_command

        raise typer.Exit(serve_command.serve(settings))


@app.command()
def replay(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="Directory of a journal, or one of its segments.")],
    node: Annotated[str, typer.Option(help="Show only events of this node, or with decisions about it.")] = "",
    job: Annotated[str, typer.Option(help="Show only events of this job, or with decisions about it.")] = "",
    trace: Annotated[str, typer.Option(help="Show only one event and its consequences, by its trace.")] = "",
    since: Annotated[str, typer.Option(metavar="TIME", help="ISO 8601, or seconds since 1970.")] = "",
    until: Annotated[str, typer.Option(metavar="TIME", help="ISO 8601, or seconds since 1970.")] = "",
    differences: Annotated[bool, typer.Option("--differences", help="Show only decisions that differ today.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event.")] = False,
) -> None:
    """Decide a recorded incident again, and show decisions that differ today. Exit with status 1 if any differs."""
    from everstep_controller.journal import replay as journal_replay

    with _exit_on_errors():
        selection = journal_replay.Selection(
            node=node,
            job=job,
            trace=trace,
            since=_time(since, float("-inf")),
            until=_time(until, float("inf")),
            differences_only=differences,
        )
        raise typer.Exit(journal_replay.run(log, selection, as_json=as_json))


def _time(text: str, default: float) -> float:
    if not text:
        return default
    with contextlib.suppress(ValueError):
        return float(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(f"{text!r} is no time: give ISO 8601, or seconds since 1970") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


@app.command()
@takes_settings(PROGRAM, "database")
def backup(file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")], flags: Flags) -> None:
    """Copy a SQLite database, even while a controller writes to it."""
    from everstep_controller.store.database import back_up

    with _exit_on_errors():
        database = PROGRAM.read(flags, os.environ).get("database", ControllerSettings().storage.database)
        print(f"{file}: {back_up(database, file)} bytes")


@app.command()
@takes_settings(PROGRAM, "secret_file")
def token(
    role: Annotated[Literal["agent", "operator", "viewer", "join"], typer.Option(help="What the token permits.")],
    subject: Annotated[str, typer.Option(metavar="NAME", help="The node for an agent's token, otherwise a person.")],
    flags: Flags,
) -> None:
    """Print a new bearer token."""
    with _exit_on_errors():
        secret_file = PROGRAM.read(flags, os.environ).get("secret_file", "")
        if not secret_file:
            raise ConfigurationError("secret_file is missing: give --secret-file, the file with the fleet's secret")
        print(mint(read_secrets(secret_file)[0], TokenRole(role), subject))


def _exit_on_errors() -> contextlib.AbstractContextManager[None]:
    return exit_on_errors("everstep-controller", unusable=(EverstepError, ValueError))


def main() -> None:
    """Run one command and end the process.

    The exit status is 0, EXIT_UNUSABLE (stderr says what to correct) or EXIT_CRASHED (``serve`` only).
    """
    app(prog_name="everstep-controller", obj=parent_pid())


if __name__ == "__main__":
    main()
