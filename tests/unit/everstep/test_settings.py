from __future__ import annotations

import enum
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from everstep.errors import ConfigurationError
from everstep.settings import Program, Setting
from tests.support.documents.command_lines import PROGRAMS, parse

COMMAND = {"everstep-controller": ("serve",)}

each_setting = pytest.mark.parametrize(
    ("program", "setting"),
    [
        pytest.param(program, setting, id=f"{program.name}-{setting.name}")
        for _, program in PROGRAMS.values()
        for setting in program.settings.values()
    ],
)


def example(setting: Setting) -> tuple[str, Any]:
    """A text, and the value that it means."""
    kind = setting.type
    if typing.get_origin(kind) is tuple:
        return ("3,4", (3, 4)) if int in typing.get_args(kind) else ("a,b", ("a", "b"))
    if typing.get_origin(kind) is typing.Literal:
        return (typing.get_args(kind)[-1],) * 2
    if isinstance(kind, enum.EnumType):
        value: Any = next(iter(kind))
        return str(value.value), value
    values: dict[Any, tuple[str, Any]] = {bool: ("true", True), float: ("2.5", 2.5), Path: ("/x", Path("/x"))}
    return values.get(kind, ("7", "7" if kind is str else 7))


def nested(setting: Setting, value: Any) -> dict[str, Any]:
    *sections, name = setting.path
    values = {name: value}
    for section in reversed(sections):
        values = {section: values}
    return values


@each_setting
def test_setting_has_one_name_in_flag_variable_and_file(program: Program, setting: Setting, tmp_path: Path) -> None:
    text, value = example(setting)
    file = tmp_path / "settings.toml"
    *tables, key = setting.name.split("_", 1) if len(setting.path) > 1 else [setting.name]
    written = {str: f'"{text}"', Path: f'"{text}"'}.get(setting.type, text if text[0].isdigit() else f'"{text}"')
    if typing.get_origin(setting.type) is tuple:
        written = f'"{text}"'
    file.write_text("".join(f"[{table}]\n" for table in tables) + f"{key} = {written if text != 'true' else text}\n")
    wanted = nested(setting, value)
    assert program.read({"settings": str(file)}, {}) == wanted
    assert program.read({}, {program.variable(setting.name): text}) == wanted
    assert program.read({setting.name: text}, {}) == wanted
    assert program.variable(setting.name) == f"{program.name}-{setting.flag[2:]}".upper().replace("-", "_")


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_setting_has_a_flag_and_a_description(name: str) -> None:
    app, program = PROGRAMS[name]
    command: Any = typer.main.get_command(app)
    for word in COMMAND.get(name, ()):
        command = command.commands[word]
    flags = {parameter.name: parameter.opts for parameter in command.params if parameter.param_type_name == "option"}
    for setting in program.settings.values():
        assert setting.flag in flags[setting.name]
        assert len(setting.doc) > 10
        assert setting.doc.endswith(".")
    assert "--settings" in flags["settings"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_has_version_help_and_completion(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--version", "--help", "-h"):
        with pytest.raises(typer.Exit):
            parse(name, [flag])
    assert "--install-completion" in capsys.readouterr().out


class Late(msgspec.Struct, frozen=True):
    after_s: float = 1.0
    """Seconds."""


class Settings(msgspec.Struct, frozen=True):
    size: int = 1
    """A number."""
    names: tuple[str, ...] = ()
    """Names."""
    late: Late = Late()


EXAMPLE = Program("everstep-example", Settings, other_variables={"size": "PET_SIZE"})


def test_flag_overrides_variable_and_variable_overrides_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("size = 1\nnames = ['a']\n[late]\nafter_s = 1.5\n")
    environ = {"EVERSTEP_EXAMPLE_SIZE": "2", "EVERSTEP_EXAMPLE_NAMES": "b", "EVERSTEP_EXAMPLE_SETTINGS": str(file)}
    assert EXAMPLE.read({"size": 3}, environ) == {"size": 3, "names": ("b",), "late": {"after_s": 1.5}}
    other = tmp_path / "other.toml"
    other.write_text("size = 7\n")
    assert EXAMPLE.read({"settings": str(other)}, {"EVERSTEP_EXAMPLE_SETTINGS": str(file)}) == {"size": 7}
    assert EXAMPLE.read({}, {"PET_SIZE": "4"}) == {"size": 4}
    assert EXAMPLE.read({}, {"PET_SIZE": "4", "EVERSTEP_EXAMPLE_SIZE": "5"}) == {"size": 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sise = 1", "settings.toml line 1: unknown key `sise`; did you mean `size`"),
        ("size = 1\n[late]\naftr_s = 1", "line 3: unknown key `late.aftr_s`; did you mean `late.after_s`"),
        ("after_s = 1", "line 1: unknown key `after_s`; did you mean `late.after_s`"),
        (
            "[other]\nafter_s = 1\n[late]\nafter_s = 'x'",
            "line 2: unknown key `other.after_s`; did you mean `late.after_s`",
        ),
        ("[late]\nafter_s = 'x'", "line 2: late.after_s: 'x' is not a number"),
        ("size = 1.5", "settings.toml line 1: size: 1.5 is not a whole number"),
        ("size =", "settings.toml: not TOML"),
    ],
)
def test_file_error_names_line_and_fix(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        EXAMPLE.read({"settings": str(file)}, {})


@pytest.mark.parametrize(
    ("program", "arguments", "meant"),
    [
        ("everstep-agent", ["--power", "p1"], "--power-domain"),
        ("everstep-launch", ["--max-restart", "3", "train.py"], "--max-restarts"),
        ("everstep-controller", ["serve", "--data-base", "sqlite:///x"], "--database"),
    ],
)
def test_abbreviated_flag_is_refused_and_named(program: str, arguments: list[str], meant: str) -> None:
    with pytest.raises(typer.exceptions.TyperException) as refused:
        parse(program, arguments)
    assert next(word for word in arguments if word.startswith("--")) in refused.value.format_message()
    assert meant in refused.value.format_message()
