"""Audits of gradients before, in and after the collective: the faults that they find, and the ranks that they name."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from bench.sdc.judging import Outcome, Statement, judge_all
from everstep.vocabulary import AuditKind, AuditRole
from everstep_trainer.digests.digest import tensor_digest
from everstep_trainer.parallel.ordered_gradients import replicate
from everstep_trainer.sdc.audit import AuditSetup, Mismatch
from everstep_trainer.sdc.build import GRADIENT_AUDITS, build_chain
from everstep_trainer.sdc.gradients import gradient_norms
from everstep_trainer.sdc.gradients.collectives import Collectives, row_digests, witnessed
from everstep_trainer.sdc.gradients.gradient_buffers import MAX_EMPTY_AUDITS, GradientBuffers, _Arrived
from everstep_trainer.sdc.gradients.gradient_exchange import GradientTap
from everstep_trainer.sdc.gradients.gradient_norms import (
    WARMUP_STEPS,
    GradientNorms,
    _Agreement,
    _SuspectedStep,
    norms_of,
)
from everstep_trainer.sdc.presets import audit_options
from tests.support.ranks.kept_ranks import KeptRanks
from tests.unit.trainer_hooks.sdc.gradients.faulty_gradients import (
    FAULTY_RANK,
    FAULTY_STEP,
    OTHER_RANK,
    REPEATED_FROM,
    train_with_fault,
)

WORLD = 4
AUDITS = {"gradient_norm": {"interval": 1}, "gradient_buffer": {"interval": 1}, "collective": {"interval": 1}}


SELDOM = {"gradient_norm": {"interval": 4}}
"""Norms are read in steps 30 and 34, and not in the faulty step between them."""


def train(
    ranks: KeptRanks,
    layout: str,
    fault: str,
    audits: Any = AUDITS,
    repetitions: Sequence[str] = (),
    repeated_from: int = REPEATED_FROM,
) -> list[dict[str, Any]]:
    return ranks.call(WORLD, train_with_fault, layout, fault, audits, repetitions, repeated_from)


def statements(results: list[dict[str, Any]], generation: int = 0) -> list[tuple[int, Mismatch]]:
    """Return the statements of each process in a generation; a process is numbered by its first rank."""
    return [(process, each) for process, outcome in enumerate(results) for each in outcome["mismatches"][generation]]


@pytest.mark.parametrize(
    ("layout", "interval"), [("ddp", 1), ("fsdp2", 1), ("ddp", 2)], ids=["ddp", "fsdp2", "repeated between two audits"]
)
def test_outlying_gradient_is_suspected_and_repeated(kept_ranks: KeptRanks, layout: str, interval: int) -> None:
    audits = {**AUDITS, "gradient_norm": {"interval": interval}}
    results = train(kept_ranks, layout, "gradient", audits, ["same seats"])
    ((rank, suspicion),) = [
        statement for statement in statements(results) if statement[1].audit is AuditKind.GRADIENT_NORM
    ]
    assert (rank, suspicion.owner, suspicion.step) == (FAULTY_RANK, FAULTY_RANK, FAULTY_STEP)
    assert not suspicion.original
    assert not suspicion.digest
    ((rank, proof),) = statements(results, 1)
    assert (rank, proof.owner, proof.step) == (FAULTY_RANK, FAULTY_RANK, FAULTY_STEP)
    assert proof.original != proof.digest


@pytest.mark.parametrize("seats", ["same seats", "exchanged seats"])
@pytest.mark.parametrize("batch", ["odd batch", "batch of NaN"])
def test_unusual_batch_is_no_fault_once_repeated(kept_ranks: KeptRanks, batch: str, seats: str) -> None:
    results = train(kept_ranks, "ddp", batch, AUDITS, [seats])
    assert [rank for rank, _ in statements(results)] == [FAULTY_RANK]
    assert [statement.clears_owner for _, statement in statements(results, 1)] == [True] * (seats == "exchanged seats")


@pytest.mark.parametrize(
    ("fault", "wrong_results"),
    [("gradient", 1), ("huge gradient", 1), ("NaN gradient", 1), ("permanent NaN gradient", 2)],
)
def test_faulty_gpu_is_named_in_another_seat(kept_ranks: KeptRanks, fault: str, wrong_results: int) -> None:
    results = train(kept_ranks, "ddp", fault, {"gradient_norm": {"interval": 1}}, ["exchanged seats"])
    ((process, proof),) = statements(results, 1)
    assert (process, proof.owner, proof.step) == (FAULTY_RANK, OTHER_RANK, FAULTY_STEP)
    assert proof.wrong_results == wrong_results
    assert proof.original != proof.digest


def test_faulty_gpu_is_named_in_the_first_step_of_a_generation(kept_ranks: KeptRanks) -> None:
    """DDP assigns gradients to other buckets in that step."""
    audits = {"gradient_norm": {"interval": 1}}
    results = train(kept_ranks, "ddp", "permanent NaN gradient", audits, ["exchanged seats"], FAULTY_STEP)
    ((process, proof),) = statements(results, 1)
    assert (process, proof.owner, proof.wrong_results) == (FAULTY_RANK, OTHER_RANK, 2)


def test_nan_in_one_shard_is_judged_alike_on_all_ranks(kept_ranks: KeptRanks) -> None:
    ((rank, suspicion),) = statements(train(kept_ranks, "fsdp2", "NaN in one row", {"gradient_norm": {"interval": 1}}))
    assert (rank, suspicion.owner, suspicion.step) == (FAULTY_RANK, FAULTY_RANK, FAULTY_STEP)


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_nan_between_two_readings_is_traced_to_its_rank(kept_ranks: KeptRanks, layout: str) -> None:
    results = train(kept_ranks, layout, "permanent NaN gradient", SELDOM, ["same seats"])
    ((_, unclear),) = statements(results)
    assert (unclear.wrong_results, unclear.step) == (0, FAULTY_STEP - 1)
    ((process, suspicion),) = statements(results, 1)
    assert (process, suspicion.owner, suspicion.step) == (FAULTY_RANK, FAULTY_RANK, FAULTY_STEP)


@pytest.mark.parametrize("audits", [AUDITS, SELDOM], ids=["every step", "seldom"])
def test_overflow_that_a_scaler_leaves_out_is_no_fault(
    kept_ranks: KeptRanks, audits: dict[str, dict[str, int]]
) -> None:
    assert not statements(train(kept_ranks, "ddp", "overflow under a scaler", audits))


def norms_with(*factors: float) -> torch.Tensor:
    """Norms of three ranks and two groups; those of rank 1 are multiples."""
    return torch.tensor([[[1.0, 2.0], [factor, 2.0], [1.5, 1.8]] for factor in factors])


@pytest.fixture
def norms() -> Iterator[GradientNorms]:
    yield GradientNorms(setup_of(list[Mismatch]().append), GradientTap([], 3))
    gradient_norms.to_repeat.clear()


def test_errors_of_one_rank_do_not_become_usual(norms: GradientNorms) -> None:
    for step, reading in enumerate(norms_with(*[1.0] * WARMUP_STEPS, *[12.0] * 20), 1):
        assert not norms._judge(step, step - 1, reading)
    assert norms._judge(100, 99, norms_with(40.0)[0])


def test_unusual_samples_become_usual_once_repeated(norms: GradientNorms) -> None:
    for step, reading in enumerate(norms_with(*[1.0] * WARMUP_STEPS), 1):
        norms._judge(step, step - 1, reading)
    (odd,) = norms_with(40.0)
    assert norms._judge(100, 99, odd)
    norms._agreed = _Agreement(suspected_step=100, suspected_rank=1, is_exchanged=True)
    assert not norms._judge(100, 99, odd), "the repeated step has the norm of the suspected one"
    assert not norms._judge(101, 100, odd * 2)


@pytest.mark.parametrize(
    ("repeated", "wrong_results"),
    [
        ([1.0, 1.2, 30.0], [1]),
        ([1.0, 1.2, math.nan], [2]),
        ([1.0, math.nan, 30.0], [1]),
        ([1.0, 80.0, 30.0], []),
        ([1.1, 1.2, math.nan], []),
    ],
    ids=["usual now", "unusual in both seats", "unusual samples", "other unusual norm", "other samples"],
)
def test_repetition_is_judged_by_its_changes(repeated: list[float], wrong_results: list[int]) -> None:
    """This process was suspected as rank 1. It is now rank 2, whose samples always give an unusual norm."""
    mismatches: list[Mismatch] = []
    norms = GradientNorms(setup_of(mismatches.append, rank=2), GradientTap([], 3))
    before = _SuspectedStep(torch.tensor([[1.0], [math.nan], [30.0], [1.3]]), owner=1, is_own=True)
    norms._compare_repetition(7, before, torch.tensor([*repeated, 1.3])[:, None])
    assert [mismatch.wrong_results for mismatch in mismatches] == wrong_results


def test_flip_in_transport_accuses_both_ends(kept_ranks: KeptRanks) -> None:
    results = train(kept_ranks, "ddp", "transport")
    stated = statements(results)
    assert {each.owner for _, each in stated} == {0}, "the flipped bit came from rank 0"
    assert sorted((rank, each.role) for rank, each in stated) == [(0, AuditRole.OWNER), (FAULTY_RANK, AuditRole.PEER)]


@pytest.mark.parametrize("fault", ["rest", "sending"])
def test_gradient_changed_after_arrival_is_stated_by_its_rank(kept_ranks: KeptRanks, fault: str) -> None:
    ((rank, mismatch),) = statements(train(kept_ranks, "ddp", fault, {"gradient_buffer": {"interval": 1}}))
    assert (rank, mismatch.owner, mismatch.step) == (FAULTY_RANK, FAULTY_RANK, FAULTY_STEP)
    assert mismatch.difference == "1 of 5 gradients changed after they had arrived (bucket 0)"


def test_buffer_changed_while_sent_accuses_no_receiver(kept_ranks: KeptRanks) -> None:
    ((rank, mismatch),) = statements(train(kept_ranks, "ddp", "sending", {"collective": {"interval": 1}}))
    assert (rank, mismatch.owner, mismatch.step) == (FAULTY_RANK, FAULTY_RANK, FAULTY_STEP)
    assert mismatch.difference == "the buffer changed while it was sent"


def test_divergent_result_is_named_by_two_witnesses(kept_ranks: KeptRanks) -> None:
    results = train(kept_ranks, "ddp", "result")
    first = [(rank, each) for rank, each in statements(results) if each.step == FAULTY_STEP]
    assert {each.owner for _, each in first} == {FAULTY_RANK}
    assert sorted(each.role for _, each in first) == [AuditRole.ARBITER, AuditRole.OWNER, AuditRole.PEER]
    digests = {each.role: each.digest for _, each in first}
    assert digests[AuditRole.PEER] == digests[AuditRole.ARBITER] != ""


def test_audits_leave_training_as_it_was(kept_ranks: KeptRanks) -> None:
    audited, plain = train(kept_ranks, "ddp", "none"), train(kept_ranks, "ddp", "none", {})
    assert not statements(audited)
    assert max(audited[0]["clean_since"]) > FAULTY_STEP
    assert all(torch.equal(a, b) for a, b in zip(audited[0]["parameters"], plain[0]["parameters"], strict=True))


def setup_of(report: Any, rank: int = 1, world: int = 3) -> AuditSetup:
    return AuditSetup(
        rank=rank,
        world_size=world,
        nodes=(),
        device=torch.device("cpu"),
        objects={},
        has_replica_per_rank=True,
        report=report,
    )


@pytest.mark.parametrize("numel", [8, 70_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_sum_is_found_and_rounding_is_not(numel: int, dtype: torch.dtype) -> None:
    mismatches: list[Mismatch] = []
    audit = Collectives(setup_of(mismatches.append), GradientTap([], 3))
    parts = torch.randn(3, numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    total = parts[0].clone()
    for other in parts[1:]:
        total += other
    audit.on_received(parts)
    audit.on_sum(total)
    audit._check_sums(7)
    assert not mismatches
    total[5] += 32.0
    audit.on_received(parts)
    audit.on_sum(total)
    audit._check_sums(7)
    assert [(each.owner, each.unit) for each in mismatches] == [(1, "sum of bucket 1")]


def judged(wrong: Sequence[tuple[int, int]], changed: Sequence[int] = ()) -> set[tuple[Outcome, int | None]]:
    """Return the judgements of slices (sender, receiver) whose two ends have different digests.

    Args:
        wrong: The slices.
            changed: Senders whose buffer differs from the gradients that had arrived at their parameters.
    """
    sent = torch.arange(WORLD * 2 * WORLD).view(WORLD, 2, WORLD)
    received = sent.permute(2, 1, 0).clone()
    for sender, receiver in wrong:
        received[receiver, 1, sender] += 1000
    flags = torch.zeros(WORLD, 2, dtype=torch.bool)
    flags[list(changed), 1] = True
    judged_statements: list[Statement] = []
    for rank in range(WORLD):
        setup = setup_of(lambda mismatch, rank=rank: judged_statements.append(Statement(rank, mismatch)), rank, WORLD)
        Collectives(setup, GradientTap([], WORLD))._check_transport(7, sent, received, flags)
    return {(verdict.outcome, verdict.rank) for verdict in judge_all(judged_statements)}


def test_one_wrong_slice_between_two_ranks_is_a_tie() -> None:
    assert judged([(2, 0)]) == {(Outcome.TIE, None)}
    assert judged([(2, 0), (1, 3)]) == {(Outcome.PROGRAM, None)}


@pytest.mark.parametrize(
    "wrong",
    [[(2, 0), (2, 3)], [(0, 2), (1, 2), (3, 2)], [(2, 0), (2, 1), (0, 2), (1, 2)]],
    ids=["sender", "receiver", "everything"],
)
def test_rank_at_several_wrong_slices_is_named_by_other_ends(wrong: list[tuple[int, int]]) -> None:
    assert judged(wrong) == {(Outcome.CONVICTED, 2)}


def subsets(pairs: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], ...]]:
    return [subset for count in range(len(pairs) + 1) for subset in itertools.combinations(pairs, count)]


def test_faulty_sender_and_lying_receiver_convict_no_other() -> None:
    sender, liar = 0, 1
    sent_wrong = subsets([(sender, other) for other in range(WORLD) if other != sender])
    lies = subsets([(other, liar) for other in range(WORLD) if other != liar])
    named = {rank for a in sent_wrong for b in lies for rank in witnessed(sorted({*a, *b}))}
    assert named == {sender, liar}


def test_slice_that_a_rank_keeps_is_its_own() -> None:
    assert judged([(2, 2)]) == {(Outcome.STRIKE, 2)}


def test_faulty_sender_and_receiver_accuse_no_honest_partner() -> None:
    found = judged([(0, 1), (0, 3), (1, 2), (3, 2)])
    assert found == {(Outcome.PROGRAM, None)}, "ranks 1 and 3 may be wrong as well as 0 and 2"


def test_buffer_changed_while_sent_differs_from_arrivals() -> None:
    mismatches: list[Mismatch] = []
    parameter, gradient = torch.nn.Parameter(torch.zeros(9)), torch.randn(9)
    audit = GradientBuffers(setup_of(mismatches.append), _OrderedTap([parameter]))
    for step, flips in enumerate((False, False, True)):  # the first step records where the gradients lie
        audit.begin_step(step, due=True)
        if step:
            audit._arrived[id(parameter)] = _Arrived(0, tensor_digest(gradient))
        sent = gradient.clone()
        audit.on_local([parameter], [sent], sent, [3, 3, 3])
        if flips:
            sent.view(torch.int32)[4] ^= 1
        audit.on_received(torch.randn(3, 3))
        audit.before_update(step, due=True)
    (mismatch,) = mismatches
    assert (mismatch.step, mismatch.difference) == (2, "1 of 1 gradients changed after they had arrived (bucket 0)")


def test_change_is_stated_with_the_number_of_its_bucket() -> None:
    mismatches: list[Mismatch] = []
    parameters, gradient = [torch.nn.Parameter(torch.zeros(9)) for _ in range(2)], torch.randn(9)
    audit = GradientBuffers(setup_of(mismatches.append), _OrderedTap(parameters))
    audit.begin_step(1, due=True)
    for number, parameter in enumerate(parameters):
        if number == 1:  # the first parameter's gradient was not seen to arrive
            audit._arrived[id(parameter)] = _Arrived(0, tensor_digest(gradient))
        audit.on_local([parameter], [gradient + 1], gradient + 1, [3, 3, 3])
        audit.on_received(torch.randn(3, 3))
    audit.before_update(1, due=True)
    assert mismatches[0].difference.endswith("(bucket 1)")


def test_model_whose_gradients_never_arrive_is_left_out() -> None:
    audit = GradientBuffers(setup_of(print), _OrderedTap())
    for step in range(MAX_EMPTY_AUDITS):
        assert not audit.left_out
        audit.begin_step(step, due=True)
        audit.before_update(step, due=True)
        assert audit.compared_part(0) is None
    assert list(audit.left_out) == [0]


def test_smallest_parameters_are_left_out() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (4, 5, 600, 2, 391)]
    audit = GradientBuffers(setup_of(print), _OrderedTap(parameters))
    assert sorted(watched.numel() for watched in audit._watched.values()) == [5, 391, 600], "6 elements are under 1 %"


def test_tap_opened_twice_is_closed_at_once() -> None:
    tap = _OrderedTap()
    audit = Collectives(setup_of(print), tap)
    for _ in range(2):  # the first step has no update
        tap.open(audit)
    tap.close(audit)
    assert tap._open == []


class _OrderedTap(GradientTap):
    def __init__(self, parameters: Sequence[torch.nn.Parameter] = ()) -> None:
        super().__init__([], 3)
        self.replicas = [torch.nn.ParameterList(parameters)]  # type: ignore[list-item]

    @property
    def sees_sums(self) -> bool:
        return True


def test_row_digests_see_swaps_and_even_flips() -> None:
    rows = torch.randn(2, 70_000, generator=torch.Generator().manual_seed(1))
    before = row_digests(rows)
    rows[0, [4, 40_000]] = rows[0, [40_000, 4]]
    rows.view(torch.int32)[1, [2, 3]] ^= 1 << 30
    assert (row_digests(rows) != before).all()


def honest_gradients(rank: int, world: int, program: str) -> list[str]:
    """Train a fault-free program on one rank with audits of gradients in each step; return the rank's statements."""
    mismatches: list[Mismatch] = []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    is_sparse = program == "sparse embedding"
    if is_sparse:
        model = nn.Sequential(nn.EmbeddingBag(50, 32, sparse=True, mode="sum"), nn.Linear(32, 4))
    replicas = replicate(model, exact=not is_sparse, equal_already=True)
    actor = replicate(nn.Linear(16, 4), exact=True, equal_already=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    setup = msgspec.structs.replace(
        setup_of(mismatches.append, rank, world), objects={"model": replicas, "actor": actor}
    )
    tap = GradientTap(setup.objects.values(), world)
    audits = [GradientBuffers(setup, tap), Collectives(setup, tap)]
    if program == "logging hook":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    for step in range(1, 5):
        for audit in audits:
            audit.begin_step(step, due=True)
        optimizer.zero_grad()
        masks = [p.register_hook(lambda gradient: gradient * 0.5) for p in model.parameters()] * (program == "masks")
        torch.manual_seed(100 * step + rank)
        if program == "actor under no_sync":
            with actor.no_sync():
                (actor(torch.randn(8, 16)).square().mean() * (rank == 0)).backward()
        with replicas.no_sync() if program in ("logging hook", "two micro-batches") else nullcontext():
            replicas(torch.randint(50, (8, 3)) if is_sparse else torch.randn(8, 16)).square().mean().backward()
        if program in ("logging hook", "two micro-batches"):
            replicas(torch.randn(8, 16)).square().mean().backward()
        for mask in masks:
            mask.remove()
        for audit in audits:
            audit.before_update(step, due=True)
        optimizer.step()
    return [f"{mismatch.audit} {mismatch.unit}" for mismatch in mismatches]


@pytest.mark.parametrize(
    "program", ["logging hook", "two micro-batches", "masks", "actor under no_sync", "sparse embedding"]
)
def test_honest_program_is_not_accused(kept_ranks: KeptRanks, program: str) -> None:
    assert kept_ranks.call(3, honest_gradients, program) == [[], [], []]


def tracked_inside(rank: int, world: int) -> list[str]:
    """Return the gaps of the audits of gradients, of a script that tracks the model and not its wrapper."""
    model = nn.Linear(16, 4)
    wrapper = replicate(model, exact=True, equal_already=True)
    setup = msgspec.structs.replace(setup_of(print, rank, world), objects={"model": model}, ddp_wrappers=(wrapper,))
    chain = build_chain(audit_options("standard", is_sharded=False), setup, 1, lambda step: None)
    assert chain is not None
    return [gap for audit in chain._audits if isinstance(audit, GRADIENT_AUDITS) for gap in audit.gaps()]


def test_model_tracked_without_its_wrapper_is_covered(kept_ranks: KeptRanks) -> None:
    assert kept_ranks.call(3, tracked_inside) == [[], [], []]


def sharded_beside_replicated(rank: int, world: int) -> list[bool]:
    """Return what a tap sees of a sharded module beside a replicated head."""
    body = fully_shard(nn.Linear(16, 16))
    head = replicate(nn.Linear(16, 4), exact=True, equal_already=True)
    tap = GradientTap([body, head], world)
    return [tap.sees_sums, tap.sees_gradients]


def test_replicated_head_beside_shards_is_left_out(kept_ranks: KeptRanks) -> None:
    assert kept_ranks.call(3, sharded_beside_replicated) == [[False, True]] * 3


def unfrozen_layer(rank: int, world: int) -> tuple[list[Mismatch], str]:
    mismatches: list[Mismatch] = []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
    replicas = replicate(model, exact=True, equal_already=True)
    setup = msgspec.structs.replace(setup_of(mismatches.append, rank, world), objects={"model": replicas})
    audit = Collectives(setup, GradientTap(setup.objects.values(), world))
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[assignment, method-assign]
    logging.getLogger("everstep_trainer.sdc.gradients.collectives").addHandler(handler)
    audit.begin_step(1, due=True)
    torch.manual_seed(rank)
    replicas(torch.randn(8, 16)).square().mean().backward()
    with replicas.no_sync():  # a second forward pass, whose gradients stay on this rank
        replicas(torch.randn(8, 16)).square().mean().backward()
    audit.before_update(1, due=True)
    logging.getLogger("everstep_trainer.sdc.gradients.collectives").removeHandler(handler)
    return mismatches, " ".join(record.getMessage() for record in records)


def test_gradients_that_differ_everywhere_name_the_parameters(kept_ranks: KeptRanks) -> None:
    (mismatches, text), *others = kept_ranks.call(3, unfrozen_layer)
    assert not mismatches
    assert not any(statement for statement, _ in others)
    assert "0.weight" in text
    assert "second forward pass under no_sync" in text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_norms_of_gradients_of_any_dtype(dtype: torch.dtype) -> None:
    norms = norms_of([torch.full((4, 4), 2, dtype=dtype), torch.full((9,), 3, dtype=dtype)])
    assert [norm.item() for norm in norms] == [8.0, 9.0]
    assert {norm.dtype for norm in norms} == {torch.float32}
