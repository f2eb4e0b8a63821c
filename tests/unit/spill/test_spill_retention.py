"""Which stored checkpoints go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.spill.retention import Stored, folder_of, superfluous, version_of
from everstep.ids import Version

versions = st.builds(Version, st.integers(1, 5), st.integers(0, 20))
stores = st.dictionaries(versions, st.booleans()).map(lambda d: [Stored(v, whole) for v, whole in d.items()])


@given(st.builds(Version, st.integers(0, 10**9), st.integers(0, 10**15)))
def test_a_folders_name_tells_its_version(version: Version) -> None:
    assert version_of(folder_of(version)) == version


@pytest.mark.parametrize("name", ["step-1-g1", "step-00000001", "step-00000001-g01", "mine", "step-00000001-g1.old"])
def test_folders_of_others_are_nobodys_versions(name: str) -> None:
    assert version_of(name) is None


@given(stores, st.integers(0, 4), st.sets(versions, max_size=3))
def test_the_newest_whole_ones_and_the_named_ones_stay(stored: list[Stored], keep: int, named: set[Version]) -> None:
    gone = superfluous(stored, keep, named)
    left = [s for s in stored if s.version not in gone]
    whole = sorted((s.version for s in stored if s.whole), reverse=True)
    assert not set(gone) & (set(whole[: max(keep, 1)]) | named)
    assert gone == sorted(gone)
    assert sum(s.whole for s in left) <= max(keep, 1) + len(named)
    newest = whole[0] if whole else None
    assert all(newest is None or s.version > newest or s.version in named for s in left if not s.whole)


def test_one_that_is_being_written_stays() -> None:
    stored = [Stored(Version(1, 10), True), Stored(Version(1, 20), False), Stored(Version(1, 5), False)]
    assert superfluous(stored, 1) == [Version(1, 5)]
