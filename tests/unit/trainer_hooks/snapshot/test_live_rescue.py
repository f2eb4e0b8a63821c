"""Survivors store the last finished step from their live state, however much of it was copied when ranks died."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import HashStore

from everstep.ids import Version
from everstep.layout.slot_header import SlotHeader, SlotState
from everstep.wire.v1.training import JobSpec, RestoreRule
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot import live_rescue
from everstep_trainer.snapshot import snapshotter as module
from everstep_trainer.snapshot.job import SnapshotJob
from everstep_trainer.snapshot.live_rescue import Storing, StoringLocks
from everstep_trainer.snapshot.planner import ActivePlan
from everstep_trainer.snapshot.retention import VersionRetention
from everstep_trainer.snapshot.slot_negotiation import SnapshotOptions
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import JOB, generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.vaults.vault_process import vaults

WORLD = 4
COPIES = ("nothing", "filling", "copied")
"""How far a rank's copy of the last step is: not begun, begun, complete."""


class LocksOfThreads(StoringLocks):
    """Locks between ranks that are threads of one process."""

    holders: ClassVar[dict[int, LocksOfThreads | None]] = {}

    def hold(self, local_rank: int) -> None:
        self.holders[local_rank] = self

    def take(self, local_rank: int, *, may_be_exiting: bool) -> Storing:
        return Storing.OVER if self.holders.setdefault(local_rank, self) is self else Storing.BUSY

    def release(self, local_rank: int) -> None:
        self.holders.pop(local_rank, None)

    end = release


class Rank:
    """One rank's model and optimizer, equal on all ranks after the same step."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.first = nn.Linear(32, 32)
        self.model = nn.Sequential(self.first, *(nn.Linear(32, 32) for _ in range(3)))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.state = TrackedState({"model": self.model, "optimizer": self.optimizer})

    def update(self, step: int) -> None:
        for number, parameter in enumerate(self.model.parameters()):
            parameter.grad = torch.full_like(parameter, step + number)
        self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return [tensor.local.clone() for tensor in self.state.tensors()]


class Node:
    """One node with a vault and four ranks in this process, in one generation after another."""

    def __init__(self, client: VaultClient) -> None:
        self.client = client
        self.numbers = itertools.count(1)

    def spec(self, number: int, rule: RestoreRule) -> Any:
        job = JobSpec(job=JOB, nproc_per_node=WORLD)
        return generation(number, ranks=[("n1", at) for at in range(WORLD)], spec=job, restore=rule)

    def train(self, ranks: list[Rank], number: int, options: SnapshotOptions) -> list[Snapshotter]:
        """Finish and store step 1, and update the state to that of step 2."""
        spec, store = self.spec(number, RestoreRule(from_scratch=True)), HashStore()
        made = [
            Snapshotter(self.client, rank.state, spec, member, store, lambda _: None, options=options)
            for rank, member in zip(ranks, spec.roster, strict=True)
        ]
        for step in (1, 2):
            for rank, snapshots in zip(ranks, made, strict=True):
                snapshots.wait()
                rank.update(step)
                if step == 1:
                    snapshots.begin(step)
        return made

    def restore(self, number: int) -> tuple[set[Version | None], list[Rank]]:
        """Restore all ranks through their agreement; return the versions that they chose."""
        spec, store, ranks = self.spec(number, RestoreRule()), HashStore(), [Rank() for _ in range(WORLD)]
        made = [Restoration(self.client, spec, member, store) for member in spec.roster]
        with ThreadPoolExecutor(WORLD) as threads:
            results = threads.map(lambda each: each[0].fill(each[1].state), zip(made, ranks, strict=True))
            return {result.version for result in results}, ranks


@pytest.fixture
def node(program_forks: ForkPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(module, "StoringLocks", LocksOfThreads)
    with vaults(program_forks) as fleet:
        vault = fleet.start("n1")
        fleet.configure()
        client = VaultClient(str(vault.run_dir / "vault.sock"))
        try:
            yield Node(client)
        finally:
            client.close()


def stop_copy_at(snapshots: Snapshotter, copy: str) -> None:
    """Make the rank's next copy end at ``copy``."""

    def fill(job: SnapshotJob, planned: ActivePlan) -> None:
        if copy == "filling":
            slot, size = snapshots._slot(planned), planned.manifest.payload_bytes
            planned.segment.view.begin(slot, snapshots._member.rank, job.version, planned.manifest_bytes, size)

    if copy != "copied":
        snapshots._fill = fill  # type: ignore[method-assign]


@pytest.mark.promise("finished-step-survives")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(COPIES), min_size=WORLD, max_size=WORLD),
    st.sets(st.integers(0, WORLD - 1)),
    st.booleans(),
)
def test_finished_step_survives_any_copies_and_deaths(
    node: Node, copies: list[str], dead: set[int], is_due: bool
) -> None:
    """With a survivor, every rank restores the step. Without one, all must have copied it."""
    number = next(node.numbers)
    ranks = [Rank() for _ in range(WORLD)]
    made = node.train(ranks, number, SnapshotOptions(interval=1 if is_due else 8))
    for snapshots, copy in zip(made, copies, strict=True):
        stop_copy_at(snapshots, copy)
        snapshots.begin(2)
        if snapshots._last is not None:
            assert snapshots._last.copied.wait(60)
    for killed in dead:
        made[killed].close(finish=False)
    survivors = [snapshots for rank, snapshots in enumerate(made) if rank not in dead]
    with ThreadPoolExecutor(WORLD) as threads:
        list(threads.map(partial(Snapshotter.close, finish=True, rescue_wait_s=60.0), survivors))
    versions, restored = node.restore(next(node.numbers))
    is_stored = bool(survivors) or (is_due and set(copies) == {"copied"})
    assert versions == {Version(number, 2 if is_stored else 1)}
    if is_stored:
        for rank in restored:
            assert all(map(torch.equal, rank.values(), ranks[0].values()))


@pytest.mark.promise("finished-step-survives")
@pytest.mark.parametrize("changed", ["", "update begun", "counted", "uncounted"])
def test_live_state_counts_only_if_unwritten(node: Node, changed: str) -> None:
    number, ranks = next(node.numbers), [Rank() for _ in range(WORLD)]
    made = node.train(ranks, number, SnapshotOptions(interval=8))
    for snapshots in made:
        snapshots.begin(2)
    for rank, snapshots in zip(ranks, made, strict=True):
        weight = rank.first.weight
        if changed == "update begun":
            snapshots.wait()
        elif changed:
            with torch.no_grad():
                (weight if changed == "counted" else weight.data).add_(1)
        snapshots.close(finish=True, rescue_wait_s=0.0)
    assert node.restore(next(node.numbers))[0] == {Version(number, 1 if changed else 2)}


@pytest.mark.promise("no-torn-step")
@pytest.mark.parametrize(("swapped", "interval", "restored_step"), [(4, 8, 1), (3, 8, 2), (4, 1, 2)])
def test_average_swapped_in_by_data_is_never_restored(
    node: Node, swapped: int, interval: int, restored_step: int
) -> None:
    """The last rank dies while so many ranks have averaged weights in the model for an evaluation between steps."""
    number, ranks = next(node.numbers), [Rank() for _ in range(WORLD)]
    made = node.train(ranks, number, SnapshotOptions(interval=interval))
    trained = {2: [parameter.detach().clone() for parameter in ranks[0].model.parameters()]}
    for snapshots in made:
        snapshots.begin(2)
        if interval == 1:
            assert snapshots._last is not None
            assert snapshots._last.copied.wait(60)
    for rank in ranks[WORLD - swapped :]:
        for parameter in rank.model.parameters():
            parameter.data.copy_(0.9 * parameter.data)
    made[-1].close(finish=False)
    with ThreadPoolExecutor(WORLD) as threads:
        list(threads.map(partial(Snapshotter.close, finish=True, rescue_wait_s=60.0), made[:-1]))
    again = Rank()
    again.update(1)
    trained[1] = [parameter.detach().clone() for parameter in again.model.parameters()]
    versions, restored = node.restore(next(node.numbers))
    assert versions == {Version(number, restored_step)}
    for rank in restored:
        assert all(map(torch.equal, rank.model.parameters(), trained[restored_step]))


@pytest.mark.promise("finished-step-survives")
def test_no_slot_is_filled_while_its_rank_may_store(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    number, ranks = next(node.numbers), [Rank() for _ in range(WORLD)]
    made = node.train(ranks, number, SnapshotOptions(interval=8))
    for snapshots in made:
        snapshots.begin(2)
    with caplog.at_level("INFO"):
        for snapshots in made[1:]:
            snapshots.close(finish=True, rescue_wait_s=0.0)
    assert "ranks 0 neither stored step 2 nor ended within 0 s" in caplog.text
    assert "for rank 0" not in caplog.text
    made[0].close(finish=True, rescue_wait_s=0.0)
    assert node.restore(next(node.numbers))[0] == {Version(number, 2)}


def test_failure_to_store_for_a_dead_rank_is_logged(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no memory")

    made = node.train([Rank() for _ in range(WORLD)], next(node.numbers), SnapshotOptions(interval=8))
    for snapshots in made:
        snapshots.begin(2)
    made[0].close(finish=False)
    monkeypatch.setattr(live_rescue, "store_live", fails)
    made[1].close(finish=True, rescue_wait_s=0.0)
    for snapshots in made[2:]:
        snapshots.close(finish=False)
    assert "cannot store step 2 for rank 0: no memory" in caplog.text


def hold_and_fork(folder: str) -> None:
    """Hold the lock of local rank 1, and leave a child process as data loaders do."""
    StoringLocks(Path(folder), 5).hold(1)
    if os.fork() == 0:
        Path(folder, "child").write_text(str(os.getpid()))
        signal.pause()
    until(lambda: Path(folder, "child").exists() and Path(folder, "child").read_text(), "the child is there")
    Path(folder, "held").touch()
    signal.pause()


@pytest.mark.parametrize("may_be_exiting", [True, False])
def test_lock_of_a_dead_rank_is_free_despite_its_children(
    program_forks: ForkPool, tmp_path: Path, may_be_exiting: bool
) -> None:
    take = partial(StoringLocks(tmp_path, 5).take, 1, may_be_exiting=may_be_exiting)
    assert take() is Storing.UNKNOWN
    rank = program_forks.start(hold_and_fork, str(tmp_path))
    until((tmp_path / "held").exists, "the rank holds its lock")
    try:
        assert take() is Storing.BUSY
        rank.signal(signal.SIGSTOP)
        assert take() is Storing.BUSY, "it may go on"
        rank.kill()
        later = StoringLocks(tmp_path, 6)
        assert later.take(1, may_be_exiting=True) is Storing.UNKNOWN, "it had planned in an earlier generation"
        assert take() is Storing.OVER
        StoringLocks(tmp_path, 5).release(1)
        later.hold(1)
        assert take() is Storing.UNKNOWN
        later.end(1)
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def stat(state: str, flags: int, start: int) -> str:
    """Return a line of /proc/PID/stat."""
    return f"7 (a) b) {state} " + " ".join(["0"] * 5 + [str(flags)] + ["0"] * 12 + [str(start), "0"])


@pytest.mark.parametrize(
    ("threads", "start", "is_exiting"),
    [
        ([("R", 0x404), ("D", 0x4)], 99, True),
        ([("Z", 0x400), ("X", 0x0)], 99, True),
        ([("R", 0x404), ("D", 0x400)], 99, False),
        ([("R", 0x404)], 98, False),
    ],
)
def test_process_is_exiting_once_all_its_threads_are(
    tmp_path: Path, threads: list[tuple[str, int]], start: int, is_exiting: bool
) -> None:
    for number, (state, flags) in enumerate(threads):
        (tmp_path / "7" / "task" / str(number)).mkdir(parents=True)
        (tmp_path / "7" / "task" / str(number) / "stat").write_text(stat(state, flags, start))
    (tmp_path / "7" / "stat").write_text(stat(*threads[0], start))
    assert live_rescue._is_exiting(b"7", b"99", tmp_path) is is_exiting
    assert not live_rescue._is_exiting(b"8", b"99", tmp_path)


def test_late_version_replaces_none_that_may_be_committed() -> None:
    def header(step: int, state: SlotState = SlotState.SEALED) -> SlotHeader:
        return SlotHeader(state, 0, Version(2, step), 1, 1)

    retention = VersionRetention(2, RestoreRule(floor=Version(1, 9)), Version(1, 9))
    retention.keep_candidate(Version(2, 3))
    full = [header(3), header(4), header(5, SlotState.COPIED), header(2)]
    assert retention.slot_for_rescue(full, lambda _: True) == 3
    assert retention.slot_for_rescue([*full, header(6, SlotState.FILLING)], lambda _: True) == 4
    retention.set_slot_count(2)
    with pytest.raises(Exception, match="still needed"):
        retention.slot_for_rescue([header(3), SlotHeader(SlotState.SEALED, 0, Version(1, 9), 1, 1)], lambda _: True)
