"""The command ``everstep-launch``."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import signal
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import typer

from everstep.command_line import CONTEXT_SETTINGS, Flags, Version, make_app, takes_settings
from everstep.errors import exit_on_errors
from everstep.host.parent_process import die_with_parent
from everstep.printable_text import escape_control
from everstep.system_clock import SYSTEM_CLOCK
from everstep_trainer.launch.init_process import continue_in_child_of_init
from everstep_trainer.launch.interruption import EndingSignals
from everstep_trainer.launch.launcher import LauncherOutcome, ended_by_signal, launch
from everstep_trainer.launch.options import (
    ALIASES,
    IGNORED_FLAGS,
    IGNORED_SWITCHES,
    NOT_MISSED,
    PROGRAM,
    LaunchOptions,
    load_options,
)
from everstep_trainer.launch.output.log_handlers import LauncherLog, install_launcher_log

log = logging.getLogger(__name__)

SHORT_FLAGS = {"redirects": ("-r",)}
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


app = make_app()


def _takes_ignored_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command hidden flags for IGNORED_FLAGS, and pass those that were given as its argument ``ignored``."""

    @functools.wraps(function)
    def command(**given: Any) -> None:
        ignored = [name for name in IGNORED_FLAGS if given.pop(name) is not None]
        function(ignored=ignored, **given)

    own = inspect.signature(function).parameters.values()
    parameters = [each for each in own if each.name != "ignored"]
    for name in IGNORED_FLAGS:
        kind: Any = bool | None if name in IGNORED_SWITCHES else str | None
        spellings = [f"--{name.replace('_', '-')}", f"--{name}", *SHORT_FLAGS.get(name, ())]
        option = typer.Option(*dict.fromkeys(spellings), hidden=True, envvar=f"PET_{name.upper()}")
        annotation: Any = Annotated[kind, option]
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


@app.command(context_settings={**CONTEXT_SETTINGS, "allow_interspersed_args": False})
@_takes_ignored_flags
@takes_settings(PROGRAM, aliases=ALIASES)
def everstep_launch(
    context: typer.Context,
    training_script: Annotated[str, typer.Argument(help="Path of the training script, or a module's name with -m.")],
    flags: Flags,
    ignored: list[str],
    training_script_args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    _version: Version = False,
) -> None:
    """Run a training script on this node's ranks, and replace single ranks when they fail.

    The flags of torchrun are accepted. The exit status is 0 if the job finished, 1 if it failed, 2 for invalid options,
    128 plus the number of the signal that ended the launcher, or, for a script that never calls everstep.main, the
    status of its first failed process.
    """
    with exit_on_errors("everstep-launch"):
        handler = install_launcher_log(is_verbose=bool(flags.get("verbose")))
        for name in ignored:
            level = logging.DEBUG if name in NOT_MISSED else logging.INFO
            log.log(level, "--%s has no effect: %s", name.replace("_", "-"), IGNORED_FLAGS[name])
        options = load_options(training_script, training_script_args or (), flags, os.environ)
        handler.is_verbose = options.display.verbose
        if options.endpoint_notice is not None:
            log.info("%s", options.endpoint_notice)
        if options.die_with_parent:
            die_with_parent(context.obj)
        outcome = asyncio.run(_run(options, handler))
    if outcome.exit_status and not outcome.is_shown:
        handler.show(escape_control(outcome.sentence))
    raise typer.Exit(outcome.exit_status)


def main() -> None:
    """Run the command and end the process."""
    _open_standard_files()
    continue_in_child_of_init()
    app(prog_name="everstep-launch", obj=os.getppid())


def _open_standard_files() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr, so that nothing else gets their numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest number
            os.set_inheritable(opened, True)


async def _run(options: LaunchOptions, shown: LauncherLog) -> LauncherOutcome:
    """Run the launcher until it ends; the first signal ends it in order, a second one at once."""
    loop, signals = asyncio.get_running_loop(), EndingSignals()

    def receive(number: signal.Signals) -> None:
        if number == signal.SIGINT:
            shown.note_echo()
        signals.receive(number)

    work = asyncio.create_task(launch(options, SYSTEM_CLOCK, os.environ, signals))
    signals.cancel_by(work.cancel)
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup asks for that
            loop.add_signal_handler(number, receive, number)
    try:
        return await work
    except asyncio.CancelledError:
        if not signals.received:
            raise
        # The answer to a first signal that left ranks their time said what a second one does.
        return msgspec.structs.replace(ended_by_signal(signals.received[0]), is_shown=len(signals.received) > 1)


if __name__ == "__main__":
    main()
