"""Bytes of others that are nested without end are as malformed as any: what reads them goes on to the next copy."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from everstep_agent.sensors.monitor import SavedSensorState, load_sensor_state
from everstep_agent.spill.dcp_metadata import decode_state
from everstep_agent.vault.parity.shards import decode_parity_manifest
from everstep_trainer.launch.forking.fork_messages import ControlChannel
from everstep_trainer.state.layout import decode_layout
from everstep_trainer.state.python_value_codec import decode_blob

from everstep.errors import MalformedMessage
from everstep.layout.manifests import decode_manifest
from everstep.layout.vault_status import LOCK_FILE, read_status

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
        channel = ControlChannel(ours, msgspec.Struct)
        theirs.send(DEEP)
        with pytest.raises(MalformedMessage):
            channel.receive()
        channel.close()
