"""Train an honest program on three ranks, each on a node of its own, under audits, and collect what ranks state.

The ranks use `everstep.Run` with a session that stores nothing, so that audits are called as in a real run.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.runtime.generation_session import TrainingSession
from everstep_trainer.sdc.audit import Mismatch
from everstep_trainer.sdc.compute_kind import compute_kind
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from everstep.wire.v1.training import SdcPreset

RANKS, STEPS = 3, 40
BATCH, WIDTH, CLASSES = 64, 64, 10
ANSWER_S, LEAVE_S = 240.0, 5.0
AUDIT_EVERY = 1
"""Steps from one audit of a link to the next: each step, so that a short run has many."""


@dataclass
class Record:
    """What the ranks of a run stated.

    Attributes:
        statements: By step, each rank's statements.
        kinds: What each rank computes with.
        steps: The last step that all ranks finished.
        failure: The traceback of the rank that ended the run; empty if none did.
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
        self._record.statements[step] = [(rank, one) for rank, said in enumerate(gathered) for one in said]


def node_of(rank: int) -> str:
    """Return the node of a rank."""
    return f"n{rank + 1}"


class AuditedTraining:
    """What an honest program gets: the run, and short ways to build and to train."""

    def __init__(self, run: Run, preset: SdcPreset) -> None:
        self.run, self.rank, self._preset = run, run.rank, preset

    def replicate(self, model: nn.Module, *, exact: bool = True) -> Any:
        """Return the model whose gradients are averaged over all ranks."""
        return self.run.replicate(model) if exact else nn.parallel.DistributedDataParallel(model)

    def track(self, **objects: Any) -> None:
        """Track objects, with an audit of each link every second step."""
        from everstep_trainer.sdc.presets import link_options

        links = {str(link): {"interval": AUDIT_EVERY} for link in link_options(self._preset)}
        self.run.track(sdc=self._preset, sdc_links=links, **objects)

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
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    record = Record()
    with tempfile.TemporaryDirectory(prefix="calm-") as folder:
        pipes: list[Connection] = []
        processes = []
        for rank in range(RANKS):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(theirs, folder, rank, name, preset), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        failures, limit_s = [], ANSWER_S
        for rank, pipe in enumerate(pipes):
            try:
                failure, record = pipe.recv() if pipe.poll(limit_s) else (f"rank {rank} did not end", record)
            except EOFError:
                failure = f"rank {rank} died"
            if failure:
                failures.append(failure)
                limit_s = LEAVE_S
        for process in processes:
            process.join(LEAVE_S)
            if process.is_alive():
                process.kill()
                process.join()
    record.failure = min(failures, key=_is_consequence, default="")
    return record


def _is_consequence(failure: str) -> bool:
    """Return whether a failure rather follows from another rank's."""
    return "did not end" in failure or "Connection" in failure


def _rank(pipe: Connection, folder: str, rank: int, name: str, preset: SdcPreset) -> None:
    from bench.calm.honest_programs import HONEST

    program = HONEST[name]
    if rank == RANKS - 1:
        os.environ.update(program.environment_of_last_rank)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    record, failure = Record(kinds=[""] * RANKS), ""
    try:
        dist.all_gather_object(record.kinds, compute_kind(torch.device("cpu")))
        context = RankContext(rank=rank, world_size=RANKS, mesh=lambda: init_device_mesh("cpu", (RANKS,)))
        run = Run(context, RecordingSession(record))
        program.train(AuditedTraining(run, preset))
        run.close()
    except Exception:  # noqa: BLE001 - handed to the parent whole
        failure = traceback.format_exc()
    pipe.send((failure, record))
    pipe.close()
    if not failure:
        dist.destroy_process_group()
