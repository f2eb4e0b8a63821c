"""The faults of a soak. Each fault chooses a victim, strikes, and describes what it did, or returns "" without one."""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from everstep.client import calls
from examples.demo.faults import flip_in_slots
from examples.demo.world import Node
from tests.integration.fleet.soak.simulated_fleet import FEWEST, Fleet, end, named

Strike = Callable[[Fleet, random.Random], str]

MOST_EVICTIONS = 3
"""Evictions within five minutes. The fifth would latch the breaker."""


@dataclass(frozen=True)
class Fault:
    """A kind of fault. ``often``: its weight among all faults."""

    name: str
    strike: Strike
    often: int = 2


def _victim(nodes: list[Node], draw: random.Random) -> Node | None:
    return draw.choice(nodes) if nodes else None


def _can_spare(fleet: Fleet) -> list[Node]:
    """Return the nodes that the job can spare now."""
    ready = fleet.ready()
    return [fleet.world.nodes[name] for name in sorted(ready)] if len(ready) > FEWEST else []


def _kill_named(prefix: str, fleet: Fleet, draw: random.Random) -> str:
    """Kill one process of a node in the job, chosen by its name."""
    victim = _victim([node for node in fleet.untouched() if node.name in fleet.ready()], draw)
    pids = named(victim, prefix) if victim is not None else []
    return f"{prefix} on {victim.name}" if victim is not None and pids and end(draw.choice(pids)) else ""


def ranks_killed(count: int, fleet: Fleet, draw: random.Random) -> str:
    """Kill ``count`` ranks within a millisecond."""
    seated = fleet.seated()
    victims = draw.sample(seated, min(count, len(seated)))
    killed = [pid for node in victims for pid in named(node, "everstep-rank") if end(pid)]
    return ", ".join(node.name for node in victims) if killed else ""


def rank_stopped(fleet: Fleet, draw: random.Random) -> str:
    """Stop a rank by SIGSTOP. Half of them continue later, and may have been replaced."""
    victim = _victim(fleet.seated(), draw)
    pids = named(victim, "everstep-rank") if victim is not None else []
    if victim is None or not pids or not end(pids[0], signal.SIGSTOP):
        return ""
    if draw.random() < 0.5:
        return f"{victim.name}, for ever"
    sleep_s = draw.uniform(0.2, 4.0)
    fleet.later(sleep_s, partial(end, pids[0], signal.SIGCONT))
    return f"{victim.name}, for {sleep_s:.2f} s"


def launcher_killed(fleet: Fleet, draw: random.Random) -> str:
    return _daemon_killed(fleet, draw, lambda node: node.launcher, fleet.launcher_back, most_away_s=3.0)


def agent_killed(fleet: Fleet, draw: random.Random) -> str:
    """Kill an agent. Its vault and its trainers live on."""
    return _daemon_killed(fleet, draw, lambda node: node.agent, fleet.agent_back, most_away_s=2.0)


def _daemon_killed(
    fleet: Fleet,
    draw: random.Random,
    daemon: Callable[[Node], subprocess.Popen[bytes] | None],
    back: Callable[[Node], None],
    *,
    most_away_s: float,
) -> str:
    """Kill a node's launcher or agent. ``back`` starts another one later."""
    victim = _victim(_can_spare(fleet), draw)
    process = daemon(victim) if victim is not None else None
    if victim is None or process is None:
        return ""
    fleet.down.add(victim.name)
    process.kill()
    process.wait()
    away_s = draw.uniform(0.0, most_away_s)
    fleet.later(away_s, partial(back, victim))
    return f"{victim.name}, another after {away_s:.2f} s"


def agent_stopped(fleet: Fleet, draw: random.Random) -> str:
    victim = _victim(_can_spare(fleet), draw)
    if victim is None or victim.agent is None or not end(victim.agent.pid, signal.SIGSTOP):
        return ""
    sleep_s = draw.uniform(1.0, 4.0)
    fleet.down.add(victim.name)
    fleet.later(sleep_s, partial(_wakes, fleet, victim, victim.agent.pid))
    return f"{victim.name}, for {sleep_s:.2f} s"


def _wakes(fleet: Fleet, node: Node, pid: int) -> None:
    end(pid, signal.SIGCONT)
    fleet.down.discard(node.name)


def child_killed(module: str, fleet: Fleet, draw: random.Random) -> str:
    """Kill a child of an agent: its vault or its sensors."""
    victim = _victim(fleet.untouched(), draw)
    pids = [pid for pid in victim.processes() if module in _command(pid)] if victim is not None else []
    return victim.name if victim is not None and pids and end(pids[0]) else ""


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def controller_killed(fleet: Fleet, draw: random.Random) -> str:
    controller = fleet.world.controller
    if controller is None or controller.poll() is not None:
        return ""
    controller.kill()
    controller.wait()
    away_s = draw.uniform(0.0, 3.0)
    fleet.later(away_s, fleet.controller_back)
    return f"another after {away_s:.2f} s"


def node_killed(fleet: Fleet, draw: random.Random) -> str:
    """Kill all processes of a node and delete its memory. It boots later."""
    victim = _victim(_can_spare(fleet), draw)
    if victim is None or not fleet.may_lose_memory():
        return ""
    fleet.memory_lost(victim)
    fleet.power_off(victim)
    away_s = draw.uniform(0.5, 4.0)
    fleet.later(away_s, partial(fleet.power_on, victim))
    return f"{victim.name}, boots after {away_s:.2f} s"


def slots_rot(fleet: Fleet, draw: random.Random) -> str:
    """Flip one bit in every sealed slot of a rank, which counts as a loss of its node's memory."""
    victim = _victim(fleet.seated(), draw)
    if victim is None or not fleet.may_lose_memory():
        return ""
    segment = fleet.world.shared_memory / victim.name / "soak" / "own-0"
    fleet.memory_lost(victim, leaves=False)
    try:
        flip_in_slots(segment)
    except (OSError, ValueError):
        return ""  # the rank has no slots at this moment
    return victim.name


def gpu_dies(fleet: Fleet, draw: random.Random) -> str:
    """Log XID 79, for which the node is evicted. A boot repairs it."""
    victim = _victim(_can_spare(fleet), draw)
    if victim is None or not fleet.may_lose_memory() or len(fleet.evictable) >= MOST_EVICTIONS:
        return ""
    fleet.down.add(victim.name)
    fleet.evictable.add(victim.name)
    with victim.kernel_log.open("a") as log:
        log.write("NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n")
    away_s = draw.uniform(2.0, 5.0)
    fleet.later(away_s, partial(_power_cycle, fleet, victim))
    return f"{victim.name}, boots after {away_s:.2f} s"


def _power_cycle(fleet: Fleet, node: Node) -> None:
    """Power-cycle the node once the job can lose its memory, as a technician would wait."""
    if not fleet.may_lose_memory():
        fleet.later(0.2, partial(_power_cycle, fleet, node))
        return
    fleet.memory_lost(node)
    fleet.power_off(node)
    fleet.power_on(node)


def drained(fleet: Fleet, draw: random.Random) -> str:
    victim = _victim(_can_spare(fleet), draw)
    if victim is None:
        return ""
    fleet.down.add(victim.name)
    answer = fleet.ask(victim, calls.drain)
    away_s = draw.uniform(0.5, 3.0)
    fleet.later(away_s, partial(fleet.readmit, victim))
    return f"{victim.name} ({answer}), readmitted after {away_s:.2f} s"


FAULTS = (
    Fault("rank killed", partial(ranks_killed, 1), 5),
    Fault("two ranks killed", partial(ranks_killed, 2), 3),
    Fault("rank stopped", rank_stopped, 4),
    Fault("launcher killed", launcher_killed, 3),
    Fault("fork server killed", partial(_kill_named, "everstep-forks")),
    Fault("zygote killed", partial(_kill_named, "everstep-zygote")),
    Fault("standby killed", partial(_kill_named, "everstep-spare")),
    Fault("store host killed", partial(_kill_named, "everstep-store"), 1),
    Fault("agent killed", agent_killed, 3),
    Fault("agent stopped", agent_stopped),
    Fault("sensors killed", partial(child_killed, "everstep_agent.sensors.sampler"), 1),
    Fault("vault killed", partial(child_killed, "everstep_agent.vault.process"), 3),
    Fault("controller killed", controller_killed, 3),
    Fault("node killed", node_killed, 4),
    Fault("slots rot", slots_rot),
    Fault("XID 79", gpu_dies, 1),
    Fault("drained", drained),
)


def draw_fault(draw: random.Random) -> Fault:
    """Draw the next fault by the weights."""
    return draw.choices(FAULTS, weights=[fault.often for fault in FAULTS])[0]
