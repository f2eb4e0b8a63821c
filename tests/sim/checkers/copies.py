"""What was committed bears losses: any ``replicas - 1`` nodes may go; and what the controller says of a loss is so."""

from __future__ import annotations

from collections.abc import Collection

from everstep_controller.core.checkpoints.restore_points import compute_restorability
from everstep_controller.core.effects import PutGeneration

from everstep.ids import Version
from everstep.wire.v1.training import GenerationSpec
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.checkers.harm import Harm
from tests.sim.facts import Violation
from tests.sim.vault_memory import Slot


class Copies(Checker):
    """Looks into the vaults when a version is written as committed, and, when a roster was made, for every loss that
    the controller says its version survives."""

    name = "copies"

    def __init__(self) -> None:
        self._specs: dict[tuple[str, int], GenerationSpec] = {}
        self._finished_at: dict[tuple[str, Version], float] = {}
        self._known: set[tuple[str, Version]] = set()
        self._harm = Harm()

    def watches(self) -> Watches:
        return {
            facts.Decided: self._handled,
            facts.Durable: self._durable,
            facts.Stepped: self._step,
            facts.MemoryLost: self._harmed,
            facts.FaultBegan: self._harmed,
        }

    def _step(self, fact: facts.Stepped) -> None:
        self._finished_at.setdefault((fact.job, Version(fact.generation, fact.step)), self.world.timeline.now)

    def _harmed(self, fact: facts.MemoryLost | facts.FaultBegan) -> None:
        self._harm.note(self.world, fact)

    def _handled(self, fact: facts.Decided) -> None:
        for effect in fact.effects:
            if isinstance(effect, PutGeneration):
                self._specs[effect.spec.job, effect.spec.number] = effect.spec
                self._compare(fact.controller, effect.spec.job)

    def _durable(self, fact: facts.Durable) -> None:
        begun = {audit.job for audit in fact.batch.audit if audit.kind == "job.created"}
        self._known = {place for place in self._known if place[0] not in begun}
        for row in fact.batch.versions.values():
            place = row.job, Version(row.generation, row.step)
            if place not in self._known:
                self._known.add(place)
                if not self._is_void(*place):
                    self._committed(*place)

    def _is_void(self, job: str, version: Version) -> bool:
        """What audits undid before the database was back to take it down."""
        later = (spec for (name, number), spec in self._specs.items() if name == job and number > version.generation)
        return any(spec.restore.ceiling is not None and spec.restore.ceiling < version for spec in later)

    def _since(self, job: str, version: Version) -> set[str]:
        """Who was harmed since the version was made."""
        return self._harm.since(self._finished_at[job, version])

    # --- what is committed -------------------------------------------------------------------------------------------

    def _committed(self, job: str, version: Version) -> None:
        spec = self._specs[job, version.generation]
        harmed, wanted = self._since(job, version), min(spec.spec.replicas, len(spec.seats))
        held = self._held(job, version)
        for rank in range(spec.world_size):
            holders = held.get(rank, set())
            if len(holders | harmed) < wanted:
                raise Violation(
                    self.name,
                    f"{job}: {version} is committed, and the share of rank {rank} is on {sorted(holders)} alone, "
                    f"not on {wanted} nodes",
                )

    def _held(self, job: str, version: Version) -> dict[int, set[str]]:
        """By rank, who holds its share."""
        held: dict[int, set[str]] = {}
        for name, machine in self.world.machines.items():
            for segment in machine.vault.of_job(job):
                for slot in segment.sealed():
                    if slot.version == version and not slot.rotten:
                        for rank in _shares(slot):
                            held.setdefault(rank, set()).add(name)
        return held

    # --- what the controller says ------------------------------------------------------------------------------------

    def _compare(self, controller: str, job: str) -> None:
        """Of harm that it cannot know of yet nothing is asked."""
        state = self.world.controller(controller).state
        version = state.job_runtime[job].commits.committed_version
        if version is None or (job, version) not in self._known or (job, version.generation) not in self._specs:
            return
        harmed = self._since(job, version)
        if any(state.nodes[node].liveness.reachable or self.world.machines[node].power for node in harmed):
            return
        for one in compute_restorability(state, state.jobs[job]).loss_forecasts:
            if one.restorable and one.fallback_version is None and (lost := self._lost(job, version, one.nodes)):
                raise Violation(self.name, f"{job}: {one.sentence}; but ranks {lost} are held by nobody else")

    def _lost(self, job: str, version: Version, without: Collection[str]) -> list[int]:
        """Ranks whose shares of the version are gone without these nodes; none where a newer one, which the ranks would
        choose and of which a controller that has just begun has not heard, is whole."""
        newer = {
            slot.version
            for machine in self.world.machines.values()
            for segment in machine.vault.of_job(job)
            for slot in segment.sealed()
            if slot.version > version and (job, slot.version.generation) in self._specs
        }
        gone = [self._gone(job, one, without) for one in (version, *sorted(newer))]
        return gone[0] if all(gone) else []

    def _gone(self, job: str, version: Version, without: Collection[str]) -> list[int]:
        held = self._held(job, version)
        ranks = range(self._specs[job, version.generation].world_size)
        return [rank for rank in ranks if not held.get(rank, set()) - set(without)]


def _shares(slot: Slot) -> set[int]:
    """The ranks whose parts are in it: of replicated state, also those ``replicas - 1`` nodes before."""
    rank, world, per_node, replicas, replicated = slot.layout
    return {(rank - per_node * back) % world for back in range(replicas if replicated else 1)}
