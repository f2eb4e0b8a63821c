"""An agent process with virtual GPUs, a vault, and temporary directories."""

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

from tests.support.processes.process_table import is_running
from tests.support.processes.waiting import until
from tests.support.processes.warm_programs import WarmProgram

DEADLINE_S = 60.0
TOKEN = "agent:n1:mac"


class AgentProcess:
    """The agent of one node, in consecutive processes over the same directories. ``controller``: "" for none."""

    def __init__(self, base: Path, controller: str, node: str) -> None:
        self.node = node
        self.run_dir = base / "run"
        self.segments = base / "segments" / node
        self.kernel_log = base / "kernel.log"
        self.kernel_log.touch()
        self.token_file = base / "token"
        self.token_file.write_text(TOKEN)
        self.controller = controller
        self.processes: list[WarmProgram] = []
        self._log = base / "log"
        self.pids: set[int] = set()

    @property
    def process(self) -> WarmProgram:
        return self.processes[-1]

    @property
    def ready(self) -> dict[str, Any]:
        """The content of ``agent.json``, or an empty dictionary if there is none."""
        with contextlib.suppress(OSError, json.JSONDecodeError):
            status: dict[str, Any] = json.loads((self.run_dir / "agent.json").read_text())
            self.pids |= {status["pid"], status["vault_pid"], status["sensor_pid"]} - {0}
            return status
        return {}

    def launch(self, *options: str) -> WarmProgram:
        """Start the agent again without waiting for it."""
        command = ["-m", "everstep_agent.main", "--node", self.node, "--run-dir", str(self.run_dir)]
        if self.controller:
            command += ["--controller", self.controller, "--token-file", str(self.token_file)]
        command += ["--segment-dir", str(self.segments), "--kernel-log", str(self.kernel_log)]
        command += ["--virtual", "default:2", *options]
        self.processes.append(WarmProgram(command, Path.cwd(), os.environ, self._log, self._log))
        return self.process

    def start(self, *options: str) -> dict[str, Any]:
        """Start the agent again, and return its ready file."""
        process = self.launch(*options)
        return until(lambda: self.ready if self.ready.get("pid") == process.pid else {}, "the agent is ready")

    def end(self) -> int:
        """Terminate the agent, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        """Return the log of all processes."""
        return self._log.read_text()

    def clean_up(self) -> None:
        for pid in self.pids:
            if is_running(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def agent_process(controller: str, node: str = "n1") -> Iterator[AgentProcess]:
    """Yield an agent that is not started yet, and remove its processes and files after the block."""
    base = Path(tempfile.mkdtemp(prefix="ev-agent-"))
    agent = AgentProcess(base, controller, node)
    try:
        yield agent
    finally:
        agent.clean_up()
        shutil.rmtree(base)
