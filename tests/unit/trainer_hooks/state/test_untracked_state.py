"""What of replicated models is not part of a version is alike on all replicas all the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import unrestored
from tests.support.replicas import on_four_ranks
from tests.support.unrestored import KINDS


@pytest.fixture(scope="module")
def ranks(session_forks: Any) -> list[dict[str, Any]]:
    return on_four_ranks(session_forks, unrestored.what_a_rank_has)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["teacher", "mask", "untracked", "late"])
def test_untracked_replica_state_is_equal_on_all_replicas(ranks, kind, part):
    """As they are in a generation that restores nothing, where rank 0's state goes to all."""
    of_rank = [rank[kind][part] for rank in ranks]
    groups = [of_rank[0::2], of_rank[1::2]] if kind == "over two ranks" else [of_rank]
    for alike in groups:
        assert all(values == alike[0] for values in alike)


def test_restored_state_is_not_overwritten_by_replication(ranks):
    for rank in ranks:
        for kind in KINDS:
            assert set(rank[kind]["restored"]) == {7.0}
