"""Ranks that train, snapshot and restore, in one generation after another."""

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
from everstep_trainer.config import HookSettings
from everstep_trainer.memory_tier.vault_client import VaultClient
from everstep_trainer.parallel.gradients import replicate
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.runtime.abort import make_backend
from everstep_trainer.runtime.process_group import Rendezvous
from everstep_trainer.snapshot.copy import HostMover
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.python_state import wrap_per_rank
from everstep_trainer.state.tracked_state import TrackedState
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from everstep.wire.v1.training import FindingRaised, GenerationSpec, VersionSealed

BATCH = 12
WIDTH = 10


class Uneven(nn.Module):
    """Sizes that divide neither by 3 nor by 4, a parameter shorter than the world, and a tied one."""

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
        return self.few(torch.tanh(self.second(hidden)))


class Counting(Uneven):
    """With a buffer that every forward pass changes, by the rank's own data."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class Wide(nn.Module):
    """About 13 MB with its AdamW moments: 4 x Linear(512, 512)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        self.head = nn.Linear(512, 2)
        self.stem = nn.Linear(WIDTH, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layers(torch.tanh(self.stem(x)))))


def ddp(model: nn.Module) -> nn.Module:
    return replicate(model, exact=True, equal_already=False)


def fsdp2(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))


def hsdp(model: nn.Module) -> nn.Module:
    """Two replicas of two shards."""
    shape, names = (2, dist.get_world_size() // 2), ("replicate", "shard")
    return fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names))


LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {"ddp": ddp, "fsdp2": fsdp2, "hsdp": hsdp}
MODELS: dict[str, type[nn.Module]] = {"uneven": Uneven, "counting": Counting, "wide": Wide, "reading": Uneven}


class Cursor:
    """How far a rank has read, each at a pace of its own."""

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
        """Forward and backward of this rank's part of the global batch; the loss over all of it."""
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, 2, generator=generator)
        rank, world = dist.get_rank(), dist.get_world_size()
        self.cursor.at += rank + 1
        loss = (self.model(x[rank::world]) - y[rank::world]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / world

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()

    def fingerprint(self) -> str:
        """Of all parameters, moments and buffers in full, to the bit; the same in every layout. A collective."""
        digest = hashlib.sha256()
        module = self.model.module if isinstance(self.model, nn.parallel.DistributedDataParallel) else self.model
        tensors = [*module.parameters(), *module.buffers()]
        for parameter in module.parameters():
            state = self.optimizer.state.get(parameter, {})
            tensors += [state[key] for key in sorted(state)]
        for tensor in tensors:
            full = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
            digest.update(full.contiguous().numpy().tobytes())
        digest.update(repr(self.schedule.state_dict()).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Part:
    """A process's part in a generation: it trains as ``rank`` to step ``until``, and saves every step or none.

    ``dies``: by SIGKILL, the moment the last step is "finished", or while it is "copying" that. The others close as
    soon as they have finished it, which is "survives".
    """

    spec: GenerationSpec
    rank: int
    until: int
    save: bool
    dies: str


def play(parts: Sequence[Part], vault_socket: str, model: str, layout: str) -> list[dict[str, Any]]:
    """Restore and train in one generation after another, all in this process; what came of each."""
    rendezvous = Rendezvous(make_backend("gloo"), HookSettings())
    vault = VaultClient(vault_socket)
    said = []
    try:
        for part in parts:
            rendezvous.join(part.spec, part.spec.roster[part.rank], lambda: False)
            assert rendezvous.group is not None
            said.append(_train(part, vault, rendezvous.group.store, Training(model, layout)))
            if not part.dies:
                dist.barrier()  # who has no part in the next generation has sealed its share by now
            rendezvous.leave(must_abort=bool(part.dies))
        return said
    finally:
        vault.close()
        rendezvous.close()


def _train(part: Part, vault: VaultClient, store: dist.Store, training: Training) -> dict[str, Any]:
    spec, until, save, dies = part.spec, part.until, part.save, part.dies
    member = spec.roster[part.rank]
    findings: list[FindingRaised] = []
    state = TrackedState(training.tracked)
    result = Restoration(vault, spec, member, store, on_finding=findings.append).fill(state)
    restored_as = training.fingerprint()
    sealed: list[VersionSealed] = []
    heard = threading.Condition()

    def hear(report: VersionSealed) -> None:
        with heard:
            sealed.append(report)
            heard.notify_all()

    snapshotter = Snapshotter(vault, state, spec, member, store, hear, restored=result.version)
    losses, blocked = [], []
    for step in range(result.step + 1, until + 1):
        losses.append(training.compute(step))
        began = time.perf_counter()
        snapshotter.wait()
        waited = time.perf_counter() - began
        training.update()
        if dies == "copying" and step == until:
            HostMover.run = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment, return-value]
        began = time.perf_counter()
        if save:
            snapshotter.update_versions(None, step)  # told of every version, as a candidate
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
    with heard:
        assert heard.wait_for(lambda: not save or not losses or _is_sealed(sealed, until), 60), sealed
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
