"""An agent as its own process (tests/support/warm_launcher.py), with virtual GPUs and a vault, in directories that go
with the test."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.processes import is_running
from tests.support.waiting import until
from tests.support.warm_launcher import WarmProgram

DEADLINE_S = 60.0
TOKEN = "agent:n1:mac"


class AgentProcess:
    """Agents of one node, one life after another over the same directories."""

    def __init__(self, base: Path, controller: str, node: str) -> None:
        self.node = node
        self.run_dir = base / "run"
        self.segments = base / "segments" / node
        self.kernel_log = base / "kernel.log"
        self.kernel_log.touch()
        self.token_file = base / "token"
        self.token_file.write_text(TOKEN)
        self.controller = controller
        self.lives: list[WarmProgram] = []
        self._log = base / "log"
        self.pids: set[int] = set()

    @property
    def process(self) -> WarmProgram:
        return self.lives[-1]

    @property
    def ready(self) -> dict[str, Any]:
        """``agent.json``, empty where there is none."""
        with contextlib.suppress(OSError, json.JSONDecodeError):
            said: dict[str, Any] = json.loads((self.run_dir / "agent.json").read_text())
            self.pids |= {said["pid"], said["vault_pid"], said["sensor_pid"]} - {0}
            return said
        return {}

    def launch(self, *options: str) -> WarmProgram:
        """Starts another life without waiting for it."""
        command = ["-m", "everstep_agent.main", "--node", self.node, "--controller", self.controller]
        command += ["--token-file", str(self.token_file), "--run-dir", str(self.run_dir)]
        command += ["--segment-dir", str(self.segments), "--kernel-log", str(self.kernel_log)]
        command += ["--virtual", "default:2", *options]
        self.lives.append(WarmProgram(command, Path.cwd(), os.environ, self._log, self._log))
        return self.process

    def start(self, *options: str) -> dict[str, Any]:
        """Starts another life and returns its ready file."""
        life = self.launch(*options)
        return until(lambda: self.ready if self.ready.get("pid") == life.pid else {}, "the agent is ready")

    def end(self) -> int:
        """Asks for an orderly end; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        """What the agents wrote to their log."""
        return self._log.read_text()

    def clean_up(self) -> None:
        for pid in self.pids:
            if is_running(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for life in self.lives:
            life.kill()
            life.wait()


@contextlib.contextmanager
def agent_process(controller: str, node: str = "n1") -> Iterator[AgentProcess]:
    """An agent that is not started yet; everything of it is gone after the block."""
    base = Path(tempfile.mkdtemp(prefix="ev-agent-"))
    agent = AgentProcess(base, controller, node)
    try:
        yield agent
    finally:
        agent.clean_up()
        shutil.rmtree(base)
