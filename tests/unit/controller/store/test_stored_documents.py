"""Documents of an earlier release, whose texts had no bound."""

from __future__ import annotations

import msgspec
import pytest
from everstep_controller.core.records import NodeRecord
from everstep_controller.store.rows import MAX_STORED_TEXT, decode_stored

from everstep.vocabulary import Finding
from tests.support.findings import xid

LONG = "x" * 100_000


def test_stored_text_beyond_its_bound_is_cut() -> None:
    doc = msgspec.to_builtins(xid(31)) | {"subject": LONG, "evidence": {"line": LONG}}
    found = decode_stored(msgspec.json.encode(doc).decode(), Finding)
    assert (found.subject, found.evidence, found.xid) == (
        LONG[:MAX_STORED_TEXT],
        {"line": LONG[:MAX_STORED_TEXT]},
        31,
    )


def test_stored_node_with_long_hardware_text_is_read() -> None:
    gpu = {"index": 0, "uuid": LONG, "name": LONG, "pci_bus_id": "0", "memory_bytes": 1}
    doc = {"node": "n1", "identity": {"incarnation": 1, "vault": "a:1", "gpus": [gpu], "agent_version": LONG}}
    record = decode_stored(msgspec.json.encode(doc).decode(), NodeRecord)
    assert len(record.identity.gpus[0].uuid) == MAX_STORED_TEXT


def test_stored_document_of_another_shape_is_an_error() -> None:
    with pytest.raises(msgspec.ValidationError, match="required field"):
        decode_stored("{}", Finding)
