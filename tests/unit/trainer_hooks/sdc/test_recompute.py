"""Comparison of forward passes with their recomputation."""

from __future__ import annotations

import pytest
import torch
from everstep_trainer.sdc.recompute import AUDITS_WITHOUT_RECOMPUTATION, Recompute

from tests.support.audited_blocks import audit_of, fresh, train


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_clean_training_is_left_alone(dtype, micro_batches):
    model = fresh()
    audit, said = audit_of(Recompute, model)
    trained = train(model, audit, 8, micro_batches, dtype)
    assert not said
    assert torch.equal(trained, train(fresh(), None, 8, micro_batches, dtype))


def test_forward_that_differs_from_recompute_is_reported():
    model = fresh()
    audit, said = audit_of(Recompute, model)
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
    audit, said = audit_of(Recompute, model)
    plain, calls = model[0].up.forward, []

    def noisy(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return plain(x) * (1 + 1e-3 * len(calls))

    model[0].up.forward = noisy
    train(model, audit, 3)
    assert not [each for each in said if each.unit == "model.0.up forward"]


def test_recompute_switches_off_without_checkpointing():
    model = fresh(checkpointed=False)
    audit, said = audit_of(Recompute, model)
    train(model, audit, AUDITS_WITHOUT_RECOMPUTATION)
    audit.begin_step(9, due=True)
    assert not said
    assert not model[0].up._forward_hooks
