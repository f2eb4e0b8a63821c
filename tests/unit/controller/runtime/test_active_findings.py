"""Findings are written one by one, as they come and go, and come back whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from everstep_controller.core.records import NodeHealth, NodeIdentity, NodeRecord
from everstep_controller.runtime.transaction import FindingDelta

from everstep.vocabulary import Finding, Severity
from everstep.wire.v1.training import FindingCleared, FindingRaised
from tests.support.controllers import InProcess
from tests.support.findings import xid
from tests.support.sessions import AgentSession, served

Findings = dict[str, Finding]


def mild(number: int) -> Finding:
    return msgspec.structs.replace(xid(number), subject=f"GPU-{number}", severity=Severity.WARNING)


def _record(**findings: Finding) -> NodeRecord:
    return NodeRecord(
        node="n1", identity=NodeIdentity(incarnation=1, vault=""), health=NodeHealth(agent_findings=findings)
    )


def test_standing_findings_write_only_changes() -> None:
    first, second = mild(31), mild(43)
    record = _record(a=first, b=second)
    standing = FindingDelta([])
    assert dict(standing.changes(record)) == {"a": first, "b": second}
    assert dict(standing.changes(record)) == {}
    again = msgspec.structs.replace(second, since=5.0)
    record.health.agent_findings = {"b": again}
    assert dict(standing.changes(record)) == {"a": None, "b": again}
    record.health.agent_findings = {}
    assert dict(standing.changes(record)) == {"b": None}


def test_restored_findings_count_as_written() -> None:
    record = _record(a=mild(31))
    assert dict(FindingDelta([record]).changes(record)) == {}


def test_standing_findings_survive_restart_until_cleared(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'c.db'}"

    def life(speak: Callable[[AgentSession], None], incarnation: int = 1) -> Findings:
        with served(InProcess(database)) as controller:
            session = AgentSession(controller.address, "n1", incarnation)
            speak(session)
            session.close()
            return dict(controller.controller.loop.state.nodes["n1"].health.agent_findings)

    def two(session: AgentSession) -> None:
        session.register()
        session.beat(findings=())
        session.report(FindingRaised(finding=mild(31)), FindingRaised(finding=mild(43)))

    def clear(session: AgentSession) -> None:
        session.register(findings=tuple(both.values()))
        session.report(FindingCleared(key=mild(31).key))

    both = {mild(31).key: mild(31), mild(43).key: mild(43)}
    assert life(two) == both
    assert life(lambda _: None) == both
    life(clear, incarnation=2)
    assert life(lambda _: None) == {mild(43).key: mild(43)}
