"""The index of decisions lists every record, and records name only what exists in the code."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tools.tests_for import repository_paths

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "decisions"
INDEX = (FOLDER / "README.md").read_text()
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
each_record = pytest.mark.parametrize("record", RECORDS, ids=[record.stem[:4] for record in RECORDS])


def test_index_lists_records_in_order() -> None:
    listed = re.findall(r"^- \[\d{4}: .+?\]\((.+?)\)(?:<br>)?$", INDEX, re.MULTILINE)
    assert listed == [record.name for record in RECORDS]


@each_record
def test_index_has_the_title_of(record: Path) -> None:
    title, status = record.read_text().split("\n", 3)[0:3:2]
    assert title.startswith(f"# {record.stem[:4]}: ")
    assert status.startswith("*Status: accepted.* ")
    assert f"- [{title.removeprefix('# ')}]({record.name})" in INDEX


@each_record
def test_number_is_used_once(record: Path) -> None:
    assert [found.name for found in FOLDER.glob(f"{record.stem[:4]}-*")] == [record.name]


CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?:[\w-]+/)*[\w-]+\.(?:py|c|toml|md|yml|yaml|sh)\b")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
OF_OTHER_PROGRAMS = {"HF_HOME", "genCA"}
"""Names in records that belong to Hugging Face's libraries and to Helm."""


@cache
def source_files() -> list[str]:
    """The repository's files without the decisions, as paths from its root."""
    return [path for path in repository_paths(ROOT) if not path.startswith("docs/decisions/")]


@cache
def source_identifiers() -> frozenset[str]:
    """Every identifier of the code; words of flags and of dashed names are identifiers too."""
    suffixes = (".py", ".c", ".js", ".html", ".toml", ".yml", ".yaml", ".json", ".sh", ".service")
    code = (path for path in source_files() if path.endswith(suffixes) or path == "Makefile")
    return frozenset(name for path in code for name in IDENTIFIER.findall((ROOT / path).read_text(errors="replace")))


def is_distinctive(name: str) -> bool:
    """Tell whether an identifier is no plain word: it has an underscore, or a capital after a small letter."""
    return "_" in name.strip("_") or re.search(r"[a-z][A-Z]", name) is not None


@each_record
def test_files_named_in_decision_exist(record: Path) -> None:
    named = {name for code in CODE.findall(record.read_text()) for name in FILE.findall(code)}
    files = source_files()
    assert [name for name in sorted(named) if not any(f"/{path}".endswith(f"/{name}") for path in files)] == []


@each_record
def test_names_in_decision_exist_in_code(record: Path) -> None:
    codes = [FILE.sub("", code) for code in CODE.findall(record.read_text())]
    named = {name for code in codes for name in IDENTIFIER.findall(code) if is_distinctive(name)}
    assert sorted(named - source_identifiers() - OF_OTHER_PROGRAMS) == []
