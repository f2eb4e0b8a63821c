"""What the vault was told about each job: its generation, its secret, who holds its slots."""

from __future__ import annotations

import threading

import msgspec

from everstep.errors import ConfigurationError, NotFound, StaleGeneration
from everstep.wire.v1.local import Configure

SHORTEST_SECRET = 16


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The newest word on a job. ``holders`` maps a node to its vault's address."""

    job: str
    generation: int
    secret: bytes
    holders: dict[str, str]

    def address(self, node: str) -> str:
        """Where ``node``'s vault listens. Raises NotFound where it is no holder of the job."""
        if node not in self.holders:
            raise NotFound(f"{node} is not among the holders of job {self.job}: {sorted(self.holders)}")
        return self.holders[node]


class JobBook:
    """All jobs' facts. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, JobFacts] = {}

    def configure(self, message: Configure) -> JobFacts:
        """Takes the supervisor's word. Raises StaleGeneration for an old one, ConfigurationError for a weak secret."""
        if len(message.secret) < SHORTEST_SECRET:
            raise ConfigurationError(f"a job's secret needs {SHORTEST_SECRET} characters, not {len(message.secret)}")
        with self._lock:
            known = self._jobs.get(message.job)
            if known is not None and message.generation < known.generation:
                raise StaleGeneration(
                    f"job {message.job} is in generation {known.generation}, {message.generation} is over"
                )
            facts = JobFacts(
                job=message.job,
                generation=message.generation,
                secret=message.secret.encode(),
                holders={h.node: h.vault for h in message.holders},
            )
            self._jobs[message.job] = facts
            return facts

    def facts(self, job: str) -> JobFacts:
        """Raises NotFound for a job nobody has configured."""
        with self._lock:
            facts = self._jobs.get(job)
        if facts is None:
            raise NotFound(f"job {job} is not known here; its supervisor has not configured it, or it is over")
        return facts

    def current(self, job: str, generation: int) -> JobFacts:
        """The job's facts, if ``generation`` is not over. Raises StaleGeneration, NotFound."""
        facts = self.facts(job)
        if generation < facts.generation:
            raise StaleGeneration(f"job {job} is in generation {facts.generation}, {generation} is over")
        return facts

    def forget(self, job: str) -> None:
        with self._lock:
            self._jobs.pop(job, None)

    def __len__(self) -> int:
        return len(self._jobs)
