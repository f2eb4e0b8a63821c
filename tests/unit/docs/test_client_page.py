"""The examples of the Python client's page run as they are shown, one after another, against a controller."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from everstep.bearer_tokens import TokenRole, mint
from tests.support.controllers import SECRET, controller_process
from tests.support.forked import ForkPool
from tools.docs_site import client_methods

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "client.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_examples_of_client_page_run(
    program_forks: ForkPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    token = tmp_path / "olga.token"
    token.write_text(mint(SECRET, TokenRole.OPERATOR, "olga"))
    with controller_process(tmp_path, program_forks) as process:
        monkeypatch.setenv("EVERSTEP_CONTROLLER", process.url)
        monkeypatch.setenv("EVERSTEP_TOKEN_FILE", str(token))
        names: dict[str, Any] = {}
        for example in EXAMPLES:
            exec(compile(example, str(PAGE), "exec"), names)
    shown = capsys.readouterr().out
    assert "0 nodes, 0 jobs" in shown
    assert "olga issued" in shown
    assert "there is no node-17" in shown


def test_methods_page_names_every_route_with_its_parameters() -> None:
    routes = {name: (route, answer) for name, route, answer in client_methods.methods()}
    assert routes["drain"] == ("POST /v1/nodes/{node}/drain", "ChangeResult")
    assert routes["nodes"] == ("GET /v1/nodes", "entries of NodeList")
    assert "| `resize_job` | `POST /v1/jobs/{job}/resize` | `ChangeResult` |" in client_methods.page()
