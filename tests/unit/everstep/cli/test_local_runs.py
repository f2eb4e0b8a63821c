"""Runs of everstep-launch are found on this machine: only this user's, and only those that are alive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everstep.cli import runs
from everstep.cli.context import DEFAULT_CONTROLLER, ConnectionOptions, local_runs, state_dir
from everstep.cli.main import app
from everstep.errors import ConfigurationError


class Machine:
    """Run directories as launchers leave them, each with a process in the place of its controller."""

    def __init__(self, folder: Path) -> None:
        self.environ = {"XDG_STATE_HOME": str(folder)}
        self.state = state_dir(self.environ)
        self.state.mkdir(parents=True)
        self.processes: list[subprocess.Popen[bytes]] = []

    def run(self, name: str, job: str, address: str = "127.0.0.1:7001") -> Path:
        directory = self.state / f"run-{name}"
        directory.mkdir(mode=0o700)
        command = [sys.executable, "-c", "print(flush=True); input()", str(directory / "controller.db")]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()  # its command line is there
        (directory / "job").write_text(job)
        (directory / "operator.token").write_text("a.token")
        (directory / "controller.json").write_text(json.dumps({"pid": process.pid, "address": address}))
        return directory


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    try:
        yield machine
    finally:
        for process in machine.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


def test_single_local_run_is_chosen(machine: Machine) -> None:
    directory = machine.run("a", "llama")
    assert ConnectionOptions().resolved(machine.environ) == ConnectionOptions(
        "http://127.0.0.1:7001", str(directory / "operator.token")
    )


def test_several_local_runs_are_listed(machine: Machine) -> None:
    machine.run("a", "llama")
    chosen = machine.run("b", "gpt", "127.0.0.1:7002")
    with pytest.raises(ConfigurationError, match=r"(?s)--run NAME.*gpt.*run-b.*llama.*run-a"):
        ConnectionOptions().resolved(machine.environ)
    for name in ("gpt", "run-b"):
        assert ConnectionOptions(run=name).resolved(machine.environ).token_file == str(chosen / "operator.token")
    with pytest.raises(ConfigurationError, match=r"(?s)no run other.*llama"):
        ConnectionOptions(run="other").resolved(machine.environ)


def test_explicit_controller_or_token_takes_precedence(machine: Machine) -> None:
    machine.run("a", "llama")
    given = ConnectionOptions("https://10.0.0.1:7700", "token")
    assert given.resolved(machine.environ) == given
    assert ConnectionOptions(token_file="token").resolved(machine.environ).controller == DEFAULT_CONTROLLER
    with pytest.raises(ConfigurationError, match="omit one"):
        ConnectionOptions("https://10.0.0.1:7700", run="llama").resolved(machine.environ)


@pytest.mark.parametrize(
    "spoil",
    [
        "open_directory",
        "linked_directory",
        "linked_token",
        "dead",
        "other_process",
        "not_loopback",
        "bad_name",
        "no_file",
    ],
)
def test_untrusted_run_directory_is_ignored(machine: Machine, tmp_path: Path, spoil: str) -> None:
    directory = machine.run("a", "llama")
    ready = json.loads((directory / "controller.json").read_text())
    match spoil:
        case "open_directory":
            directory.chmod(0o750)
        case "linked_directory":
            directory.rename(tmp_path / "elsewhere")
            directory.symlink_to(tmp_path / "elsewhere")
        case "linked_token":
            (directory / "operator.token").rename(tmp_path / "token")
            (directory / "operator.token").symlink_to(tmp_path / "token")
        case "dead":
            machine.processes[0].kill()
            machine.processes[0].wait()
        case "other_process":
            ready["pid"] = os.getpid()
        case "not_loopback":
            ready["address"] = "10.0.0.1:7700"
        case "bad_name":
            (directory / "job").write_text("../x\n[31m")
        case "no_file":
            (directory / "operator.token").unlink()
    (directory / "controller.json").write_text(json.dumps(ready))
    assert local_runs(machine.state) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("name", ["", "operator.token", "controller.json"])
def test_run_of_another_user_is_ignored(machine: Machine, name: str) -> None:
    directory = machine.run("a", "llama")
    assert len(local_runs(machine.state)) == 1
    os.chown(directory / name, 65534, 65534)
    assert local_runs(machine.state) == []


def test_open_prints_the_link_of_a_run(machine: Machine) -> None:
    machine.run("a", "llama")
    machine.run("b", "gpt", "127.0.0.1:7002")
    shown = CliRunner().invoke(app, ["open", "gpt", "--state-dir", str(machine.state)])
    assert shown.output == "http://127.0.0.1:7002/#token=a.token&to=%2Fjob%2Fgpt\n"
    shown = CliRunner().invoke(app, ["open"], env=machine.environ)
    assert shown.exit_code == 2
    assert "2 runs of everstep-launch" in shown.output


def test_open_without_a_run_says_so(machine: Machine) -> None:
    shown = CliRunner().invoke(app, ["open"], env=machine.environ)
    assert shown.exit_code == 2
    assert "has no run with a live controller" in shown.output


def test_browser_gets_no_token_on_its_command_line(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    page = machine.run("a", "llama") / "open.html"
    runs._browse(page, "http://127.0.0.1:7001/#token=a.token&to=%2Fjob%2Fllama")
    assert opened == [page.as_uri()]
    assert page.stat().st_mode & 0o777 == 0o600
    assert "#token=a.token&amp;to=%2Fjob%2Fllama" in page.read_text()
