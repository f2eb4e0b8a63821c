"""Groups of real gloo ranks lose a rank, and the survivors continue in the same processes."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest

from everstep.wire.v1.directives import NewGeneration
from everstep.wire.v1.local import RankHeartbeat
from everstep.wire.v1.training import (
    CollectiveFailed,
    JobSpec,
    RankFinished,
    RankStalled,
    RestoreRule,
    Resumed,
    UserError,
    VersionSealed,
)
from tests.support.fleet.generations import JOB
from tests.support.processes.fork_pool import ForkPool
from tests.support.ranks import training_functions
from tests.support.ranks.node_ranks import NodeRanks, node_ranks
from tests.support.vaults.vault_process import vaults


def resumed(scene: NodeRanks, generation: int, count: int) -> list[Resumed]:
    return scene.wait_for_messages(Resumed, count, where=lambda m: m.generation == generation)


def test_survivors_of_a_killed_rank_continue_in_next_generation(forks: ForkPool) -> None:
    with node_ranks(forks, training_functions.sum_ones) as scene:
        scene.start(0, 1, 2, 3)
        scene.form_generation(1, 0, 1, 2, 3)
        resumed(scene, 1, 4)
        scene.kill(3)
        witness = scene.wait_for_messages(CollectiveFailed, 1)[0]
        assert witness.generation == 1
        assert witness.trace == "", "a new fault must not continue the trace of this generation"
        pids = {process.pid for process in scene.ranks.values()}
        scene.form_generation(2, 0, 1, 2)
        acknowledged = resumed(scene, 2, 3)
        assert {process.pid for process in scene.ranks.values()} == pids
        assert sorted(m.rank for m in acknowledged) == [0, 1, 2]
        assert all({"abort", "teardown", "wait", "rendezvous", "first_step"} <= m.phases_s.keys() for m in acknowledged)
        scene.wait_for_messages(RankHeartbeat, 1, where=lambda t: t.generation == 2 and t.loss == 3.0)
        assert scene.finish() == [0, 0, 0]


@pytest.mark.promise("stale-refused")
def test_rank_stopped_through_an_eviction_parks_on_resume(forks: ForkPool) -> None:
    with node_ranks(forks, training_functions.sum_ones) as scene:
        scene.start(0, 1, 2)
        scene.form_generation(1, 0, 1, 2)
        resumed(scene, 1, 3)
        scene.signal(2, signal.SIGSTOP)
        scene.form_generation(2, 0, 1)
        resumed(scene, 2, 2)
        scene.signal(2, signal.SIGCONT)
        scene.form_generation(3, 0, 1, 2)
        resumed(scene, 3, 3)
        assert scene.finish() == [0, 0, 0]


def test_all_ranks_leave_at_the_same_boundary_step(forks: ForkPool) -> None:
    with node_ranks(forks, training_functions.sum_ones) as scene:
        scene.start(0, 1, 2)
        scene.form_generation(1, 0, 1)
        resumed(scene, 1, 2)
        step = scene.wait_for_messages(RankHeartbeat, 1, where=lambda t: t.step > 0)[0].step
        boundary = step + 100
        scene.form_generation(2, 0, 1, 2, after_step=boundary)
        resumed(scene, 2, 3)
        last = [
            max(t.step for t in scene.peer(r).messages if isinstance(t, RankHeartbeat) and t.generation == 1)
            for r in (0, 1)
        ]
        assert all(step <= boundary for step in last)
        assert not [m for p in scene.agent.peers for m in p.messages if isinstance(m, CollectiveFailed)]
        assert scene.finish() == [0, 0, 0]


def test_impossible_join_is_left_for_a_newer_generation(forks: ForkPool) -> None:
    with node_ranks(forks, training_functions.sum_ones) as scene:
        scene.start(0, 1)
        scene.form_generation(1, 0, 1, 2)  # local rank 2 does not exist
        scene.wait_for_messages(RankHeartbeat, 2, where=lambda t: t.generation == 1)
        scene.form_generation(2, 0, 1)
        resumed(scene, 2, 2)
        assert scene.finish() == [0, 0]


def test_a_join_without_a_store_waits_for_a_newer_generation(forks: ForkPool) -> None:
    with node_ranks(forks, training_functions.sum_ones) as scene:
        scene.start(0, 1)
        scene.form_generation(1, 0, 1)
        resumed(scene, 1, 2)
        old = scene.store
        scene.store = scene.new_store()
        scene.kill_store(old)
        scene.form_generation(2, 0, 1, store=old)
        scene.wait_for_messages(RankHeartbeat, 2, where=lambda t: t.generation == 2)
        scene.form_generation(3, 0, 1)
        resumed(scene, 3, 2)
        assert scene.finish() == [0, 0]


@pytest.mark.promise("newcomers-meet")
def test_restarted_store_at_the_same_address_is_reconnected(forks: ForkPool) -> None:
    """The store's host died with its fork server between two generations, so the earlier connection is broken."""
    with node_ranks(forks, training_functions.sum_ones) as scene:
        scene.start(0, 1)
        scene.form_generation(1, 0, 1)
        resumed(scene, 1, 2)
        scene.kill_store(scene.store)
        assert scene.new_store(int(scene.store.rpartition(":")[2])) == scene.store
        step = max(t.step for t in scene.wait_for_messages(RankHeartbeat, 1, where=lambda t: t.step > 0))
        scene.form_generation(2, 0, 1, after_step=step + 100)  # a planned departure: no abort ends the waits of rank 0
        resumed(scene, 2, 2)
        assert not [m for p in scene.agent.peers for m in p.messages if isinstance(m, CollectiveFailed)]
        assert scene.finish() == [0, 0]


@pytest.mark.promise("newcomers-meet")
def test_newcomer_waits_longer_at_a_boundary_than_for_members(forks: ForkPool) -> None:
    """The other ranks finish steps before the boundary, which may take minutes."""
    with node_ranks(forks, training_functions.sum_ones, join_timeout_s=0.5) as scene:
        scene.start(0, 1, 2)
        scene.form_generation(1, 0, 1)
        resumed(scene, 1, 2)
        scene.peer(2).send(NewGeneration(spec=scene.generation(2, 0, 1, 2, after_step=10**9)))
        heartbeats = len([m for m in scene.peer(2).messages if isinstance(m, RankHeartbeat)])
        scene.wait_for_messages(
            RankHeartbeat, heartbeats + 15, where=scene.peer(2).messages.__contains__
        )  # ten a second
        step = max(t.step for t in scene.wait_for_messages(RankHeartbeat, 1, where=lambda t: t.step > 0))
        scene.form_generation(2, 0, 1, 2, after_step=step + 100)
        resumed(scene, 2, 3)
        assert not [m for p in scene.agent.peers for m in p.messages if isinstance(m, CollectiveFailed)]
        assert scene.finish() == [0, 0, 0]


@pytest.mark.promise("no-orphaned-wait")
def test_lost_peer_is_reported_until_a_new_generation(forks: ForkPool) -> None:
    """The controller is unreachable or was replaced. The lost peer is not an error of the training function."""
    with node_ranks(forks, training_functions.sum_ones, error_attribution_grace_s=0.05, regroup_wait_s=0.2) as scene:
        scene.start(0, 1, 2)
        scene.form_generation(1, 0, 1, 2)
        resumed(scene, 1, 3)
        scene.kill(2)
        scene.wait_for_messages(CollectiveFailed, 6)
        scene.form_generation(2, 0, 1)
        resumed(scene, 2, 2)
        assert not [m for p in scene.agent.peers for m in p.messages if isinstance(m, UserError)]
        assert scene.finish() == [0, 0]


@pytest.mark.promise("no-orphaned-wait")
def test_failed_join_is_reported_until_a_new_generation(forks: ForkPool) -> None:
    with node_ranks(
        forks, training_functions.sum_ones, join_timeout_s=0.3, error_attribution_grace_s=0.05, regroup_wait_s=0.2
    ) as scene:
        scene.start(0, 1)
        scene.form_generation(1, 0, 1, 2)
        scene.wait_for_messages(CollectiveFailed, 6, where=lambda m: m.generation == 1)
        scene.form_generation(2, 0, 1)
        resumed(scene, 2, 2)
        assert not [m for p in scene.agent.peers for m in p.messages if isinstance(m, UserError)]
        assert scene.finish() == [0, 0]


@pytest.mark.promise("user-error")
def test_user_error_is_reported_whole_and_ends_the_rank(forks: ForkPool) -> None:
    with node_ranks(forks, training_functions.fail_at_step_3, error_attribution_grace_s=0.05) as scene:
        scene.start(0, 1)
        scene.form_generation(1, 0, 1)
        (error,) = scene.wait_for_messages(UserError, 1)
        assert error.error == "ValueError: a mistake of the user's own"
        assert "fail_at_step_3" in error.traceback
        assert error.step == 2
        assert scene.finish(ok=False, reason="a user's error") == [1, 1]


@pytest.mark.promise("caught-errors")
def test_step_catching_a_lost_peer_error_is_not_finished(forks: ForkPool) -> None:
    with node_ranks(forks, training_functions.skip_what_fails) as scene:
        scene.start(0, 1)
        scene.form_generation(1, 0, 1)
        resumed(scene, 1, 2)
        scene.kill(1)
        (witness,) = scene.wait_for_messages(CollectiveFailed, 1)
        assert "the training function caught" in witness.detail
        scene.form_generation(2, 0)
        resumed(scene, 2, 1)
        assert not [m for peer in scene.agent.peers for m in peer.messages if isinstance(m, RankFinished | UserError)]
        assert scene.finish() == [0]


@pytest.mark.promise("caught-errors")
def test_step_catching_regroup_is_not_finished(forks: ForkPool) -> None:
    with node_ranks(forks, training_functions.skip_even_regroup, interrupt_after_s=0.05) as scene:
        scene.start(0)
        scene.form_generation(1, 0)
        resumed(scene, 1, 1)
        scene.form_generation(2, 0)
        resumed(scene, 2, 1)
        ticks = scene.wait_for_messages(RankHeartbeat, 1, where=lambda t: t.generation == 1)
        assert {tick.step for tick in ticks} <= {0, 1}
        assert scene.finish() == [0]


def test_script_exiting_with_a_status_has_failed(forks: ForkPool) -> None:
    with node_ranks(forks, training_functions.give_up_at_step_3, error_attribution_grace_s=0.05) as scene:
        scene.start(0)
        scene.form_generation(1, 0)
        (error,) = scene.wait_for_messages(UserError, 1)
        assert error.error == "SystemExit: 7"
        assert scene.finish(ok=False, reason="a user's error") == [1]


def test_user_error_may_be_retried(forks: ForkPool) -> None:
    with node_ranks(forks, training_functions.fail_at_step_3, error_attribution_grace_s=0.05) as scene:
        scene.start(0, 1)
        scene.form_generation(1, 0, 1)
        scene.wait_for_messages(UserError, 1)
        scene.form_generation(2, 0, 1)
        scene.wait_for_messages(RankHeartbeat, 2, where=lambda t: t.generation == 2 and t.step > 3)
        assert scene.finish() == [0, 0]


def test_finished_rank_waits_and_can_be_called_back(forks: ForkPool) -> None:
    with node_ranks(forks, training_functions.sum_ones_a_few_times) as scene:
        scene.start(0, 1)
        scene.form_generation(1, 0, 1)
        assert {m.step for m in scene.wait_for_messages(RankFinished, 2)} == {20}
        scene.form_generation(2, 0, 1)
        scene.wait_for_messages(RankFinished, 2, where=lambda m: m.generation == 2)
        assert scene.finish() == [0, 0]


def is_from(rank: int, message: RankStalled) -> bool:
    return message.rank == rank


def test_stalled_ranks_report_stacks_and_collective_counts(forks: ForkPool) -> None:
    with node_ranks(
        forks,
        training_functions.wait_for_absent_ranks,
        min_hang_threshold_s=0.3,
        hang_warmup_steps=1,
        first_step_allowance_s=5.0,
    ) as scene:
        scene.start(0, 1)
        scene.form_generation(1, 0, 1)
        first, second = (scene.wait_for_messages(RankStalled, 1, where=partial(is_from, rank))[0] for rank in (0, 1))
        assert "wait_for_absent_ranks" in first.stacks
        assert "all_reduce" in first.stacks
        assert first.trace == ""
        assert (first.step, first.collectives) > (second.step, second.collectives)
        scene.form_generation(2, 0)
        resumed(scene, 2, 1)
        assert scene.finish() == [0, 0]


def test_tracked_state_goes_on_from_the_last_finished_step(forks: ForkPool) -> None:
    spec = JobSpec(job=JOB, replicas=1, nproc_per_node=3)
    with vaults(forks) as fleet:
        vault = fleet.start("n1")
        fleet.configure(vault)
        with node_ranks(forks, training_functions.train_tracked, vault.run_dir) as scene:
            scene.start(0, 1, 2)
            scene.form_generation(1, 0, 1, 2, spec=spec)
            sealed = scene.wait_for_messages(VersionSealed, 9, where=lambda m: m.version.step >= 3)
            scene.kill(1)
            whole = max(s for s in {m.version.step for m in sealed} if sum(m.version.step == s for m in sealed) == 3)
            scene.start(1)
            scene.form_generation(2, 0, 1, 2, spec=spec, restore=RestoreRule())
            acknowledged = resumed(scene, 2, 3)
            (restored,) = {m.restored for m in acknowledged}
            assert restored is not None
            assert restored.generation == 1
            assert restored.step >= whole
            assert {m.step for m in acknowledged} == {restored.step + 1}
            assert scene.finish() == [0, 0, 0]


def test_models_of_earlier_generations_are_freed(forks: ForkPool) -> None:
    spec = JobSpec(job=JOB, replicas=1, nproc_per_node=2)
    with vaults(forks) as fleet:
        vault = fleet.start("n1")
        fleet.configure(vault)
        with node_ranks(forks, training_functions.count_models, vault.run_dir) as scene:
            scene.start(0, 1)
            for number in (1, 2, 3):
                scene.form_generation(number, 0, 1, spec=spec, restore=RestoreRule())
                resumed(scene, number, 2)
                scene.kill(1)
                scene.start(1)
            scene.form_generation(4, 0, 1, spec=spec, restore=RestoreRule())
            heartbeats = scene.wait_for_messages(
                RankHeartbeat, 1, where=lambda t: t.generation == 4 and t.rank == 0 and t.loss is not None
            )
            assert heartbeats[0].loss == 1.0
            assert scene.finish() == [0, 0]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.nightly), 2])
def test_ten_losses_in_a_row_leak_no_thread_or_socket(forks: ForkPool, victim: int) -> None:
    with node_ranks(forks, training_functions.train_replicas) as scene:
        scene.start(0, 1, 2)
        scene.form_generation(1, 0, 1, 2)
        resumed(scene, 1, 3)
        threads = threads_of(scene)
        descriptors = descriptors_of(scene)
        for number in range(2, 12):
            scene.kill(victim)
            scene.start(victim)
            scene.form_generation(number, 0, 1, 2)
            resumed(scene, number, 3)
        survivor = 1
        scene.agent.wait_until(lambda: threads_of(scene)[survivor] <= threads[survivor] or None, "threads to end")
        scene.agent.wait_until(lambda: descriptors_of(scene)[survivor] <= descriptors[survivor] or None, "sockets gone")
        assert scene.finish() == [0, 0, 0]


def threads_of(scene: NodeRanks) -> dict[int, int]:
    return {r: len(os.listdir(f"/proc/{p.pid}/task")) for r, p in scene.ranks.items()}


def descriptors_of(scene: NodeRanks) -> dict[int, int]:
    return {r: len(os.listdir(f"/proc/{p.pid}/fd")) for r, p in scene.ranks.items()}
