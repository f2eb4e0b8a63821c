"""Remedies on their way: stored before they are begun, read back, told once, across crashes."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator

import pytest
from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.leadership.lease import NotLeadingError
from everstep_controller.remediation.executor import THREADS, RemediationExecutor
from everstep_controller.remediation.kubernetes import KubernetesRemediator
from everstep_controller.remediation.remediator import DryRunRemediator
from everstep_controller.store.rows import RemediationState

from everstep.clock import Backoff
from tests.support import kube
from tests.support.remedy_desk import AT_ONCE, Book, Machine, run, wanted


@pytest.mark.promise("remediation-once")
def test_remediation_is_stored_as_begun_before_the_request() -> None:
    machine, book = Machine(pending=3), Book()
    seen: list[list[str]] = []
    ask = machine.apply
    machine.apply = lambda remedy: (seen.append(book.states(remedy.id)), ask(remedy))[1]  # type: ignore[method-assign]
    run(machine, book, wanted(1))
    assert seen == [["started"]]
    assert book.states("n1-a1") == ["started", "confirmed"]
    assert [(told.remediation_id, told.succeeded, told.trace) for told in book.told] == [("n1-a1", True, "t")]


@pytest.mark.promise("remediation-once")
def test_begun_remediation_is_checked_before_repeating() -> None:
    machine, book = Machine(), Book()
    machine.applied = ["n1-a1"]
    run(machine, book, left=[wanted(1, RemediationKind.REBOOT, state=RemediationState.STARTED)])
    assert machine.applied == ["n1-a1"]
    assert book.states("n1-a1") == ["confirmed"]


def test_begun_but_unrequested_remediation_is_requested_once() -> None:
    machine, book = Machine(pending=2), Book()
    run(machine, book, left=[wanted(1, RemediationKind.REBOOT, state=RemediationState.STARTED)])
    assert machine.applied == ["n1-a1"]
    assert book.states("n1-a1") == ["confirmed"]


def test_remediation_retries_on_outage_but_not_on_refusal() -> None:
    machine, book = Machine(away=4), Book()
    run(machine, book, wanted(1))
    assert (machine.applied, book.states("n1-a1")) == (["n1-a1"], ["started", "confirmed"])
    refusing, other = Machine(refuses=True), Book()
    run(refusing, other, wanted(1))
    assert other.states("n1-a1") == ["started", "failed"]
    assert [(told.succeeded, told.detail) for told in other.told] == [(False, "it will not")]


def test_unexpected_remediation_error_is_counted_and_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine, book, failures = Machine(), Book(), list[int]()
    ask, times = machine.apply, 2

    def broken(remedy: Remediation) -> None:
        nonlocal times
        if times > 0:
            times -= 1
            raise KeyError("spec")
        ask(remedy)

    machine.apply = broken  # type: ignore[method-assign]
    run(machine, book, wanted(1), wanted(2, RemediationKind.REBOOT), on_failure=lambda: failures.append(1))
    assert book.states("n1-a1") == ["started", "confirmed"]
    assert machine.applied == ["n1-a1", "n1-a2"]
    assert len(failures) == 2
    assert "KeyError: 'spec'" in caplog.text


@pytest.mark.promise("cordons-returned")
def test_remediation_waits_until_leadership_is_certain() -> None:
    machine, book = Machine(), Book()
    doubts = iter([NotLeadingError("it was stopped")] * 3)

    def check_leading() -> None:
        if (doubt := next(doubts, None)) is not None:
            assert machine.applied == []
            raise doubt

    run(machine, book, wanted(1, RemediationKind.REBOOT), check_leading=check_leading)
    assert next(doubts, None) is None
    assert machine.applied == ["n1-a1"]


def test_queued_remediation_is_not_requested_after_lost_lease() -> None:
    machine, book = Machine(), Book()
    ask, number, go = machine.apply, itertools.count(1), threading.Event()
    leads, doubts, asked_as_leader = [True], list[int](), list[bool]()

    def stopped() -> None:
        leads[0] = False
        go.set()

    def apply(remedy: Remediation) -> None:
        mine = next(number)
        if mine == THREADS:
            book.loop.call_soon_threadsafe(stopped)  # after the last one has been handed to the threads
        elif mine > THREADS:
            asked_as_leader.append(leads[0])
        assert go.wait(60)
        ask(remedy)

    def check_leading() -> None:
        if not leads[0]:
            doubts.append(1)
            leads[0] = len(doubts) > THREADS
            raise NotLeadingError("it was stopped")

    machine.apply = apply  # type: ignore[method-assign]
    run(machine, book, *(wanted(1, node=f"n{n}") for n in range(THREADS + 1)), check_leading=check_leading)
    assert asked_as_leader == [True]
    assert len(machine.applied) == THREADS + 1


def test_unsupported_remediation_names_the_remediator() -> None:
    book = Book()
    run(Machine(), book, wanted(1, RemediationKind.RESET_GPU))
    assert book.told[0].detail == "machine cannot reset gpu"


def test_unstarted_remediation_is_superseded_on_its_node() -> None:
    machine, book = Machine(), Book()
    run(machine, book, wanted(1), wanted(2, RemediationKind.UNCORDON), wanted(3), wanted(1, node="n2"))
    assert book.states("n1-a1") == ["superseded"]
    assert book.states("n1-a2") == ["superseded"]
    assert book.states("n1-a3") == ["started", "confirmed"]
    assert book.states("n2-a1") == ["started", "confirmed"]
    assert {told.remediation_id for told in book.told} == {"n1-a3", "n2-a1"}


def test_remediation_waits_for_the_database() -> None:
    machine, book = Machine(), Book(away=5)
    run(machine, book, wanted(1))
    assert machine.applied == ["n1-a1"]
    assert book.states("n1-a1") == ["started", "confirmed"]


def test_remediation_end_during_outage_is_reported_once() -> None:
    machine, book = Machine(), Book(unsure=7)
    run(machine, book, wanted(1, RemediationKind.REBOOT))
    assert machine.applied == ["n1-a1"]
    assert book.states("n1-a1") == ["started", "confirmed"]
    assert [told.remediation_id for told in book.told] == ["n1-a1"]


def test_cordon_is_kept_beside_later_remediation() -> None:
    machine, book = Machine(), Book()
    run(machine, book, wanted(1), wanted(2, RemediationKind.REBOOT))
    assert machine.applied == ["n1-a1", "n1-a2"]
    assert [(told.remediation_id, told.succeeded) for told in book.told] == [("n1-a1", True), ("n1-a2", True)]


def test_superseded_remediation_is_reported_to_the_core() -> None:
    for later in (RemediationKind.RESET_GPU, RemediationKind.REBOOT, RemediationKind.REPAIR, RemediationKind.UNCORDON):
        machine, book = Machine(), Book()
        machine.kinds = frozenset(RemediationKind)
        run(machine, book, wanted(1, RemediationKind.REBOOT), wanted(2, later))
        assert machine.applied == ["n1-a2"]
        assert book.states("n1-a1") == ["superseded"]
        assert [(told.remediation_id, told.succeeded) for told in book.told] == [("n1-a1", False), ("n1-a2", True)]
        assert book.told[0].detail == f"n1-a2 ({later}) replaced it before it was started"


def test_repair_is_requested_even_when_followed_by_uncordon() -> None:
    machine, book = Machine(), Book()
    machine.kinds = frozenset(RemediationKind)
    run(machine, book, wanted(1), wanted(2, RemediationKind.REPAIR), wanted(3, RemediationKind.UNCORDON))
    assert machine.applied == ["n1-a2", "n1-a3"]


def test_simultaneous_remediations_keep_order_across_crash() -> None:
    machine, book = Machine(), Book()
    left = [wanted(10, RemediationKind.REBOOT, requested_at=5.0), wanted(9, requested_at=5.0)]
    run(machine, book, left=left)
    assert machine.applied == ["n1-a9", "n1-a10"]


@pytest.fixture
def guarded() -> Iterator[kube.Cluster]:
    """A cluster whose node n1 has a pod that a disruption budget holds."""
    cluster = kube.Cluster("n1")
    cluster.add_pod("web", "n1")
    cluster.guarded = {"web"}
    yield cluster
    cluster.close()


def evictions(cluster: kube.Cluster) -> int:
    return sum(path.endswith("/eviction") for _, path, _ in cluster.calls)


@pytest.mark.promise("kubernetes-events")
@pytest.mark.parametrize("later", [RemediationKind.UNCORDON, RemediationKind.REPAIR])
def test_blocked_cordon_gives_way_to_uncordon_and_repair(guarded: kube.Cluster, later: RemediationKind) -> None:
    book = Book()

    async def story() -> None:
        remediator = KubernetesRemediator(guarded.api(), evict=True)
        desk = RemediationExecutor(
            remediator, submit=book.submit, now=lambda: book.now, uniform=lambda: 0.0, backoff=Backoff(0.01, 0.02)
        )
        async with asyncio.timeout(60):
            desk.enqueue([wanted(1)])
            while evictions(guarded) < 3:
                await asyncio.sleep(0.01)
            desk.enqueue([wanted(2, later)])
            while desk.open_count():
                await asyncio.sleep(0.01)
        await desk.stop()

    asyncio.run(story())
    assert book.states("n1-a1") == ["started", "superseded"]
    assert book.states("n1-a2") == ["started", "confirmed"]
    assert guarded.nodes["n1"]["spec"]["unschedulable"] is (later is RemediationKind.REPAIR)
    assert set(guarded.pods) == {"web"}
    assert [told.remediation_id for told in book.told] == ["n1-a2"]


def test_unanswered_cordon_is_checked_before_giving_way() -> None:
    machine, book = Machine(away=1), Book()

    async def story() -> None:
        desk = RemediationExecutor(
            machine, submit=book.submit, now=lambda: book.now, uniform=lambda: 0.0, backoff=AT_ONCE
        )
        ask = machine.apply

        def asked(remedy: Remediation) -> None:
            if remedy.id == "n1-a1":
                machine.applied.append(remedy.id)
                book.loop.call_soon_threadsafe(desk.enqueue, [wanted(2, RemediationKind.UNCORDON)])
            ask(remedy)

        machine.apply = asked  # type: ignore[method-assign]
        desk.enqueue([wanted(1)])
        async with asyncio.timeout(60):
            while desk.open_count():
                await asyncio.sleep(0)
        await desk.stop()

    asyncio.run(story())
    assert machine.applied == ["n1-a1", "n1-a2"]
    assert book.states("n1-a1") == ["started", "confirmed"]


def test_unsent_cordon_is_not_dropped_for_a_repair() -> None:
    machine, book = Machine(away=5), Book()
    machine.kinds = frozenset(RemediationKind)
    run(machine, book, wanted(1), wanted(2, RemediationKind.REPAIR))
    assert machine.applied == ["n1-a1", "n1-a2"]


def test_dry_run_is_reported_as_dry_run() -> None:
    book = Book()
    run(DryRunRemediator(), book, wanted(1, RemediationKind.REBOOT))
    assert [(told.succeeded, told.dry_run) for told in book.told] == [(True, True)]
    assert (book.states("n1-a1"), book.written[-1].detail) == (["started", "confirmed"], "dry run: nothing was done")
