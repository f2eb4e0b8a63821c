from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from everstep.bearer_tokens import TokenRole, mint, split_stored
from everstep.cli.events import parse_duration
from everstep.cli.main import app
from everstep.errors import ConfigurationError
from tests.support.controllers import SECRET, ControllerProcess, controller_process
from tests.support.forked import ForkPool

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def process(program_forks: ForkPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    with controller_process(tmp_path_factory.mktemp("controller"), program_forks) as process:
        yield process


@pytest.fixture
def run(process: ControllerProcess, tmp_path: Path) -> Run:
    """The command, as an operator of a minted token; ``by`` is another token's file."""
    own = tmp_path / "olga.token"
    own.write_text(mint(SECRET, TokenRole.OPERATOR, "olga"))

    def run(*words: str, by: Path = own) -> Any:
        return CliRunner().invoke(app, ["--controller", process.url, "--token-file", str(by), *words])

    return run


def test_issued_token_is_printed_and_usable(run: Run, tmp_path: Path) -> None:
    done = run("token", "issue", "--role", "operator", "--subject", "omar", "--reason", "on call")
    assert done.exit_code == 0, done.output
    (tmp_path / "omar.token").write_text(done.stdout)
    assert run("status", by=tmp_path / "omar.token").exit_code == 0
    assert run("token", "list", by=tmp_path / "omar.token").exit_code == 0


def test_token_file_is_owner_only_and_not_overwritten(run: Run, tmp_path: Path) -> None:
    words = ("token", "issue", "--role", "viewer", "--subject", "wall", "-r", "for all", "--out")
    file = tmp_path / "wall.token"
    done = run(*words, str(file))
    assert done.exit_code == 0
    token = file.read_text().strip()
    assert token not in done.output
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert run("status", by=file).exit_code == 0
    before = run("token", "list", "--json").stdout
    assert run(*words, str(file)).exit_code == 2
    assert file.read_text().strip() == token
    assert run("token", "list", "--json").stdout == before


def test_refused_issue_leaves_no_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "refused.token"
    done = run("token", "issue", "--role", "agent", "--subject", "no node", "-r", "x", "--out", str(file))
    assert (done.exit_code, file.exists()) == (1, False)


def test_tokens_are_listed_rotated_and_revoked(run: Run, tmp_path: Path) -> None:
    first = run("token", "issue", "--role", "viewer", "--subject", "rota", "-r", "x", "--expires", "30d").stdout.strip()
    id = split_stored(first)[0]
    assert id in run("token", "list").stdout
    second = tmp_path / "second.token"
    assert run("token", "rotate", id, "--grace", "0s", "-r", "yearly", "--out", str(second)).exit_code == 0
    (tmp_path / "first.token").write_text(first)
    assert run("status", by=tmp_path / "first.token").exit_code == 2
    assert run("status", by=second).exit_code == 0
    listed = json.loads(run("token", "list", "--json").stdout)["credentials"]
    (living,) = [one["id"] for one in listed if one["subject"] == "rota"]
    of_rota = json.loads(run("token", "list", "--role", "viewer", "--subject", "rota", "--all", "--json").stdout)
    assert [one["id"] for one in of_rota["credentials"]] == [id, living]
    assert json.loads(run("token", "show", living, "--json").stdout)["subject"] == "rota"
    assert living == split_stored(second.read_text().strip())[0]
    done = run("token", "revoke", living, "-r", "lost")
    assert "olga revoked viewer credential" in done.stdout
    assert run("status", by=second).exit_code == 2
    assert "revoked" in run("token", "list", "--all").stdout


def test_join_token_list_shows_remaining_uses(run: Run) -> None:
    words = ("token", "issue", "--role", "join", "-r", "rack 3", "--subject", "rack3-*")
    assert run(*words, "--uses", "40").exit_code == run(*words, "--uses", "0", "--replace").exit_code == 0
    listed = run("token", "list").stdout
    assert "40 left" in listed
    assert "any number" in listed


def test_token_command_requires_its_options(run: Run) -> None:
    assert run("token", "issue", "--role", "agent", "-r", "x").exit_code == 2
    assert run("token", "issue", "--role", "viewer", "--subject", "v").exit_code == 2  # no reason
    assert run("token", "revoke", "0" * 16, "-r", "x").exit_code == 1


@pytest.mark.parametrize(("text", "expected"), [("90s", 90.0), ("1.5h", 5400.0), ("30m", 1800.0), ("2d", 172800.0)])
def test_durations_accept_units(text: str, expected: float) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "5", "h", "5 h", "-5h", "1w"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_duration(text)
