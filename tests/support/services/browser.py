"""Chromium for tests of the web page, with checks of errors, layout shifts and accessibility."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlencode

import pytest

CHROMIUM = Path("/usr/bin/chromium")
AXE = Path(os.environ.get("EVERSTEP_AXE", "out/node_modules/axe-core/axe.min.js"))
"""The accessibility checks of axe-core: `npm install --prefix out axe-core` fetches them."""
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--renderer-process-limit=1"]
"""One renderer for all pages, since each costs half a second of CPU to start."""
MOST_SHIFT = 0.02
"""Cumulative layout shift of a view; 0.1 counts as good, and the width of a changing number costs some 0.0001."""

WATCH_LAYOUT = """
window.shifted = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) {
    const nameOf = (node) => node?.id || node?.className || node?.textContent?.slice(0, 80) || "";
    const moved = entry.sources.map((it) => `${nameOf(it.node)} ${it.previousRect.y} -> ${it.currentRect.y}`);
    if (!entry.hadRecentInput) window.shifted.push([entry.value, moved]);
  }
}).observe({ type: "layout-shift", buffered: true });
"""


def _skip(reason: str) -> NoReturn:
    """Skip the test, or fail where EVERSTEP_REQUIRE_BROWSER says that nothing is missing."""
    if os.environ.get("EVERSTEP_REQUIRE_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)


def require_browser() -> Any:
    """Return Playwright's API, or skip the test if Playwright or Chromium is missing."""
    try:
        import playwright.sync_api
    except ImportError as error:
        _skip(f"Playwright cannot be imported: {error}")
    if not CHROMIUM.exists():
        _skip(f"there is no {CHROMIUM}")
    return playwright.sync_api


def require_axe() -> str:
    """Return the script of axe-core, or skip the test if it is missing."""
    if not AXE.exists():
        _skip(f"there is no {AXE}: run `npm install --prefix out axe-core`, or set EVERSTEP_AXE")
    return AXE.read_text()


AXE_RUN = """async (rules) => {
  const { violations } = await axe.run(document, { resultTypes: ["violations"], ...(rules && { runOnly: rules }) });
  return violations.flatMap((rule) => rule.nodes.map((node) => `${rule.impact} ${rule.id}: ${node.target.join(" ")}`));
}"""


def axe_findings(page: Any, script: str) -> list[str]:
    """Return the findings of axe-core in the current page: impact, rule and element.

    In the light theme by all rules, and in the dark one, where only colours differ, by that of contrast.
    """
    page.evaluate(f"() => {{ {script} }}")
    found: list[str] = []
    for theme, rules in (("dark", ["color-contrast"]), ("light", None)):
        page.emulate_media(color_scheme=theme)
        found += page.evaluate(AXE_RUN, rules)
    return found


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser, and close it at the end."""
    with require_browser().sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


def link_of(url: str, token: str, to: str = "/fleet") -> str:
    """Return the link that opens a view with a token."""
    return f"{url}/#{urlencode({'token': token, 'to': to})}"


class WatchedPage:
    """A page with its recorded errors, foreign requests and layout shifts."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.foreign: list[str] = []
        self._home = ""
        page.add_init_script(WATCH_LAYOUT)
        page.on("console", self._note_message)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self._note(request.url))

    def _note_message(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _note(self, url: str) -> None:
        if not url.startswith((self._home, "blob:", "data:")):
            self.foreign.append(url)

    def open(self, link: str) -> Any:
        """Open a link from a blank page, as a person would."""
        self._home = "/".join(link.split("/")[:3])
        self.page.goto("about:blank")
        self.page.goto(link)
        return self.page

    def forget_shifts(self) -> None:
        """Forget the layout shifts so far."""
        self.page.evaluate("window.shifted = []")

    def check(self) -> None:
        """Fail after an error, a request to another host, or a layout shift."""
        assert self.complaints == []
        assert [url for url in self.foreign if url != "about:blank"] == []
        shifted = self.page.evaluate("window.shifted")
        assert sum(value for value, _ in shifted) < MOST_SHIFT, shifted


@contextmanager
def watched(browser: Any, width: int = 1400, height: int = 900, *, dark: bool = False) -> Iterator[WatchedPage]:
    """Yield a page with a new profile, and check it at the end."""
    scheme = "dark" if dark else "light"
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, accept_downloads=True
    )
    context.set_default_timeout(25_000)
    try:
        page = WatchedPage(context.new_page())
        yield page
        page.check()
    finally:
        context.close()
