"""Checks of a vault's settings in the vault process, beside those of the agent."""

from __future__ import annotations

import json

import pytest

from everstep.errors import ConfigurationError
from everstep.wire.v1.transfer import MIN_SEND_BYTES_PER_S
from everstep_agent.vault.settings import decode_settings

SETTINGS = {"node": "n1", "run_dir": "/tmp/n1", "segment_dir": "/dev/shm/n1"}


def test_vault_refuses_a_rate_that_looks_dead_to_peers() -> None:
    with pytest.raises(ConfigurationError, match="send_bytes_per_s"):
        decode_settings(json.dumps(SETTINGS | {"send_bytes_per_s": MIN_SEND_BYTES_PER_S - 1}))
    assert decode_settings(json.dumps(SETTINGS | {"send_bytes_per_s": MIN_SEND_BYTES_PER_S}))
