"""The processes of a job are found on this machine by the fork servers of its launchers."""

from __future__ import annotations

import json
from pathlib import Path

from everstep.chaos.targets import AGENT_SOCKET_VARIABLE, JOB_VARIABLE, LocalNode, find_nodes, nodes_of_run
from everstep.host.processes import Process

USER = 1000
FORKS = ("python", "-m", "everstep_trainer.launch.forking.forkserver")


def process(pid: int, parent: int, name: str, *arguments: str, user: int = USER) -> Process:
    return Process(pid=pid, parent=parent, user=user, name=name, state="S", started=pid, arguments=arguments)


def launcher(first: int, *, user: int = USER, ranks: int = 2) -> list[Process]:
    """A launcher's processes, with a worker of a data loader below the first rank, and a standby."""
    return [
        process(first, 1, "everstep-launch", user=user),
        process(first + 1, first, "everstep-zygote", *FORKS, user=user),
        process(first + 2, first + 1, "everstep-forks", *FORKS, user=user),
        process(first + 3, first + 2, "everstep-store", *FORKS, user=user),
        process(first + 4, first + 2, "everstep-spare", *FORKS, user=user),
        *(process(first + 10 + rank, first + 2, f"everstep-rank{rank}", *FORKS, user=user) for rank in range(ranks)),
        process(first + 20, first + 10, "everstep-rank0", *FORKS, user=user),
    ]


def services(first: int, node: str, controller: str = "http://127.0.0.1:1") -> list[Process]:
    """A launcher's private controller and agent, and the agent's vault."""
    agent = ("python", "-P", "-m", "everstep_agent.main", "--node", node, "--controller", controller)
    return [
        process(first + 30, first, "python", "python", "-P", "-m", "everstep_controller.main", "serve"),
        process(first + 31, first, "python", *agent),
        process(first + 32, first + 31, "python", *agent),
    ]


def found(processes: list[Process], environments: dict[int, dict[str, str]]) -> list[LocalNode]:
    table = {process.pid: process for process in processes}
    return find_nodes(table, lambda pid: environments.get(pid, {}), USER)


def test_private_run_is_found_with_its_ranks_and_agent() -> None:
    (node,) = found([*launcher(100), *services(100, "local")], {101: {JOB_VARIABLE: "llama"}})
    assert (node.job, node.name, node.is_private, node.has_controller) == ("llama", "local", True, True)
    assert {rank: process.pid for rank, process in node.ranks.items()} == {0: 110, 1: 111}
    assert node.agent is not None
    assert node.agent.pid == 131
    assert {100, 101, 102, 110, 120, 130, 131, 132} <= {process.pid for process in node.processes}


def test_fleets_agent_is_found_by_its_socket(tmp_path: Path) -> None:
    (tmp_path / "agent.json").write_text(json.dumps({"pid": 7, "node": "node-7", "vault": "10.0.0.7:1"}))
    environment = {JOB_VARIABLE: "llama", AGENT_SOCKET_VARIABLE: str(tmp_path / "agent.sock")}
    agent = process(7, 1, "everstep-agent", user=0)
    (node,) = found([*launcher(100), agent], {101: environment})
    assert (node.name, node.agent, node.is_private, node.has_controller) == ("node-7", agent, False, False)
    assert agent not in node.processes


def test_unreadable_agent_leaves_the_node_unnamed(tmp_path: Path) -> None:
    environment = {JOB_VARIABLE: "llama", AGENT_SOCKET_VARIABLE: str(tmp_path / "agent.sock")}
    (node,) = found(launcher(100), {101: environment})
    assert (node.name, node.agent) == ("", None)


def test_runs_with_the_same_job_name_are_distinguished() -> None:
    environments = {101: {JOB_VARIABLE: "gpt"}, 201: {JOB_VARIABLE: "gpt"}, 301: {JOB_VARIABLE: "gpt"}}
    first, second = (services(pid, "local", f"http://127.0.0.1:{pid}") for pid in (100, 200))
    nodes = found([*launcher(100), *first, *launcher(200), *second, *launcher(300)], environments)
    assert {node.launcher.pid for node in nodes_of_run(nodes, "gpt", "http://10.0.0.1:200")} == {200, 300}
    assert nodes_of_run(nodes, "llama", "http://10.0.0.1:200") == []
