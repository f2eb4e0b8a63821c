"""Parse command lines of the programs as the programs do, without running them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from everstep.cli import context as cli_context
from everstep.cli import main as cli_main
from everstep.settings import FILE, Program
from everstep_agent import command as agent_command
from everstep_agent import config as agent_config
from everstep_controller import config as controller_config
from everstep_controller import main as controller_main
from everstep_trainer.launch import command as launch_command
from everstep_trainer.launch import options as launch_options

PROGRAMS: dict[str, tuple[typer.Typer, Program]] = {
    "everstep": (cli_main.app, cli_context.PROGRAM),
    "everstep-agent": (agent_command.app, agent_config.PROGRAM),
    "everstep-controller": (controller_main.app, controller_config.PROGRAM),
    "everstep-launch": (launch_command.app, launch_options.PROGRAM),
}
"""The programs that users start, and their settings."""


@functools.cache
def _command(name: str) -> Any:
    """Return the program's commands, cached because Typer makes all of them again for each line."""
    return typer.main.get_command(PROGRAMS[name][0])


def parse(name: str, arguments: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the chosen command, and the given arguments and flags. Exits and errors are Typer's."""
    command = _command(name)
    words = list(arguments)
    while True:
        context = command.make_context(name, words)
        left = [*context._protected_args, *context.args]
        if not hasattr(command, "commands") or (not left and command.invoke_without_command):
            return name, {key: value for key, value in context.params.items() if value is not None}
        name, command, words = command.resolve_command(context, left)


def flags(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the settings that a command line sets."""
    given = parse(name, arguments)[1]
    return {key: value for key, value in given.items() if key in PROGRAMS[name][1].settings or key == FILE}


def agent_settings(arguments: Sequence[str], environ: Mapping[str, str]) -> agent_config.AgentSettings:
    return agent_config.load_settings(flags("everstep-agent", arguments), environ)


def controller_settings(arguments: Sequence[str], environ: Mapping[str, str]) -> controller_config.ControllerSettings:
    return controller_config.load_settings(flags("everstep-controller", arguments), environ)


def launch_settings(arguments: Sequence[str], environ: Mapping[str, str]) -> launch_options.LaunchOptions:
    given = parse("everstep-launch", arguments)[1]
    script, rest = given["training_script"], given.get("training_script_args", ())
    return launch_options.load_options(script, rest, flags("everstep-launch", arguments), environ)
