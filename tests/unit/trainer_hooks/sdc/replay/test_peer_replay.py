"""Ranks repeat each other's work: runs without faults give no statements, and faults give those that name the rank."""

from __future__ import annotations

import pytest

from everstep_trainer.sdc.replay.peer_replay import MAX_SKIPS
from everstep_trainer.sdc.witnesses import choose_arbiter
from tests.support.ranks.kept_ranks import KeptRanks
from tests.unit.trainer_hooks.sdc.replay.auditing_ranks import Training, roles, train_by_run, train_ranks


@pytest.mark.parametrize(
    "training",
    [
        Training(),
        Training(model="convolutions", steps=9),
        Training(model="mlp", steps=4),
        Training(model="checkpointed", autocast=True),
        Training(wrap="fsdp"),
        Training(wrap="root", steps=5),
        pytest.param(Training(model="checkpointed", wrap="fsdp", autocast=True), marks=pytest.mark.nightly),
    ],
    ids=lambda training: f"{training.model}-{training.wrap}",
)
def test_clean_training_is_audited_without_a_trace(kept_ranks: KeptRanks, training: Training) -> None:
    audited = train_ranks(kept_ranks, 3, training)
    plain = train_ranks(kept_ranks, 3, Training(**{**training.__dict__, "interval": None}))
    assert [rank["statements"] for rank in audited] == [[], [], []]
    assert [rank["lines"] for rank in audited] == [[], [], []]
    units = len(audited[0]["units"])
    assert [rank["clean"] for rank in audited] == [list(range(training.steps + 1 - units))] * 3
    assert [rank["state"] for rank in audited] == [rank["state"] for rank in plain]


@pytest.mark.parametrize("virtual_ranks", [None, 4])
def test_run_audits_replicas_and_virtual_ranks(kept_ranks: KeptRanks, virtual_ranks: int | None) -> None:
    ranks = kept_ranks.call(2, train_by_run, virtual_ranks)
    # Three audits of each of the six units make the steps before them clean.
    assert ranks == [{"mismatches": 0, "clean": [*range(1, 8)]}] * 2


@pytest.mark.parametrize(
    ("compiled", "wrap"),
    [
        ("in place", "fsdp"),
        ("wrapped", "ddp"),
        pytest.param("in place", "ddp", marks=pytest.mark.nightly),
        pytest.param("wrapped", "fsdp", marks=pytest.mark.nightly),
    ],
)
def test_compiled_blocks_are_audited(kept_ranks: KeptRanks, compiled: str, wrap: str) -> None:
    ranks = train_ranks(kept_ranks, 2, Training(compiled=compiled, wrap=wrap))
    assert [(rank["statements"], rank["lines"]) for rank in ranks] == [([], []), ([], [])]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_one_wrong_output_is_a_transient_of_its_rank(kept_ranks: KeptRanks, wrap: str) -> None:
    ranks = train_ranks(kept_ranks, 4, Training(wrap=wrap, fault=(1, "blocks.0", "once")))
    ((step, owner), case), *rest = roles(ranks).items()
    assert (step, owner, rest) == (2, 1, [])
    (_, original, rerun), (peer, _, replayed), (arbiter, _, arbitrated) = (
        case[role] for role in ("owner", "peer", "arbiter")
    )
    assert len({1, peer, arbiter}) == 3
    assert original != rerun
    assert rerun == replayed == arbitrated
    (difference,) = {statement["difference"] for statement in ranks[arbiter]["statements"]}
    assert difference.startswith("output 0: 1 of 192 elements differ, the first at [0, 0, 3]: ")
    (unit,) = {statement["unit"] for rank in ranks for statement in rank["statements"]}
    assert unit == "blocks.0 forward, micro-batch 0"


def test_persistent_fault_is_repeated_by_its_rank_alone(kept_ranks: KeptRanks) -> None:
    ranks = train_ranks(kept_ranks, 4, Training(fault=(2, "blocks.1.project", "always"), steps=3, fault_step=3))
    cases = roles(ranks)
    assert {owner for _, owner in cases} == {2, next(owner for _, owner in cases if owner != 2)}
    for (step, owner), case in cases.items():
        assert step == 3
        (rank, original, rerun), (peer, _, replayed), (_, _, arbitrated) = (
            case[role] for role in ("owner", "peer", "arbiter")
        )
        assert rank == owner
        assert original == rerun
        if owner == 2:
            assert original != replayed == arbitrated
        else:
            assert peer == 2
            assert original == arbitrated != replayed


def test_lying_partner_is_contradicted(kept_ranks: KeptRanks) -> None:
    ranks = train_ranks(kept_ranks, 3, Training(fault=(0, "words", "lie"), steps=7, fault_step=1))
    ((_, case),) = roles(ranks).items()
    (_, original, rerun), (peer, _, replayed), (_, _, arbitrated) = (
        case[role] for role in ("owner", "peer", "arbiter")
    )
    assert peer == 0
    assert original == rerun == arbitrated != replayed


def test_two_ranks_report_without_an_arbiter(kept_ranks: KeptRanks) -> None:
    ranks = train_ranks(kept_ranks, 2, Training(fault=(1, "head", "once"), steps=7, fault_step=6))
    ((_, case),) = roles(ranks).items()
    assert sorted(case) == ["owner", "peer"]
    (owner, original, rerun), (_, _, replayed) = case["owner"], case["peer"]
    assert owner == 1
    assert original != rerun == replayed
    (peers,) = ranks[0]["statements"]
    assert not peers["expects_arbiter"]
    assert "bits" in peers["difference"]


def test_unrepeatable_unit_is_named_and_compared_by_tolerance(kept_ranks: KeptRanks) -> None:
    ranks = train_ranks(kept_ranks, 3, Training(fault=(-1, "blocks.1.project", "vary"), steps=14))
    assert [rank["statements"] for rank in ranks] == [[], [], []]
    (line,) = [line for rank in ranks for line in rank["lines"]]
    assert line.startswith("blocks.1 is not bitwise repeatable: project (output 0")


def test_large_error_in_an_unrepeatable_unit_is_found(kept_ranks: KeptRanks) -> None:
    ranks = train_ranks(
        kept_ranks, 4, Training(fault=(2, "blocks.1.project", "vary and once"), steps=15, fault_step=15)
    )
    cases = roles(ranks)
    assert {owner for _, owner in cases} == {2}
    (case,) = cases.values()
    (_, original, rerun), (_, _, replayed), (_, _, arbitrated) = (case[role] for role in ("owner", "peer", "arbiter"))
    assert original != rerun
    assert rerun == replayed == arbitrated


def test_unit_that_is_always_skipped_is_left_out(kept_ranks: KeptRanks) -> None:
    steps = 6 * MAX_SKIPS
    ranks = train_ranks(kept_ranks, 2, Training(steps=steps, odd_steps=tuple(range(1, 1 + steps))))
    left_out = [line for line in ranks[0]["lines"] if "does not cover" in line]
    assert [line.split(":")[0] for line in left_out] == [
        f"audit peer_replay does not cover blocks.{n}" for n in range(3)
    ]
    assert all(line.endswith(f"({MAX_SKIPS} audits in a row were skipped)") for line in left_out)
    # From then on the other three units alone make steps clean.
    assert ranks[0]["clean"] == ranks[1]["clean"] == [steps - 8, steps - 7, steps - 6]


def test_model_is_one_unit_if_no_block_can_be_sent(kept_ranks: KeptRanks) -> None:
    ranks = train_ranks(kept_ranks, 3, Training(model="cached", steps=10))
    assert [rank["units"] for rank in ranks] == [["model"]] * 3
    assert [rank["statements"] for rank in ranks] == [[], [], []]
    *left_out, last = ranks[0]["lines"]
    assert [line.split(":")[0] for line in left_out] == [
        f"audit peer_replay does not cover blocks.{n}" for n in range(3)
    ]
    assert last == "audit peer_replay computes model as a whole again, since no block of it can be"
    # Steps 2 to 4 left the blocks out; from step 5 on the model was compared.
    assert ranks[0]["clean"] == ranks[1]["clean"] == [4, 5, 6, 7, 8, 9]


def test_outputs_used_beside_others_made_of_them_accuse_no_rank(kept_ranks: KeptRanks) -> None:
    ranks = train_ranks(kept_ranks, 3, Training(model="means", steps=6))
    assert [(rank["units"], rank["statements"]) for rank in ranks] == [(["layers.0", "layers.1"], [])] * 3
    words = "only its forward pass is audited: the loss uses an output from which another output is computed"
    assert ranks[0]["lines"] == [f"audit peer_replay: layers.{n}: {words}" for n in range(2)]
    assert ranks[0]["clean"] == [2, 3, 4], "steps 1 and 2 compared nothing"


def test_fault_in_a_model_without_units_is_found(kept_ranks: KeptRanks) -> None:
    ranks = train_ranks(kept_ranks, 4, Training(model="cached", fault=(1, "blocks.2", "once"), steps=8, fault_step=7))
    ((step, owner), case), *rest = roles(ranks).items()
    assert (step, owner, rest) == (7, 1, [])
    (_, original, rerun), (_, _, replayed), (_, _, arbitrated) = (case[role] for role in ("owner", "peer", "arbiter"))
    assert original != rerun == replayed == arbitrated


def test_arbiter_is_on_a_third_node_if_there_is_one() -> None:
    assert choose_arbiter(0, 1, 5, ("a", "b", "b", "a", "c")) == 4
    assert choose_arbiter(0, 1, 4, ("a", "b", "b", "a")) == 2
    assert choose_arbiter(3, 0, 4, ()) == 1
