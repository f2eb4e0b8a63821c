"""An agent without a controller: its own answers, and a fleet that it joins while it runs."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from everstep.bearer_tokens import TokenRole, mint
from everstep.cli.main import app
from everstep_trainer.launch.services.launcher_connection import describe_absence
from tests.support.agents.agent_process import AgentProcess, agent_process
from tests.support.agents.sensors import Control
from tests.support.fleet.controllers import SECRET, controller_process
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def agent() -> Iterator[AgentProcess]:
    with agent_process("", "n1") as made:
        made.token_file.write_text(mint(SECRET, TokenRole.AGENT, "n1"))
        yield made


def ask(agent: AgentProcess, command: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["node", command, *arguments, "--run-dir", str(agent.run_dir)])


def test_standalone_agent_reports_a_lost_gpu(agent: AgentProcess, control: Control) -> None:
    ready = agent.start("--standalone", "--virtual-control", str(control.path))
    health = agent.run_dir / "health"
    until(lambda: health.exists() and "health=healthy" in health.read_text(), "the node is healthy")
    assert ask(agent, "local").exit_code == 0
    assert (ready["vault_pid"], (agent.run_dir / "agent.sock").exists()) == (0, False)
    control.write(gpus={"0": {"lost": True}})
    until(lambda: "health=unfit" in health.read_text(), "the node is unfit")
    until(lambda: "kept the node's logs in" in agent.log(), "the logs are kept")
    answer = ask(agent, "local", "--json")
    status = json.loads(answer.stdout)
    assert (answer.exit_code, status["health"], len(status["gpus"])) == (3, "unfit", 2)
    assert status["gpus"][0]["error"]
    assert Path(status["newest_bundle"]).parent == agent.run_dir / "bundles"


def test_standalone_agent_serves_loopback_metrics_without_token(agent: AgentProcess) -> None:
    ready = agent.start("--standalone")
    with urllib.request.urlopen(f"http://{ready['metrics']}/metrics") as response:
        text = response.read().decode()
    assert "everstep_gpu_up" in text
    assert "everstep_vault_up" not in text


def test_agent_releases_gpus_for_a_bounded_time(agent: AgentProcess) -> None:
    agent.start("--standalone")
    until(lambda: ask(agent, "local").exit_code == 0, "the node is healthy")
    assert "NVML is closed for 60 s at most" in ask(agent, "pause-nvml", "--seconds", "60").output
    assert (agent.run_dir / "nvml-pause").read_text().startswith("until=")
    assert ask(agent, "local").exit_code == 0
    ask(agent, "pause-nvml", "--end")
    assert not (agent.run_dir / "nvml-pause").exists()


def test_standalone_agent_joins_a_controller_and_remembers_it(
    agent: AgentProcess, tmp_path: Path, program_forks: ForkPool
) -> None:
    agent.start("--standalone")
    absence = describe_absence(str(agent.run_dir / "agent.sock"), FileNotFoundError())
    assert "runs standalone" in absence
    with controller_process(tmp_path, program_forks) as controller:
        assert ask(agent, "join", "ftp://x", "--token-file", str(agent.token_file)).exit_code == 1
        joined = ask(agent, "join", controller.url, "--token-file", str(agent.token_file))
        assert f"n1 connects to {controller.url}" in joined.stdout
        until(lambda: agent.log().count("registered with controller") == 1, "the controller knows the node")
        assert (agent.run_dir / "agent.sock").is_socket()
        assert "has a controller" in ask(agent, "join", controller.url).output
        agent.end()
        agent.start("--standalone", "--stop-vault-on-exit")
        until(lambda: agent.log().count("registered with controller") == 2, "the next agent knows the controller")
        agent.end()


def test_absent_agent_makes_health_unknown(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["node", "local", "--run-dir", str(tmp_path)])
    assert ended.exit_code == 2
    assert f"no agent answers at {tmp_path}/node.sock" in ended.stderr
