"""Processes that play generation after generation, each in a layout of its own, and say what they restored."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from everstep_trainer.config import HookSettings
from everstep_trainer.memory_tier.vault_client import VaultClient
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.runtime.abort import make_backend
from everstep_trainer.runtime.process_group import Rendezvous
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState

from everstep.wire.v1.training import GenerationSpec, VersionSealed
from tests.support.layouts import Layout, Trained

DEADLINE_S = 60.0

Played = dict[str, Any]
"""What rank 0 says of a generation: "restored" (RestoreResult), what all ranks had "before" and "after" the step."""


def play(parts: Sequence[tuple[GenerationSpec, Layout]], rank: int, vault_socket: str) -> list[Played]:
    """Each generation restores, takes one step, keeps it, and ends; ``rank`` sits out those of fewer ranks."""
    rendezvous = Rendezvous(make_backend("gloo"), HookSettings())
    vault = VaultClient(vault_socket)
    said: list[Played] = []
    try:
        for spec, layout in parts:
            if rank >= spec.world_size:
                continue
            rendezvous.join(spec, spec.roster[rank], lambda: False)
            assert rendezvous.group is not None
            said.append(_one(spec, rank, vault, rendezvous.group.store, layout))
            rendezvous.leave(must_abort=False)
        return said if rank == 0 else []
    finally:
        vault.close()
        rendezvous.close()


def _one(spec: GenerationSpec, rank: int, vault: VaultClient, store: dist.Store, layout: Layout) -> Played:
    trained = Trained(layout)
    member = spec.roster[rank]
    state = TrackedState(trained.tracked)
    result = Restoration(vault, spec, member, store).fill(state)
    before = trained.gathered()
    sealed = threading.Event()

    def hear(_: VersionSealed) -> None:
        sealed.set()

    snapshotter = Snapshotter(vault, state, spec, member, store, hear, restored=result.version)
    step = result.step + 1
    trained.step(step)
    snapshotter.update_versions(None, step)
    snapshotter.begin(step)
    snapshotter.wait()
    assert sealed.wait(DEADLINE_S), "the step was not sealed"
    snapshotter.close(finish=True)
    after = trained.gathered()
    dist.barrier()  # who sits out the next generation has sealed its share by now
    return {"restored": result, "before": before, "after": after}
