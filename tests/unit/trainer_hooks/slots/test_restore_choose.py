"""The choice of the version to restore: the newest complete one that the rule allows, or an error with its reason."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from everstep.errors import MalformedMessage, NotRestorable
from everstep.ids import Version
from everstep.layout.manifests import LAYOUT_FORMAT, Box, Manifest, StoredBox, TensorInfo
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.training import RestoreRule
from everstep.wire.v1.vault_reports import NodeGroup, Protection
from everstep_trainer.slots.version_choice import choose_version

CATALOG = (TensorInfo("weight", "float32", 4, (4, 2), False),)


def half(rank: int) -> Manifest:
    """Rank 0 and rank 1 hold two rows each."""
    stored = (StoredBox(0, Box((2 * rank, 0), (2, 2)), 0),)
    return Manifest(LAYOUT_FORMAT, rank, 2, CATALOG, stored, 64, 0, 128, 0)


def manifest_of(digest: str) -> Manifest:
    if digest == "damaged":
        raise MalformedMessage("manifest damaged is not what was sealed")
    return half(int(digest))


def slot(rank: int, version: Version, node: str = "", *, replica: bool = False, digest: str = "") -> SlotInfo:
    return SlotInfo(
        node=node or f"n{rank}",
        rank=rank,
        version=version,
        path=f"/x/{rank}",
        slot=0,
        replica=replica,
        manifest_digest=digest or str(rank),
    )


def both(*versions: Version) -> list[SlotInfo]:
    return [slot(rank, version) for version in versions for rank in (0, 1)]


OLD, MIDDLE, NEW = Version(1, 9), Version(1, 10), Version(2, 10)


def chosen(rule: RestoreRule, slots: Sequence[SlotInfo]) -> Version | None:
    return choose_version(rule, slots, manifest_of).version


@pytest.mark.promise("restored-is-whole")
def test_the_newest_whole_version_is_taken() -> None:
    assert chosen(RestoreRule(floor=OLD), both(OLD, MIDDLE, NEW)) == NEW


def test_replica_replaces_a_missing_slot() -> None:
    slots = [slot(0, NEW), slot(1, NEW, "n0", replica=True)]
    assert chosen(RestoreRule(floor=NEW), slots) == NEW


def test_nothing_newer_than_the_ceiling_is_taken() -> None:
    assert chosen(RestoreRule(floor=OLD, ceiling=MIDDLE), both(OLD, MIDDLE, NEW)) == MIDDLE


@pytest.mark.promise("restore-floor")
def test_version_older_than_the_floor_is_refused() -> None:
    with pytest.raises(NotRestorable, match="version 1:10 was committed, but no version from it on is complete"):
        chosen(RestoreRule(floor=MIDDLE), [*both(OLD), slot(0, MIDDLE)])


def test_missing_floor_and_version_start_from_scratch() -> None:
    assert chosen(RestoreRule(), []) is None
    assert chosen(RestoreRule(), [slot(1, OLD)]) is None


def test_scratch_rule_restores_nothing() -> None:
    assert chosen(RestoreRule(from_scratch=True), both(NEW)) is None


def test_a_damaged_manifest_does_not_count() -> None:
    slots = [*both(OLD), slot(0, NEW), slot(1, NEW, digest="damaged")]
    assert chosen(RestoreRule(floor=OLD), slots) == OLD
    with pytest.raises(NotRestorable, match="none of 1 manifests can be read: manifest damaged"):
        chosen(RestoreRule(floor=NEW), [slot(1, NEW, digest="damaged")])


def _kept_by_parity(version: Version) -> Protection:
    group = NodeGroup(members=("n0", "n1"), parity=("n2", "n3"))
    return Protection(version=version, seats=("n0", "n1"), nproc_per_node=1, groups=(group,))


def test_parity_version_is_chosen_if_nothing_newer_is_whole() -> None:
    rule = RestoreRule(floor=MIDDLE, protection=_kept_by_parity(OLD))
    assert chosen(rule, both(OLD, MIDDLE)) == MIDDLE
    choice = choose_version(rule, [*both(OLD), slot(0, MIDDLE)], manifest_of)
    assert choice.version == OLD
    assert "1:10 was committed but is lost; 1:9, protected by parity, is complete" in choice.sentence


def test_storage_is_chosen_only_without_a_version_in_memory() -> None:
    rule = RestoreRule(floor=MIDDLE, storage_url="/stored/job/step-00000005-g1")
    assert chosen(rule, both(MIDDLE)) == MIDDLE
    choice = choose_version(rule, [slot(0, MIDDLE)], manifest_of)
    assert choice.version is None
    assert "version 1:10 was committed" in choice.sentence
    assert choice.sentence.endswith("the job restores /stored/job/step-00000005-g1")


def finished(
    slots: Sequence[SlotInfo], rank: int, step: int, generation: int = 1, *, is_last: bool = False
) -> list[SlotInfo]:
    """Return the slots, with the step that rank ``rank`` recorded as its last finished one."""
    mark = {"finished": Version(generation, step), "finished_by": rank, "loop_ended": is_last}
    return [msgspec.structs.replace(slot, **mark) if slot.rank == rank else slot for slot in slots]


def test_step_whose_end_a_rank_did_not_reach_is_repeated() -> None:
    choice = choose_version(RestoreRule(floor=OLD), finished(both(OLD, MIDDLE), 1, 9), manifest_of)
    assert (choice.version, choice.repeats) == (OLD, True)
    assert choice.unfinished == "rank 1 on n1 had not come to the end of step 10"


def test_unfinished_step_is_named_without_earlier_version() -> None:
    early = Version(1, 1)
    for slots in (both(MIDDLE), both(early, MIDDLE)):
        choice = choose_version(RestoreRule(floor=early), finished(slots, 0, 9), manifest_of)
        assert (choice.version, choice.repeats) == (MIDDLE, False)
        assert choice.unfinished == "rank 0 on n0 had not come to the end of step 10"


@pytest.mark.parametrize("floor", [Version(1, 1), OLD, MIDDLE])
def test_last_step_is_repeated_for_the_work_after_it(floor: Version) -> None:
    slots = finished(both(Version(1, 1), OLD, MIDDLE), 1, 10, is_last=True)
    choice = choose_version(RestoreRule(floor=floor), slots, manifest_of)
    assert (choice.version, choice.repeats) == (OLD, True)
    assert choice.unfinished.startswith("step 10 was the last one")
