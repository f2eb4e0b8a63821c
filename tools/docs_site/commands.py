"""Pages of the command lines: every command, argument and flag of the four programs, from their Typer apps."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from everstep.cli import context as cli_context
from everstep.cli import main as cli_main
from everstep.settings import FILE, Program, choices_of
from everstep_agent import config as agent_config
from everstep_agent.command import app as agent_app
from everstep_controller import config as controller_config
from everstep_controller import main as controller_main
from everstep_trainer.launch import command as launch_command
from everstep_trainer.launch import options as launch_options
from tools.docs_site.markdown import code, sentence, table

_HEADINGS = ("Argument", "Default", "Variable", "Meaning")


def agent_page() -> str:
    """Return the page of ``everstep-agent``."""
    note = "[Agent settings](../settings/agent.md) has more about each setting."
    return _page(agent_app, agent_config.PROGRAM, note)


def controller_page() -> str:
    """Return the page of ``everstep-controller``."""
    note = (
        "[Controller settings](../settings/controller.md) has more about each setting of `serve`. Each setting of the "
        "[decision policy](../settings/policy.md) is a flag too: `--policy-liveness-lost-after-s 30`."
    )
    return _page(controller_main.app, controller_config.PROGRAM, note)


def launch_page() -> str:
    """Return the page of ``everstep-launch``."""
    note = (
        "It accepts all flags of torchrun, in both spellings (`--nproc-per-node`, `--nproc_per_node`), and its `PET_` "
        "variables. Flags of torchrun that are not listed have no effect; the launcher prints the reason at its start."
    )
    return _page(launch_command.app, launch_options.PROGRAM, note)


def everstep_page() -> str:
    """Return the page of the operator's command."""
    note = "Flags of the program itself come before the command: `everstep --controller URL status`."
    return _page(cli_main.app, cli_context.PROGRAM, note)


def _page(app: typer.Typer, program: Program, note: str) -> str:
    root: Any = typer.main.get_command(app)
    parts = [f"# {program.name}\n\n{sentence(_text(root.help))} {note}\n", table(_HEADINGS, _rows(root, program))]
    commands = [(name, command) for name, command in leaves(root, program.name) if command is not root]
    if commands:
        rows = [(code(name), sentence(_text(command.help).split("\n\n", 1)[0])) for name, command in commands]
        parts += ["## Commands\n", table(("Command", "Purpose"), rows)]
    for name, command in commands:
        parts.append(f"## {name}\n\n{sentence(_text(command.help))}\n")
        rows = list(_rows(command, program))
        if rows:
            parts.append(table(_HEADINGS, rows))
    return "\n".join(parts)


def leaves(command: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Yield every command of a program with its full name, and groups that are commands themselves."""
    if getattr(command, "invoke_without_command", False):
        yield " ".join(path), command
    for name, child in getattr(command, "commands", {}).items():
        yield from leaves(child, *path, name)
    if not hasattr(command, "commands"):
        yield " ".join(path), command


def _text(text: str | None) -> str:
    return inspect.cleandoc(text or "")


def _rows(command: Any, program: Program) -> Iterator[tuple[str, ...]]:
    for parameter in command.params:
        is_option = parameter.param_type_name == "option"
        if getattr(parameter, "hidden", False) or parameter.name in ("help", "install_completion", "show_completion"):
            continue
        flags = (*parameter.opts, *parameter.secondary_opts)
        names = ", ".join(map(code, flags)) if is_option else code(parameter.metavar or parameter.name)
        choices = choices_of(parameter.type_descriptor.annotation)
        default = (
            "" if parameter.default in (None, "", False) or callable(parameter.default) else code(parameter.default)
        )
        is_setting = is_option and (parameter.name in program.settings or parameter.name == FILE)
        yield (
            names,
            "required" if parameter.required and is_option else default,
            code(program.variable(parameter.name)) if is_setting else "",
            sentence(parameter.help or "") + (" One of " + ", ".join(map(code, choices)) + "." if choices else ""),
        )
