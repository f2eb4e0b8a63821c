"""How long a remedy is asked for: what is to stand until the outside has answered, a cure while the core waits."""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
import pytest
from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.core.policy import CorePolicy
from everstep_controller.remediation.executor import PATIENCE_S, PATIENCE_SHARE
from everstep_controller.store.rows import RemediationState

from everstep.errors import Unavailable
from tests.support.remedy_desk import Book, Machine, run, wanted


def test_unconfirmed_cordon_fails_after_timeout() -> None:
    machine, book = Machine(pending=10**9), Book()
    done = machine.is_done

    def later(remedy: Remediation) -> bool:
        book.now += PATIENCE_S[remedy.kind]
        return done(remedy)

    machine.is_done = later  # type: ignore[method-assign]
    run(machine, book, wanted(1))
    assert book.told[0].detail == "the remediation was not confirmed within 300 s"


@pytest.mark.promise("cordons-returned")
@pytest.mark.parametrize("kind", [RemediationKind.CORDON, RemediationKind.UNCORDON, RemediationKind.REPAIR])
def test_lasting_remediation_is_retried_through_any_outage(
    kind: RemediationKind,
) -> None:
    machine, book, failures = Machine(away=9), Book(), Counter[str]()
    machine.kinds = frozenset(RemediationKind)
    ask = machine.apply

    def later(remedy: Remediation) -> None:
        book.now += PATIENCE_S[remedy.kind] / 2
        ask(remedy)

    machine.apply = later  # type: ignore[method-assign]
    run(machine, book, wanted(1, kind), on_failure=lambda: failures.update(["failed"]))
    assert machine.applied == ["n1-a1"]
    assert book.states("n1-a1") == ["started", "confirmed"]
    assert failures["failed"] == 4


@pytest.mark.parametrize("kind", [RemediationKind.CORDON, RemediationKind.UNCORDON, RemediationKind.REPAIR])
def test_inherited_remediation_is_requested_after_outage(
    kind: RemediationKind,
) -> None:
    """Patience is with an outside that answers: one that is back, and has not done it, was never asked in this life."""
    machine, book = Machine(pending=3), Book()
    machine.kinds, looks = frozenset(RemediationKind), itertools.count()
    done = machine.is_done

    def later(remedy: Remediation) -> bool:
        book.now += PATIENCE_S[remedy.kind] / 4
        if next(looks) < 4:
            raise Unavailable("it does not answer")
        return done(remedy)

    machine.is_done = later  # type: ignore[method-assign]
    run(machine, book, left=[wanted(1, kind, state=RemediationState.STARTED)])
    assert machine.applied == ["n1-a1"]
    assert book.states("n1-a1") == ["confirmed"]


def test_remediation_timeout_names_confirmation_not_outage() -> None:
    """And not for the absence before it."""
    machine, book = Machine(pending=10**9), Book()
    looks, done = itertools.count(), machine.is_done

    def later(remedy: Remediation) -> bool:
        book.now += PATIENCE_S[remedy.kind] / 4
        if next(looks) < 4:
            raise Unavailable("it does not answer")
        return done(remedy)

    machine.is_done = later  # type: ignore[method-assign]
    run(machine, book, wanted(1))
    assert book.told[0].detail == "the remediation was not confirmed within 300 s"


def test_node_remediation_is_not_requested_after_timeout() -> None:
    machine, book = Machine(away=3), Book()
    ask = machine.apply

    def later(remedy: Remediation) -> None:
        book.now += PATIENCE_S[remedy.kind]
        ask(remedy)

    machine.apply = later  # type: ignore[method-assign]
    run(machine, book, wanted(1, RemediationKind.REBOOT))
    assert machine.applied == []
    assert [(told.succeeded, told.detail) for told in book.told] == [(False, "it does not answer within 3600 s")]


@pytest.mark.parametrize("kind", [RemediationKind.RESET_GPU, RemediationKind.REBOOT])
def test_executor_timeout_is_below_core_timeout(kind: RemediationKind) -> None:
    assert PATIENCE_S[kind] <= PATIENCE_SHARE * CorePolicy().remediation_timeout_s


@pytest.mark.promise("remediation-caps")
@pytest.mark.parametrize("waited_s", [0.0, 500.0])
@pytest.mark.parametrize("due_s", [1800.0, 30.0])
def test_node_remediation_gets_full_timeout_before_core_deadline(waited_s: float, due_s: float) -> None:
    """Whatever the core's policy is, and while it waited behind another remedy of its node."""
    machine, book = Machine(pending=10**9), Book()
    at, waited_s, step_s = book.now, waited_s * due_s / 1800.0, due_s / 100
    book.now += waited_s
    done = machine.is_done

    def later(remedy: Remediation) -> bool:
        book.now += step_s
        return done(remedy)

    machine.is_done = later  # type: ignore[method-assign]
    run(machine, book, wanted(1, RemediationKind.REBOOT, at=at, due=at + due_s))
    assert [told.succeeded for told in book.told] == [False]
    assert machine.applied == ["n1-a1"]
    assert PATIENCE_SHARE * due_s <= book.now - at - waited_s
    assert book.now < at + due_s


def test_node_remediation_timeout_starts_at_first_request() -> None:
    """It was away at first. Given up sooner, it would be carried out while the node serves again."""
    machine, book = Machine(away=1, pending=10**9), Book()
    at, asked_at, ask, done = book.now, 0.0, machine.apply, machine.is_done

    def late(remedy: Remediation) -> None:
        nonlocal asked_at
        if machine.away:
            book.now += 500.0
        asked_at = book.now
        ask(remedy)

    def later(remedy: Remediation) -> bool:
        book.now += 10.0
        return done(remedy)

    machine.apply, machine.is_done = late, later  # type: ignore[method-assign]
    run(machine, book, wanted(1, RemediationKind.REBOOT, at=at, due=at + 1800.0))
    assert (machine.applied, [told.succeeded for told in book.told]) == (["n1-a1"], [False])
    assert book.now - asked_at >= PATIENCE_SHARE * 1800.0
    assert book.now < at + 1800.0


@pytest.mark.promise("remediation-caps")
def test_node_remediation_is_not_started_too_late() -> None:
    machine, book = Machine(), Book()
    run(machine, book, wanted(1, RemediationKind.REBOOT, at=book.now - 600.0, due=book.now + 1200.0))
    assert machine.applied == []
    assert "before this one could complete" in book.told[0].detail


def test_lost_remediation_response_is_checked_after_deadline() -> None:
    machine, book = Machine(pending=1), Book()
    ask = machine.apply

    def lost(remedy: Remediation) -> None:
        ask(remedy)
        book.now += 700.0
        raise Unavailable("the connection broke", 0.0)

    machine.apply = lost  # type: ignore[method-assign]
    run(machine, book, wanted(1, RemediationKind.REBOOT, at=book.now, due=book.now + 1800.0))
    assert machine.applied == ["n1-a1"]
    assert [told.succeeded for told in book.told] == [True]


def test_finished_remediation_is_confirmed_after_deadline() -> None:
    machine, book = Machine(), Book()
    machine.applied = ["n1-a1"]
    row = wanted(1, RemediationKind.REBOOT, at=book.now - 100.0, due=book.now)
    run(machine, book, left=[msgspec.structs.replace(row, state=RemediationState.STARTED)])
    assert [told.succeeded for told in book.told] == [True]
