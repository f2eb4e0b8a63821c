"""The document that goes to a vendor is described field by field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everstep.wire.v1.agent import Domain, Gpu, Host
from everstep.wire.v1.operator_history import Evidence, EvidenceNote

API = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
TABLE = (
    API.partition("What goes with a board to its vendor")[2]
    .partition("| field | is |\n|---|---|\n")[2]
    .partition("\n\n")[0]
)
ROWS = [re.match(r"\| (.*?) \| (.*) \|$", line) for line in TABLE.splitlines()]


def _named(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


@pytest.mark.promise("vendor-document")
def test_every_field_of_the_document_is_in_the_table_and_nothing_else() -> None:
    assert all(ROWS)
    fields = [name for row in ROWS if row for name in _named(row[1])]
    assert sorted(fields) == sorted(Evidence.__struct_fields__)


@pytest.mark.parametrize(
    ("field", "kind"), [("domain", Domain), ("host", Host), ("gpus", Gpu), ("history", EvidenceNote)]
)
def test_what_a_part_of_it_has_is_named_there_too(field: str, kind: type[Domain | Host | Gpu | EvidenceNote]) -> None:
    (row,) = [row for row in ROWS if row and field in _named(row[1])]
    assert set(kind.__struct_fields__) <= set(_named(row[2]))
