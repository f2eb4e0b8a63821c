"""Audits of memory: every changed bit is found, and writes of the program are not reported."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from everstep.vocabulary import AuditKind
from everstep_trainer.sdc import state_digests
from everstep_trainer.sdc.audit import AuditSetup, Mismatch
from everstep_trainer.sdc.state_digests import StateAudit


class Loop:
    """A model that is trained with an audit of its memory in each step."""

    def __init__(self, world_size: int = 1) -> None:
        self.model = nn.Sequential(nn.Linear(150, 200), nn.BatchNorm1d(200), nn.Linear(200, 1))
        self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-3)
        self.reported: list[Mismatch] = []
        setup = AuditSetup(
            rank=0,
            world_size=world_size,
            nodes=tuple(f"node-{rank}" for rank in range(world_size)),
            device=torch.device("cpu"),
            objects={"model": self.model, "optimizer": self.optimizer},
            has_replica_per_rank=True,
            report=self.reported.append,
        )
        self.audit = StateAudit(setup)
        self.step = 0

    def run(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            self.audit.begin_step(self.step, due=True)
            self.model(torch.randn(8, 150)).square().mean().backward()
            self.audit.before_update(self.step, due=True)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.audit.after_update(self.step, due=True)

    def tensors(self) -> list[torch.Tensor]:
        moments = (value for state in self.optimizer.state.values() for value in state.values())
        return [*self.model.parameters(), *moments]


def corrupt(tensor: torch.Tensor) -> None:
    """Change a bit without torch's count of writes, as broken memory does."""
    tensor.detach().numpy().reshape(-1).view("uint8")[0] ^= 1


@pytest.mark.parametrize("number", range(18))
def test_changed_bit_of_any_tensor_is_found(number: int) -> None:
    loop = Loop()
    loop.run(2)
    tensors = loop.tensors()
    assert len(tensors) == 6 * 4
    corrupt(tensors[number])
    loop.run()
    (found,) = loop.reported
    assert found.audit is AuditKind.STATE
    assert found.step == 2
    assert found.original != found.digest
    loop.run(3)
    assert len(loop.reported) == 1


def test_counted_writes_are_not_reported() -> None:
    loop = Loop()
    loop.run(2)
    with torch.no_grad():
        loop.model.get_parameter("0.weight").mul_(0.5)
    loop.run(2)
    assert not loop.reported


def test_uncounted_writes_to_many_tensors_are_the_programs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    loop = Loop()
    for _ in range(3):
        loop.run(2)
        for tensor in loop.tensors():
            corrupt(tensor)
    loop.run(2)
    assert not loop.reported
    assert caplog.text.count("the program writes past it") == 1


@pytest.mark.parametrize(("others", "is_hint"), [(0, True), (2, False)])
def test_many_changes_on_one_rank_hint_at_its_memory(
    others: int, is_hint: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``others``: ranks besides this one that saw changes."""
    monkeypatch.setattr(dist, "all_reduce", lambda ranks: ranks.add_(others))
    loop = Loop(world_size=4)
    loop.run(2)
    for tensor in loop.tensors():
        corrupt(tensor)
    loop.run()
    assert not loop.reported
    assert ("on this rank alone" in caplog.text) is is_hint
    assert ("the program writes past it, so" in caplog.text) is not is_hint


def test_parts_cover_the_state_within_the_promised_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(state_digests.PART_BYTES, "cpu", 100 << 10)
    loop = Loop()
    promised = loop.audit.rounds
    loop.run(2)
    parts = loop.audit._plan()
    covered = sum(piece.bits().nbytes for part in parts for unit in part for piece in unit)
    buffers = sum(buffer.nbytes for buffer in loop.model.buffers())
    assert covered == buffers + sum(tensor.nbytes for tensor in loop.tensors())
    assert 2 < len(parts) + 1 <= promised


def test_buffer_written_past_torch_accuses_no_node(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    loop = Loop()
    loop.run(2)
    corrupt(loop.model.get_buffer("1.running_mean"))  # as a program writes statistics by .data on one rank
    with torch.no_grad():
        loop.model[1].eval()
    loop.run()
    assert not loop.reported
    assert "running_mean" in caplog.text
