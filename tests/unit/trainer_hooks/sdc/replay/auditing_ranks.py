"""Ranks that train a small model with audits by peer replay, one of which may compute wrong results."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from everstep.vocabulary import AuditKind
from everstep_trainer.digests.digest import combined_digest, to_hex
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.sdc.audit import AuditSetup, Mismatch
from everstep_trainer.sdc.chain import AuditChain
from everstep_trainer.sdc.presets import AuditOptions
from everstep_trainer.sdc.replay import peer_replay
from everstep_trainer.sdc.replay.call_replay import is_replaying
from everstep_trainer.sdc.replay.memory import MemoryLevels
from everstep_trainer.sdc.replay.peer_replay import PeerReplay
from everstep_trainer.session.generation_session import TrainingSession
from tests.support.ranks.kept_ranks import KeptRanks
from tests.unit.trainer_hooks.sdc.audited_models import CPU, MODELS, TOKENS, UNUSUAL, WORDS, Gpt, Model

NODES = ("a", "a", "b", "c")


@dataclass(frozen=True)
class Training:
    """The training of all ranks. ``wrap``: "ddp", "fsdp" or "root" (``fully_shard`` of the whole model alone).

    ``fault``: (rank, unit, "once" | "always" | "lie" | "vary" | "vary and once") or None. ``odd_steps``: steps in which
    rank 1 calls the blocks with another argument. ``free_bytes``: free memory of rank 1; None: enough.
    """

    model: str = "gpt"
    wrap: str = "ddp"
    steps: int = 7
    micro_batches: int = 2
    interval: int | None = 1
    compiled: str = ""
    autocast: bool = False
    fault: tuple[int, str, str] | None = None
    fault_step: int = 2
    odd_steps: tuple[int, ...] = ()
    free_bytes: int | None = None


def train_ranks(ranks: KeptRanks, world: int, training: Training) -> list[dict[str, Any]]:
    """Return the statements, log lines and state digest of each rank after training."""
    return ranks.call(world, train, asdict(training))


@contextmanager
def grouped(rank: int, world: int, port: int) -> Iterator[None]:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def train(rank: int, world: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train on one of the kept ranks."""
    training = Training(**options)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    peer_replay.log.addHandler(handler)
    peer_replay.log.setLevel(logging.INFO)
    try:
        return {**_train(rank, world, training), "lines": lines}
    finally:
        peer_replay.log.removeHandler(handler)
        if training.compiled:
            torch._dynamo.reset()


def _train(rank: int, world: int, training: Training) -> dict[str, Any]:
    torch.manual_seed(3)
    kind = (MODELS | UNUSUAL)[training.model]
    inner = kind.build()
    model = _wrapped(inner, training, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    statements: list[Mismatch] = []
    clean: list[int] = []
    setup = AuditSetup(
        rank=rank,
        world_size=world,
        nodes=NODES[:world],
        device=CPU,
        objects={"model": model, "optimizer": optimizer},
        has_replica_per_rank=True,
        report=statements.append,
    )
    audit = PeerReplay(setup)
    if training.free_bytes is not None:
        levels = MemoryLevels(training.free_bytes if rank == 1 else 1 << 40, 0)
        audit.read_memory = lambda: levels  # type: ignore[method-assign]
    options_of = {AuditKind.PEER_REPLAY: AuditOptions(interval=training.interval or 1)}
    # The generation begins at step 0, in which nothing is audited, and its training at step 1.
    chain = AuditChain([audit] if training.interval else [], options_of, setup, 0, clean.append, rotations=1)
    chain.begin_step(0)
    chain.before_update(0)
    chain.step_finished(0)
    fault = _Fault(inner, training, rank)
    for step in range(1, training.steps + 1):
        chain.begin_step(step)
        torch.manual_seed(100 * step + rank)
        fault.step = step
        inner.scale = 0.25 if rank == 1 and step in training.odd_steps else 0.5  # type: ignore[assignment]
        _passes(model, kind, training, 10 * step + rank)
        chain.before_update(step)
        optimizer.step()
        optimizer.zero_grad()
        chain.step_finished(step)
    chain.close()
    held = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return {
        "statements": [msgspec.structs.asdict(statement) for statement in statements],
        "clean": clean,
        "units": [rotation.unit.name for rotation in audit._rotations],
        "state": to_hex(combined_digest([*held, *model.buffers(), torch.get_rng_state()])),
    }


def train_by_run(rank: int, world: int, virtual_ranks: int | None) -> dict[str, Any]:
    """Train on one of the kept ranks by a run that audits every step."""
    mismatches: list[Mismatch] = []
    clean: list[int] = []

    class Session(TrainingSession):
        def report_mismatch(self, mismatch: Mismatch) -> None:
            mismatches.append(mismatch)

        def report_clean_audits(self, step: int) -> None:
            clean.append(step)

    run = Run(RankContext(rank=rank, world_size=world, mesh=lambda: init_device_mesh("cpu", (world,))), Session())
    torch.manual_seed(5)
    inner = Gpt()
    model = run.replicate(inner, virtual_ranks=virtual_ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    words = torch.randint(WORDS, (64, TOKENS), generator=torch.Generator().manual_seed(1))
    sampler = run.sampler(len(words), global_batch=8)
    run.track(model=inner, optimizer=optimizer, sdc_audits={"peer_replay": {"interval": 1}})
    for step in run.steps(until=25, seed=1):
        for part in run.parts(sampler, step):
            (model(words[part.indices]).square().mean() * part.loss_weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return {"mismatches": len(mismatches), "clean": clean}


def _wrapped(model: nn.Module, training: Training, world: int) -> nn.Module:
    blocks = model.blocks if isinstance(model, Gpt) else nn.ModuleList()
    for number, block in enumerate(blocks):
        if training.compiled == "in place":
            block.compile(backend="aot_eager")
        elif training.compiled:
            blocks[number] = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]
    if training.wrap == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (world,))
    if training.wrap == "fsdp":
        for block in blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _passes(model: nn.Module, kind: Model, training: Training, seed: int) -> None:
    for number in range(training.micro_batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=training.autocast):
            loss = model(kind.data(1000 * number + seed)).float().square().mean() / training.micro_batches
        loss.backward()


class _Fault:
    """Make one rank compute wrong outputs of a unit from a step on.

    "once": in training only; "always": whenever it computes; "lie": only in audits of other ranks. With "vary" the
    outputs of all ranks vary a little from the beginning.
    """

    def __init__(self, model: nn.Module, training: Training, rank: int) -> None:
        self.step = 0
        if training.fault is None:
            return
        wrong, name, self._kind = training.fault
        self._is_wrong, self._first_step, self._is_done = rank == wrong, training.fault_step, False
        module = model.get_submodule(name)
        self._forward = module.forward
        self._noise = torch.Generator().manual_seed(rank)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._forward(*args, **kwargs)
        if self._kind.startswith("vary"):
            outputs = outputs * (1 + 1e-6 * torch.rand(1, generator=self._noise))
        if not self._is_due():
            return outputs
        self._is_done = True
        mask = torch.ones_like(outputs)
        mask.view(-1)[3] = 1.5
        return outputs * mask

    def _is_due(self) -> bool:
        if not self._is_wrong or self.step < self._first_step or self._is_done:
            return self._is_done and self._kind == "always"
        return {"vary": False, "always": True, "lie": is_replaying()}.get(self._kind, not is_replaying())


def roles(ranks: Sequence[dict[str, Any]]) -> dict[tuple[int, int], dict[str, tuple[int, str, str]]]:
    """Return the statements by (step, owner): rank, original and digest of each role."""
    found: dict[tuple[int, int], dict[str, tuple[int, str, str]]] = {}
    for rank, results in enumerate(ranks):
        for statement in results["statements"]:
            case = found.setdefault((statement["step"], statement["owner"]), {})
            assert statement["role"] not in case
            case[statement["role"]] = (rank, statement["original"], statement["digest"])
    return found
