"""Remediations in progress: stored before they begin, read back, and reported once, across crashes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.clock import Backoff
from everstep.system_clock import SYSTEM_CLOCK
from everstep_controller.app.replica import ControllerReplica
from everstep_controller.auth.credentials import Keyring
from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.leadership.lease import NotLeadingError
from everstep_controller.remediation.alerts import AlertNotifier
from everstep_controller.remediation.executor import NVML_CLOSE_S, RemediationExecutor
from everstep_controller.remediation.kubernetes import KubernetesRemediator
from everstep_controller.remediation.remediator import DryRunRemediator
from everstep_controller.remediation.service import CordonObserver
from everstep_controller.store.database_errors import LeadershipLost
from everstep_controller.store.rows import RemediationRow, RemediationState
from tests.support.fleet.controllers import SECRET, make_settings
from tests.support.fleet.remediation_executor import (
    FakeRemediator,
    RecordedTransactions,
    requested_row,
    run_executor,
)
from tests.support.services import kube
from tests.support.services.sqlite import create_with_schema


@pytest.mark.promise("remediation-once")
def test_remediation_is_stored_as_begun_before_the_request() -> None:
    remediator, transactions = FakeRemediator(pending=3), RecordedTransactions()
    seen: list[list[str]] = []
    ask = remediator.apply

    def recording_apply(remediation: Remediation) -> None:
        seen.append(transactions.states(remediation.id))
        ask(remediation)

    remediator.apply = recording_apply  # type: ignore[method-assign]
    run_executor(remediator, transactions, requested_row(1))
    assert seen == [["started"]]
    assert transactions.states("n1-a1") == ["started", "confirmed"]
    assert [(event.remediation_id, event.succeeded, event.trace) for event in transactions.events] == [
        ("n1-a1", True, "t")
    ]


@pytest.mark.promise("remediation-once")
def test_begun_remediation_is_checked_before_repeating() -> None:
    remediator, transactions = FakeRemediator(), RecordedTransactions()
    remediator.applied = ["n1-a1"]
    run_executor(
        remediator, transactions, left=[requested_row(1, RemediationKind.REBOOT, state=RemediationState.STARTED)]
    )
    assert remediator.applied == ["n1-a1"]
    assert transactions.states("n1-a1") == ["confirmed"]


def test_remediation_retries_on_outage_but_not_on_refusal() -> None:
    remediator, transactions = FakeRemediator(failures=4), RecordedTransactions()
    run_executor(remediator, transactions, requested_row(1))
    assert (remediator.applied, transactions.states("n1-a1")) == (["n1-a1"], ["started", "confirmed"])
    refusing, other = FakeRemediator(refuses=True), RecordedTransactions()
    run_executor(refusing, other, requested_row(1))
    assert other.states("n1-a1") == ["started", "failed"]
    assert [(event.succeeded, event.detail) for event in other.events] == [(False, "it will not")]


def test_unexpected_remediation_error_is_counted_and_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    remediator, transactions, failures = FakeRemediator(), RecordedTransactions(), list[int]()
    ask, times = remediator.apply, 2

    def broken(remediation: Remediation) -> None:
        nonlocal times
        if times > 0:
            times -= 1
            raise KeyError("spec")
        ask(remediation)

    remediator.apply = broken  # type: ignore[method-assign]
    run_executor(
        remediator,
        transactions,
        requested_row(1),
        requested_row(2, RemediationKind.REBOOT),
        on_failure=lambda: failures.append(1),
    )
    assert transactions.states("n1-a1") == ["started", "confirmed"]
    assert remediator.applied == ["n1-a1", "n1-a2"]
    assert len(failures) == 2
    assert "KeyError: 'spec'" in caplog.text


@pytest.mark.promise("cordons-returned")
def test_remediation_waits_until_leadership_is_certain() -> None:
    remediator, transactions = FakeRemediator(), RecordedTransactions()
    doubts = iter([NotLeadingError("it was stopped")] * 3)

    def check_leading() -> None:
        if (doubt := next(doubts, None)) is not None:
            assert remediator.applied == []
            raise doubt

    run_executor(remediator, transactions, requested_row(1, RemediationKind.REBOOT), check_leading=check_leading)
    assert next(doubts, None) is None
    assert remediator.applied == ["n1-a1"]


def test_unsupported_remediation_names_the_remediator() -> None:
    transactions = RecordedTransactions()
    run_executor(FakeRemediator(), transactions, requested_row(1, RemediationKind.RESET_GPU))
    assert transactions.events[0].detail == "fake cannot reset gpu"


def test_reset_waits_until_agents_have_closed_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def recorded(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", recorded)
    for dry_run in (False, True):
        remediator = FakeRemediator()
        remediator.kinds, remediator.dry_run = frozenset({RemediationKind.RESET_GPU}), dry_run
        run_executor(remediator, RecordedTransactions(), requested_row(1, RemediationKind.RESET_GPU))
        assert remediator.applied == ["n1-a1"]
        assert waits.count(NVML_CLOSE_S) == 1, "a dry run waits for nothing"


def test_unstarted_remediation_is_superseded_on_its_node() -> None:
    remediator, transactions = FakeRemediator(), RecordedTransactions()
    run_executor(
        remediator,
        transactions,
        requested_row(1),
        requested_row(2, RemediationKind.UNCORDON),
        requested_row(3),
        requested_row(1, node="n2"),
    )
    assert transactions.states("n1-a1") == ["superseded"]
    assert transactions.states("n1-a2") == ["superseded"]
    assert transactions.states("n1-a3") == ["started", "confirmed"]
    assert transactions.states("n2-a1") == ["started", "confirmed"]
    assert {event.remediation_id for event in transactions.events} == {"n1-a3", "n2-a1"}


def test_remediation_waits_for_the_database() -> None:
    remediator, transactions = FakeRemediator(), RecordedTransactions(failures=5)
    run_executor(remediator, transactions, requested_row(1))
    assert remediator.applied == ["n1-a1"]
    assert transactions.states("n1-a1") == ["started", "confirmed"]


def test_remediation_end_during_outage_is_reported_once() -> None:
    remediator, transactions = FakeRemediator(), RecordedTransactions(unconfirmed=7)
    run_executor(remediator, transactions, requested_row(1, RemediationKind.REBOOT))
    assert remediator.applied == ["n1-a1"]
    assert transactions.states("n1-a1") == ["started", "confirmed"]
    assert [event.remediation_id for event in transactions.events] == ["n1-a1"]


@pytest.fixture
def guarded() -> Iterator[kube.Cluster]:
    """A cluster whose node n1 has a pod that a disruption budget holds."""
    cluster = kube.Cluster("n1")
    cluster.add_pod("web", "n1")
    cluster.protected_pods = {"web"}
    yield cluster
    cluster.close()


def evictions(cluster: kube.Cluster) -> int:
    return sum(path.endswith("/eviction") for _, path, _ in cluster.calls)


@pytest.mark.promise("kubernetes-events")
@pytest.mark.parametrize("later", [RemediationKind.UNCORDON, RemediationKind.REPAIR])
def test_blocked_cordon_gives_way_to_uncordon_and_repair(guarded: kube.Cluster, later: RemediationKind) -> None:
    transactions = RecordedTransactions()

    async def story() -> None:
        remediator = KubernetesRemediator(guarded.api(), evict=True)
        executor = RemediationExecutor(
            remediator,
            submit=transactions.submit,
            now=lambda: transactions.now,
            uniform=lambda: 0.0,
            backoff=Backoff(0.01, 0.02),
        )
        async with asyncio.timeout(60):
            executor.enqueue([requested_row(1)])
            while evictions(guarded) < 3:
                await asyncio.sleep(0.01)
            executor.enqueue([requested_row(2, later)])
            while executor.open_count():
                await asyncio.sleep(0.01)
        await executor.stop()

    asyncio.run(story())
    assert transactions.states("n1-a1") == ["started", "superseded"]
    assert transactions.states("n1-a2") == ["started", "confirmed"]
    assert guarded.nodes["n1"]["spec"]["unschedulable"] is (later is RemediationKind.REPAIR)
    assert set(guarded.pods) == {"web"}
    assert [event.remediation_id for event in transactions.events] == ["n1-a2"]


def test_dry_run_is_reported_as_dry_run() -> None:
    transactions = RecordedTransactions()
    run_executor(DryRunRemediator(), transactions, requested_row(1, RemediationKind.REBOOT))
    assert [(event.succeeded, event.dry_run) for event in transactions.events] == [(True, True)]
    assert (transactions.states("n1-a1"), transactions.written[-1].detail) == (
        ["started", "confirmed"],
        "dry run: nothing was done",
    )


class Bug(Exception):
    """An error that no handler expects."""


async def _broken(*_: object, **__: object) -> None:
    raise Bug


def member(directory: Path) -> ControllerReplica:
    database = f"sqlite:///{directory}/c.db"
    create_with_schema(database)
    settings = make_settings(name="c", database=database, alert_url="http://127.0.0.1:1/")
    return ControllerReplica(settings, Keyring((SECRET,)), SYSTEM_CLOCK, DryRunRemediator, database=database)


async def ended(made: ControllerReplica) -> None:
    async with asyncio.timeout(60):
        await made.run()


@pytest.mark.parametrize(("kind", "method"), [(CordonObserver, "observe"), (AlertNotifier, "check")])
def test_failed_background_task_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type, method: str
) -> None:
    monkeypatch.setattr(kind, method, _broken)
    with pytest.raises(Bug):
        asyncio.run(ended(member(tmp_path)))


def test_failed_remediation_task_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemediationExecutor, "_carry_out", _broken)
    row = RemediationRow(
        id="r1", node="n1", kind=RemediationKind.CORDON, state=RemediationState.REQUESTED, requested_at=1.0, doc="{}"
    )

    async def story() -> None:
        made = member(tmp_path)
        running = asyncio.create_task(ended(made))
        async with asyncio.timeout(60):
            await made.leader_known.wait()
        controller = made.leading()
        assert controller is not None
        controller.remediation.executor.enqueue([row])
        await running

    with pytest.raises(Bug):
        asyncio.run(story())


def test_superseded_alerting_ends_the_leadership(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def superseded(*_: object) -> None:
        raise LeadershipLost("another controller took the database over")

    monkeypatch.setattr(AlertNotifier, "check", superseded)
    with pytest.raises(LeadershipLost):
        asyncio.run(ended(member(tmp_path)))
