"""One rank alone in its world, over a real vault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from everstep_trainer.memory_tier.vault_client import VaultClient
from everstep_trainer.restore.restorer import Restoration, RestoreResult
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState
from torch import nn

from everstep.ids import Version
from everstep.layout.slots import SegmentView
from everstep.wire.v1.training import FindingRaised, JobSpec, RestoreRule, VersionSealed
from tests.support.forked import ForkPool
from tests.support.generations import JOB, generation
from tests.support.vaults import Vaults, map_segment, vaults


class Counter:
    """Small Python state."""

    def __init__(self) -> None:
        self.text = ""

    def state_dict(self) -> dict[str, str]:
        return {"text": self.text}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.text = state["text"]


class LoneRank:
    """A rank alone in its world, with a model whose weights say which step they are of."""

    def __init__(self, fleet: Vaults, client: VaultClient) -> None:
        self.fleet = fleet
        self.client = client
        self.path: Path = fleet.segments / "n1" / JOB / "own-0"

    def objects(self) -> dict[str, object]:
        self.model = nn.Linear(64, 64)
        self.counter = Counter()
        return {"model": self.model, "counter": self.counter}

    def restore(self, number: int, rule: RestoreRule, findings: list[FindingRaised] | None = None) -> RestoreResult:
        spec = generation(number, restore=rule)
        hear = (findings if findings is not None else []).append
        restoration = Restoration(self.client, spec, spec.roster[0], dist.HashStore(), on_finding=hear)
        return restoration.fill(TrackedState(self.objects()))

    def snapshotter(
        self,
        number: int,
        hear: Callable[[VersionSealed], None] = lambda _: None,
        *,
        rule: RestoreRule | None = None,
        job: JobSpec | None = None,
        **more: object,
    ) -> Snapshotter:
        spec = generation(number, restore=rule, spec=job)
        self.state = TrackedState(self.objects())
        return Snapshotter(self.client, self.state, spec, spec.roster[0], dist.HashStore(), hear, **more)  # type: ignore[arg-type]

    def step(self, snapshots: Snapshotter, step: int) -> None:
        """One step of a training loop: the weights become the step's number."""
        snapshots.wait()
        with torch.no_grad():
            self.model.weight.fill_(step)
        self.counter.text = f"step {step}"
        snapshots.begin(step)

    def steps(self, number: int, last: int, *, first: int = 1, **more: object) -> None:
        snapshots = self.snapshotter(number, **more)  # type: ignore[arg-type]
        for step in range(first, last + 1):
            self.step(snapshots, step)
        snapshots.close(finish=True)

    def view(self) -> SegmentView:
        return map_segment(self.path)

    def sealed(self) -> set[Version]:
        return {header.version for _, header in self.view().sealed_slots()}

    def slot_of(self, version: Version) -> int:
        return next(slot for slot, header in self.view().sealed_slots() if header.version == version)

    def damage(self, version: Version) -> None:
        """Flips one bit of a stored weight."""
        view = self.view()
        view.payload(self.slot_of(version))[4000] ^= 4


@contextmanager
def lone_rank(forks: ForkPool) -> Iterator[LoneRank]:
    """With a vault of its own, which ends with it."""
    with vaults(forks) as fleet:
        vault = fleet.start("n1")
        fleet.configure()
        client = VaultClient(str(vault.run_dir / "vault.sock"))
        try:
            yield LoneRank(fleet, client)
        finally:
            client.close()
