"""The interactive API page in a real Chromium: it lists every route, and sends requests under the person's token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.bearer_tokens import TokenRole, mint
from everstep.client import Client
from everstep_controller.api import openapi
from tests.support.fleet.controllers import SECRET, ControllerProcess, controller_process
from tests.support.processes.fork_pool import ForkPool
from tests.support.services.browser import chromium, require_browser, watched

pytestmark = pytest.mark.slow
OPERATOR = mint(SECRET, TokenRole.OPERATOR, "olga")


@pytest.fixture(scope="module")
def process(program_forks: ForkPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    require_browser()
    with controller_process(tmp_path_factory.mktemp("controller"), program_forks) as process:
        yield process


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


def operation(page: Any, name: str) -> Any:
    """Open a route's form."""
    found = page.locator(f"#{name}")
    found.locator("> summary").click()
    return found


def test_page_lists_routes_and_sends_orders(browser: Any, process: ControllerProcess, tmp_path: Path) -> None:
    ids = {
        operation["operationId"] for methods in openapi.document()["paths"].values() for operation in methods.values()
    }
    with watched(browser) as seen:
        page = seen.open(f"{process.url}/docs")
        page.locator(".operation").first.wait_for()
        assert set(page.locator(".operation").evaluate_all("all => all.map((element) => element.id)")) == ids
        page.get_by_label("Token").fill(OPERATOR)
        page.get_by_role("button", name="Use").click()
        status = operation(page, "status")
        status.get_by_role("button", name="Send").click()
        status.get_by_text('"epoch": 1').wait_for()

        page.get_by_label("Filter").fill("credentials post")
        issue = operation(page, "issue_credential")
        body = '{"role": "viewer", "subject": "wall", "reason": "by hand"}'
        issue.locator("textarea").fill(body)
        assert f"--json '{body}'" in issue.locator("pre").first.text_content()
        issue.get_by_role("button", name="Send").click()
        issue.get_by_text('"token": "es1.').wait_for()
        page.screenshot(path=tmp_path / "docs.png", full_page=True)
    assert [credential.subject for credential in Client(process.url, OPERATOR).credentials()] == ["wall"]


def test_page_shows_a_refusal_and_a_missing_token(browser: Any, process: ControllerProcess) -> None:
    with watched(browser, dark=True, width=420) as seen:
        page = seen.open(f"{process.url}/docs")
        node = operation(page, "node")
        node.get_by_label("node *").fill("n 1/x?")
        assert "/v1/nodes/n%201%2Fx%3F'" in node.locator("pre").first.text_content()
        node.get_by_label("node *").fill("n1")
        node.get_by_role("button", name="Send").click()
        node.get_by_text('"code": "unauthenticated"').wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        seen.complaints = [text for text in seen.complaints if "401" not in text]
