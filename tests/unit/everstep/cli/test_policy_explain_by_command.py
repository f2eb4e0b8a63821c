"""``everstep policy explain`` and ``check`` on files of agents, by the programs of both sides."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from everstep.cli.main import app
from everstep_controller.core.policy import CorePolicy
from everstep_controller.policy.rulebook import policy_document, with_rules
from tests.support.fleet.fake_controllers import FakeControllers

pytestmark = pytest.mark.slow  # starts processes

SITE = '[[rule]]\nid = "gpu-lost"\nmode = "recommend"\nsource = "ticket"\n'


@pytest.fixture
def site(tmp_path: Path) -> Path:
    path = tmp_path / "site.toml"
    path.write_text(SITE)
    return path


def policy(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["policy", *map(str, words)], terminal_width=200)


def test_explain_joins_agent_and_controller(site: Path, tmp_path: Path) -> None:
    done = policy("explain", "gpu-lost", site, "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["explanation"]["values"]["mode"] == {"value": "recommend", "origin": f"{site} line 3"}
    assert "a person decides" in answer["consequence"]["sentence"]
    settings = tmp_path / "controller.toml"
    settings.write_text('[policy.remediation]\nmode = "enforce"\n')
    printed = "".join(policy("explain", "gpu-lost", "--controller-settings", settings).output.split())
    assert "rebootnodeisrequested" in printed
    assert f"settingsfile{settings}" in printed  # a console breaks a long path, too


def test_explain_finds_rules_of_the_controller() -> None:
    done = policy("explain", "gpu.xid.application")
    assert done.exit_code == 0, done.output
    assert "of the controller" in done.output


def test_explain_asks_the_named_controller(tmp_path: Path) -> None:
    enforcing = with_rules(CorePolicy()).with_values(remediation={"mode": "enforce"})
    document = json.loads(msgspec.json.encode(policy_document(enforcing)))
    controllers = FakeControllers()
    address = controllers.add(lambda: (200, document))
    (tmp_path / "token").write_text("token")
    words = ["--controller", address, "--token-file", str(tmp_path / "token"), "policy", "explain", "gpu-lost"]
    done = CliRunner().invoke(app, words, terminal_width=200)
    controllers.close()
    assert done.exit_code == 0, done.output
    printed = " ".join(done.output.split())
    assert "reboot node is requested" in printed
    assert f"by the controller {address}" in printed


def test_explain_suggests_a_rule() -> None:
    done = policy("explain", "gpu-lozt")
    assert done.exit_code == 1
    assert "did you mean `gpu-lost`" in done.output


def test_check_of_agents_needs_no_controller(site: Path) -> None:
    done = policy("check", site)
    assert done.exit_code == 0, done.output
    assert "gpu-lost: mode" in done.output
    site.write_text(SITE.replace("mode", "mood"))
    done = policy("check", site)
    assert done.exit_code == 1
    assert done.output.startswith(f"refused: {site} line 3: [[rule]] gpu-lost: unknown key `mood`")


def test_check_names_unreadable_and_mixed_files(site: Path, tmp_path: Path) -> None:
    assert "cannot read" in policy("check", tmp_path / "none.toml").output
    change = tmp_path / "change.toml"
    change.write_text("[policy.budget]\ncount = 2\n")
    assert "by itself" in policy("check", site, change).output
