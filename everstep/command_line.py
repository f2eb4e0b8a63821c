"""Make the command lines of all programs with Typer: flags from settings, ``--version``, completion, exit statuses."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from everstep import __version__
from everstep.settings import FILE, Program, Setting

Flags = dict[str, Any]
"""The settings given on the command line, by name, for ``Program.read``."""


def _print_version(requested: bool) -> None:
    if requested:
        print(__version__)
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the release and exit.")
]
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}


def make_app(help_text: str = "", *, completion: bool = True) -> typer.Typer:
    """Return a program, or a group of commands, that shows its help in plain text."""
    return typer.Typer(
        help=help_text or None,
        add_completion=completion,
        no_args_is_help=True,
        context_settings=CONTEXT_SETTINGS,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


def takes_settings(
    program: Program, *names: str, aliases: Mapping[str, Sequence[str]] = {}
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a Typer command one flag per setting, and pass those that were given as its argument ``flags``. It takes the
    settings ``names``, or all if none is named. ``aliases`` has further spellings of flags, by setting."""
    settings = [program.settings[name] for name in names or program.settings]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(**given: Any) -> Any:
            flags = {name: given.pop(name) for name in (FILE, *(setting.name for setting in settings))}
            return function(flags={name: value for name, value in flags.items() if value is not None}, **given)

        own = inspect.signature(function, eval_str=True).parameters.values()
        parameters = [each.replace(kind=each.KEYWORD_ONLY) for each in own if each.name != "flags"]
        parameters.append(_file_parameter(program))
        parameters += [_setting_parameter(setting, aliases.get(setting.name, ())) for setting in settings]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {}
        return command

    return decorate


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _file_parameter(program: Program) -> inspect.Parameter:
    text = (
        f"TOML file with settings. Each setting is also a variable, {program.prefix} and its name in capitals. Flags "
        "override variables, and variables override the file."
    )
    return _parameter(FILE, Path, typer.Option("--settings", metavar="FILE", help=text))


def _setting_parameter(setting: Setting, aliases: Sequence[str]) -> inspect.Parameter:
    """Return the parameter of a setting. Types that Typer does not know are taken as text."""
    kind = setting.type
    if kind not in (bool, int, float, Path) and typing.get_origin(kind) is not typing.Literal:
        kind = str
    flag = f"{setting.flag}/--no-{setting.flag[2:]}" if kind is bool else setting.flag
    text = " ".join(setting.doc.replace("``", "").split())  # one line, without markup
    if value := default_text(setting):
        text += f" [default: {value}]"
    option = typer.Option(flag, *aliases, help=text, hidden=len(setting.path) > 1)
    return _parameter(setting.name, kind, option)


def default_text(setting: Setting) -> str:
    """Return a default as one would write it on the command line; "" for none."""
    value = setting.default
    if value is None or value is False:
        return ""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
