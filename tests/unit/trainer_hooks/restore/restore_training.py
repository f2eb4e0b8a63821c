"""Ranks that restore, train and take snapshots in consecutive generations."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from everstep.wire.v1.training import FindingRaised, GenerationSpec, VersionSealed
from everstep_trainer.config import HookSettings
from everstep_trainer.parallel.ordered_gradients import replicate
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.runtime.abort import make_backend
from everstep_trainer.runtime.process_group import Rendezvous
from everstep_trainer.slots.copy import HostMover
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.python_state import wrap_per_rank
from everstep_trainer.state.tracked_state import TrackedState

BATCH = 12
WIDTH = 10


class Uneven(nn.Module):
    """A model with sizes not divisible by 3 or 4, a parameter shorter than the world, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 30)
        self.second = nn.Linear(30, WIDTH)
        self.few = nn.Linear(WIDTH, 2)
        self.tied = nn.Linear(WIDTH, 30, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("constant", torch.arange(7.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x) + self.tied(x))
        result: torch.Tensor = self.few(torch.tanh(self.second(hidden)))
        return result


class Counting(Uneven):
    """A model with a buffer that every forward pass changes by the rank's own data."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class Wide(nn.Module):
    """A model of 8 x Linear(512, 512): 2.1 M parameters, 25 MB with its AdamW moments."""

    count, width = 8, 512

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(self.count)))
        self.head = nn.Linear(self.width, 2)
        self.stem = nn.Linear(WIDTH, self.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.tanh(self.layers(torch.tanh(self.stem(x)))))
        return result


class Broad(Wide):
    """A model of 6 x Linear(2048, 2048): 25 M parameters, 300 MB with its AdamW moments."""

    count, width = 6, 2048


def ddp(model: nn.Module) -> nn.Module:
    return replicate(model, exact=True, equal_already=False)


def fsdp2(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def hsdp(model: nn.Module) -> nn.Module:
    """Shard the model as two replicas of two shards."""
    shape, names = (2, dist.get_world_size() // 2), ("replicate", "shard")
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names))
    return model


LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {"ddp": ddp, "fsdp2": fsdp2, "hsdp": hsdp}
MODELS: dict[str, type[nn.Module]] = {
    "uneven": Uneven,
    "counting": Counting,
    "wide": Wide,
    "broad": Broad,
    "reading": Uneven,
}


class Cursor:
    """The reading position of a rank. Each rank reads at a different pace."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Training:
    """One rank's model, optimizer and schedule, and a step whose data are a function of the step.

    ``cursor`` is not tracked unless the model is "reading".
    """

    def __init__(self, model: str, layout: str) -> None:
        torch.manual_seed(3)
        self.model = LAYOUTS[layout](MODELS[model]())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=40)
        self.cursor = Cursor()
        self.tracked = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        if model == "reading":
            everything = {**self.tracked, "cursor": self.cursor}
            self.tracked = wrap_per_rank(everything, ["cursor"], dist.get_rank(), dist.get_world_size())

    def compute(self, step: int) -> float:
        """Run forward and backward on this rank's part of the global batch, and return the whole batch's loss."""
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, 2, generator=generator)
        rank, world = dist.get_rank(), dist.get_world_size()
        self.cursor.at += rank + 1
        loss = (self.model(x[rank::world]) - y[rank::world]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / world

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()

    def fingerprint(self) -> str:
        """Return a digest of all full parameters, moments and buffers, equal in every layout. This is a collective."""
        digest = hashlib.sha256()
        module = self.model.module if isinstance(self.model, nn.parallel.DistributedDataParallel) else self.model
        tensors = [*module.parameters(), *module.buffers()]
        for parameter in module.parameters():
            state = self.optimizer.state.get(parameter, {})
            tensors += [state[key] for key in sorted(state)]
        for tensor in tensors:
            full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
            digest.update(full.contiguous().numpy().tobytes())
        digest.update(repr(self.schedule.state_dict()).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class GenerationPart:
    """A process's part in a generation: it trains as ``rank`` to step ``until``, and saves every step or none.

    ``dies``: "finished" or "copying" kill the process when the last step is finished, or while it is copied. With
    "survives" the process closes its session after the last step, since another one dies. Empty: no process dies.
    """

    spec: GenerationSpec
    rank: int
    until: int
    save: bool
    dies: str


def run_parts(parts: Sequence[GenerationPart], vault_socket: str, model: str, layout: str) -> list[dict[str, Any]]:
    """Restore and train in consecutive generations in this process, and return the result of each."""
    rendezvous = Rendezvous(make_backend("gloo"), HookSettings())
    vault = VaultClient(vault_socket)
    results = []
    try:
        for part in parts:
            rendezvous.join(part.spec, part.spec.roster[part.rank], lambda: False)
            assert rendezvous.group is not None
            results.append(_train(part, vault, rendezvous.group.store, Training(model, layout)))
            if not part.dies:
                dist.barrier()  # ranks without a part in the next generation have sealed their share
            rendezvous.leave(must_abort=bool(part.dies))
        return results
    finally:
        vault.close()
        rendezvous.close()


def _train(part: GenerationPart, vault: VaultClient, store: Store, training: Training) -> dict[str, Any]:
    spec, until, save, dies = part.spec, part.until, part.save, part.dies
    member = spec.roster[part.rank]
    findings: list[FindingRaised] = []
    state = TrackedState(training.tracked)
    result = Restoration(vault, spec, member, store, on_finding=findings.append).fill(state)
    restored_as = training.fingerprint()
    sealed: list[VersionSealed] = []
    changed = threading.Condition()

    def on_sealed(report: VersionSealed | FindingRaised) -> None:
        assert isinstance(report, VersionSealed)
        with changed:
            sealed.append(report)
            changed.notify_all()

    snapshotter = Snapshotter(vault, state, spec, member, store, on_sealed, restored=result.version)
    losses, blocked = [], []
    for step in range(result.step + 1, until + 1):
        losses.append(training.compute(step))
        began = time.perf_counter()
        snapshotter.wait()
        waited = time.perf_counter() - began
        training.update()
        if dies == "copying" and step == until:
            HostMover.run = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
        began = time.perf_counter()
        if save:
            snapshotter.update_versions(None, step)  # every version is a candidate
            snapshotter.begin(step)
        blocked.append(waited + time.perf_counter() - began)
    if dies == "copying":
        threading.Event().wait(60)
    if dies == "finished":
        os.kill(os.getpid(), signal.SIGKILL)
    if dies == "survives":
        snapshotter.close(finish=True)
        return {}
    snapshotter.wait()
    with changed:
        assert changed.wait_for(lambda: not save or not losses or _is_sealed(sealed, until), 60), sealed
    snapshotter.close(finish=True)
    return {
        "restored": result,
        "restored_as": restored_as,
        "held": sum(tensor.local.nbytes for tensor in state.tensors()),
        "losses": losses,
        "read": training.cursor.at,
        "fingerprint": training.fingerprint(),
        "sealed": sealed,
        "findings": findings,
        "blocked": blocked,
    }


def _is_sealed(reports: list[VersionSealed], step: int) -> bool:
    return bool(reports) and reports[-1].version.step == step
