"""Flags and variables that sentences name exist; test_documents.py parses the commands of code blocks."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer

from everstep.settings import FILE
from tests.support.documents.command_lines import PROGRAMS
from tests.support.documents.markdown import FENCE

if TYPE_CHECKING:
    from typer._click.core import Command

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)

CODE = re.compile(r"`([^`]+)`")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
VARIABLE = re.compile(r"\bEVERSTEP_[A-Z0-9_]*[A-Z0-9]\b")

OTHERS = {
    "--data-checksums": "initdb",
    "--dist": "pytest-xdist",
    "--kill-on-bad-exit": "srun",
    "--no-deps": "pip",
    "--no-kill": "sbatch",
    "--no-loadscope-reorder": "pytest-xdist",
    "--numprocesses": "pytest-xdist",
    "--requeue": "sbatch",
    "--set": "helm",
    "--shm-size": "docker run",
    "--signal": "sbatch",
    "--standalone": "torchrun",
    "--wait": "helm",
}
"""Flags of other programs that documents name, and the program."""


def subcommands_of(command: Command) -> dict[str, Command]:
    """Return the commands of a group by name; a plain command has none."""
    subcommands: dict[str, Command] = getattr(command, "commands", {})
    return subcommands


def flags_of(command: Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for subcommand in subcommands_of(command).values():
        yield from flags_of(subcommand)


@functools.cache
def command_of(program: str) -> Command:
    return typer.main.get_command(PROGRAMS[program][0])


@functools.cache
def flags_of_programs() -> frozenset[str]:
    return frozenset({"--help"}.union(*(flags_of(command_of(program)) for program in PROGRAMS)))


def flags_of_line(program: str, words: list[str]) -> set[str]:
    """The flags of the commands that a line names, and of those below the last one."""
    command, found = command_of(program), {"--help"}
    for word in words:
        if subcommand := subcommands_of(command).get(word):
            found.update(flag for parameter in command.params for flag in parameter.opts)
            command = subcommand
    return found.union(flags_of(command))


@functools.cache
def flags_of_tools() -> frozenset[str]:
    """The flags of benches, of the simulator and of the tests."""
    files = [path for folder in ("bench", "tests", "tools", "examples") for path in (ROOT / folder).rglob("*.py")]
    added = re.compile(r"(?:add_argument|addoption)\(\s*\"(--[a-z][\w-]*)\"")
    return frozenset(flag for path in files for flag in added.findall(path.read_text()))


def unknown_flags(document: str, text: str) -> list[str]:
    unknown = []
    for code in CODE.findall(FENCE.sub("", text)):
        program, *words = code.split()
        known = flags_of_line(program, words) if program in PROGRAMS else flags_of_programs() | OTHERS.keys()
        if re.search(r"bench|tests|pytest", code) or document.startswith(("docs/measures", "docs/decisions")):
            known |= flags_of_tools()
        unknown += [f"{flag} in `{code}`" for flag in FLAG.findall(code) if flag not in known]
    return unknown


@each_document
def test_every_flag_named_in_prose_exists(document: Path) -> None:
    assert unknown_flags(str(document.relative_to(ROOT)), document.read_text()) == []


@functools.cache
def variables() -> frozenset[str]:
    """The variables of settings, and those that the sources read."""
    found = {program.variable(name) for _, program in PROGRAMS.values() for name in (*program.settings, FILE)}
    for folder in ("everstep", "trainer_hooks", "bench", "tests", "examples", "deploy"):
        for path in (ROOT / folder).rglob("*.py"):
            found.update(re.findall(r"[\"'](EVERSTEP_[A-Z0-9_]+)[\"']", path.read_text()))
    for path in (ROOT / "hatch_build.py", ROOT / "docker-compose.yml"):
        found.update(VARIABLE.findall(path.read_text()))
    return frozenset(found)


@each_document
def test_every_variable_named_in_documents_is_read(document: Path) -> None:
    if document.parent.name == "decisions":
        return  # they speak of earlier releases, too
    named = set(VARIABLE.findall(document.read_text()))
    prefixes = {program.prefix.rstrip("_") for _, program in PROGRAMS.values()}
    assert named - variables() - prefixes == set()
