"""Train an honest program on three ranks, each on a node of its own, under audits, and collect what ranks state.

The ranks use `everstep.Run` with a session that stores nothing, so that audits are called as in a real run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh

from bench.processes import ProcessPool, RankFailed
from everstep.wire.v1.training import SdcPreset
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.sdc.audit import Mismatch
from everstep_trainer.sdc.compute_kind import compute_kind
from everstep_trainer.session.generation_session import TrainingSession

RANKS, STEPS = 3, 40
BATCH, WIDTH, CLASSES = 64, 64, 10
AUDIT_EVERY = 1
"""Steps from one audit to the next of its kind: each step, so that a short run has many."""


@dataclass
class Record:
    """What the ranks of a run stated.

    Attributes:
        statements: By step, each rank's statements.
        kinds: What each rank computes with.
        steps: The last step that all ranks finished.
        failure: The traceback of the rank that ended the run; empty if none did. Then nothing else is known.
    """

    statements: dict[int, list[tuple[int, Mismatch]]] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)
    steps: int = 0
    failure: str = ""


class RecordingSession(TrainingSession):
    """Keeps statements, and shares them between ranks after each step."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._said: list[Mismatch] = []

    @property
    def nodes(self) -> tuple[str, ...]:
        """One node for each rank."""
        return tuple(node_of(rank) for rank in range(RANKS))

    def report_mismatch(self, mismatch: Mismatch) -> None:
        """Keep a statement."""
        self._said.append(mismatch)

    def on_step_finished(self, step: int) -> None:
        """Gather the statements of all ranks."""
        self._record.steps = step
        count = torch.tensor(len(self._said))
        dist.all_reduce(count)
        if not count:
            return
        gathered: list[Any] = [None] * RANKS
        dist.all_gather_object(gathered, self._said)
        self._said = []
        self._record.statements[step] = [(rank, statement) for rank, said in enumerate(gathered) for statement in said]


def node_of(rank: int) -> str:
    """Return the node of a rank."""
    return f"n{rank + 1}"


class AuditedTraining:
    """An honest program's interface: the run, and short functions to build and to train."""

    def __init__(self, run: Run, preset: SdcPreset) -> None:
        self.run, self.rank, self._preset = run, run.rank, preset

    def replicate(self, model: nn.Module, *, exact: bool = True) -> Any:
        """Return the model whose gradients are averaged over all ranks."""
        return self.run.replicate(model) if exact else nn.parallel.DistributedDataParallel(model)

    def track(self, **objects: Any) -> None:
        """Track objects, with an audit of each kind every second step."""
        from everstep_trainer.sdc.presets import audit_options

        audits = {str(kind): {"interval": AUDIT_EVERY} for kind in audit_options(self._preset)}
        self.run.track(sdc=self._preset, sdc_audits=audits, **objects)

    def build(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **others: Any) -> Any:
        """Replicate and track a model, and an optimizer, by default AdamW. Return both."""
        replicas = self.replicate(model)
        if optimizer is None:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.track(model=replicas, optimizer=optimizer, **others)
        return replicas, optimizer

    def steps(self, until: int = STEPS) -> Iterator[int]:
        """Yield steps, as ``run.steps`` does."""
        return self.run.steps(until=until)

    def loss(self, model: nn.Module, width: int = WIDTH) -> torch.Tensor:
        """Return the loss of a random batch."""
        return nn.functional.cross_entropy(model(torch.randn(BATCH, width)), torch.randint(CLASSES, (BATCH,)))


def mlp(middle: nn.Module | None = None) -> nn.Sequential:
    """Return a model of three layers, the same on all ranks."""
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, 128), nn.LayerNorm(128) if middle is None else middle, nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(128, 64), nn.GELU(), nn.Linear(64, CLASSES))


def train(name: str, preset: SdcPreset) -> Record:
    """Train an honest program on all ranks; return what they stated."""
    with tempfile.TemporaryDirectory(prefix="calm-") as folder, ProcessPool([__name__, "torch._dynamo"]) as pool:
        try:
            records: list[Record] = pool.run(_train_rank, [(folder, rank, name, preset) for rank in range(RANKS)])
        except RankFailed as failed:
            return Record(kinds=[""] * RANKS, failure=str(failed))
    return records[0]


def _train_rank(folder: str, rank: int, name: str, preset: SdcPreset) -> Record:
    from bench.calm.honest_programs import HONEST

    program = HONEST[name]
    if rank == RANKS - 1:
        os.environ.update(program.environment_of_last_rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    record = Record(kinds=[""] * RANKS)
    dist.all_gather_object(record.kinds, compute_kind(torch.device("cpu")))
    context = RankContext(rank=rank, world_size=RANKS, mesh=lambda: init_device_mesh("cpu", (RANKS,)))
    run = Run(context, RecordingSession(record))
    program.train(AuditedTraining(run, preset))
    run.close()
    dist.destroy_process_group()
    return record
