"""Ranks that save and load checkpoints by torch.distributed.checkpoint over their vaults."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from everstep.wire.v1.training import GenerationSpec
from everstep_trainer.config import HookSettings
from everstep_trainer.memory_tier.dcp import MemoryTier, VaultLoadPlanner, VaultReader, VaultSavePlanner, VaultWriter
from everstep_trainer.runtime.abort import make_backend
from everstep_trainer.runtime.process_group import Rendezvous
from everstep_trainer.slots.vault_client import VaultClient
from tests.support.ranks.layouts import Layout, Trained

Order = tuple[str, int | None, Layout]
"""(action, step, layout).

Actions: "save", "load", "pickle" (save with torch's planner), "unpickle" (load with torch's planner), and
"torn" (a save in which the last rank fails).
"""

NOTES = {"step": 7, "note": {"names": ["a", "b"], "pair": (1, 2.5)}}


class FailingPlanner(VaultSavePlanner):
    """A planner that fails on the last rank."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("torn")
        return super().resolve_data(write_item)


def run_orders(
    generations: Sequence[tuple[GenerationSpec, Sequence[Order]]], rank: int, vault_socket: str
) -> list[Any]:
    """Carry out the orders of each generation with this rank, and return what rank 0 gathered after each."""
    rendezvous = Rendezvous(make_backend("gloo"), HookSettings())
    vault = VaultClient(vault_socket)
    results: list[Any] = []
    try:
        for spec, orders in generations:
            if rank >= spec.world_size:
                continue
            rendezvous.join(spec, spec.roster[rank], lambda: False)
            assert rendezvous.group is not None
            tier = MemoryTier(vault, spec, spec.roster[rank], rendezvous.group.store)
            try:
                results += [_carry_out(order, tier) for order in orders]
            except CheckpointException as error:  # not a subclass of Exception
                raise RuntimeError(str(error)) from error
            dist.barrier()
            rendezvous.leave(must_abort=False)
        return results if rank == 0 else []
    finally:
        vault.close()
        rendezvous.close()


def _carry_out(order: Order, tier: MemoryTier) -> Any:
    action, step, layout = order
    trained = Trained(layout)
    if action in ("save", "pickle", "torn"):
        assert step is not None
        for number in range(1, step + 1):
            trained.step(number)
    model, optimizer = get_state_dict(trained.module, trained.optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "notes": NOTES}
    if action == "torn":
        with contextlib.suppress(CheckpointException):
            state_dict_saver.save(state, storage_writer=VaultWriter(tier, step), planner=FailingPlanner())
        return None
    if action in ("save", "pickle"):
        planner = VaultSavePlanner() if action == "save" else DefaultSavePlanner()
        writer = VaultWriter(tier, step or 0, allow_pickle=action == "pickle")
        state_dict_saver.save(state, storage_writer=writer, planner=planner)
        return trained.gathered(), NOTES
    state["notes"] = {"step": 0, "note": {"names": ["", ""], "pair": None}}
    loading = VaultLoadPlanner() if action == "load" else DefaultLoadPlanner()
    reader = VaultReader(tier, step, allow_pickle=action == "unpickle")
    state_dict_loader.load(state, storage_reader=reader, planner=loading)
    set_state_dict(
        trained.module,
        trained.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return trained.gathered(), state["notes"]
