"""Receipts as files: their names, their page, their bound."""

from __future__ import annotations

import os
import re
import stat
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from everstep.errors import ConfigurationError
from everstep.receipts import receipt_files
from everstep.receipts.page import render_page
from everstep.receipts.receipt_files import find_receipt, store_receipt, stored_receipts
from everstep.wire.v1.receipts import JobReceipt
from tests.support.fleet.receipts import BEGAN_AT, full_receipt, receipt, recovery


class Elements(HTMLParser):
    """The elements of a page, its texts, and the addresses that it names."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.addresses += [str(value) for name, value in attrs if name in ("src", "href", "action")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_receipt_is_kept_as_json_and_page_for_its_owner(tmp_path: Path) -> None:
    stored = store_receipt(tmp_path, full_receipt())
    assert stored.path == tmp_path / "receipts" / "llama-20261118T121320Z.json"
    assert msgspec.json.decode(stored.path.read_bytes(), type=JobReceipt) == full_receipt()
    assert stored.page.read_text() == render_page(full_receipt())
    assert {stat.S_IMODE(path.stat().st_mode) for path in stored.path.parent.iterdir()} == {0o600}
    assert stat.S_IMODE(stored.path.parent.stat().st_mode) == 0o700


def test_receipts_of_one_second_are_all_kept(tmp_path: Path) -> None:
    paths = {store_receipt(tmp_path, receipt(steps=steps)).path.name for steps in (1, 2, 3)}
    assert len(paths) == 3
    assert {stored.receipt.steps for stored in stored_receipts(tmp_path)} == {1, 2, 3}


def test_only_the_newest_receipts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipt_files, "MAX_RECEIPTS", 2)
    for number in range(4):
        stored = store_receipt(tmp_path, receipt(steps=number, ended_at=BEGAN_AT + number))
        os.utime(stored.path, (number, number))
    assert [stored.receipt.steps for stored in stored_receipts(tmp_path)] == [3, 2]
    assert len(list((tmp_path / "receipts").iterdir())) == 4


def test_receipt_is_found_by_job_and_by_number(tmp_path: Path) -> None:
    for number, job in enumerate(("gpt", "llama", "gpt")):
        store_receipt(tmp_path, receipt(job=job, steps=number, ended_at=BEGAN_AT + number))
    assert [find_receipt(tmp_path, wanted).receipt.steps for wanted in ("gpt", "llama", "1", "3")] == [2, 1, 2, 0]
    for wanted in ("other", "0", "4", "-1"):
        with pytest.raises(ConfigurationError, match="everstep runs"):
            find_receipt(tmp_path, wanted)


def test_page_loads_nothing_and_is_well_formed() -> None:
    page = render_page(full_receipt())
    elements = Elements(page)
    assert elements.open == []
    assert elements.addresses == []
    assert not {"script", "link", "img", "iframe"} & set(elements.names)
    assert not re.search(r"https?://|url\(|@import", page)
    assert "default-src 'none'" in page


@pytest.mark.parametrize(
    "expected",
    ["llama", "node evicted", "gpu.xid.79", "XID 79: GPU has fallen off the bus", "8 → 6", "/data/llama/step-800"],
)
def test_page_names(expected: str) -> None:
    assert any(expected in text for text in Elements(render_page(full_receipt())).texts)


def test_page_escapes_foreign_text() -> None:
    attack = "</style><script>alert(1)</script>"
    page = render_page(receipt(recovery(2, 1.0, 1.0, sentence=attack), sentence=attack, release=attack))
    assert "<script" not in page
    assert any(attack in text for text in Elements(page).texts)
