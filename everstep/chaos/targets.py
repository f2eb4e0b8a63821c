"""Find the processes of a job on this machine: launchers, their ranks and the agents of their nodes.

A launcher is found by the fork server below it, which has the job's name in its environment. Only processes of the
calling user count.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from everstep.errors import DECODE_ERRORS
from everstep.host.processes import Process, read_environment

FLIP_SIGNAL = signal.SIGRTMIN + 7
"""Makes a rank flip one bit of a parameter before its next update, if its job allows that."""
JOB_VARIABLE = "EVERSTEP_JOB"
AGENT_SOCKET_VARIABLE = "EVERSTEP_LAUNCH_AGENT_SOCKET"
_ZYGOTE, _FORK_SERVER = "everstep-zygote", "everstep-forks"
_RANK = re.compile(r"everstep-rank(\d+)")
_AGENT_MODULE = "everstep_agent.main"


class AgentFile(msgspec.Struct, frozen=True):
    """The fields that matter here of the file ``agent.json``, which an agent writes beside its socket."""

    pid: int
    node: str


class LocalNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part of a job, as far as it runs on this machine.

    Attributes:
        name: Name of the node; "" if it cannot be found out.
        is_private: The launcher runs the agent, and perhaps the controller, for this job alone.
        controller: Address of a private agent's controller; "" for a fleet's agent.
        has_controller: The launcher runs the job's controller.
        processes: The launcher and everything below it, with a private agent and its vault.
        ranks: Processes of ranks by local rank.
    """

    job: str
    name: str
    is_private: bool
    controller: str
    has_controller: bool
    launcher: Process
    agent: Process | None
    processes: tuple[Process, ...]
    ranks: dict[int, Process]


def find_nodes(
    processes: Mapping[int, Process],
    environment_of: Callable[[int], Mapping[str, str]] = read_environment,
    user: int | None = None,
) -> list[LocalNode]:
    """Return the parts of all jobs that run here for ``user``, by default the calling one, by job and node."""
    user = os.geteuid() if user is None else user
    found = []
    for zygote in processes.values():
        launcher = processes.get(zygote.parent)
        if zygote.name != _ZYGOTE or zygote.user != user or launcher is None:
            continue
        environment = environment_of(zygote.pid)
        if job := environment.get(JOB_VARIABLE):
            found.append(_node(job, environment.get(AGENT_SOCKET_VARIABLE, ""), launcher, zygote, processes))
    return sorted(found, key=lambda node: (node.job, node.name, node.launcher.pid))


def nodes_of_run(nodes: Iterable[LocalNode], job: str, controllers: str) -> list[LocalNode]:
    """Return the nodes of the job that one of ``controllers`` runs. Another private run may have a job of that name.

    Ports are compared: a private controller is on this machine, and nodes may know it by other addresses of it.
    """
    ports = {urlsplit(url).port for url in controllers.split(",")}
    return [
        node for node in nodes if node.job == job and (not node.controller or urlsplit(node.controller).port in ports)
    ]


def _node(
    job: str, agent_socket: str, launcher: Process, zygote: Process, processes: Mapping[int, Process]
) -> LocalNode:
    services = [process for process in processes.values() if process.parent == launcher.pid]
    own = next((process for process in services if _AGENT_MODULE in process.arguments), None)
    agent, name = (own, _argument(own, "--node")) if own is not None else _agent_at(agent_socket, processes)
    below = _below(launcher, processes)
    return LocalNode(
        job=job,
        name=name,
        is_private=own is not None,
        controller="" if own is None else _argument(own, "--controller"),
        has_controller=any("everstep_controller.main" in process.arguments for process in services),
        launcher=launcher,
        agent=agent,
        processes=tuple(below),
        ranks={
            int(match[1]): process
            for process in _below(zygote, processes)
            if (match := _RANK.fullmatch(process.name)) and _is_forked(process, processes)
        },
    )


def _is_forked(rank: Process, processes: Mapping[int, Process]) -> bool:
    """Return whether the fork server made the process: the rank's own children have its name, too."""
    parent = processes.get(rank.parent)
    return parent is not None and parent.name == _FORK_SERVER


def _below(top: Process, processes: Mapping[int, Process]) -> list[Process]:
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    found = [top]
    for process in found:
        found += children.get(process.pid, [])
    return found


def _argument(process: Process, flag: str) -> str:
    """Return the value of a flag on a process's command line; "" if it is not there."""
    arguments = process.arguments
    return next((value for name, value in itertools.pairwise(arguments) if name == flag), "")


def _agent_at(socket: str, processes: Mapping[int, Process]) -> tuple[Process | None, str]:
    """Return a fleet's agent by its socket, and its node; neither if its file cannot be read."""
    try:
        ready = msgspec.json.decode((Path(socket).parent / "agent.json").read_bytes(), type=AgentFile)
    except (OSError, *DECODE_ERRORS):
        return None, ""
    return processes.get(ready.pid), ready.node
