"""Store the vault's knowledge of each job: generation, secret, slot holders and parity groups."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from everstep.errors import ConfigurationError, NotFound, StaleGeneration
from everstep.ids import Version
from everstep.wire.v1.local import ConfigureJob
from everstep.wire.v1.vault_reports import ParityGroup

MIN_SECRET_LENGTH = 16
MAX_HOLDERS_PER_RANK = 4  # nodes remembered as holders of a rank's share; more than there are copies of it
MAX_LIKELY_HOLDERS = 16  # nodes to ask for a share whose holders are unknown
MAX_GROUP_VERSIONS = 2
"""Versions for which a group is remembered: the protected one, and the next one while it is made."""
MAX_ENDED_JOBS = 256  # ended jobs remembered, because a rank may outlive its job by seconds


class JobConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The newest configuration of a job. ``holders`` maps a node to its vault's address."""

    job: str
    generation: int
    secret: bytes
    holders: dict[str, str]

    def address(self, node: str) -> str:
        """Return the address of ``node``'s vault. Raises NotFound if it is no holder of the job."""
        if node not in self.holders:
            raise NotFound(f"{node} is not among the holders of job {self.job}: {sorted(self.holders)}")
        return self.holders[node]


class JobTable:
    """The configurations of all jobs. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, JobConfig] = {}
        self._seen_holders: dict[tuple[str, int], list[str]] = {}
        self._groups: dict[tuple[str, int], dict[Version, ParityGroup]] = {}
        self._ended: dict[str, None] = {}

    def configure(self, message: ConfigureJob) -> JobConfig:
        """Store the supervisor's configuration. Raises StaleGeneration, ConfigurationError."""
        if len(message.secret) < MIN_SECRET_LENGTH:
            raise ConfigurationError(f"a job's secret must have at least {MIN_SECRET_LENGTH} characters")
        with self._lock:
            known = self._jobs.get(message.job)
            if known is not None and message.generation < known.generation:
                raise StaleGeneration(
                    f"job {message.job} is in generation {known.generation}, {message.generation} is over"
                )
            job_config = JobConfig(
                job=message.job,
                generation=message.generation,
                secret=message.secret.encode(),
                holders={h.node: h.vault for h in message.holders},
            )
            self._jobs[message.job] = job_config
            self._ended.pop(message.job, None)
            return job_config

    def get_config(self, job: str) -> JobConfig:
        """Return the job's configuration. Raises NotFound if the job is not configured."""
        with self._lock:
            job_config = self._jobs.get(job)
        if job_config is None:
            raise NotFound(f"job {job} is unknown to this vault: it is not configured yet, or has ended")
        return job_config

    def require_current(self, job: str, generation: int) -> JobConfig:
        """Return the job's configuration. Raises StaleGeneration if ``generation`` is over, NotFound if unknown."""
        job_config = self.get_config(job)
        if generation < job_config.generation:
            raise StaleGeneration(f"job {job} is in generation {job_config.generation}, {generation} is over")
        return job_config

    def require_configured(self, job: str, delete_job: Callable[[str], None]) -> None:
        """Raise NotFound and delete the job's data if the job ended while a segment was made for it."""
        try:
            self.get_config(job)
        except NotFound:
            delete_job(job)
            raise

    def require_not_ended(self, job: str, delete_job: Callable[[str], None]) -> None:
        """Like ``require_configured``, but accept jobs not configured yet: a node's own ranks may be first."""
        with self._lock:
            over = job in self._ended
        if over:
            self.require_configured(job, delete_job)

    def note_holder(self, job: str, rank: int, node: str) -> None:
        """Note that ``node`` holds, or held, the rank's share of some version."""
        with self._lock:
            if job in self._jobs:
                others = [other for other in self._seen_holders.get((job, rank), []) if other != node]
                self._seen_holders[job, rank] = [node, *others][:MAX_HOLDERS_PER_RANK]

    def likely_holders(self, job: str, rank: int, exclude: str, limit: int = MAX_LIKELY_HOLDERS) -> list[str]:
        """Return nodes to ask for the rank's share: known holders, latest first, then others. Raises NotFound."""
        holders = self.get_config(job).holders
        with self._lock:
            seen = self._seen_holders.get((job, rank), [])
        candidates = [node for node in dict.fromkeys([*seen, *holders]) if node in holders and node != exclude]
        return candidates[:limit]

    def add_parity_group(self, job: str, version: Version, group: ParityGroup) -> None:
        """Note that the version's parity covers the shards of ``group``; this node holds one of them, or P or Q."""
        with self._lock:
            if job in self._jobs:
                known = {**self._groups.get((job, group.group), {}), version: group}
                newest = sorted(known)[-MAX_GROUP_VERSIONS:]
                self._groups[job, group.group] = {each: known[each] for each in newest}

    def find_parity_group(self, job: str, version: Version, rank: int) -> ParityGroup | None:
        """Return the known group that contains ``rank``'s shard of the version, or None."""
        with self._lock:
            for (of, _), known in self._groups.items():
                group = known.get(version)
                if of == job and group is not None and any(member == rank for member, _ in group.members):
                    return group
        return None

    def get_parity_group(self, job: str, version: Version, number: int) -> ParityGroup | None:
        with self._lock:
            return self._groups.get((job, number), {}).get(version)

    def forget(self, job: str) -> None:
        with self._lock:
            self._jobs.pop(job, None)
            self._ended[job] = None
            if len(self._ended) > MAX_ENDED_JOBS:
                del self._ended[next(iter(self._ended))]
            for known in (self._seen_holders, self._groups):
                for key in [key for key in known if key[0] == job]:
                    del known[key]

    def __len__(self) -> int:
        return len(self._jobs)
