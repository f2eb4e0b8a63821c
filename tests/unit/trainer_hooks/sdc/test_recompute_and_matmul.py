"""Audits that one rank makes alone: recomputed activations and rows of matrix products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from everstep_trainer.sdc.audit import Audit, AuditSetup, Mismatch
from everstep_trainer.sdc.matmul import Matmul
from everstep_trainer.sdc.recompute import AUDITS_WITHOUT_RECOMPUTATION, Recompute
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Two layers with a residual, checkpointed."""

    def __init__(self, checkpointed: bool = True) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 64), nn.ReLU(inplace=True), nn.Linear(64, 16)
        self.drop = nn.Dropout(0.1)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self._inner, x, use_reentrant=False) if self.checkpointed else self._inner(x)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.act(self.up(x))))


def made(kind: type[Audit], model: nn.Module) -> tuple[Audit, list[Mismatch]]:
    said: list[Mismatch] = []
    setup = AuditSetup(
        rank=1,
        world_size=4,
        nodes=(),
        device=torch.device("cpu"),
        objects={"model": model},
        has_replica_per_rank=True,
        report=said.append,
    )
    return kind(setup), said


def train(model: nn.Module, audit: Audit | None, steps: int, micro_batches: int = 1, dtype: Any = None) -> torch.Tensor:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        if audit is not None:
            audit.begin_step(step, due=True)
        for _ in range(micro_batches):
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = model(torch.randn(4, 8, 16)).float().square().mean()
            loss.backward()
        if audit is not None:
            audit.before_update(step, due=True)
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def fresh(checkpointed: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(checkpointed), Block(checkpointed))


@pytest.mark.parametrize("kind", [Recompute, Matmul])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_clean_training_is_left_alone(kind, dtype, micro_batches):
    model = fresh()
    audit, said = made(kind, model)
    trained = train(model, audit, 8, micro_batches, dtype)
    assert not said
    assert torch.equal(trained, train(fresh(), None, 8, micro_batches, dtype))


def test_forward_that_differs_from_recompute_is_reported():
    model = fresh()
    audit, said = made(Recompute, model)
    plain, calls = model[1].up.forward, []

    def once_wrong(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        output = plain(x)
        if len(calls) == 5:  # the third forward pass, after two with their recomputations
            output.view(torch.int32).view(-1)[3] ^= 1 << 12
        return output

    model[1].up.forward = once_wrong
    train(model, audit, 4)
    assert [(each.unit, each.step, each.owner) for each in said] == [("model.1.up forward", 3, 1)]
    assert said[0].original != said[0].digest


def test_unrepeatable_module_is_left_out_and_accuses_nobody():
    model = fresh()
    audit, said = made(Recompute, model)
    plain, calls = model[0].up.forward, []

    def noisy(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return plain(x) * (1 + 1e-3 * len(calls))

    model[0].up.forward = noisy
    train(model, audit, 3)
    assert not [each for each in said if each.unit == "model.0.up forward"]


def test_recompute_switches_off_without_checkpointing():
    model = fresh(checkpointed=False)
    audit, said = made(Recompute, model)
    train(model, audit, AUDITS_WITHOUT_RECOMPUTATION)
    audit.begin_step(9, due=True)
    assert not said
    assert not model[0].up._forward_hooks


@pytest.mark.parametrize("wrong", ["forward", "input gradient", "weight gradient"])
def test_wrong_product_is_found_by_its_rows(wrong, monkeypatch):
    model = fresh(checkpointed=False)
    audit, said = made(Matmul, model)
    train(model, audit, 4)  # four layers, one in each step

    class Faulty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return spoiled(x @ weight.t() + bias, wrong == "forward")

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            outer = gradients[0]
            flat = outer.reshape(-1, outer.shape[-1])
            of_weight = flat.t() @ x.reshape(-1, x.shape[-1])
            return (
                spoiled(outer @ weight, wrong == "input gradient"),
                spoiled(of_weight, wrong == "weight gradient"),
                flat.sum(0),
            )

    def spoiled(result: torch.Tensor, really: bool) -> torch.Tensor:
        if really:
            result.view(-1, result.shape[-1])[:, 2] *= 1.01  # a column: every row sees it
        return result

    layer = model[1].down
    monkeypatch.setattr(layer, "forward", lambda x: Faulty.apply(x, layer.weight, layer.bias))
    train(model, audit, 4)
    assert {each.unit for each in said} == {f"model.1.down {wrong}"}


def test_penalty_in_the_loss_is_no_wrong_product():
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    audit, said = made(Matmul, model)
    for step in range(1, 4):
        audit.begin_step(step, due=True)
        (model(torch.randn(8, 16)).square().mean() + model.weight.square().sum()).backward()
        audit.before_update(step, due=True)
    assert not said
