"""Every text that a client can send has a bound, which is checked where the message is decoded."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from everstep.errors import MalformedMessage
from everstep.layout.manifests import decode_manifest
from everstep.layout.vault_status import LOCK_FILE, read_status
from everstep.wire.v1 import agent, enrolment, local, transfer
from everstep_agent.findings.monitor import SavedSensorState, load_sensor_state
from everstep_agent.spill.dcp_metadata import decode_state
from everstep_agent.vault.parity.shards import decode_parity_manifest
from everstep_controller.api.routes import ROUTES
from everstep_trainer.launch.forking.fork_messages import ControlChannel
from everstep_trainer.state.layout import decode_layout
from everstep_trainer.state.python_value_codec import decode_blob

CLIENT_MESSAGES: list[Any] = [
    agent.Register,
    agent.Heartbeat,
    agent.Reports,
    agent.Acknowledge,
    enrolment.Enrol,
    local.ToAgent,
    local.ToVault,
    transfer.Opening,
    transfer.TransferRequest,
    *dict.fromkeys(route.body for route in ROUTES.values() if route.body is not None),
]

READ_AGAIN = {"PolicyChange.rules values"}
"""Rules are decoded a second time, by their kind."""


def unbounded_texts(kind: Any) -> Iterator[str]:
    """Yield the places of all texts in a message that may have any length."""
    seen: set[Any] = set()

    def walk(part: Any, place: str) -> Iterator[str]:
        match part:
            case inspect.StrType(max_length=None, pattern=None):
                yield place
            case inspect.StructType(cls=cls, fields=fields) if cls not in seen:
                seen.add(cls)
                for field in fields:
                    yield from walk(field.type, f"{cls.__name__}.{field.name}")
            case inspect.UnionType(types=types):
                for member in types:
                    yield from walk(member, place)
            case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
                yield from walk(item, place)
            case inspect.TupleType(item_types=items):
                for member in items:
                    yield from walk(member, place)
            case inspect.DictType(key_type=key, value_type=value):
                yield from walk(key, f"{place} keys")
                yield from walk(value, f"{place} values")
            case inspect.Metadata(type=inner):
                yield from walk(inner, place)
            case inspect.AnyType() | inspect.RawType():
                yield place

    yield from walk(inspect.type_info(kind), str(kind))


@pytest.mark.parametrize("kind", CLIENT_MESSAGES, ids=lambda kind: getattr(kind, "__name__", str(kind)[:40]))
def test_texts_of_clients_have_bounds(kind: Any) -> None:
    assert set(unbounded_texts(kind)) <= READ_AGAIN


DEEP = b"\x81\xa1x" + b"\x91" * 100_000


@pytest.mark.parametrize(
    "read",
    [
        decode_manifest,
        decode_layout,
        decode_blob,
        decode_state,
        lambda data: decode_parity_manifest(data, "n1"),
    ],
)
def test_deeply_nested_input_is_malformed(read: Callable[[bytes], object]) -> None:
    with pytest.raises(MalformedMessage):
        read(DEEP)


def test_deeply_nested_file_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / LOCK_FILE
    path.write_bytes(b'{"x":' + b"[" * 100_000)
    assert read_status(tmp_path) is None
    assert load_sensor_state(str(path)) == SavedSensorState()


def test_deeply_nested_packet_is_malformed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        channel: ControlChannel[msgspec.Struct] = ControlChannel(ours, msgspec.Struct)
        theirs.send(DEEP)
        with pytest.raises(MalformedMessage):
            channel.receive()
        channel.close()
