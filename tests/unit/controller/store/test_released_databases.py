"""Databases as controllers of older releases left them, one for each revision of the schema, go on with this release.

The rows in tests/released/schemas are those that a controller of that revision wrote, taken from its database: six
nodes, a job in its third generation, an eviction, findings, orders; from 0002 on credentials and remedies. None of them
was made by the present code, but for those of the present revision.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from alembic.script import ScriptDirectory
from everstep_controller.core import invariants
from everstep_controller.core.engine import handle
from everstep_controller.core.events import ControllerStarted
from everstep_controller.core.health.eviction import recent_evictions
from everstep_controller.core.policy import CorePolicy
from everstep_controller.runtime.startup_state import restored
from everstep_controller.store import reader as history
from everstep_controller.store import tables
from everstep_controller.store.database import config, engine_of, open_database, parse_url
from everstep_controller.store.reader import Reader
from everstep_controller.store.rows import Loaded
from everstep_controller.store.writer import Writer
from sqlalchemy import text
from starlette.testclient import TestClient

from everstep.clock import ManualClock
from everstep.ids import Version
from everstep.vocabulary import JobState, NodeState, Verdict
from everstep.wire.v1 import operator as op
from everstep.wire.v1.directives import Directive, NewGeneration
from everstep.wire.v1.training import FindingCleared, GenerationSpec
from tests.support.controllers import InProcess, Speaker, get, post
from tests.support.old_schemas import released_database

RELEASED = Path(__file__).parents[3] / "released" / "schemas"
REVISIONS = sorted(file.stem for file in RELEASED.glob("*.sql"))
LEFT_AT = 1_700_000_006.0
"""When those controllers stopped."""
REWRITTEN = {("fleet", "doc"), ("nodes", "doc"), ("jobs", "doc"), ("generations", "doc"), ("outbox", "body")}
"""Documents that a migration writes anew."""

Rows = dict[str, list[dict[str, Any]]]


def rows_of(database: str) -> Rows:
    """Every row of every table, in an order of their own."""
    engine = engine_of(parse_url(database))
    found = {}
    with engine.connect() as connection:
        for name in tables.metadata.tables:
            if engine.dialect.has_table(connection, name):
                found[name] = [dict(row) for row in connection.execute(text(f"SELECT * FROM {name}")).mappings()]
    engine.dispose()
    return {name: sorted(rows, key=repr) for name, rows in found.items()}


def left_by(database: str, revision: str) -> Rows:
    """Makes ``database`` what that revision's controller left; all of its rows."""
    released_database(database, revision, (RELEASED / f"{revision}.sql").read_text())
    return rows_of(database)


def take_over(database: str) -> Loaded:
    engine = open_database(database)
    writer = Writer(engine)
    try:
        return writer.take_over()
    finally:
        writer.close()
        engine.dispose()


@pytest.fixture(params=REVISIONS)
def revision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_there_is_a_database_of_every_revision() -> None:
    assert {script.revision for script in ScriptDirectory.from_config(config()).walk_revisions()} == set(REVISIONS)


def test_every_table_of_a_revision_holds_something(database: str, revision: str) -> None:
    assert [name for name, rows in left_by(database, revision).items() if not rows] == []


@pytest.mark.promise("backups")
def test_no_row_and_no_column_of_a_release_is_lost(database: str, revision: str) -> None:
    before = left_by(database, revision)
    open_database(database).dispose()
    after = rows_of(database)
    for table, rows in before.items():
        kept = [name for name in rows[0] if (table, name) not in REWRITTEN]
        old = [{name: row[name] for name in kept} for row in rows]
        new = [{name: row[name] for name in kept} for row in after[table]]
        assert [row for row in old if row not in new] == [], table
        assert table == "meta" or len(rows) == len(after[table])


def test_a_state_comes_of_it_in_which_all_that_was_decided_stands(database: str, revision: str) -> None:
    left_by(database, revision)
    loaded = take_over(database)
    assert (loaded.epoch, loaded.newest_at) == (2, LEFT_AT)
    state = restored(CorePolicy.lab(), loaded)
    handle(state, ControllerStarted(epoch=loaded.epoch, trace="start"), LEFT_AT)
    invariants.check(state)
    nodes = state.nodes
    assert {node: nodes[node].state for node in ("n1", "n2", "n5", "n6")} == {
        "n1": NodeState.QUARANTINED,
        "n2": NodeState.HEALTHY,
        "n5": NodeState.REPAIR,
        "n6": NodeState.HELD,
    }
    assert {node: [finding.xid for finding in record.findings.values()] for node, record in nodes.items()} == {
        "n1": [79],
        "n2": [31],
        **{node: [] for node in ("n3", "n4", "n5", "n6")},
    }
    assert (nodes["n1"].causes, nodes["n1"].gpus[0].serial) == (["gpu.xid/GPU-n1/79"], "165241")
    assert [one.node for one in recent_evictions(state, LEFT_AT)] == ["n1"]
    job = state.jobs["llama"]
    assert (job.state, job.generation and job.generation.number, job.last_number) == (JobState.RUNNING, 3, 3)
    assert job.generation is not None
    assert set(job.generation.seats) == {"n2", "n4"}
    assert set(job.launchers) == {"n1", "n2", "n4"}
    live = state.live_jobs["llama"]
    assert (live.committed, live.verified) == (Version(2, 3), Version(2, 2))


def test_what_waits_for_agents_and_what_they_said_is_known(database: str, revision: str) -> None:
    before = left_by(database, revision)
    loaded = take_over(database)
    directives = {
        (row.node, row.seq): msgspec.json.decode(f'{{"seq":{row.seq},"body":{row.body}}}', type=Directive)
        for row in loaded.outbox
    }
    assert directives.keys() == {(row["node"], row["seq"]) for row in before["outbox"]}
    assert {type(one.body).__name__ for one in directives.values()} == {"NewGeneration", "RunProbe"}
    assert loaded.marks == {(row["node"], row["incarnation"]): row["through"] for row in before["report_marks"]}
    assert loaded.poisoned == {("n4", 1, 99)}
    assert {row.id for row in loaded.credentials} == {row["id"] for row in before.get("credentials", [])}
    assert {row.id for row in loaded.remedies} <= {row["id"] for row in before.get("remedies", [])}


def test_its_history_is_read(database: str, revision: str) -> None:
    before = left_by(database, revision)
    engine = open_database(database)
    reader = Reader(engine)
    assert [row.id for row in reader.events(after=0, limit=999)] == sorted(row["id"] for row in before["audit"])
    (verdict,) = (msgspec.json.decode(doc, type=Verdict) for doc in reader.verdicts("n1", limit=9))
    assert (verdict.decision, [one.xid for one in verdict.evidence]) == ("evict", [79])
    recoveries = [msgspec.json.decode(doc, type=op.Recovery) for doc in reader.recoveries("llama", limit=9)]
    assert [(one.generation, one.world_size) for one in recoveries] == [(1, 2), (2, 2)]
    rosters, _ = reader.page(lambda connection: history.generations(connection, job="llama", cursor="", limit=9))
    specs = [msgspec.json.decode(row["doc"], type=GenerationSpec) for row in rosters]
    assert [(spec.number, sorted(spec.seats)) for spec in specs] == [
        (3, ["n2", "n4"]),
        (2, ["n1", "n2"]),
        (1, ["n1", "n2"]),
    ]
    engine.dispose()


@pytest.mark.promise("backups")
def test_a_controller_goes_on_with_it(database: str, revision: str) -> None:
    before = left_by(database, revision)
    through = {row["node"]: row["through"] for row in before["report_marks"]}
    clock = ManualClock(wall=LEFT_AT + 1.0)
    app = InProcess(database, clock=clock)
    with TestClient(app) as client:
        speakers = {node: Speaker(client, node) for node in ("n1", "n2", "n3", "n4")}
        for node, speaker in speakers.items():
            speaker.number = through.get(node, 0)
            told = [one.body.spec.number for one in speaker.beat().directives if isinstance(one.body, NewGeneration)]
            assert told[-1:] == ([3] if node in ("n1", "n2", "n4") else [])
        status = get(client, "/v1/status", op.FleetStatus)
        assert (status.nodes["quarantined"], status.jobs[0].generation) == (1, 3)
        speakers["n1"].report(FindingCleared(key="gpu.xid/GPU-n1/79"))
        post(client, "/v1/nodes/n1/readmit", op.Because(reason="a new board"), op.Changed)
        assert get(client, "/v1/nodes/n1", op.NodeDetail).summary.state is NodeState.PROBATION
        (order,) = get(client, "/v1/audit?newest=true&limit=1", op.EventList).events
        assert order.id > max(row["id"] for row in before["audit"])
        assert app.controller is not None
        invariants.check(app.controller.loop.state)


def test_the_rows_are_of_then(revision: str) -> None:
    """Those of older revisions have what the present ones have no more."""
    told = (RELEASED / f"{revision}.sql").read_text()
    jobs = json.loads(re.search(r"INTO jobs .* VALUES \('llama', '(.*)'\);", told)[1].replace("''", "'"))  # type: ignore[index]
    assert ("roster" in jobs["generation"]) == (revision < "0003")
    assert ("INTO standing_findings" in told) == (revision >= "0003")
