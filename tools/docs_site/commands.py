"""Pages of the command lines: every command, argument and flag of the four programs, from their parsers."""

from __future__ import annotations

import argparse
import enum
import inspect
import typing
from collections.abc import Iterator
from typing import Any

import typer
from everstep_agent import config as agent_config
from everstep_controller import main as controller_main
from everstep_trainer.launch.options import make_parser as launch_parser

from everstep.cli.main import app
from tools.docs_site.markdown import code, sentence, table

_HEADINGS = ("Argument", "Default", "Variable", "Meaning")


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a program's commands by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def argparse_flags(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return each option's first flag by the name of the setting that it fills."""
    return {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings}


def _argparse_rows(parser: argparse.ArgumentParser, variable: str = "") -> Iterator[tuple[str, ...]]:
    for action in parser._actions:
        hidden = action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction)
        if hidden or isinstance(action, argparse._SubParsersAction):
            continue
        names = ", ".join(code(option) for option in action.option_strings) or code(action.metavar or action.dest)
        choices = " One of " + ", ".join(code(one) for one in action.choices) + "." if action.choices else ""
        settable = variable and action.option_strings and not isinstance(action, argparse._VersionAction)
        default = "" if action.default in (None, argparse.SUPPRESS, False) else code(action.default)
        yield (
            names,
            "required" if action.required and action.option_strings else default,
            code(variable + action.option_strings[0].strip("-").replace("-", "_").upper()) if settable else "",
            (sentence(action.help or "") + choices).replace("%%", "%"),
        )


def agent_page() -> str:
    """Return the page of ``everstep-agent``."""
    parser = agent_config._parser()
    return (
        f"# everstep-agent\n\n{sentence(parser.description or '')} [Agent settings](../settings/agent.md) say more "
        "about each option.\n\n" + table(_HEADINGS, _argparse_rows(parser, agent_config.ENVIRONMENT_PREFIX))
    )


def controller_page() -> str:
    """Return the page of ``everstep-controller``."""
    parser = controller_main._parser()
    (commands,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    helps = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    parts = [
        f"# everstep-controller\n\n{sentence(parser.description or '')} Settings of `serve` without a flag "
        "are in [controller settings](../settings/controller.md).\n"
    ]
    for name, command in subparsers(parser).items():
        parts.append(f"## everstep-controller {name}\n\n{sentence(helps[name])}\n")
        parts.append(table(_HEADINGS, _argparse_rows(command)))
    return "\n".join(parts)


def launch_page() -> str:
    """Return the page of ``everstep-launch``."""
    parser = launch_parser({})
    return (
        f"# everstep-launch\n\n{sentence(parser.description or '')} It takes torchrun's flags in both spellings "
        "(`--nproc-per-node`, `--nproc_per_node`); where a flag is not given, the variable beside it counts. Flags of "
        "torchrun that are not listed are accepted, have no effect, and are named in a message at the start.\n\n"
        + table(_HEADINGS, _argparse_rows(parser, "PET_"))
    )


def everstep_page() -> str:
    """Return the page of the operator's command."""
    root: Any = typer.main.get_command(app)
    parts = [
        f"# everstep\n\n{sentence(root.help)} Options of the program itself come before the command: "
        "`everstep --controller URL status`.\n",
        table(_HEADINGS, _typer_rows(root)),
        "## Commands\n",
        table(("Command", "Purpose"), [(code(name), sentence(_first(one.help))) for name, one in leaves(root)]),
    ]
    for name, command in leaves(root):
        parts.append(f"## {name}\n\n{sentence(command.help or '')}\n")
        rows = list(_typer_rows(command))
        if rows:
            parts.append(table(_HEADINGS, rows))
    return "\n".join(parts)


def leaves(command: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Yield every command of a Typer program with its full name."""
    path = path or ("everstep",)
    for name, child in getattr(command, "commands", {}).items():
        yield from leaves(child, *path, name)
    if not hasattr(command, "commands"):
        yield " ".join(path), command


def _first(text: str | None) -> str:
    return inspect.cleandoc(text or "").split("\n\n", 1)[0]


def _typer_rows(command: Any) -> Iterator[tuple[str, ...]]:
    for one in command.params:
        option = one.param_type_name == "option"
        if getattr(one, "hidden", False) or one.name in ("help", "install_completion", "show_completion"):
            continue
        names = (
            ", ".join(code(flag) for flag in (*one.opts, *one.secondary_opts))
            if option
            else code(one.metavar or one.name)
        )
        choices = _choices(one.type_descriptor.annotation)
        default = "" if one.default in (None, "", False) or callable(one.default) else code(one.default)
        yield (
            names,
            "required" if one.required and option else default,
            code(one.envvar or "") if isinstance(one.envvar, str | None) else ", ".join(map(code, one.envvar)),
            sentence(one.help or "") + (" One of " + ", ".join(map(code, choices)) + "." if choices else ""),
        )


def _choices(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is typing.Literal:
        return [str(one) for one in typing.get_args(annotation) if one]
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return [str(one.value) for one in annotation]
    return []
