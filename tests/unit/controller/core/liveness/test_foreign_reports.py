"""A node's report on a job or rank of other nodes changes nothing, because a compromised node must harm no other node.

Extreme values in a report do not stop the controller.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from everstep.ids import Version
from everstep.vocabulary import FindingKind, JobState
from everstep.wire.v1.agent import Acknowledge, Heartbeat, Register, Reports
from everstep.wire.v1.directives import KillRank, SpillVersion, StopJob, VersionNotice
from everstep.wire.v1.training import CollectiveFailed, LauncherJoined, RankStalled, SpillPlan, UserError
from everstep.wire.v1.vault_reports import VersionSpilled
from everstep_controller.core.effects import Effect, PutJob, Send
from everstep_controller.core.records import StoredCheckpoint
from tests.support.fleet.core_fleet import CoreFleet, decisions, sent

REPORTS: tuple[tuple[type[Any], dict[str, Any]], ...] = (
    (CollectiveFailed, {"step": 5, "detail": "reset by peer"}),
    (RankStalled, {"step": 5, "collectives": 10, "stalled_s": 1.0, "threshold_s": 1.0}),
    (UserError, {"step": 5, "error": "ValueError: bad batch", "traceback": ""}),
)


def _report(fleet: CoreFleet, node: str, kind: type[Any], rank: int, **more: Any) -> list[Effect]:
    return fleet.report(node, kind(job="job", at=fleet.now, generation=fleet.spec().number, rank=rank, **more))


@pytest.mark.parametrize("node", ["stranger", "n2"])
@pytest.mark.parametrize("rank", [0, 2, 1000])
@pytest.mark.parametrize(("kind", "more"), REPORTS, ids=[kind.__name__ for kind, _ in REPORTS])
def test_report_about_rank_of_another_node_is_ignored(
    kind: type[Any], more: dict[str, Any], node: str, rank: int
) -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.register("stranger")
    fleet.progress(5)
    before = fleet.spec()
    _report(fleet, node, kind, rank, **more)
    effects = fleet.advance(10.0, "n1", "n2", "n3", "stranger")
    assert fleet.job_state() is JobState.RUNNING
    assert fleet.spec() == before
    assert not [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.body, KillRank)]
    assert all(
        finding.kind is not FindingKind.RANK_FLAPPING
        for finding in fleet.state.nodes["n1"].health.controller_findings.values()
    )


def test_checkpoint_report_of_uninvolved_node_is_ignored() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.register("stranger")
    stored = StoredCheckpoint(
        version=Version(1, 100), url="/store/job/step-100", bytes=10, started_at=fleet.now, stored_at=fleet.now
    )
    fleet.job().spills.stored = [stored]
    checkpoint_stored = VersionSpilled(
        job="job", at=fleet.now, version=Version(1, 200), attempt=0, url="/store/job/x", removed=("step-100",)
    )
    assert not [effect for effect in fleet.report("stranger", checkpoint_stored) if isinstance(effect, PutJob)]
    assert fleet.job().spills.stored == [stored]
    fleet.report("n1", checkpoint_stored)
    assert fleet.job().spills.stored == []


def test_rerun_job_gets_a_new_secret() -> None:
    fleet = CoreFleet()
    fleet.start(1)
    before = fleet.job().secret
    fleet.finish()
    fleet.now += 1.0
    fleet.launchers["job", "n1"] = int(fleet.now * 1000)
    with patch("tests.support.fleet.core_fleet.ENTROPY", "cd" * 32):
        fleet.join("n1")
    assert fleet.job_state() is JobState.RUNNING
    assert fleet.job().secret == fleet.spec().secret == "cd" * 32 != before


@pytest.mark.parametrize(
    "url", ["/elsewhere/job/step-100", "/store/job/..", "/store/job/step/deeper", "s3://evil/step-100"]
)
def test_checkpoint_url_outside_job_folder_is_refused(url: str) -> None:
    fleet = CoreFleet()
    fleet.start(1, spill=SpillPlan(every_steps=100, url="/store"))
    fleet.progress(100)
    fleet.state.job_runtime["job"].commits.candidate_step = 100
    order = sent(fleet.seal(100), SpillVersion)["n1"]
    checkpoint_stored = VersionSpilled(
        job="job", at=fleet.now, version=order.version, attempt=order.attempt, url=url, complete=True
    )
    fleet.report("n1", checkpoint_stored)
    assert fleet.job().spills.stored == []
    assert fleet.job().spills.pending is not None


@pytest.mark.promise("digest-majority")
def test_one_node_cannot_outvote_a_digest_group_of_others() -> None:
    """A node with many ranks must not vote in a digest group of two other nodes, and convict them."""
    fleet = CoreFleet()
    fleet.start(3, nproc_per_node=4)
    fleet.progress(5)
    for rank in range(12):
        digest = {"replicated-4": "wrong" if rank < 4 else "right"} if rank < 4 or rank in (4, 8) else {}
        fleet.seal_one(5, rank, digests=digest)
    assert not [node for node, decision in decisions(fleet.effects) if decision == "evict"]
    assert set(fleet.spec().seats) == {"n1", "n2", "n3"}


def _join(fleet: CoreFleet, node: str, job: str, generation: int) -> list[Effect]:
    spec = msgspec.structs.replace(fleet.job().spec, job=job)
    words = LauncherJoined(job=job, at=fleet.now, spec=spec, launcher=1, store="s:1", generation=generation)
    return fleet.report(node, words)


@pytest.mark.parametrize("known", [False, True])
def test_generation_number_of_uninvolved_node_is_bounded(known: bool) -> None:
    """A later generation number could not be encoded, and no controller could start from such a record."""
    fleet = CoreFleet()
    fleet.start(2)
    fleet.register("stranger")
    before, last = fleet.spec(), (1 << 48) - 1
    effects = _join(fleet, "stranger", "job" if known else "other", last)
    assert not sent(effects, StopJob)["stranger"].ok
    assert fleet.spec() == before
    assert set(fleet.state.jobs) == {"job"}
    _join(fleet, "stranger", "job", before.number + 5)
    assert fleet.spec().number == before.number + 6, "a controller whose record is behind still catches up"
    fleet.restart()


@pytest.mark.parametrize("step_s", [5e-324, 1e-300, 1e308])
def test_extreme_step_times_are_handled(step_s: float) -> None:
    fleet = CoreFleet()
    fleet.start(1)
    for step in range(2, 40, 4):
        fleet.progress(step, step_s=step_s)
        fleet.seal(step)
        fleet.advance(5.0, "n1")
    for notice in sent(fleet.effects, VersionNotice).values():
        msgspec.msgpack.decode(msgspec.msgpack.encode(notice), type=VersionNotice)
    fleet.restart()


def _numbers(kind: msgspec.inspect.Type, path: str, seen: set[type]) -> Iterator[tuple[str, msgspec.inspect.IntType]]:
    parts: list[tuple[str, Any]] = []
    match kind:
        case msgspec.inspect.IntType():
            yield path, kind
        case msgspec.inspect.StructType() if kind.cls not in seen:
            seen.add(kind.cls)
            parts = [(f"{kind.cls.__name__}.{field.name}", field.type) for field in kind.fields]
        case msgspec.inspect.UnionType():
            parts = [(path, part_type) for part_type in kind.types]
        case msgspec.inspect.DictType():
            parts = [(path, kind.key_type), (path, kind.value_type)]
        case msgspec.inspect.TupleType():
            parts = [(path, part_type) for part_type in kind.item_types]
        case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType() | msgspec.inspect.SetType():
            parts = [(path, kind.item_type)]
        case msgspec.inspect.Metadata():
            parts = [(path, kind.type)]
    for place, part in parts:
        yield from _numbers(part, place, seen)


def test_every_number_in_agent_messages_is_bounded() -> None:
    """MessagePack and databases hold 64 bits: a larger number could not be stored or sent."""
    seen: set[type] = set()
    number_types = [
        found
        for kind in (Register, Heartbeat, Reports, Acknowledge)
        for found in _numbers(msgspec.inspect.type_info(kind), kind.__name__, seen)
    ]
    assert len(number_types) > 30
    assert not [
        path for path, kind in number_types if (kind.ge, kind.gt) == (None, None) or (kind.le, kind.lt) == (None, None)
    ]
