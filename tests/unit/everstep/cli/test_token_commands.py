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
from tests.support.fleet.controllers import SECRET, ControllerProcess, controller_process
from tests.support.processes.fork_pool import ForkPool

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
    (living,) = [credential["id"] for credential in listed if credential["subject"] == "rota"]
    of_rota = json.loads(run("token", "list", "--role", "viewer", "--subject", "rota", "--all", "--json").stdout)
    assert [credential["id"] for credential in of_rota["credentials"]] == [id, living]
    assert json.loads(run("token", "show", living, "--json").stdout)["subject"] == "rota"
    assert living == split_stored(second.read_text().strip())[0]
    done = run("token", "revoke", living, "-r", "lost")
    assert "olga revoked viewer credential" in done.stdout
    assert run("status", by=second).exit_code == 2
    assert "revoked" in run("token", "list", "--all").stdout


@pytest.mark.parametrize("text", ["", "5", "h", "5 h", "-5h", "1w"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_duration(text)
