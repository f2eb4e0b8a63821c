"""A process with many lean agents: ``python -m bench.load.crowd``. It reads orders as JSON lines, and answers each.

One thread runs one epoll loop. Heartbeats are due at fixed times, spread evenly over the interval. The crowd also
measures its own lateness, so that it does not count against the controller.
"""

from __future__ import annotations

import json
import random
import re
import select
import sys
import time
from array import array
from collections import Counter, deque
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from bench.load import failure_mix, messages
from bench.load.agent import Agent, Seats, read_generation
from bench.load.statistics import summary
from everstep.bearer_tokens import TokenRole, mint
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import Severity
from everstep.wire.v1.training import AnyReport, FindingRaised

LONGEST_POLL_S = 0.002
"""Longest wait in seconds between two looks at the clock, by which a heartbeat may be late."""
RESUME_AT_ONCE = 16
AGAIN_S = (0.2, 1.0)
"""Bounds of the seconds until reports are sent again after a broken connection, as with the agent's back-off."""


_PAUSE = re.compile(r'"retry_after_s":([0-9.]+)')
LONGEST_PAUSE_S = 1.0
"""What a controller may ask of an agent with a job on its node (``everstep_agent.uplink.connection``)."""
FIRST_PAUSES_S = (0.02, 0.2)
"""Where the refusal names none: drawn from between, as the agent's back-off does."""


def _pair(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


class Crowd:
    """The agents of one process, and their measurements.

    Args:
        order: The first order, with the controllers' addresses and this process's part of the fleet.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self._controllers = [_pair(address) for address in order["addresses"]]
        self._home_at = array("d")
        """When agents that had lost their controller were answered by another; wall seconds."""
        self._spread = bool(order["spread"])
        self._jobs = int(order["jobs"])
        secret = Path(order["secret_file"]).read_bytes().strip()
        self.agents = [self._agent(index, secret) for index in range(order["first"], order["last"])]
        self._by_fd: dict[int, Agent] = {}
        self._epoll = select.epoll()
        self._epoll.register(sys.stdin.fileno(), select.EPOLLIN)
        self._seats: dict[bytes, Seats | None] = {}
        self._opening: deque[Agent] = deque()
        self._window = 0
        self._interval_s = 0.0
        self._began_at = 0.0
        self._due = 0
        self._loss = 0.0
        self._jitter_s = 0.0
        self._late: list[tuple[float, Agent]] = []
        self._again: list[tuple[float, int, Agent]] = []
        self._storms: list[_Storm] = []
        self._random = random.Random(order["first"])
        self._resuming: deque[tuple[Agent, Seats, int]] = deque()
        self._in_generation: set[Agent] = (
            set()
        )  # both are sets, since counting 125,000 agents on each request takes long
        self._unreported: set[Agent] = set()
        self.phases: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.entered_by: dict[tuple[str, int], list[float]] = {}
        self.latencies = array("d")
        self.report_latencies = array("d")
        self.lateness = array("d")
        self.skipped = 0
        self.sent = 0

    def _agent(self, index: int, secret: bytes) -> Agent:
        name = messages.node_name(index)
        token = mint(secret, TokenRole.AGENT, name)
        return Agent(index, messages.job_of(index, self._jobs), messages.upgrade(index, token), self)

    # --- callbacks of agents -------------------------------------------------------------------------------------

    def answered(self, agent: Agent, latency_s: float) -> None:
        self.latencies.append(latency_s)
        if agent.away:
            self._home_at.append(agent.read_at)
            agent.away = False

    def progressed(self, agent: Agent, phase: str) -> None:
        self.phases[phase] += 1
        if phase == "registered":
            agent.show()
        elif phase == "shown":
            self._open_more()
        elif phase == "reported":
            self.report_latencies.append(agent.read_at - agent.report_sent_at)
            if not agent.unreported():
                self._unreported.discard(agent)

    def entered(self, agent: Agent, seats: Seats, at: float) -> None:
        seen = self.entered_by.setdefault((seats.job, seats.number), [])
        seen.append(at)
        self._in_generation.add(agent)
        first = seats.first_rank.get(agent.name)
        if first is not None:
            self._resuming.append((agent, seats, first))

    def refused(self, agent: Agent, refusal: str) -> None:
        agent.beat_sent_at = 0.0
        self.refusals[refusal] += 1
        if not agent.seq:
            agent.introduce()
        elif agent.seq == 1:
            agent.show()

    def ended(self, agent: Agent) -> None:
        """Close the session of an agent that must not keep it open, and that waits for no answer."""
        self._forget(agent)
        self.phases["hung up"] += 1

    def seats_of(self, body: bytes, deflated: bool) -> Seats | None:
        """Return the seats of a generation. All nodes get the same bytes, which are decoded once."""
        if body not in self._seats:
            if len(self._seats) > 64:
                self._seats.clear()
            self._seats[body] = read_generation(body, deflated)
        return self._seats[body]

    # --- connections ---------------------------------------------------------------------------------------------

    def _connect(self, agent: Agent) -> None:
        index = agent.index
        own = f"127.{1 + (index >> 16)}.{index >> 8 & 255}.{index & 255}"
        agent.connect(self._controllers[agent.home % len(self._controllers)], own if self._spread else "")
        assert agent.sock is not None
        descriptor = agent.sock.fileno()
        self._by_fd[descriptor] = agent
        self._epoll.register(descriptor, select.EPOLLIN | (select.EPOLLOUT if agent.connecting else 0))

    def _report(self, agent: Agent, *reports: AnyReport) -> None:
        """Send urgent reports, which do not wait for the next heartbeat of an agent without a session."""
        if agent.sock is None:
            self._connect(agent)
        self._unreported.add(agent)
        agent.report(*reports)

    def _forget(self, agent: Agent) -> None:
        if agent.sock is not None:
            del self._by_fd[agent.sock.fileno()]
            agent.close()

    def _broken(self, agent: Agent, error: OSError) -> None:
        if len(self._controllers) > 1 and agent.shown:
            self._go_elsewhere(agent, str(error))
            return
        self.refusals[f"connection: {error}"] += 1
        self._forget(agent)
        agent.beat_sent_at = 0.0
        if not agent.shown:  # it connects again after all others
            agent.seq = 0
            self._opening.append(agent)
            self._open_more()
        elif agent.unreported():
            heappush(self._again, (time.perf_counter() + self._random.uniform(*AGAIN_S), agent.index, agent))

    def _go_elsewhere(self, agent: Agent, refusal: str) -> None:
        """Go to the next address: at once after the end of a session, or with a pause after a refusal.

        A real agent also looks whether the dead controller is back; a host of its own answers that.
        """
        pause_s = 0.0
        if agent.away:
            asked = _PAUSE.search(refusal)
            asked_s = min(LONGEST_PAUSE_S, float(asked.group(1))) if asked else 0.0
            pause_s = max(asked_s, self._random.uniform(*FIRST_PAUSES_S))
        agent.home += not agent.away
        agent.away, agent.beat_sent_at = True, 0.0
        self._forget(agent)
        heappush(self._again, (time.perf_counter() + pause_s, agent.index, agent))

    def _open_more(self) -> None:
        if self._opening:
            agent = self._opening.popleft()
            try:
                self._connect(agent)
                agent.introduce()
            except OSError as error:
                self._broken(agent, error)

    # --- time ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until standard input ends."""
        while True:
            timeout = self._run_due()
            ready = self._epoll.poll(0.0 if self._resuming else timeout, 4096)
            self._resume_some(1 if ready else RESUME_AT_ONCE)
            for descriptor, events in ready:
                if descriptor == sys.stdin.fileno():
                    line = sys.stdin.buffer.readline()
                    if not line:
                        return
                    self._obey(json.loads(line))
                elif (agent := self._by_fd.get(descriptor)) is not None:
                    self._serve(agent, descriptor, events)

    def _resume_some(self, most: int) -> None:
        """Report steps after all nodes got the generation: on real machines no report delays another node's push."""
        for _ in range(min(len(self._resuming), most)):
            agent, seats, first = self._resuming.popleft()
            self._report(agent, *messages.resumed(seats.job, seats.number, first))

    def _serve(self, agent: Agent, descriptor: int, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                self._epoll.modify(descriptor, select.EPOLLIN)
                agent.writable()
            if events & ~select.EPOLLOUT:
                agent.readable()
        except OSError as error:
            self._broken(agent, error)

    def _run_due(self) -> float:
        """Send everything that is due, and return the seconds until more is due."""
        now = time.perf_counter()
        while self._again and self._again[0][0] <= now:
            self._come_again(heappop(self._again)[-1])
        for storm in self._storms:
            storm.blow(now)
        if not self._interval_s:
            return LONGEST_POLL_S if self._storms else 1.0
        spacing_s = self._interval_s / len(self.agents)
        while (due_at := self._began_at + self._due * spacing_s) <= now:
            agent = self.agents[self._due % len(self.agents)]
            self._due += 1
            self._beat_or_not(agent, due_at, now)
        for place in [p for p, (at, _) in enumerate(self._late) if at <= now][::-1]:
            self._beat(self._late.pop(place)[1])
        return min(LONGEST_POLL_S, due_at - now)

    def _beat_or_not(self, agent: Agent, due_at: float, now: float) -> None:
        self.lateness.append(now - due_at)
        if self._loss and self._random.random() < self._loss:
            self.skipped += 1
        elif self._jitter_s:
            self._late.append((due_at + self._random.random() * self._jitter_s, agent))
        else:
            self._beat(agent)

    def _beat(self, agent: Agent) -> None:
        if not agent.seq or (agent.away and agent.sock is None):
            return  # it has not registered yet, or waits to try another address
        if agent.beat_sent_at:  # the real agent also waits for the answer
            self.skipped += 1
            return
        try:
            if agent.sock is None:
                self._connect(agent)
            agent.beat(self._interval_s)
            self.sent += 1
        except OSError as error:
            self._broken(agent, error)

    def _come_again(self, agent: Agent) -> None:
        """Connect an agent again, unless it has come back meanwhile."""
        if agent.sock is not None or not (agent.away or agent.unreported()):
            return
        try:
            if agent.away:
                self._connect(agent)
                agent.beat(self._interval_s)
            else:
                self._report(agent)
        except OSError as error:
            self._broken(agent, error)

    # --- orders --------------------------------------------------------------------------------------------------

    def _obey(self, order: dict[str, Any]) -> None:
        answer = getattr(self, "do_" + order.pop("do"))(**order)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()

    def do_open(self, window: int) -> None:
        """Open all sessions and register, ``window`` at a time."""
        self._opening.extend(self.agents)
        for _ in range(window):
            self._open_more()

    def do_join(self, nodes_of_a_job: int, launcher: int = messages.INCARNATION, job: str = "") -> int:
        """Offer the nodes of all jobs, or of one, by launchers that started at ``launcher``. Returns how many."""
        joining = [agent for agent in self.agents if agent.job and job in ("", agent.job)]
        for agent in joining:
            self._report(agent, messages.launcher_joined(agent.job, nodes_of_a_job, 29500, launcher))
        return len(joining)

    def do_generation(self, job: str) -> int:
        """Return the newest generation of the job that an agent here was told; 0 for none."""
        return max((agent.generation for agent in self.agents if agent.job == job), default=0)

    def do_beat(self, interval_s: float, loss: float = 0.0, jitter_s: float = 0.0) -> None:
        """Start the heartbeats, each agent at its own time. An interval of 0 ends them."""
        self._interval_s, self._loss, self._jitter_s = interval_s, loss, jitter_s
        self._began_at, self._due, self._late = time.perf_counter(), 0, []

    def do_status(self) -> dict[str, Any]:
        """Return counts of phases, refusals, sessions and reports."""
        return {
            "phases": self.phases,
            "refusals": self.refusals,
            "connected": len(self._by_fd),
            "in_generation": len(self._in_generation),
            "unreported": len(self._resuming) + len(self._unreported),
            "sent": self.sent,
            "skipped": self.skipped,
        }

    def do_sample(self) -> dict[str, Any]:
        """Return the measurements since the last sample."""
        answer = {
            "beats": summary(self.latencies),
            "reports": summary(self.report_latencies),
            "lateness": summary(self.lateness),
            "unanswered": sum(1 for agent in self.agents if agent.beat_sent_at),
        }
        self.latencies, self.report_latencies, self.lateness = array("d"), array("d"), array("d")
        return answer

    def do_home(self) -> list[float]:
        """Return the times at which agents that lost their controller were answered by another one."""
        return sorted(self._home_at)

    def do_lose_rank(self, job: str) -> dict[str, Any] | None:
        """Let one agent of the job report the loss of its first rank, and return the time and the generation.

        Each call takes the next agent, since a job leaves out a node that loses many ranks. Returns None if this crowd
        has no agent of the job.
        """
        members = [agent for agent in self.agents if agent.job == job and agent.first_rank is not None]
        if not members:
            return None
        agent = members[members[0].generation % len(members)]
        assert agent.first_rank is not None
        generation, at = agent.generation, time.time()
        self._report(agent, messages.rank_lost(job, generation, agent.first_rank))
        return {"at": at, "generation": generation}

    def do_entered(self, job: str, generation: int) -> dict[str, Any]:
        """Return the number of agents that have received a generation, and the time of the last one."""
        seen = self.entered_by.get((job, generation), [])
        return {"count": len(seen), "last": max(seen, default=0.0)}

    def do_fail(self, kinds: list[str]) -> dict[str, float]:
        """Report one fault of each of ``kinds`` from nodes spread over the crowd. Returns the wall time by node."""
        count = len(kinds)
        failing = self.agents[:: max(1, len(self.agents) // max(1, count))][:count]
        reported_at = {}
        for agent, kind in zip(failing, kinds, strict=True):
            reported_at[agent.name] = SYSTEM_CLOCK.wall()
            finding = failure_mix.finding(kind, reported_at[agent.name])
            self._report(agent, FindingRaised(finding=finding, job=agent.job or None))
        return reported_at

    def do_storm(self, nodes: int, per_s: float, seconds: float) -> None:
        """Let the last ``nodes`` agents report XIDs continuously."""
        self._storms = [_Storm(agent, per_s, seconds) for agent in self.agents[len(self.agents) - nodes :]]

    def do_calm(self) -> dict[str, int]:
        """Return the number of reports that the storms made so far, and of those not acknowledged yet."""
        return {
            "made": sum(storm.made for storm in self._storms),
            "open": sum(storm.agent.unreported() for storm in self._storms),
        }


class _Storm:
    """A storm of XIDs in one node's kernel log: 29 XIDs over eight GPUs, repeatedly."""

    def __init__(self, agent: Agent, per_s: float, seconds: float) -> None:
        self.agent = agent
        self.made = 0
        self._per_s = per_s
        self._most = round(per_s * seconds)
        self._began_at = time.perf_counter()

    def blow(self, now: float) -> None:
        due = min(self._most, int((now - self._began_at) * self._per_s))
        while self.made < due:
            finding = messages.xid(10 + self.made % 29, Severity.WARNING, self.made % messages.RANKS)
            self.agent.report(FindingRaised(finding=finding))
            self.made += 1


def main() -> None:
    crowd = Crowd(json.loads(sys.stdin.buffer.readline()))
    sys.stdout.write("null\n")
    sys.stdout.flush()
    crowd.run()


if __name__ == "__main__":
    main()
