"""``everstep doctor`` prints one line per check, and its exit status says whether one failed."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everstep.cli.doctor import parse_size
from everstep.cli.main import app
from everstep.doctor import accelerators
from everstep.doctor.accelerators import TorchFacts
from everstep.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    """No runs of everstep-launch, and a torch that is not imported."""
    monkeypatch.setenv("XDG_STATE_HOME", str(short_path))
    monkeypatch.setattr(accelerators, "read_torch", lambda: TorchFacts(version="2.13.0", has_gloo=True))
    for name in ("EVERSTEP_CONTROLLER", "EVERSTEP_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def results(*arguments: str) -> tuple[int, dict[str, str]]:
    ended = CliRunner().invoke(app, [*arguments, "--json"])
    return ended.exit_code, {result["check"]: result["status"] for result in json.loads(ended.stdout)["results"]}


def test_taken_port_fails_the_command() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        status, found = results("doctor", "--port", str(port))
    assert (status, found[f"port {port}"]) == (1, "fail")
    assert found["loopback"] == found["controller"] == found["torch"] == "ok"


def test_huge_model_fails_the_command() -> None:
    assert results("doctor", "--model-bytes", "900T")[1]["checkpoint memory"] == "fail"
    assert results("doctor", "--model-bytes", "1M")[1]["checkpoint memory"] == "ok"


def test_absent_controller_fails_the_command(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("viewer:olga:mac")
    token.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    status, found = results("--controller", f"http://127.0.0.1:{port}", "--token-file", str(token), "doctor")
    assert (status, found["controller"], found["token file"]) == (1, "fail", "ok")
    status, found = results("--controller", f"http://127.0.0.1:{port}", "doctor")
    assert (status, found["controller"]) == (1, "fail")


@pytest.mark.parametrize(("text", "size"), [("17", 17), ("2K", 2048), ("1.5g", 3 << 29), ("12GiB", 12 << 30)])
def test_sizes_are_read_with_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "12Q", "-1G"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="no size"):
        parse_size(text)
