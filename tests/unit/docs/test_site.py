"""Build the documentation site as `make docs` does, and read what it serves."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import everstep
from tools.docs_site.hook import PAGES

pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # CI builds the site by make docs

ROOT = Path(__file__).parents[3]
FETCHED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "video": "src"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Tags(HTMLParser):
    """Collect the addresses that a browser fetches to show a page, and the ids that it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        address = values.get(FETCHED.get(tag, ""))
        if address and not (tag == "link" and values.get("rel") == "canonical"):
            self.fetched.append(address)


def pages(site: Path) -> Iterator[Path]:
    yield from site.rglob("*.html")


def test_site_fetches_nothing_from_outside(site: Path) -> None:
    outside = {address for page in pages(site) for address in Tags(page).fetched if re.match(r"(https?:)?//", address)}
    assert outside == set()


def test_site_has_every_script_that_it_names(site: Path) -> None:
    for page in pages(site):
        for address in Tags(page).fetched:
            folder = site if address.startswith("/") else page.parent
            assert (folder / address.partition("?")[0].lstrip("/")).exists(), f"{page}: {address}"


def test_site_has_every_generated_page(site: Path) -> None:
    for path in PAGES:
        assert (site / path).with_suffix(".html").is_file()


def test_python_page_documents_every_public_name(site: Path) -> None:
    ids = Tags(site / "reference" / "python.html").ids
    missing = [name for name in everstep.__all__ if f"everstep.{name}" not in ids]
    members = [name for name, _ in inspect.getmembers(everstep.Run) if not name.startswith("_")]
    missing += [f"Run.{name}" for name in members if f"everstep.Run.{name}" not in ids]
    assert missing == []
