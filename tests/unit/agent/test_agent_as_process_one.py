"""An agent as process 1 of a process namespace, as in a container."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agents.agent_process import DEADLINE_S, TOKEN
from tests.support.agents.controller_stub import ControllerStub
from tests.support.processes.process_table import is_running
from tests.support.processes.waiting import until

UNSHARE = ("unshare", "--user", "--map-current-user", "--pid", "--fork")


def _cannot() -> bool:
    if shutil.which("unshare") is None:
        return True
    return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode != 0


pytestmark = pytest.mark.skipif(_cannot(), reason="this machine makes no process namespaces without root")


@pytest.fixture
def base() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ev-one-"))
    yield path
    shutil.rmtree(path)


@contextlib.contextmanager
def agent_in_namespace(base: Path, controller: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``unshare`` with an agent as its child, which is process 1 in its own namespace."""
    (base / "token").write_text(TOKEN)
    command = [*UNSHARE, sys.executable, "-m", "everstep_agent.main", "--node", "n1", "--controller", controller]
    command += ["--token-file", str(base / "token"), "--run-dir", str(base / "run"), "--virtual", "default:2"]
    command += ["--segment-dir", str(base / "segments" / "n1"), *options]
    outer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    family: list[int] = []
    try:
        until((base / "run" / "agent.json").exists, "the agent is ready")
        family = descendants(outer.pid)
        yield outer
    finally:
        for pid in [*reversed(family or descendants(outer.pid)), outer.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        outer.wait()


def descendants(pid: int) -> list[int]:
    """Processes below ``pid`` as this namespace numbers them, parents first."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [each for child in children for each in (child, *descendants(child))]


@pytest.mark.slow
def test_agent_as_process_1_serves_and_ends_in_order(base: Path, controller: ControllerStub) -> None:
    with agent_in_namespace(base, controller.url) as outer:
        status = json.loads((base / "run" / "agent.json").read_text())
        assert status["pid"] == 1
        assert min(status["vault_pid"], status["sensor_pid"]) > 1
        controller.wait_for(lambda: controller.listening)
        agent, *helpers = descendants(outer.pid)
        assert len(helpers) >= 2
        os.kill(agent, signal.SIGTERM)
        assert outer.wait(DEADLINE_S) == 0
        assert not any(is_running(pid) for pid in helpers)
        assert not (base / "run" / "agent.json").exists()


@pytest.mark.slow
def test_agent_as_process_1_follows_an_outside_parent(base: Path, controller: ControllerStub) -> None:
    with agent_in_namespace(base, controller.url, "--die-with-parent") as outer:
        family = descendants(outer.pid)
        outer.kill()
        until(lambda: not any(is_running(pid) for pid in family), "all its processes are gone")
        assert not (base / "segments" / "n1").exists()
