"""Damaged checkpoints of the bench: every hop's check sees what changed, and only that."""

from __future__ import annotations

import pytest

from bench.sdc.checkpoints import Checkpoints, Hop


@pytest.mark.parametrize("hop", Hop)
def test_each_hop_is_checked(hop: Hop) -> None:
    records = [Checkpoints("mlp").record(hop, number) for number in range(3)]
    assert all(one["activations"] for one in records)
    assert [one["caught"] for one in records] == [one["changed"] for one in records]
    assert any(one["changed"] for one in records)
