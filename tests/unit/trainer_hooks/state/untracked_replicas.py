"""Replicas that ranks initialise from different seeds, in a generation that restores their tracked state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.session.generation_session import TrainingSession
from everstep_trainer.snapshot.slot_negotiation import SnapshotOptions
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.ranks.replicas import WORLD, grouped

KINDS = ("replicas", "over two ranks", "virtual ranks")


class Net(nn.Module):
    mask: torch.Tensor
    seven: torch.Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.teacher = nn.Linear(300, 40).requires_grad_(False)
        self.head = nn.Linear(40, 1)
        self.register_buffer("mask", torch.randn(3, 2).t(), persistent=False)
        self.register_buffer("odd", torch.eye(3).to_sparse())


class Restoring(TrainingSession):
    """A session that restores 7 into every tracked tensor. Other tensors keep each rank's values."""

    def track(self, objects: Mapping[str, object], options: SnapshotOptions) -> int:
        for tracked in TrackedState(objects, options.exclude).tensors():
            tracked.local.fill_(7.0)
        return 5


def rank_results(rank: int, port: int) -> dict[str, dict[str, list[float]]]:
    """Return for each kind of replica the rank's tensors after ``run.track``. Runs in its own process, one of four."""
    found = {}
    with grouped(rank, port):
        for kind in KINDS:
            mesh = lambda: init_device_mesh("cpu", (WORLD,))  # noqa: E731 - as short as it gets
            run = Run(RankContext(rank=rank, world_size=WORLD, mesh=mesh, will_restore=True), Restoring())
            net, apart = Net(rank), nn.Linear(2, 2)
            net.register_buffer("seven", torch.zeros(1))
            if kind == "over two ranks":
                whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
                run.data_parallel(whole["dp"])
            more = {"virtual_ranks": WORLD} if kind == "virtual ranks" else {"broadcast_buffers": False}
            for model in (net, apart):
                run.replicate(model, **more)
            run.track(model=net, exclude=["model.teacher.*", "model.odd"])
            late = run.replicate(nn.Linear(2, 2), **more)
            found[kind] = {
                "teacher": net.teacher.weight.tolist()[3],
                "mask": net.mask.flatten().tolist(),
                "untracked": apart.weight.flatten().tolist(),
                "late": next(late.parameters()).flatten().tolist(),
                "restored": [*net.head.weight.flatten().tolist(), *net.seven.tolist()],
            }
    return found
