"""What the demonstration sees of its fleet: the controller's events, nodes and job, over the REST API."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from everstep.client import Client
from everstep.errors import EverstepError
from everstep.vocabulary import NodeState
from everstep.wire.v1.operator import Event, JobDetail, NodeSummary

POLL_S = 0.1


class Watch:
    """Polls in a thread of its own; a controller that is away is waited for.

    ``on_event`` is called for every line of the event log, once, in order, from that thread.
    """

    def __init__(self, client: Callable[[], Client], job: str, on_event: Callable[[Event], None]) -> None:
        self._client = client
        self._job = job
        self._on_event = on_event
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-watch", daemon=True)
        self.events: list[Event] = []
        self.nodes: tuple[NodeSummary, ...] = ()
        self.job: JobDetail | None = None
        self._after = 0

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)

    def state(self, node: str) -> NodeState | None:
        """Where ``node`` stands with the fleet, as last seen."""
        return next((found.state for found in self.nodes if found.node == node), None)

    @property
    def roster(self) -> frozenset[str]:
        """Nodes that take part now."""
        return frozenset(member.node for member in self.job.roster) if self.job else frozenset()

    @property
    def generation(self) -> int:
        return self.job.summary.generation if self.job else 0

    def settled(self, generation: int) -> bool:
        """Every rank of ``generation`` (or of a later one) has finished its first step."""
        if self.job is None:
            return False
        done = [r for r in self.job.recoveries if r.generation >= generation]
        return any(r.world_size and r.resumed_ranks >= r.world_size for r in done)

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                self._poll()
            except EverstepError:
                continue  # the controller is away; the demonstration itself may have killed it

    def _poll(self) -> None:
        client = self._client()
        answer = client.events(after=self._after).collect(500)
        self.nodes = client.nodes().collect().nodes
        if any(event.job for event in (*self.events, *answer.events)):
            self.job = client.job(self._job)
        self._after = answer.next_after  # only now: had a request failed, these events would never have been seen
        for event in answer.events:
            self.events.append(event)
            self._on_event(event)

    def wait(self, condition: Callable[[], bool], what: str, deadline_s: float = 120.0) -> None:
        """Returns when ``condition`` holds. Raises TimeoutError naming ``what``."""
        end = time.perf_counter() + deadline_s
        while not condition():
            if time.perf_counter() > end:
                raise TimeoutError(f"{what}: not within {deadline_s:.0f} s")
            time.sleep(POLL_S / 4)
