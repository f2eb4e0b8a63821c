"""List a job's restore points, and which losses it could not survive, from the records alone.

Unknown data counts as lost: a holder that is unreachable, has lost its vault or restarted after the commit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations
from typing import Literal

from everstep.ids import Version
from everstep.wire.v1.operator import LossForecast, Restorability
from everstep.wire.v1.operator_history import CheckpointCopy, JobCheckpoints
from everstep_controller.core.checkpoints.parity import groups_by_parity_node, lost_protected_nodes, still_holds_data
from everstep_controller.core.checkpoints.storage import NO_VERSION
from everstep_controller.core.records import JobRecord, ShareLocations
from everstep_controller.core.seats.membership import domain_of, eligible_nodes
from everstep_controller.core.state import FleetState
from everstep_controller.core.wording import format_node_count, join_names

MAX_LISTED_RANKS = 64
MAX_NODES_FOR_PAIRS = 16
"""Maximum number of a job's nodes for which every pair is checked: 120 pairs."""

LossKind = Literal["node", "pair", "rack", "switch", "power"]
_DOMAIN_KINDS: tuple[LossKind, ...] = ("rack", "switch", "power")


def compute_restorability(state: FleetState, job: JobRecord) -> Restorability:
    """Return the version that would be restored now, and the effect of losing each node, domain and pair."""
    live = state.job_runtime[job.job]
    version, verified = live.commits.committed_version, live.commits.verified_version
    shares = _VersionShares(state, job, version, live.commits.committed_at)
    outlook = _RosterForecast(state, job)
    missing = shares.lost(())
    forecasts = []
    for kind, name, lost in _possible_losses(state, job, shares):
        gone = shares.lost(lost)
        older = _version_by_parity(state, job, lost) if gone else None
        forecasts.append(_forecast(shares, outlook, kind, name, lost, gone, version, older))
    fatal = {forecast.name for forecast in forecasts if forecast.kind == "node" and not forecast.restorable}
    forecasts = [forecast for forecast in forecasts if forecast.kind != "pair" or fatal.isdisjoint(forecast.nodes)]
    forecasts.sort(key=lambda one: (one.restorable, one.restorable and one.remaining_nodes > 0, len(one.nodes)))
    return Restorability(
        job=job.job,
        sentence=_summary(job, version, _version_by_parity(state, job, ()) if missing else None, missing, forecasts),
        version=version,
        verified=version is not None and verified is not None and version <= verified,
        ceiling=job.commits.restore_ceiling if job.commits.restore_ceiling != NO_VERSION else None,
        missing_ranks=shares.ranks(missing)[:MAX_LISTED_RANKS],
        loss_forecasts=tuple(forecasts),
    )


class _VersionShares:
    """Holders of the shares of a version that was committed at ``since``."""

    def __init__(self, state: FleetState, job: JobRecord, version: Version | None, since: float) -> None:
        self._replicas = job.spec.replicas
        self._per_node = job.spec.nproc_per_node
        self._homes = _locations_of(job, version)
        holders = {
            other for node, share in self._homes.items() for other in (node, *share.full_copies, *share.partial_copies)
        }
        self._gone = {node for node in holders if not still_holds_data(state, node, since)}
        self._kept_for: dict[str, list[str]] = defaultdict(list)
        for node, share in self._homes.items():
            for other in {node, *share.full_copies, *share.partial_copies}:
                self._kept_for[other].append(node)
        self._first = {node: seat for seat, node in enumerate(self._homes)}

    @property
    def nodes(self) -> Sequence[str]:
        """Nodes whose ranks stored a share."""
        return list(self._homes)

    def lost(self, without: Collection[str]) -> list[str]:
        """Return the nodes whose share would be lost without these nodes and those already gone."""
        gone = self._gone.union(without)
        touched = dict.fromkeys(node for other in (without or self._gone) for node in self._kept_for.get(other, ()))
        if without:
            touched |= dict.fromkeys(node for node in self._gone if node in self._homes)
        others = len(gone & self._homes.keys()) - 1
        lost = (node for node in touched if node in gone and self._is_lost(node, gone, others))
        return sorted(lost, key=self._first.__getitem__)

    def _is_lost(self, node: str, gone: set[str], others_gone: int) -> bool:
        """Return whether a gone node's share is lost. The core does not know which holder has which part."""
        share = self._homes[node]
        if self._replicas == 1 or len(self._homes) == 1:
            return True
        if share.full_copies and all(copy in gone for copy in share.full_copies):
            return True
        if share.full_copies or share.partial_copies:
            others, away = len(share.partial_copies), sum(1 for other in share.partial_copies if other in gone)
        else:
            others, away = len(self._homes) - 1, others_gone
        return others > 0 and away >= min(self._replicas - 1, others)

    def ranks(self, lost: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks of these nodes in the generation that stored the version."""
        first = (self._first[node] * self._per_node for node in lost)
        return tuple(sorted(rank + local for rank in first for local in range(self._per_node)))


def _locations_of(job: JobRecord, committed: Version | None) -> dict[str, ShareLocations]:
    """Return the committed version's shares by node, as reported or else as its generation placed them."""
    if committed is None:
        return {}
    if shares := job.commits.shares_of(committed.generation):
        return shares
    for spec in (job.outgoing_generation, job.generation):
        if spec is not None and spec.number == committed.generation:
            return {node: ShareLocations(full_copies=spec.replica_nodes.get(node, ())) for node in spec.seats}
    return {}


class _RosterForecast:
    """Forecast of the number of nodes with which the job would continue, counted by blocks."""

    def __init__(self, state: FleetState, job: JobRecord) -> None:
        within = job.spec.block_within
        self._able = {
            node: domain_of(state.nodes[node].identity.domain, within) if within else "any"
            for node in eligible_nodes(state, job)
        }
        self._room = Counter(self._able.values())
        self._block = job.spec.block_nodes
        self._blocks = sum(count // self._block for count in self._room.values())
        self.least, self.most = job.min_seats, job.max_seats

    def without(self, lost: Collection[str]) -> int:
        """Return the number of nodes in the next roster; 0 if these are too few."""
        fewer = Counter(self._able[node] for node in lost if node in self._able)
        broken = sum(
            self._room[domain] // self._block - (self._room[domain] - count) // self._block
            for domain, count in fewer.items()
        )
        left = min(self.most, (self._blocks - broken) * self._block)
        return left if left >= self.least else 0


def _possible_losses(
    state: FleetState, job: JobRecord, shares: _VersionShares
) -> Iterator[tuple[LossKind, str, tuple[str, ...]]]:
    concerned = list(dict.fromkeys([*job.seats, *shares.nodes]))
    for node in concerned:
        yield "node", node, (node,)
    domains: dict[tuple[LossKind, str], list[str]] = defaultdict(list)
    for node in concerned:
        for kind in _DOMAIN_KINDS:
            if name := getattr(state.nodes[node].identity.domain, kind):
                domains[kind, name].append(node)
    for (kind, name), members in domains.items():
        yield kind, name, tuple(members)
    if len(concerned) <= MAX_NODES_FOR_PAIRS:
        for pair, other in combinations(concerned, 2):
            yield "pair", f"{pair}, {other}", (pair, other)


def _version_by_parity(state: FleetState, job: JobRecord, lost: Collection[str]) -> Version | None:
    """Return the protected version, if it stays complete without these nodes."""
    active = job.parity.active
    return active.protection.version if active and not lost_protected_nodes(state, job, lost) else None


def _forecast(
    shares: _VersionShares,
    outlook: _RosterForecast,
    kind: LossKind,
    name: str,
    lost: tuple[str, ...],
    gone: Sequence[str],
    version: Version | None,
    older: Version | None,
) -> LossForecast:
    left = outlook.without(lost)
    what = _describe_loss(kind, name) if kind in ("node", "pair") else f"{kind} {name} ({format_node_count(len(lost))})"
    goes_on = f"the job goes on with {left} of {format_node_count(outlook.most)}"
    after = goes_on if left else f"fewer than {format_node_count(outlook.least)} are left and the job is paused"
    if version is None:
        data = "nothing is committed yet"
    elif gone:
        data = f"the state of the ranks on {join_names(gone)} at version {version} may be lost: no other copy is known"
        data += f"; version {older} can be rebuilt from parity" if older else ""
    else:
        data = f"version {version} stays complete"
    return LossForecast(
        kind=kind,
        name=name,
        nodes=lost,
        restorable=not gone or older is not None,
        remaining_nodes=left,
        sentence=f"without {what}: {data}; {after}",
        ranks=() if older else shares.ranks(gone)[:MAX_LISTED_RANKS],
        fallback_version=older,
    )


def _summary(
    job: JobRecord,
    version: Version | None,
    older: Version | None,
    missing: Sequence[str],
    forecasts: Sequence[LossForecast],
) -> str:
    if version is None:
        from_scratch = job.progress.last_number == 0 or job.commits.restore_ceiling == NO_VERSION
        restored = "the newest complete version in the vaults is restored"
        start = "the job restarts from scratch" if from_scratch else restored
        return f"nothing of job {job.job} is committed yet: after a loss {start}"
    if missing:
        advice = "restart those nodes, or wait for the next commit"
        then = f"version {older} can be rebuilt from parity" if older is not None else advice
        return (
            f"version {version} cannot be restored now: no reachable node has the state of the ranks on "
            f"{join_names(missing)}; {then}"
        )
    fatal = [forecast for forecast in forecasts if not forecast.restorable]
    kinds = Counter(forecast.kind for forecast in fatal)
    if not fatal:
        oldest = next(
            (
                f", or at least {forecast.fallback_version} by parity"
                for forecast in forecasts
                if forecast.fallback_version
            ),
            "",
        )
        return f"version {version} or a newer one would be restored{oldest}, whichever of its nodes or domains is lost"
    words = ", ".join(f"{kinds[kind]} {kind}{'s' if kinds[kind] > 1 else ''}" for kind in kinds)
    example = _describe_loss(fatal[0].kind, fatal[0].name)
    return f"version {version} or a newer one would be restored; {words} cannot be spared, such as {example}"


def _describe_loss(kind: LossKind, name: str) -> str:
    return {"node": name, "pair": name.replace(", ", " and ")}.get(kind, f"{kind} {name}")


def list_checkpoints(state: FleetState, job: JobRecord) -> JobCheckpoints:
    """List checkpoints in the order in which the job would use them: memory, parity, storage; newest first in each."""
    versions = (*_in_memory(state, job), *_by_parity(state, job), *_on_storage(state, job))
    first = next((version for version in versions if version.restorable), None)
    if first is None:
        sentence = f"no checkpoint of job {job.job} can be restored"
    else:
        sentence = f"after a loss now, job {job.job} goes back to {first.version} or a newer one: {first.sentence}"
    return JobCheckpoints(
        job=job.job,
        sentence=sentence,
        versions=versions,
        spills_failed=job.spills.failed_versions,
        last_error="; ".join(filter(None, (job.spills.error, job.parity.error)))[:4096],
    )


def _in_memory(state: FleetState, job: JobRecord) -> Iterator[CheckpointCopy]:
    live = state.job_runtime[job.job]
    told = compute_restorability(state, job)
    if live.commits.committed_version is None:
        return
    barred = job.commits.restore_ceiling is not None and (
        job.commits.restore_ceiling == NO_VERSION or live.commits.committed_version > job.commits.restore_ceiling
    )
    lost = bool(told.missing_ranks)
    why = "it is committed, and every rank's share is on a reachable node"
    if lost:
        why = "it is committed, but some ranks' shares are on no reachable node"
    elif barred:
        why = "it may be corrupt"
    yield CheckpointCopy(
        version=live.commits.committed_version,
        storage_tier="memory",
        state="complete",
        restorable=not lost and not barred,
        sentence=why,
        since=live.commits.committed_at,
        verified=told.verified,
        audited=_is_audited(job, live.commits.committed_version),
    )
    audited = job.commits.audited
    if audited is not None and audited.version < live.commits.committed_version:
        shares = _VersionShares(state, job, audited.version, audited.committed_at)
        known = bool(shares.nodes)
        lost = known and bool(shares.lost(()))
        why = "audits have verified it; it is restored after corruption"
        if not known:
            why = "audits have verified it; which nodes hold it is not known any more"
        elif lost:
            why = "audits have verified it, but some ranks' shares are on no reachable node"
        yield CheckpointCopy(
            version=audited.version,
            storage_tier="memory",
            state="complete",
            restorable=known and not lost,
            sentence=why,
            since=audited.committed_at,
            verified=audited.verified_at is not None,
            audited=True,
        )


def _is_audited(job: JobRecord, version: Version) -> bool:
    audited = job.commits.audited
    return audited is not None and version <= audited.version


def _by_parity(state: FleetState, job: JobRecord) -> Iterator[CheckpointCopy]:
    live, active, pending = state.job_runtime[job.job], job.parity.active, job.parity.pending
    verified = live.commits.verified_version
    if active is not None:
        version, lost = active.protection.version, lost_protected_nodes(state, job)
        why = f"its shards are in {len(active.protection.groups)} groups, each of which survives 2 lost nodes"
        yield CheckpointCopy(
            version=version,
            storage_tier="parity",
            state="complete",
            restorable=not lost,
            sentence=f"too many nodes of a group are lost (at most 2 may be): {join_names(lost)}" if lost else why,
            since=active.protected_at,
            verified=verified is not None and version <= verified,
        )
    if pending is not None:
        done, parity_nodes = live.vault_orders.made_parity, groups_by_parity_node(pending.protection)
        yield CheckpointCopy(
            version=pending.protection.version,
            storage_tier="parity",
            state="in_progress",
            restorable=False,
            sentence=f"{len(done)} of {len(parity_nodes)} parity nodes are done",
            since=pending.started_at,
        )


def _on_storage(state: FleetState, job: JobRecord) -> Iterator[CheckpointCopy]:
    spilling, done = job.spills.pending, state.job_runtime[job.job].vault_orders.spilled_nodes
    if spilling is not None:
        trouble = f"; {spilling.last_error}" if spilling.last_error else ""
        yield CheckpointCopy(
            version=spilling.version,
            storage_tier="storage",
            state="in_progress",
            restorable=False,
            sentence=f"{len(done)} of {len(spilling.writers)} nodes have written their part{trouble}"[:4096],
            since=spilling.started_at,
            bytes=spilling.bytes,
            url=spilling.url,
        )
    for checkpoint in reversed(job.spills.stored):
        yield CheckpointCopy(
            version=checkpoint.version,
            storage_tier="storage",
            state="complete",
            restorable=not checkpoint.maybe_corrupt,
            sentence="it may be corrupt" if checkpoint.maybe_corrupt else "it is complete on storage",
            since=checkpoint.stored_at,
            bytes=checkpoint.bytes,
            url=checkpoint.url,
        )
