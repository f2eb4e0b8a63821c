"""Audits of gradients before, in and after the collective: what they see, whom they name, and what they leave alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from everstep_trainer.sdc.audit import AuditSetup, Mismatch
from everstep_trainer.sdc.gradients.collectives import Collectives, row_digests
from everstep_trainer.sdc.gradients.gradient_exchange import GradientTap

from everstep.vocabulary import AuditLink, AuditRole
from tests.support.audited_training import FAULTY_RANK, FAULTY_STEP, train_with_fault
from tests.support.forked import ForkPool

WORLD = 4
LINKS = {"gradient_norm": {"interval": 1}, "collective": {"interval": 1}}


def train(forks: ForkPool, layout: str, fault: str, links: Any = LINKS) -> list[dict[str, Any]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [forks.start(train_with_fault, rank, WORLD, store.port, layout, fault, links) for rank in range(WORLD)]
    return [rank.result() for rank in ranks]


def statements(told: list[dict[str, Any]], key: str = "mismatches") -> list[tuple[int, Mismatch]]:
    return [(rank, each) for rank, one in enumerate(told) for each in one[key]]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_outlying_gradient_is_suspected_and_repeated(forks, layout):
    told = train(forks, layout, "gradient")
    ((rank, suspicion),) = [said for said in statements(told) if said[1].link is AuditLink.GRADIENT_NORM]
    assert (rank, suspicion.owner, suspicion.step) == (FAULTY_RANK, FAULTY_RANK, FAULTY_STEP)
    assert not suspicion.original
    assert not suspicion.digest
    ((rank, proof),) = statements(told, "repeated")
    assert (rank, proof.owner, proof.step) == (FAULTY_RANK, FAULTY_RANK, FAULTY_STEP)
    assert proof.original != proof.digest


def test_unusual_batch_is_no_fault_once_repeated(forks):
    told = train(forks, "ddp", "odd batch")
    assert [rank for rank, _ in statements(told)] == [FAULTY_RANK]
    assert not statements(told, "repeated")


def test_flip_in_transport_accuses_both_ends(forks):
    told = train(forks, "ddp", "transport")
    said = statements(told)
    assert {each.owner for _, each in said} == {0}, "it flipped a bit of what came from rank 0"
    assert sorted((rank, each.role) for rank, each in said) == [(0, AuditRole.OWNER), (FAULTY_RANK, AuditRole.PEER)]


def test_gradient_changed_at_rest_is_stated_by_its_rank(forks):
    ((rank, said),) = statements(train(forks, "ddp", "rest"))
    assert (rank, said.owner, said.step) == (FAULTY_RANK, FAULTY_RANK, FAULTY_STEP)
    assert said.difference == "1 of 6 gradients changed after they had arrived"


def test_divergent_result_is_named_by_two_witnesses(forks):
    told = train(forks, "ddp", "result")
    first = [(rank, each) for rank, each in statements(told) if each.step == FAULTY_STEP]
    assert {each.owner for _, each in first} == {FAULTY_RANK}
    assert sorted(each.role for _, each in first) == [AuditRole.ARBITER, AuditRole.OWNER, AuditRole.PEER]
    digests = {each.role: each.digest for _, each in first}
    assert digests[AuditRole.PEER] == digests[AuditRole.ARBITER] != ""


def test_audits_leave_training_as_it_was(forks):
    audited, plain = train(forks, "ddp", "none"), train(forks, "ddp", "none", {})
    assert not statements(audited)
    assert max(audited[0]["clean_since"]) > FAULTY_STEP
    assert all(torch.equal(a, b) for a, b in zip(audited[0]["parameters"], plain[0]["parameters"], strict=True))


def setup_of(report: Any) -> AuditSetup:
    return AuditSetup(
        rank=1,
        world_size=3,
        nodes=(),
        device=torch.device("cpu"),
        objects={},
        has_replica_per_rank=True,
        report=report,
    )


@pytest.mark.parametrize("numel", [8, 70_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_sum_is_found_and_rounding_is_not(numel, dtype):
    said: list[Mismatch] = []
    audit = Collectives(setup_of(said.append), GradientTap([], 3))
    parts = torch.randn(3, numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    total = parts[0].clone()
    for other in parts[1:]:
        total += other
    audit.on_received(parts)
    audit.on_sum(total)
    audit._check_sums(7)
    assert not said
    total[5] += 32.0
    audit.on_received(parts)
    audit.on_sum(total)
    audit._check_sums(7)
    assert [(each.owner, each.unit) for each in said] == [(1, "sum of bucket 1")]


def test_row_digests_see_swaps_and_even_flips():
    rows = torch.randn(2, 70_000, generator=torch.Generator().manual_seed(1))
    before = row_digests(rows)
    rows[0, [4, 40_000]] = rows[0, [40_000, 4]]
    rows.view(torch.int32)[1, [2, 3]] ^= 1 << 30
    assert (row_digests(rows) != before).all()
