"""The records that a standby reads ahead equal those that it would read after its takeover."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from sqlalchemy import Engine

from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import NodeIdentity, NodeRecord
from everstep_controller.runtime.startup_state import NO_RECORDS, KnownRecords, read_records, restore_state
from everstep_controller.store.database import open_database
from everstep_controller.store.rows import Batch
from everstep_controller.store.writer import DatabaseWriter


@pytest.fixture
def engine(postgres: str) -> Iterator[Engine]:
    engine = open_database(postgres)
    yield engine
    engine.dispose()


class Leader:
    """Writes records as a leader does."""

    def __init__(self, engine: Engine) -> None:
        self.writer = DatabaseWriter(engine)
        self.batches = self.writer.take_over().batch

    def put(self, **sentences: str) -> None:
        nodes = {node: record(node, sentence) for node, sentence in sentences.items()}
        self._commit(Batch(nodes=nodes))

    def forget(self, node: str) -> None:
        self._commit(Batch(forgotten_nodes={node: None}))

    def _commit(self, batch: Batch) -> None:
        self.batches += 1
        batch.number = self.batches
        self.writer.commit([batch])


def record(node: str, sentence: str) -> str:
    return msgspec.json.encode(
        NodeRecord(node=node, sentence=sentence, identity=NodeIdentity(incarnation=1, vault="127.0.0.1:7000"))
    ).decode()


@pytest.fixture
def leader(engine: Engine) -> Iterator[Leader]:
    made = Leader(engine)
    yield made
    made.writer.close()


def look(engine: Engine, known: KnownRecords) -> KnownRecords:
    with engine.connect() as connection:
        return read_records(connection, known)


def test_read_ahead_rereads_only_changed_records(engine: Engine, leader: Leader) -> None:
    leader.put(n1="one", n2="two", n3="three")
    first = look(engine, NO_RECORDS)
    assert {node: record.sentence for node, record in first.records.items()} == {
        "n1": "one",
        "n2": "two",
        "n3": "three",
    }
    leader.put(n2="changed", n4="new")
    leader.put(n2="two", n5="newer")  # as it was, and yet written
    leader.forget("n3")
    second = look(engine, first)
    assert sorted(second.records) == sorted(second.row_versions.nodes) == ["n1", "n2", "n4", "n5"]
    assert second.records["n1"] is first.records["n1"]
    assert second.records["n2"] is not first.records["n2"]
    assert first.records["n3"].sentence == "three", "who has taken it over already starts from that"


def test_takeover_after_read_ahead_restores_the_same_fleet(engine: Engine, leader: Leader) -> None:
    leader.put(**{f"n{number}": "before" for number in range(20)})
    known = look(engine, NO_RECORDS)
    leader.put(n3="changed", n20="new")
    leader.forget("n7")
    follower, another = DatabaseWriter(engine), DatabaseWriter(engine)
    ahead = follower.take_over(known=known.row_versions)
    whole = another.take_over()
    follower.close()
    another.close()
    assert sorted(ahead.nodes) == ["n20", "n3"]
    assert ahead.unchanged == known.records.keys() - {"n3", "n7"}
    policy = CorePolicy.lab_preset()
    assert restore_state(policy, ahead, known).nodes == restore_state(policy, whole).nodes
    assert not whole.unchanged


def test_read_ahead_skips_unreadable_record(engine: Engine, leader: Leader) -> None:
    leader.put(n1="one")
    leader._commit(Batch(nodes={"n2": '{"node":7}'}))
    known = look(engine, NO_RECORDS)
    assert list(known.records) == list(known.row_versions.nodes) == ["n1"]
    follower = DatabaseWriter(engine)
    assert list(follower.take_over(known=known.row_versions).nodes) == ["n2"]
    follower.close()
