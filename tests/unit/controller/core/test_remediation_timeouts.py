"""Timeouts of remediations, which differ for those that wait and those that stay in effect."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from everstep.errors import Unavailable
from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.core.policy import CorePolicy
from everstep_controller.remediation.executor import PATIENCE_S, PATIENCE_SHARE
from everstep_controller.store.rows import RemediationState
from tests.support.fleet.remediation_executor import FakeRemediator, RecordedTransactions, requested_row, run_executor


def test_unconfirmed_cordon_fails_after_timeout() -> None:
    remediator, transactions = FakeRemediator(pending=10**9), RecordedTransactions()
    done = remediator.is_done

    def later(remediation: Remediation) -> bool:
        transactions.now += PATIENCE_S[remediation.kind]
        return done(remediation)

    remediator.is_done = later  # type: ignore[method-assign]
    run_executor(remediator, transactions, requested_row(1))
    assert transactions.events[0].detail == "the remediation was not confirmed within 300 s"


@pytest.mark.promise("cordons-returned")
@pytest.mark.parametrize("kind", [RemediationKind.CORDON, RemediationKind.UNCORDON, RemediationKind.REPAIR])
def test_lasting_remediation_is_retried_through_any_outage(
    kind: RemediationKind,
) -> None:
    remediator, transactions, failures = FakeRemediator(failures=9), RecordedTransactions(), Counter[str]()
    remediator.kinds = frozenset(RemediationKind)
    ask = remediator.apply

    def later(remediation: Remediation) -> None:
        transactions.now += PATIENCE_S[remediation.kind] / 2
        ask(remediation)

    remediator.apply = later  # type: ignore[method-assign]
    run_executor(remediator, transactions, requested_row(1, kind), on_failure=lambda: failures.update(["failed"]))
    assert remediator.applied == ["n1-a1"]
    assert transactions.states("n1-a1") == ["started", "confirmed"]
    assert failures["failed"] == 4


def test_node_remediation_is_not_requested_after_timeout() -> None:
    remediator, transactions = FakeRemediator(failures=3), RecordedTransactions()
    ask = remediator.apply

    def later(remediation: Remediation) -> None:
        transactions.now += PATIENCE_S[remediation.kind]
        ask(remediation)

    remediator.apply = later  # type: ignore[method-assign]
    run_executor(remediator, transactions, requested_row(1, RemediationKind.REBOOT))
    assert remediator.applied == []
    assert [(event.succeeded, event.detail) for event in transactions.events] == [
        (False, "it does not answer within 3600 s")
    ]


@pytest.mark.parametrize("kind", [RemediationKind.RESET_GPU, RemediationKind.REBOOT])
def test_executor_timeout_is_below_core_timeout(kind: RemediationKind) -> None:
    assert PATIENCE_S[kind] <= PATIENCE_SHARE * CorePolicy().remediation.timeout_s


@pytest.mark.promise("remediation-caps")
@pytest.mark.parametrize("waited_s", [0.0, 500.0])
@pytest.mark.parametrize("due_s", [1800.0, 30.0])
def test_node_remediation_gets_full_timeout_before_core_deadline(waited_s: float, due_s: float) -> None:
    """Whatever the core's policy is, and while it waited behind another remediation of its node."""
    remediator, transactions = FakeRemediator(pending=10**9), RecordedTransactions()
    at, waited_s, step_s = transactions.now, waited_s * due_s / 1800.0, due_s / 100
    transactions.now += waited_s
    done = remediator.is_done

    def later(remediation: Remediation) -> bool:
        transactions.now += step_s
        return done(remediation)

    remediator.is_done = later  # type: ignore[method-assign]
    run_executor(remediator, transactions, requested_row(1, RemediationKind.REBOOT, at=at, due=at + due_s))
    assert [event.succeeded for event in transactions.events] == [False]
    assert remediator.applied == ["n1-a1"]
    assert PATIENCE_SHARE * due_s <= transactions.now - at - waited_s
    assert transactions.now < at + due_s


@pytest.mark.promise("remediation-caps")
def test_node_remediation_is_not_started_too_late() -> None:
    remediator, transactions = FakeRemediator(), RecordedTransactions()
    run_executor(
        remediator,
        transactions,
        requested_row(1, RemediationKind.REBOOT, at=transactions.now - 600.0, due=transactions.now + 1200.0),
    )
    assert remediator.applied == []
    assert "before this one could complete" in transactions.events[0].detail


def test_lost_remediation_response_is_checked_after_deadline() -> None:
    remediator, transactions = FakeRemediator(pending=1), RecordedTransactions()
    ask = remediator.apply

    def lost(remediation: Remediation) -> None:
        ask(remediation)
        transactions.now += 700.0
        raise Unavailable("the connection broke", 0.0)

    remediator.apply = lost  # type: ignore[method-assign]
    run_executor(
        remediator,
        transactions,
        requested_row(1, RemediationKind.REBOOT, at=transactions.now, due=transactions.now + 1800.0),
    )
    assert remediator.applied == ["n1-a1"]
    assert [event.succeeded for event in transactions.events] == [True]


def test_finished_remediation_is_confirmed_after_deadline() -> None:
    remediator, transactions = FakeRemediator(), RecordedTransactions()
    remediator.applied = ["n1-a1"]
    row = requested_row(1, RemediationKind.REBOOT, at=transactions.now - 100.0, due=transactions.now)
    run_executor(remediator, transactions, left=[msgspec.structs.replace(row, state=RemediationState.STARTED)])
    assert [event.succeeded for event in transactions.events] == [True]
