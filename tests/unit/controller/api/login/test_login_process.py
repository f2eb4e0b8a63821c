"""A controller process and a provider on loopback: orders with the provider's tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from everstep.wire.v1 import enrolment as wire
from everstep.wire.v1 import operator as op
from tests.support.fleet.controllers import OPERATOR, ControllerProcess, controller_process
from tests.support.processes.fork_pool import ForkPool
from tests.support.services.openid_provider import COMMANDS, OpenidProvider, login_settings, new_key, openid_provider

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def provider() -> Iterator[OpenidProvider]:
    with openid_provider() as running:
        yield running


@pytest.fixture(scope="module")
def process(
    program_forks: ForkPool, provider: OpenidProvider, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControllerProcess]:
    folder = tmp_path_factory.mktemp("login")
    arguments = ("--settings", str(login_settings(folder, provider)))
    with controller_process(folder, program_forks, arguments=arguments) as process:
        yield process


def ask(process: ControllerProcess, token: str, path: str = "/v1/identity") -> tuple[int, Any]:
    status, body = process.ask("GET", path, headers={"Authorization": f"Bearer {token}"})
    return status, json.loads(body)


def test_token_of_provider_gives_orders_by_name(process: ControllerProcess, provider: OpenidProvider) -> None:
    person = f"olga (00u1 at {provider.issuer})"
    status, body = ask(process, provider.token())
    assert (status, body["role"], body["subject"]) == (200, "operator", person)
    assert body["expires_at"] > 0
    sent = {"Authorization": f"Bearer {provider.token(COMMANDS)}"}
    wanted = wire.IssueViewer(subject="wall", reason="a display")
    assert process.ask("POST", "/v1/credentials", wanted, sent)[0] == 200
    order = json.loads(process.ask("GET", "/v1/orders?newest=true&limit=1", headers=OPERATOR)[1])["events"][0]
    assert order["sentence"].startswith(person)
    assert order["detail"]["actor"] == person


def test_rotated_key_is_found_by_the_process(process: ControllerProcess, provider: OpenidProvider) -> None:
    """The keys were fetched some milliseconds ago, so the new one is refused until the next fetch is due."""
    provider.keys.insert(0, new_key("k2"))
    assert ask(process, provider.token())[0] in (200, 401)
    provider.keys.reverse()
    assert ask(process, provider.token())[0] == 200


def test_refused_tokens_are_answered_as_problems(process: ControllerProcess, provider: OpenidProvider) -> None:
    for token, expected in (
        (provider.token("another"), 401),
        (provider.token(exp=1.0), 401),
        (provider.token()[:-8] + "AAAAAAAA", 401),
        ("eyJhbGciOiJub25lIn0.eyJzdWIiOiJyb290In0.", 401),
        (provider.token(groups=["none"]), 403),
    ):
        status, body = ask(process, token)
        assert (status, body["status"]) == (expected, expected)
    status, _ = process.ask(
        "POST",
        "/v1/breaker/reset",
        op.ReasonOnlyRequest(reason="x"),
        {"Authorization": f"Bearer {provider.token(groups=['staff'])}"},
    )
    assert status == 403


def test_programs_without_an_issuer_load_no_login_library() -> None:
    code = "import sys, everstep_controller.app.serve_command, everstep.cli.main, everstep_controller.main\n"
    code += "print([name for name in ('authlib', 'joserfc', 'httpx') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]"
