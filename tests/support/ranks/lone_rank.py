"""A training of one rank over a real vault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from everstep.ids import Version
from everstep.layout.slots import SegmentView
from everstep.wire.v1.training import FindingRaised, JobSpec, RestoreRule, VersionSealed
from everstep_trainer.restore.restorer import Restoration, RestoreResult
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import JOB, generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.vaults.vault_process import Vaults, map_segment, vaults


class Counter:
    """Small Python state."""

    def __init__(self) -> None:
        self.text = ""

    def state_dict(self) -> dict[str, str]:
        return {"text": self.text}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.text = state["text"]


class LoneRank:
    """The only rank of a training, whose model has the number of the step as its weights."""

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
        on_finding = (findings if findings is not None else []).append
        restoration = Restoration(self.client, spec, spec.roster[0], HashStore(), on_finding=on_finding)
        return restoration.fill(TrackedState(self.objects()))

    def snapshotter(
        self,
        number: int,
        on_sealed: Callable[[VersionSealed], None] = lambda _: None,
        *,
        rule: RestoreRule | None = None,
        job: JobSpec | None = None,
        **more: object,
    ) -> Snapshotter:
        spec = generation(number, restore=rule, spec=job)
        self.state = TrackedState(self.objects())
        return Snapshotter(self.client, self.state, spec, spec.roster[0], HashStore(), on_sealed, **more)  # type: ignore[arg-type]

    def step(self, snapshots: Snapshotter, step: int) -> None:
        """Run one step of a training loop: the weights become the step's number."""
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
        """Flip one bit of a stored weight."""
        view = self.view()
        view.payload(self.slot_of(version))[4000] ^= 4


@contextmanager
def lone_rank(forks: ForkPool) -> Iterator[LoneRank]:
    """Yield a rank with a vault of its own, and end the vault afterwards."""
    with vaults(forks) as fleet:
        vault = fleet.start("n1")
        fleet.configure()
        client = VaultClient(str(vault.run_dir / "vault.sock"))
        try:
            yield LoneRank(fleet, client)
        finally:
            client.close()
