"""Replicas whose gradients are added in the order of ranks: options, saved models, ignored parameters."""

from __future__ import annotations

import io

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from everstep_trainer.parallel.ordered_gradients import replicate
from tests.support.ranks.kept_ranks import KeptRanks


def small_replicas(model: nn.Module | None = None) -> DistributedDataParallel:
    return replicate(model or nn.Linear(4, 4), exact=True, equal_already=True)


def refused_option(rank: int, world: int) -> str:
    try:
        replicate(
            nn.Linear(4, 4),
            exact=True,
            equal_already=True,
            find_unused_parameters=True,
            skip_all_reduce_unused_params=True,
        )
    except TypeError as error:
        return str(error)
    return ""


def test_option_that_leaves_gradients_out_is_refused(kept_ranks: KeptRanks) -> None:
    for reason in kept_ranks.call(2, refused_option):
        assert "skip_all_reduce_unused_params leaves gradients out of the exchange" in reason
        assert "exact=False" in reason


def saved_and_loaded(rank: int, world: int) -> list[float]:
    """Return the gradient of a bias after a whole model was saved by torch.save and loaded again."""
    stored = io.BytesIO()
    torch.save(small_replicas(), stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    (loaded(torch.ones(2, 4)) * (rank + 1)).sum().backward()
    gradient: list[float] = loaded.module.bias.grad.tolist()
    return gradient


def test_whole_model_can_be_saved_and_loaded(kept_ranks: KeptRanks) -> None:
    assert kept_ranks.call(2, saved_and_loaded) == [[3.0] * 4] * 2


class Scaled(nn.Module):
    """A model with a parameter of its own beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.scale * self.layer(inputs)
        return outputs


def ignored_parameters(rank: int, world: int) -> tuple[float, list[float]]:
    """Return the gradients of the parameter ``scale`` and of an ignored bias."""
    model = Scaled()
    nn.init.zeros_(model.layer.weight)
    nn.init.ones_(model.layer.bias)
    # DistributedDataParallel finds no parameter of the outermost module by its name, and reduces it all the same.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["scale", "layer.bias"])
    replicas = small_replicas(model)
    (replicas(torch.ones(1, 4)) * (rank + 1)).sum().backward()
    assert model.scale.grad is not None
    assert model.layer.bias.grad is not None
    return model.scale.grad.item(), model.layer.bias.grad.tolist()


def test_parameters_are_ignored_as_plain_replicas_ignore_them(kept_ranks: KeptRanks) -> None:
    assert kept_ranks.call(2, ignored_parameters) == [(6.0, [1.0] * 4), (6.0, [2.0] * 4)]


def large_half_gradients(rank: int, world: int) -> list[float]:
    """Return the mean of gradients whose sum is beyond the range of float16."""
    model = nn.Linear(1, 3, bias=False, dtype=torch.float16)
    replicas = small_replicas(model)
    replicas(torch.full((1, 1), 30000.0 + 1000 * rank, dtype=torch.float16)).float().sum().backward()
    assert model.weight.grad is not None
    gradient: list[float] = model.weight.grad.flatten().tolist()
    return gradient


def test_mean_of_half_precision_gradients_is_finite(kept_ranks: KeptRanks) -> None:
    assert kept_ranks.call(3, large_half_gradients) == [[31008.0] * 3] * 3  # 31,000 in float16's steps of 16


def refusals(rank: int, world: int) -> list[str]:
    """Return what is raised for complex parameters, and for a second communication hook."""
    raised = []
    replicas = small_replicas()
    for attempt in (
        lambda: small_replicas(nn.Linear(2, 2, dtype=torch.complex64)),
        lambda: replicas.register_comm_hook(None, bf16_compress_hook),
    ):
        try:
            attempt()
        except (TypeError, RuntimeError) as error:
            raised.append(str(error))
    return raised


def test_complex_parameters_and_second_hook_are_refused(kept_ranks: KeptRanks) -> None:
    for of_complex, of_hook in kept_ranks.call(2, refusals):
        assert of_complex.startswith("weight is complex")
        assert of_complex.endswith("exact=False")
        assert "exact=False" in of_hook
