"""Audits of optimizer updates: every update repeats bit for bit, and a wrong one is found on its rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import fully_shard

from everstep.vocabulary import AuditKind, AuditRole
from everstep_trainer.base.injected_flip import flip_bit
from everstep_trainer.sdc import updates
from everstep_trainer.sdc.audit import AuditSetup, Mismatch
from everstep_trainer.sdc.chain import AuditChain
from everstep_trainer.sdc.presets import AuditOptions
from everstep_trainer.sdc.updates import ELEMENTWISE, UpdateAudit
from everstep_trainer.state.tensors import local_part
from tests.support.ranks.kept_ranks import KeptRanks

OPTIONS = {AuditKind.UPDATE: AuditOptions(interval=1)}


class Net(nn.Module):
    """A large matrix, which is cut into slices, and small tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wide = nn.Linear(180, 411)
        self.norm = nn.LayerNorm(411)
        self.narrow = nn.Linear(411, 2)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.narrow(self.norm(self.wide(samples)))
        return out


class Training:
    """A model and optimizers with an audit in each step, on one rank or more."""

    def __init__(self, make: Callable[..., Any], *, audited: bool = True, shard: bool = False) -> None:
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        net = Net()
        self.model: nn.Module = net
        if shard:
            fully_shard(net.wide)
            fully_shard(net)
        self.step = 0
        self.optimizer = make(self.model.parameters())
        self.reported: list[Mismatch] = []
        setup = AuditSetup(
            rank=self.rank,
            world_size=self.world,
            nodes=tuple(f"node-{rank}" for rank in range(self.world)),
            device=torch.device("cpu"),
            objects={"model": self.model, "optimizer": self.optimizer},
            has_replica_per_rank=not shard,
            report=self.reported.append,
        )
        self.optimizer.register_step_pre_hook(lambda *_: self.chain.before_update(self.step) if self.chain else None)
        self.chain: AuditChain | None = None
        self.clean: list[int] = []
        if audited:
            self.audit = UpdateAudit(setup)
            self.chain = AuditChain([self.audit], OPTIONS, setup, 1, self.clean.append, rotations=1)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            if self.chain:
                self.chain.begin_step(self.step)
            generator = torch.Generator().manual_seed(100 * self.step + self.rank)
            self.model(torch.randn(8, 180, generator=generator)).square().mean().backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.clamp_(-2.0, 2.0)  # what a loop does after the update is no part of it
            self.optimizer.zero_grad()
            if self.chain:
                self.chain.step_finished(self.step)

    def corrupt_next(self, change: Callable[[], object]) -> None:
        """Make the next update read other values than the audit copied."""
        capture, changes = self.audit._capture, [change]

        def capture_then_change(number: int, *, has_closure: bool) -> None:
            capture(number, has_closure=has_closure)
            if changes:
                changes.pop()()

        self.audit._capture = capture_then_change  # type: ignore[method-assign]


def makes() -> Iterator[Any]:
    for kind in ELEMENTWISE:
        for flags in ({}, {"foreach": True}, {"foreach": False}):
            yield pytest.param(kind, {"lr": 1e-2, **flags}, id=f"{kind.__name__}-{flags}")
    for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad):
        yield pytest.param(kind, {"lr": 1e-2, "fused": True}, id=f"{kind.__name__}-fused")
    yield pytest.param(optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}, id="SGD-momentum")
    yield pytest.param(optim.AdamW, {"lr": torch.tensor(1e-2), "amsgrad": True, "maximize": True}, id="AdamW-others")


@pytest.mark.parametrize(("kind", "options"), list(makes()))
def test_updates_repeat_and_change_nothing(kind: Any, options: dict[str, Any]) -> None:
    audited, plain = (Training(lambda p: kind(p, **options), audited=audited) for audited in (True, False))
    audited.run(5)
    plain.run(5)
    assert not audited.reported
    assert not audited.audit._off
    for parameter, other in zip(audited.model.parameters(), plain.model.parameters(), strict=True):
        assert parameter.equal(other)
    assert audited.clean


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
def test_changed_gradient_is_found_in_its_update(kind: Any) -> None:
    training = Training(lambda p: kind(p, lr=1e-2))
    training.run(3)
    gradient = training.model.narrow.weight  # type: ignore[union-attr]
    training.corrupt_next(lambda: _flip(gradient.grad))  # type: ignore[arg-type]
    training.run(4)
    training.run(len(training.audit._rotations[0]))
    found = [mismatch for mismatch in training.reported if mismatch.step == 4]
    parts = training.audit._rotations[0]._parts
    where = next(i for i, part in enumerate(parts) if any(unit.parameter is gradient for unit in part))
    assert bool(found) == (where == 2 % len(parts)), "step 4 has the third audit"


def test_every_part_is_audited_in_turn() -> None:
    training = Training(lambda p: optim.AdamW(p, lr=1e-2))
    rotation = training.audit._rotations[0]
    sizes = {id(p): p.numel() for p in training.model.parameters()}
    seen: dict[int, int] = {}
    for _ in range(len(rotation)):
        for unit in rotation.take():
            assert unit.start % updates.ALIGNMENT == 0
            seen[id(unit.parameter)] = seen.get(id(unit.parameter), 0) + unit.stop - unit.start
    assert seen == sizes
    assert len(rotation) > 1


def test_other_optimizers_are_not_audited() -> None:
    training = Training(lambda p: optim.Adafactor(p, lr=1e-2))
    training.run(3)
    assert not training.reported
    (gap,) = training.audit.gaps()
    assert gap.endswith("Adafactor, cannot be repeated by parts")


def test_closures_switch_the_audit_off() -> None:
    training = Training(lambda p: optim.SGD(p, lr=1e-2))
    step = training.optimizer.step
    training.optimizer.step = lambda: step(lambda: torch.zeros(()))
    training.run(3)
    assert not training.reported
    (gap,) = training.audit.gaps()
    assert "takes a closure" in gap


class Unrepeatable(optim.SGD):
    """An optimizer whose updates differ from its formula."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # without a closure
        Unrepeatable.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-0.01 * Unrepeatable.calls)


def test_unrepeatable_updates_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "ELEMENTWISE", (Unrepeatable,))
    training = Training(lambda p: Unrepeatable(p, lr=1e-2))
    training.run(4)
    assert not training.reported
    (gap,) = training.audit.gaps()
    assert "not repeatable" in gap


class OddAtEnds(optim.SGD):
    """An optimizer that updates the last elements of a tensor otherwise, as a kernel with a scalar remainder may."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # without a closure
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-0.01)
                parameter.view(-1)[-3:].add_(1e-3)


def test_whole_tensors_are_compared_where_slices_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "ELEMENTWISE", (OddAtEnds,))
    training = Training(lambda p: OddAtEnds(p, lr=1e-2))
    training.run(6)
    assert not training.reported
    assert training.audit._rotations[0].whole_kinds
    assert not any(unit.is_slice for part in training.audit._rotations[0]._parts for unit in part)


BAD = 1


def _flip(local: torch.Tensor) -> None:
    if local.numel():
        flip_bit(local)


def on_ranks(rank: int, world: int, shard: bool, bad: int) -> tuple[list[dict[str, Any]], list[int]]:
    training = Training(lambda p: optim.AdamW(p, lr=1e-2), shard=shard)
    training.run(2)
    if rank == bad:
        for parameter in training.model.parameters():
            local = local_part(parameter).detach()
            training.corrupt_next(lambda local=local: _flip(local))  # type: ignore[misc]
    training.run(3)
    described = [
        {
            "role": mismatch.role,
            "original": mismatch.original,
            "digest": mismatch.digest,
            "unit": mismatch.unit,
            "step": mismatch.step,
        }
        | {"owner": mismatch.owner, "arbiter": mismatch.expects_arbiter, "difference": mismatch.difference}
        for mismatch in training.reported
    ]
    return described, training.clean


@pytest.mark.parametrize("shard", [False, True])
def test_two_ranks_do_a_wrong_update_again(kept_ranks: KeptRanks, shard: bool) -> None:
    (peerless, _), (owner, _), (peer, _) = kept_ranks.call(3, on_ranks, shard, BAD)
    (own,), (second,), (third,) = owner, peer, peerless
    assert (own["role"], second["role"], third["role"]) == (AuditRole.OWNER, AuditRole.PEER, AuditRole.ARBITER)
    assert own["original"] != own["digest"] == second["digest"] == third["digest"]
    assert {report["unit"] for report in (own, second, third)} == {own["unit"]}
    assert {(report["owner"], report["step"], report["arbiter"]) for report in (own, second, third)} == {(BAD, 3, True)}
    assert "elements differ" in own["difference"]


def test_sharded_updates_repeat(kept_ranks: KeptRanks) -> None:
    assert all(not reported and clean for reported, clean in kept_ranks.call(3, on_ranks, True, -1))
