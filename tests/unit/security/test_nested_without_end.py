"""Bytes of others that are nested without end are as malformed as any: what reads them goes on to the next copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agent.spill.python_state import decode_state
from agent.vault.parity.manifest import read_manifest
from everstep.errors import MalformedMessage
from everstep.manifests import decode_manifest
from trainer_hooks.snapshot.blob import decode_blob
from trainer_hooks.snapshot.layout import decode_layout

DEEP = b"\x81\xa1x" + b"\x91" * 100_000


@pytest.mark.parametrize(
    "read",
    [
        decode_manifest,
        decode_layout,
        decode_blob,
        decode_state,
        lambda data: read_manifest(data, "n1"),
    ],
)
def test_it_is_malformed(read: Callable[[bytes], object]) -> None:
    with pytest.raises(MalformedMessage):
        read(DEEP)
