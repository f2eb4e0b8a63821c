"""Read the settings of all programs: one struct per program, and one name for a setting wherever it is set.

The field ``vault_listen`` of ``everstep-agent``, for example, is the flag ``--vault-listen``, the variable
``EVERSTEP_AGENT_VAULT_LISTEN`` and the key ``vault_listen`` of the TOML file that ``--settings`` names. A flag
overrides the variable, the variable overrides the file, and the file overrides the default. ``everstep.command_line``
makes the flags.
"""

from __future__ import annotations

import ast
import difflib
import enum
import inspect
import itertools
import re
import sys
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

import msgspec

from everstep.errors import ConfigurationError

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

FILE = "settings"
"""The name of the setting that names the file: ``--settings``, ``EVERSTEP_<PROGRAM>_SETTINGS``."""


class SettingsPart(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a program that belong together. Unlike those of other nested structs, their names and paths do not
    show the part."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of a program."""

    name: str  # in flags and variables; words of nested structs come first: ``policy_liveness_lost_after_s``
    path: tuple[str, ...]  # attributes that lead to the value, but no parts: ``policy``, ``liveness``, ``lost_after_s``
    type: Any  # of the value, without None
    default: Any  # None if the field has none
    doc: str  # the docstring below the field

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


class Given(NamedTuple):
    """A value that a flag, a variable or the file gives."""

    value: Any
    source: str  # as words for people


@dataclass(frozen=True)
class Program:
    """A program and its settings."""

    name: str  # of the command
    kind: type[msgspec.Struct]  # with a docstring below each field; fields may be nested structs
    excluded: Collection[str] = ()  # names of fields that no flag, variable or file sets
    other_variables: Mapping[str, str] = field(default_factory=dict)  # read if the program's own is not set, by setting

    @property
    def prefix(self) -> str:
        """Prefix of the program's environment variables."""
        return self.name.upper().replace("-", "_") + "_"

    def variable(self, name: str) -> str:
        """Return the environment variable of a setting."""
        return self.prefix + name.upper()

    @cached_property
    def settings(self) -> dict[str, Setting]:
        """The program's settings by name, in the order of the fields."""
        return {setting.name: setting for setting in self._settings_of(self.kind, "", ())}

    def _settings_of(self, kind: type[msgspec.Struct], names: str, path: tuple[str, ...]) -> Iterator[Setting]:
        docs = field_docs(kind)
        for each in msgspec.structs.fields(kind):
            name = names + each.encode_name
            if name in self.excluded:
                continue
            if isinstance(each.type, type) and issubclass(each.type, msgspec.Struct):
                above = (names, path) if is_part(each.type) else (name + "_", (*path, each.name))
                yield from self._settings_of(each.type, *above)
                continue
            default = None if each.default is msgspec.NODEFAULT else each.default
            doc = docs.get(each.name, "")
            yield Setting(name=name, path=(*path, each.name), type=_without_none(each.type), default=default, doc=doc)

    def read(self, flags: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
        """Return what is set by flags, variables and the file: values by attribute, those of a nested struct as a dict.

        ``flags`` are by the setting's name, and the file as ``settings``; text is converted. Raises ConfigurationError
        if a variable or key is unknown, or a value has another type. The message names the source.
        """
        return self.by_attribute(self.given(flags, environ))

    def given(self, flags: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Given]:
        """Return the same as ``read`` by the setting's name, each value with its source."""
        variables = self._given_variables(environ)
        _, named = variables.pop(FILE, ("", ""))
        file = flags.get(FILE) or named
        found = self._read_file(Path(file)) if file else {}
        for name, (variable, text) in variables.items():
            found[name] = Given(self._convert(variable, text, name), f"environment, {variable}")
        for name, value in flags.items():
            if name != FILE:
                flag = self.settings[name].flag
                converted = self._convert(flag, value, name) if isinstance(value, str) else value
                found[name] = Given(converted, f"flag {flag}")
        return found

    def by_attribute(self, given: Mapping[str, Given]) -> dict[str, Any]:
        """Return the values by attribute, those of a nested struct as a dict."""
        values: dict[str, Any] = {}
        for name, each in given.items():
            *groups, attribute = self.settings[name].path
            target = values
            for group in groups:
                target = target.setdefault(group, {})
            target[attribute] = each.value
        return values

    def _given_variables(self, environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """Return the set variables and their texts, by setting."""
        own = {self.variable(name): name for name in (*self.settings, FILE)}
        wrong = unknown_variables(environ, self.prefix, own) if "-" in self.name else []
        if wrong:
            raise ConfigurationError(f"{', '.join(wrong)}: no such setting; {suggest(wrong[0], own)}")
        others = {variable: name for name, variable in self.other_variables.items()}
        return {name: (source, environ[source]) for source, name in (others | own).items() if source in environ}

    def _read_file(self, path: Path) -> dict[str, Given]:
        text = read_text(path)
        found = {}
        for dotted, value in flatten(load_table(text, str(path))):
            name = dotted.replace(".", "_")
            table, _, key = dotted.rpartition(".")
            source = f"{path}{_line(text, table, key)}"
            if name not in self.settings:
                known = [".".join(each.path) for each in self.settings.values()]
                raise ConfigurationError(f"{source}: unknown key `{dotted}`; {suggest_key(dotted, known)}")
            found[name] = Given(self._convert(f"{source}: {dotted}", value, name), f"settings file {path}")
        return found

    def _convert(self, source: str, value: Any, name: str) -> Any:
        kind = self.settings[name].type
        try:
            return _from_text(value, kind) if isinstance(value, str) else msgspec.convert(value, kind)
        except (ValueError, KeyError, msgspec.ValidationError):
            raise ConfigurationError(f"{source}: {value!r} is not {_describe(kind)}") from None


def with_values(settings: S, values: Mapping[str, Any]) -> S:
    """Return the settings with other values by attribute, as ``Program.read`` returns them: those of a part without its
    name, and those of another nested struct as a dict. Raises TypeError for an unknown name."""
    owners: dict[str, str] = {}
    for each in msgspec.structs.fields(settings):
        if is_part(each.type):
            owners |= dict.fromkeys(each.type.__struct_fields__, each.name)
    changed: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name in owners:
            inner.setdefault(owners[name], {})[name] = value
        elif isinstance(value, dict):
            inner[name] = value
        else:
            changed[name] = value
    nested = {name: with_values(getattr(settings, name), given) for name, given in inner.items()}
    return msgspec.structs.replace(settings, **changed, **nested)


def flat_values(settings: msgspec.Struct) -> dict[str, Any]:
    """Return all values by attribute, those of a part without its name; ``with_values`` takes them."""
    found: dict[str, Any] = {}
    for name, value in msgspec.structs.asdict(settings).items():
        found |= msgspec.structs.asdict(value) if isinstance(value, SettingsPart) else {name: value}
    return found


def is_part(kind: Any) -> TypeGuard[type[SettingsPart]]:
    """Return whether a field of this type is a part of the settings."""
    return isinstance(kind, type) and issubclass(kind, SettingsPart)


def flatten(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each key of a table and of the tables in it."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _from_text(text: str, kind: Any) -> Any:
    if kind is bool:
        return _BOOLEANS[text.lower()]
    if kind is Path:
        return Path(text)
    if typing.get_origin(kind) is tuple:
        return msgspec.convert([part.strip() for part in text.split(",") if part.strip()], kind, strict=False)
    if isinstance(kind, types.UnionType) and int in typing.get_args(kind):
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else text
    return msgspec.convert(text, kind, strict=False)


def _describe(kind: Any) -> str:
    choices = choices_of(kind)
    if choices:
        return f"one of {', '.join(choices)}"
    if typing.get_origin(kind) is tuple:
        return "a list of such values with commas between them"
    return {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, f"a {kind}")


def choices_of(kind: Any) -> tuple[str, ...]:
    """Return the values that a setting of this type can have; empty if they cannot be listed."""
    if typing.get_origin(kind) is typing.Literal:
        return tuple(str(choice) for choice in typing.get_args(kind) if choice != "")
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return tuple(str(choice.value) for choice in kind)
    return ()


def _without_none(kind: Any) -> Any:
    if not isinstance(kind, types.UnionType):
        return kind
    kinds = [each for each in typing.get_args(kind) if each is not types.NoneType]
    return kinds[0] if len(kinds) == 1 else kind


def field_docs(kind: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class and of its bases, as written in the source."""
    docs: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if each is not object and not each.__module__.startswith("msgspec"):
            docs |= _docs_by_class(each.__module__)[each.__name__]
    return docs


@cache
def _docs_by_class(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings below fields by class and field. One parse serves all classes of a module."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {each.name: dict(_docs_below(each.body)) for each in body if isinstance(each, ast.ClassDef)}


def _docs_below(body: Iterable[ast.stmt]) -> Iterator[tuple[str, str]]:
    for node, below in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(below, ast.Expr):
            yield node.target.id, inspect.cleandoc(str(ast.literal_eval(below.value)))


# ---- variables that look like settings but are not

_SERVICE_LINK = re.compile(
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes sets in every pod for a service with the prefix as its name."""


def unknown_variables(names: Iterable[str], prefix: str, known: Collection[str]) -> list[str]:
    """Return the names with ``prefix`` that are neither in ``known`` nor set by Kubernetes."""
    ours = (name for name in names if name.startswith(prefix) and name not in known)
    return sorted(name for name in ours if _SERVICE_LINK.fullmatch(name.removeprefix(prefix)) is None)


# ---- TOML files

_UNKNOWN = re.compile(r"unknown field `([^`]+)`")
_WHERE = re.compile(r" - at `\$([^`]*)`")
_TABLE_OF_MANY = re.compile(r"^\.([A-Za-z0-9_]+)\[(\d+)\]")


def load_toml(path: Path, kind: type[T], known: Iterable[type[msgspec.Struct]] = ()) -> T:
    """Return the TOML file at ``path`` as a ``kind``. Raises ConfigurationError if it cannot be read or does not fit.
    ``known``: structs that can occur inside ``kind``, whose fields are suggested for a misspelt key."""
    return parse_toml(read_text(path), str(path), kind, known)


def parse_toml(text: str, name: str, kind: type[T], known: Iterable[type[msgspec.Struct]] = ()) -> T:
    """Return ``text`` as a ``kind``; errors call it ``name``. Raises ConfigurationError."""
    try:
        return msgspec.convert(load_table(text, name), kind)
    except msgspec.ValidationError as error:
        path, unknown = _error_path(error), _UNKNOWN.search(str(error))
        key = unknown[1] if unknown else path.rpartition(".")[2].partition("[")[0]
        raise ConfigurationError(f"{name}{_line(text, path, key)}: {explain_error(error, known)}") from error


def explain_error(error: msgspec.ValidationError, known: Iterable[type[msgspec.Struct]]) -> str:
    """Return the message of a failed conversion; an unknown key gets the nearest field of the ``known`` structs."""
    unknown = _UNKNOWN.search(str(error))
    if unknown is None:
        return str(error)
    fields = {field.encode_name for struct in known for field in msgspec.structs.fields(struct)}
    path = _error_path(error).lstrip(".")
    return f"unknown key `{unknown[1]}`{f' in {path}' if path else ''}; {suggest(unknown[1], fields)}"


def _error_path(error: msgspec.ValidationError) -> str:
    where = _WHERE.search(str(error))
    return where[1] if where else ""


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ConfigurationError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from error


def load_table(text: str, name: str) -> dict[str, Any]:
    """Return a TOML text as tables; errors call it ``name``. Raises ConfigurationError."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{name}: not TOML: {error}") from error


def suggest_key(key: str, known: Collection[str]) -> str:
    """Return a hint at the right one of the ``known`` dotted keys: the same key in another table, or the nearest."""
    last = key.rpartition(".")[2]
    moved = [each for each in known if each.rpartition(".")[2] == last]
    return suggest(key, moved if len(moved) == 1 else known)


def suggest(name: str, known: Collection[str]) -> str:
    """Return a hint at the nearest of the ``known`` names, or at all of them."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean `{near[0]}`?" if near else f"known are {', '.join(sorted(known))}"


def _line(text: str, path: str, key: str) -> str:
    line = find_line(text, path, key)
    return "" if line is None else f" line {line}"


def find_line(text: str, path: str, key: str) -> int | None:
    """Return the line of a key in the table or array element at ``path`` (``.rule[2]``), as far as the text tells. An
    element without the key has the line of its heading."""
    lines, table, start = text.splitlines(), _TABLE_OF_MANY.match(path), 0
    if table:
        header = re.compile(rf"^\s*\[\[\s*{re.escape(table[1])}\s*\]\]")
        headers = [number for number, line in enumerate(lines) if header.match(line)]
        start = next(iter(headers[int(table[2]) :]), 0)
    elif path:
        header = re.compile(rf"^\s*\[\s*{re.escape(path.strip('.'))}\s*\]")
        start = next((number for number, line in enumerate(lines) if header.match(line)), 0)
    pattern = re.compile(rf"^\s*\[*\s*(?:[A-Za-z0-9_.]+\.)?{re.escape(key)}\s*[=\]]")
    later = (number for number in range(start + 1, len(lines)) if table and lines[number].startswith("[["))
    end = next(later, len(lines))
    found = (number for number in range(start, end) if key and pattern.match(lines[number]))
    line = next(found, start if table else None)
    return None if line is None else line + 1
