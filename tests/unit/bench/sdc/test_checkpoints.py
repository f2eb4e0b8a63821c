"""Damaged checkpoints of the bench: the check of each hop sees its own changes only."""

from __future__ import annotations

import pytest

from bench.sdc.checkpoints import Checkpoints, Hop


@pytest.mark.parametrize("hop", Hop)
def test_each_hop_is_checked(hop: Hop) -> None:
    records = [Checkpoints("mlp").record(hop, number) for number in range(3)]
    assert all(record["activations"] for record in records)
    assert [record["caught"] for record in records] == [record["changed"] for record in records]
    assert any(record["changed"] for record in records)
