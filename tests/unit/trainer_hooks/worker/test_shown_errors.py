"""An exception of the script is printed once into each terminal or log."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep_trainer.worker import shown_errors
from everstep_trainer.worker.shown_errors import claim_error, launcher_shares_stderr

OTHER_RANK = (
    "import sys; from everstep_trainer.worker.shown_errors import claim_error; print(claim_error(*sys.argv[1:]))"
)


@pytest.fixture
def scope() -> Iterator[str]:
    yield secrets.token_hex(8)
    while shown_errors._claims:
        shown_errors._claims.pop().close()


def claimed_by_another(error: str, scope: str, stderr: int | None = None) -> bool:
    command = [sys.executable, "-c", OTHER_RANK, error, scope]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, check=True, text=True).stdout == "True\n"


def test_same_error_is_claimed_once(scope: str) -> None:
    assert claim_error("ValueError: bad batch", scope)
    assert not claimed_by_another("ValueError: bad batch", scope)


def test_error_is_shown_in_each_log_file(scope: str, tmp_path: Path) -> None:
    assert claim_error("ValueError: bad batch", scope)
    with (tmp_path / "worker-1.err").open("w") as file:
        assert claimed_by_another("ValueError: bad batch", scope, file.fileno())


def test_error_is_shown_if_no_claim_can_be_made(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no descriptors")

    monkeypatch.setattr(socket, "socket", refuse)
    assert claim_error("ValueError: bad batch", scope)
    assert claim_error("ValueError: bad batch", scope)


def test_rank_knows_whether_its_launcher_prints_there(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys; code = 'from everstep_trainer.worker.shown_errors import launcher_shares_stderr as f;"
        " print(f(), flush=True)'; command = [sys.executable, '-c', code]; subprocess.run(command, check=True);"
        " subprocess.run(command, check=True, stderr=open(sys.argv[1], 'w'))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "err")]
    assert subprocess.check_output(command, text=True).split() == ["True", "False"]
    assert launcher_shares_stderr() in (True, False)
    assert os.path.exists(tmp_path / "err")
