"""Models of other structures: each learns, and faults can act at all of its places."""

from __future__ import annotations

import pytest
import torch

from bench.sdc.cells import MODELS as OTHERS
from bench.sdc.cells import cells_of_model
from bench.sdc.injection import Fault, Site
from bench.sdc.models import MODELS, Config, batch_of
from bench.sdc.sites import SITES

IN_PASSES = (Site.GEMM_FORWARD, Site.GEMM_INPUT_GRADIENT, Site.GEMM_WEIGHT_GRADIENT, Site.ATTENTION, Site.ACTIVATIONS)


@pytest.mark.parametrize("name", OTHERS)
def test_model_learns_with_all_of_its_parameters(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name](False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        loss = model(*batch_of(name, 1, 1, 0))
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", OTHERS)
def test_faults_have_elements_at_each_place_in_the_passes(name: str) -> None:
    model = MODELS[name](False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    places = {cell.what for cell in cells_of_model(name, "light")}
    for kind in IN_PASSES:
        fault = Fault(None, 0)
        site = SITES[kind](fault, model, model, optimizer)
        with site.install(), site.forward_pass():
            loss = model(*batch_of(name, 1, 1, 0))
        with site.install():
            loss.backward()
        assert (fault.seen > 0) == (kind in places), kind


@pytest.mark.parametrize("name", ["moe", "unet"])
def test_model_without_recomputation_refuses_it(name: str) -> None:
    assert Config.parse(f"{name}-ddp-float32").name == f"{name}-ddp-float32"
    with pytest.raises(ValueError, match="leave out -recompute"):
        MODELS[name](True)
