"""The index of decisions lists every record, by number and title, and says which ones others replaced."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "docs" / "decisions"
INDEX = (FOLDER / "README.md").read_text()
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
each_record = pytest.mark.parametrize("record", RECORDS, ids=[record.stem[:4] for record in RECORDS])


def test_index_lists_records_in_order() -> None:
    listed = re.findall(r"^- \[\d{4}: .+?\]\((.+?)\)<br>$", INDEX, re.MULTILINE)
    assert listed == [record.name for record in RECORDS]


@each_record
def test_index_has_title_and_status_of(record: Path) -> None:
    title, status = record.read_text().split("\n", 3)[0:3:2]
    entry = INDEX.split(f"- [{title.removeprefix('# ')}]({record.name})<br>\n", 1)[1].split("\n- ", 1)[0]
    number = record.stem[:4]
    assert title.startswith(f"# {number}: ")
    said = re.match(r"\*Status: (accepted|(?:replaced|amended) by \[\d{4}\]\(.+?\))\.\* \S", status)
    assert said is not None
    assert said[1] == "accepted" or said[1].capitalize() in entry


@each_record
def test_number_is_used_once(record: Path) -> None:
    assert [one.name for one in FOLDER.glob(f"{record.stem[:4]}-*")] == [record.name]
