"""Modules that do not compute the same bits twice are named, and compared with a tolerance."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from everstep_trainer.sdc.replay.determinism import are_close, relative_spread, unrepeatable_modules
from tests.unit.trainer_hooks.sdc.audited_models import Gpt, tokens


class Varying(nn.Linear):
    """A layer that adds noise that no seed fixes, as a sum in the order of arrival does."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.noise = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 1e-6 * torch.rand(1, generator=self.noise))


class VaryingGradient(torch.autograd.Function):
    noise = torch.Generator()

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * (1 + 1e-6 * torch.rand(1, generator=VaryingGradient.noise))


def test_varying_modules_are_named_with_their_results() -> None:
    model = Gpt()
    model.blocks[1].project = Varying(16)

    class Backward(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            varying: torch.Tensor = VaryingGradient.apply(x)
            return varying

    mlp = model.get_submodule("blocks.2.mlp")
    assert isinstance(mlp, nn.Sequential)
    mlp.append(Backward())
    found = unrepeatable_modules(model, tokens(0))
    assert {name: results.split(", ")[0] for name, results in found.items()} == {
        "blocks.1.project": "output 0",
        "blocks.2.mlp.4": "gradient of input 0",
    }
    assert "gradient of weight" in found["blocks.1.project"]


def test_varying_code_between_modules_is_reported() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.noise = nn.Linear(4, 4), torch.Generator()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(x) + torch.rand(1, generator=self.noise)
            return result

    assert unrepeatable_modules(Between(), torch.ones(2, 4)) == {"": "output 0"}


def test_unsupported_model_is_refused() -> None:
    class Takes(nn.Linear):
        def forward(self, x: torch.Tensor, other: object = None) -> torch.Tensor:
            return super().forward(x)

    with pytest.raises(ValueError, match="its arguments contain a object"):
        unrepeatable_modules(Takes(4, 4), torch.ones(1, 4), object())


@pytest.mark.parametrize(
    ("change", "spread", "close"),
    [(0.0, 0.0, True), (1e-6, 0.0, True), (1e-4, 0.0, False), (1e-4, 2e-5, True), (float("nan"), 1.0, False)],
)
def test_tolerance_follows_the_spread_of_replays(change: float, spread: float, close: bool) -> None:
    expected = torch.linspace(-1.0, 1.0, 9)
    found = expected.clone()
    found[4] += change
    assert are_close([expected], [found], spread) == close


def test_spread_is_relative_to_the_largest_element() -> None:
    output = torch.tensor([4.0, 1.0])
    assert relative_spread([output], [output + torch.tensor([0.0, 1.0])]) == 0.25
    assert relative_spread([output.int()], [output.int()]) == 0.0
