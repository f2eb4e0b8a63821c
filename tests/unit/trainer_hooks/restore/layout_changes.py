"""Ranks that run consecutive generations in different layouts, and return the restored state."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from everstep.wire.v1.training import FindingRaised, GenerationSpec, VersionSealed
from everstep_trainer.config import HookSettings
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.runtime.abort import make_backend
from everstep_trainer.runtime.process_group import Rendezvous
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.ranks.layouts import Layout, Trained

DEADLINE_S = 60.0

GenerationResult = dict[str, Any]
"""Results of rank 0: "restored" (RestoreResult), and the full arrays "before" and "after" the step."""


def run_generations(
    parts: Sequence[tuple[GenerationSpec, Layout]], rank: int, vault_socket: str
) -> list[GenerationResult]:
    """Restore, take one step, store it, and end, in each generation. ``rank`` skips generations of fewer ranks."""
    rendezvous = Rendezvous(make_backend("gloo"), HookSettings())
    vault = VaultClient(vault_socket)
    results: list[GenerationResult] = []
    try:
        for spec, layout in parts:
            if rank >= spec.world_size:
                continue
            rendezvous.join(spec, spec.roster[rank], lambda: False)
            assert rendezvous.group is not None
            results.append(_run_generation(spec, rank, vault, rendezvous.group.store, layout))
            rendezvous.leave(must_abort=False)
        return results if rank == 0 else []
    finally:
        vault.close()
        rendezvous.close()


def _run_generation(
    spec: GenerationSpec, rank: int, vault: VaultClient, store: Store, layout: Layout
) -> GenerationResult:
    trained = Trained(layout)
    member = spec.roster[rank]
    state = TrackedState(trained.tracked)
    result = Restoration(vault, spec, member, store).fill(state)
    before = trained.gathered()
    sealed = threading.Event()

    def on_sealed(_: VersionSealed | FindingRaised) -> None:
        sealed.set()

    snapshotter = Snapshotter(vault, state, spec, member, store, on_sealed, restored=result.version)
    step = result.step + 1
    trained.step(step)
    snapshotter.update_versions(None, step)
    snapshotter.begin(step)
    snapshotter.wait()
    assert sealed.wait(DEADLINE_S), "the step was not sealed"
    snapshotter.close(finish=True)
    after = trained.gathered()
    dist.barrier()  # ranks that skip the next generation have sealed their share
    return {"restored": result, "before": before, "after": after}
