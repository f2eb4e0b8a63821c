"""The document that goes to a vendor is described field by field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everstep.wire.v1.agent import Domain, Gpu, Host
from everstep.wire.v1.operator_history import Evidence, EvidenceNote

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "rest-examples-findings.md").read_text()
LIST = PAGE.partition("The document has these fields:\n\n")[2].partition("\n\n")[0]
ITEMS = [item.partition(": ")[::2] for item in re.split(r"^- ", LIST, flags=re.MULTILINE)[1:]]


def _named(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


@pytest.mark.promise("vendor-document")
def test_evidence_page_names_every_field_once() -> None:
    fields = [name for names, _ in ITEMS for name in _named(names)]
    assert sorted(fields) == sorted(Evidence.__struct_fields__)


@pytest.mark.parametrize(
    ("field", "kind"), [("domain", Domain), ("host", Host), ("gpus", Gpu), ("history", EvidenceNote)]
)
def test_evidence_page_names_fields_of_parts(field: str, kind: type[Domain | Host | Gpu | EvidenceNote]) -> None:
    (text,) = [text for names, text in ITEMS if field in _named(names)]
    assert set(kind.__struct_fields__) <= set(_named(text))
