"""Ranks that save and load by torch.distributed.checkpoint over their vaults."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from everstep_trainer.config import HookSettings
from everstep_trainer.memory_tier.dcp import MemoryTier, VaultLoadPlanner, VaultReader, VaultSavePlanner, VaultWriter
from everstep_trainer.memory_tier.vault_client import VaultClient
from everstep_trainer.runtime.abort import make_backend
from everstep_trainer.runtime.process_group import Rendezvous
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from everstep.wire.v1.training import GenerationSpec
from tests.support.layouts import Layout, Trained

Order = tuple[str, int | None, Layout]
"""("save" or "load", step, layout); "pickle" saves with torch's own planner, "unpickle" loads with it, and of a "torn"
save the last rank writes nothing."""

NOTES = {"step": 7, "note": {"names": ["a", "b"], "pair": (1, 2.5)}}


class Torn(VaultSavePlanner):
    """Fails on the last rank."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("torn")
        return super().resolve_data(write_item)


def play(generations: Sequence[tuple[GenerationSpec, Sequence[Order]]], rank: int, vault_socket: str) -> list[Any]:
    """Carries out the orders of each generation that has the rank. What rank 0 gathered after each of them."""
    rendezvous = Rendezvous(make_backend("gloo"), HookSettings())
    vault = VaultClient(vault_socket)
    said: list[Any] = []
    try:
        for spec, orders in generations:
            if rank >= spec.world_size:
                continue
            rendezvous.join(spec, spec.roster[rank], lambda: False)
            assert rendezvous.group is not None
            tier = MemoryTier(vault, spec, spec.roster[rank], rendezvous.group.store)
            try:
                said += [_carry_out(order, tier) for order in orders]
            except CheckpointException as error:  # no Exception to Python
                raise RuntimeError(str(error)) from error
            dist.barrier()
            rendezvous.leave(must_abort=False)
        return said if rank == 0 else []
    finally:
        vault.close()
        rendezvous.close()


def _carry_out(order: Order, tier: MemoryTier) -> Any:
    what, step, layout = order
    trained = Trained(layout)
    if what in ("save", "pickle", "torn"):
        assert step is not None
        for number in range(1, step + 1):
            trained.step(number)
    model, optimizer = get_state_dict(trained.module, trained.optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "notes": NOTES}
    if what == "torn":
        with contextlib.suppress(CheckpointException):
            dcp.save(state, storage_writer=VaultWriter(tier, step), planner=Torn())
        return None
    if what in ("save", "pickle"):
        planner = VaultSavePlanner() if what == "save" else DefaultSavePlanner()
        dcp.save(state, storage_writer=VaultWriter(tier, step or 0, allow_pickle=what == "pickle"), planner=planner)
        return trained.gathered(), NOTES
    state["notes"] = {"step": 0, "note": {"names": ["", ""], "pair": None}}
    loading = VaultLoadPlanner() if what == "load" else DefaultLoadPlanner()
    dcp.load(state, storage_reader=VaultReader(tier, step, allow_pickle=what == "unpickle"), planner=loading)
    set_state_dict(
        trained.module,
        trained.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return trained.gathered(), state["notes"]
