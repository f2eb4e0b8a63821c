"""What all ranks' outcomes of a restore come to."""

from __future__ import annotations

from everstep_trainer.restore.agreement import RestoreOutcome, SlotKey, combine_outcomes, encode_live_tensors
from hypothesis import given
from hypothesis import strategies as st

from everstep.ids import Version

NAMES = tuple(f"t{i:02}" for i in range(20))


@given(st.lists(st.sets(st.integers(0, len(NAMES) - 1)), min_size=1, max_size=5))
def test_each_tensor_must_be_live_on_some_rank(live: list[set[int]]) -> None:
    verdict = combine_outcomes(
        [RestoreOutcome(True, live_tensors=encode_live_tensors(indices, len(NAMES))) for indices in live], NAMES
    )
    gone = [name for index, name in enumerate(NAMES) if not any(index in indices for indices in live)]
    assert verdict.succeeded
    if gone:
        assert f"{len(gone)} tensors are gone from all ranks ({', '.join(gone[:3])})" in verdict.error
        assert "give an optimizer all parameters from the start" in verdict.error
    else:
        assert not verdict.error


def test_error_of_one_rank_reaches_all_ranks() -> None:
    verdict = combine_outcomes(
        [RestoreOutcome(True), RestoreOutcome(False, error="rank 1: other model"), RestoreOutcome(True)], NAMES
    )
    assert (verdict.succeeded, verdict.error) == (False, "rank 1: other model")


def test_failed_slots_lead_to_another_choice_without_them() -> None:
    bad = SlotKey("n1", 0, Version(1, 2), False)
    verdict = combine_outcomes([RestoreOutcome(True), RestoreOutcome(False, (bad,), b"\x01")], NAMES)
    assert (verdict.succeeded, verdict.bad_slots, verdict.error) == (False, (bad,), "")
