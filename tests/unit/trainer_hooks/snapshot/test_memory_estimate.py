"""The memory that a job's checkpoints need on a node is estimated early, and a shortage is reported at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from everstep.errors import OutOfSlotMemory
from everstep.ids import Version
from everstep.layout.segment_header import PAGE_BYTES, segment_bytes
from everstep.layout.slots import SegmentView
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import FindingKind, Mode, Severity
from everstep.wire.v1 import local
from everstep.wire.v1.training import FindingRaised, VersionSealed
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.session.generation_session import GenerationSession
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot.slot_negotiation import SnapshotOptions
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.vaults.vault_process import JOB, RankMemory, Vaults, map_segment, vaults

STATE = 1 << 20


@pytest.fixture
def fleet(program_forks: ForkPool) -> Iterator[Vaults]:
    with vaults(program_forks) as running:
        yield running


class Ranks:
    """Two ranks of one node with equal state of one MiB, of which each stores half, in five slots."""

    def __init__(self, fleet: Vaults, limit: int, choices: SnapshotOptions, optimizer: bool = False) -> None:
        vault = fleet.start("n1", "--scrub-interval-s", "0", "--memory-limit", str(limit))
        self.supervisor = fleet.configure()["n1"]
        self.folder = vault.segment_dir / JOB
        self._stack, store = ExitStack(), HashStore()
        spec = generation(1, ranks=[("n1", 0), ("n1", 1)])
        self.models = [nn.Linear(512, STATE // 4 // 512, bias=False) for _ in range(2)]
        self.optimizers = [torch.optim.Adam(model.parameters()) for model in self.models]
        self.reports: list[VersionSealed | FindingRaised] = []
        self.snapshotters: list[Snapshotter] = []
        for member, model, adam in zip(spec.roster, self.models, self.optimizers, strict=True):
            client = VaultClient(str(vault.run_dir / "vault.sock"))
            self._stack.callback(client.close)
            state = TrackedState({"model": model} | ({"adam": adam} if optimizer else {}))
            self.snapshotters.append(
                Snapshotter(client, state, spec, member, store, self.reports.append, options=choices)
            )

    def planned(self) -> None:
        for snapshots in self.snapshotters:
            until(snapshots.first_plan._attempted.is_set, "a plan was tried")

    def step(self, number: int) -> None:
        for model, optimizer, snapshots in zip(self.models, self.optimizers, self.snapshotters, strict=True):
            model(torch.ones(512)).sum().backward()
            snapshots.wait()
            optimizer.step()
        for snapshots in self.snapshotters:
            snapshots.begin(number)

    def close(self) -> None:
        for snapshots in self.snapshotters:
            snapshots.close(finish=True)
        self._stack.close()


Make = Callable[..., Ranks]


@pytest.fixture
def ranks(fleet: Vaults) -> Iterator[Make]:
    with ExitStack() as stack:

        def make(limit: int, *, optimizer: bool = False, **choices: Any) -> Ranks:
            made = Ranks(fleet, limit, SnapshotOptions(**choices), optimizer)
            stack.callback(made.close)
            return made

        yield make


@pytest.mark.promise("memory-fits")
def test_node_short_of_memory_reports_the_sum_at_once(ranks: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Each of two ranks needs five slots of a little more than half a MiB; the limit has room for four."""
    with caplog.at_level(logging.WARNING):
        two = ranks(4 * STATE, slots=5)
        two.planned()
    (line,) = (record.message for record in caplog.records if "5 slots of 2 ranks here" in record.message)
    assert "n1 has no memory for all checkpoints of job in 5 slots per rank" in line
    assert f"of the memory limit {4 * STATE} are in use" in line
    assert "run.track(slots=2)" in line
    finding = two.supervisor.finding().finding.finding
    assert (finding.kind, finding.mode, finding.subject) == (FindingKind.MEMORY_LOW, Mode.OBSERVE, "memory/job")
    assert finding.message in line
    two.step(1)
    two.step(2)


def has_steps(view: SegmentView, steps: set[int]) -> bool:
    return {header.version.step for _, header in view.sealed_slots()} == steps


@pytest.mark.promise("memory-fits")
def test_job_short_of_memory_falls_back_to_two_slots(ranks: Make, caplog: pytest.LogCaptureFixture) -> None:
    """With the optimizers' state, each rank stores half of three MiB: too much for five slots."""
    with caplog.at_level(logging.INFO):
        two = ranks(9 * STATE, optimizer=True)
        for number in range(1, 6):
            two.step(number)
    (line,) = (record.message for record in caplog.records if "slots per rank" in record.message)
    assert "checkpoints of job use 2 slots per rank instead of 5" in line
    assert "n1: job job (5 slots of 2 ranks here: " in line
    assert f"of the memory limit {9 * STATE} are in use" in line
    (finding,) = (report.finding for report in two.reports if isinstance(report, FindingRaised))
    assert (finding.kind, finding.subject, finding.message) == (FindingKind.MEMORY_LOW, "slots/job", line)
    assert two.supervisor.findings == [], "it is an answer, and no lack"
    assert [snapshots.interval_at(5) for snapshots in two.snapshotters] == [0, 0]
    for snapshots in two.snapshotters:
        snapshots.update_versions(Version(1, 1), 7)
    two.step(6)
    two.step(7)
    views = [map_segment(two.folder / f"own-{number}") for number in range(2)]
    for view in views:
        until(partial(has_steps, view, {1, 7}), "the announced versions are stored")
    assert [view.slots for view in views] == [2, 2]
    assert sum(path.stat().st_size for path in two.folder.glob("own-*")) < 9 * STATE


def test_job_without_room_for_two_slots_reports_no_commits(ranks: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        two = ranks(STATE)
        for number in range(1, 4):
            two.step(number)
        until(lambda: two.reports, "the finding is reported")
    (finding,) = (report.finding for report in two.reports if isinstance(report, FindingRaised))
    assert (finding.kind, finding.severity, finding.subject) == (
        FindingKind.MEMORY_LOW,
        Severity.WARNING,
        "slots/job",
    )
    assert finding.message.startswith("n1 has no memory for all checkpoints of job in 2 slots per rank")
    assert "nothing is committed until there is memory" in finding.message
    assert f"0 of the memory limit {STATE} are in use, {STATE} are free" in finding.message
    assert finding.message in [record.message for record in caplog.records]


@pytest.mark.promise("memory-fits")
def test_required_checkpoints_fail_once_optimizer_state_exists(
    ranks: Make,
) -> None:
    two = ranks(STATE, optimizer=True, require_checkpoints=True)
    for snapshots in two.snapshotters:
        snapshots.first_plan.wait()
    two.step(1)
    until(lambda: two.snapshotters[0].first_plan._error, "the first plan has failed")
    with pytest.raises(OutOfSlotMemory, match="slots of 2 ranks here"):
        two.snapshotters[0].wait()


@pytest.mark.promise("memory-fits")
def test_track_stops_a_script_requiring_checkpoints(fleet: Vaults) -> None:
    vault = fleet.start("n1", "--scrub-interval-s", "0", "--memory-limit", str(STATE))
    fleet.configure()
    client, spec = VaultClient(str(vault.run_dir / "vault.sock")), generation(1)
    nothing = SimpleNamespace(
        end=lambda _: None, resume_from=lambda _: None, is_generation_over=lambda *_: False, finished_step=0
    )
    keeper = GenerationSession(
        SimpleNamespace(  # type: ignore[arg-type]
            spec=spec, member=spec.roster[0], store=HashStore(), device=torch.device("cpu")
        ),
        directives=nothing,  # type: ignore[arg-type]
        progress=nothing,  # type: ignore[arg-type]
        interrupter=nothing,  # type: ignore[arg-type]
        connect_vault=lambda: client,
        send=lambda _: None,
        timeline=nothing,  # type: ignore[arg-type]
        clock=SYSTEM_CLOCK,
    )
    try:
        run = Run(RankContext(rank=0, world_size=1, local_rank=0, local_world_size=1), keeper)
        with pytest.raises(OutOfSlotMemory, match="slots of 1 ranks here"):
            run.track(model=nn.Linear(512, STATE // 4 // 512), require_checkpoints=True)
    finally:
        keeper.close()
        client.close()


def test_existing_slots_are_not_needed_again_and_copies_count(fleet: Vaults) -> None:
    size = segment_bytes(5, STATE)
    vault = fleet.start("n1", "--scrub-interval-s", "0", "--memory-limit", str(3 * size))
    client = fleet.configure()["n1"]
    RankMemory(client, rank=0, slot_bytes=STATE)

    def asked(ranks: int, copies: int) -> local.FromVault:
        needs = [local.SegmentRequirement(replica=False, number=n, slot_bytes=STATE, slots=5) for n in range(ranks)]
        needs += [
            local.SegmentRequirement(replica=True, number=n, slot_bytes=STATE, slots=4, pinned_slots=1)
            for n in range(copies)
        ]
        return client.ask(local.CheckCapacity, job=JOB, needs=tuple(needs))

    assert isinstance(asked(2, 1), local.RequestDone)
    refused = asked(2, 2)
    assert isinstance(refused, local.RequestFailed)
    assert refused.code == OutOfSlotMemory.code
    copies = (
        f"copies of 2 ranks of other nodes: {2 * size} bytes, {2 * (STATE + PAGE_BYTES)} of these for "
        "versions kept for storage, parity or audits"
    )
    assert f"slots of 2 ranks here: {2 * size} bytes, {copies}" in refused.message
    assert f"needs {3 * size} bytes; {size} of the memory limit {3 * size} are in use" in refused.message
    assert refused.message == client.finding().finding.finding.message
    assert not (vault.segment_dir / JOB / "own-1").exists()
