"""Tensors tied in one layout and separate in another, such as the embeddings of the first and last pipeline stage."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from everstep.errors import NotRestorable
from everstep.ids import Version
from everstep.layout.manifests import Manifest, decode_manifest
from everstep_agent.spill.__main__ import execute
from everstep_trainer.slots.shares import build_manifest, divide_state
from everstep_trainer.state.python_state import MergedState, decode
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.vaults.sealed_slots import fill_slots, load_checkpoint_alone

WORDS, WIDTH, LAYERS = 5, 3, 2
VERSION = Version(1, 4)


class Stage(nn.Module):
    """A part of a language model whose first layer and head are one matrix, or two that are kept alike."""

    def __init__(self, number: int, stages: int) -> None:
        super().__init__()
        if number == 0:
            self.embed = nn.Embedding(WORDS, WIDTH)
        here = range(LAYERS * number // stages, LAYERS * (number + 1) // stages)
        self.layers = nn.ModuleDict({str(layer): nn.Linear(WIDTH, WIDTH) for layer in here})
        if number == stages - 1:
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
            if number == 0:
                self.head.weight = self.embed.weight


class Rank:
    def __init__(self, number: int, stages: int) -> None:
        self.model = Stage(number, stages)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.5 if number else 0.1)
        self.tracked = {"model": self.model, "optimizer": self.optimizer}
        self.state = TrackedState(self.tracked)

    def train(self) -> None:
        """Set all values to a function of their names, the same for both ends of the model."""
        for name, parameter in self.model.named_parameters():
            value = float(sum(name.replace("head", "embed").encode()) % 89)
            parameter.data = torch.arange(value, value + parameter.numel()).view_as(parameter)
            moments = {"exp_avg": parameter.detach() + 0.25, "exp_avg_sq": parameter.detach() + 0.5}
            self.optimizer.state[parameter] = {"step": torch.tensor(value), **moments}
        self.optimizer.param_groups[0]["lr"] = 0.25


def job(stages: int, *, trained: bool) -> list[Rank]:
    ranks = [Rank(number, stages) for number in range(stages)]
    for rank in ranks if trained else ():
        rank.train()
    return ranks


def catalog_of(ranks: list[Rank]) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Return the manifest of the ranks' state, and all values."""
    live = [rank.state.tensors() for rank in ranks]
    layouts = [
        rank.state.layout(tensors, n, len(ranks)) for n, (rank, tensors) in enumerate(zip(ranks, live, strict=True))
    ]
    shares = divide_state(layouts, ["n1"] * len(ranks), 1)
    return build_manifest(0, layouts, shares[0], 1 << 12), {t.name: t.local for tensors in live for t in tensors}


def restore(ranks: list[Rank], before: list[Rank]) -> set[int]:
    """Restore the ranks as a generation does; return the tensors of the version that a rank has live."""
    manifest, values = catalog_of(before)
    lives: set[int] = set()
    for rank in ranks:
        with torch.no_grad():
            for index, target in rank.state.restore_targets(manifest.catalog):
                lives.add(index)
                target.local.copy_(values[manifest.catalog[index].name])
        python = MergedState([decode(job.state.capture().data()) for job in before], rank.state.python_names())
        rank.state.require_python(python)
        rank.state.load_python(python)
    assert lives == {*range(len(manifest.catalog))}, "nothing is gone"
    return lives


def assert_as_trained(ranks: list[Rank]) -> None:
    for rank, other in zip(ranks, job(len(ranks), trained=True), strict=True):
        assert rank.optimizer.param_groups[0]["lr"] == 0.25
        for parameter, twin in zip(rank.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(parameter, twin)
            assert all(
                torch.equal(t, other.optimizer.state[twin][key]) for key, t in rank.optimizer.state[parameter].items()
            )
            assert len(rank.optimizer.state[parameter]) == 3


@pytest.mark.promise("layout-change")
@pytest.mark.parametrize(("stages", "into"), [(1, 2), (2, 1), (2, 2), (1, 1)])
def test_tied_state_restores_between_one_and_two_ranks(stages: int, into: int) -> None:
    after = job(into, trained=False)
    restore(after, job(stages, trained=True))
    assert_as_trained(after)


@pytest.mark.parametrize(("stages", "into"), [(1, 2), (2, 1), (2, 2), (1, 1)])
def test_tied_state_starts_from_storage(tmp_path: Path, stages: int, into: int) -> None:
    order = fill_slots(tmp_path / "slots", [rank.state for rank in job(stages, trained=True)], VERSION)
    assert decode_manifest(order.manifests[0]).world_size == stages
    assert execute(msgspec.structs.replace(order, url=str(tmp_path / "out"))).complete
    after = job(into, trained=False)
    for number, rank in enumerate(after):
        assert load_checkpoint_alone(tmp_path / "out", rank.tracked, rank.state, number, into) == VERSION.step
    assert_as_trained(after)


def test_differing_untied_state_is_not_tied_again() -> None:
    before = job(2, trained=True)
    with torch.no_grad():
        before[1].model.head.weight[0, 0] += 1
    with pytest.raises(NotRestorable, match=r"model\.head\.weight and model\.embed\.weight now share one tensor"):
        restore(job(1, trained=False), before)


def test_guard_rollback_uses_the_current_tied_names() -> None:
    after = job(2, trained=False)
    restore(after, job(1, trained=True))
    for rank in after:
        rank.optimizer.param_groups[0]["lr"] = 7.0
        rank.state.load_python(MergedState([decode(rank.state.capture().data())], rank.state.python_names()))
        assert rank.optimizer.param_groups[0]["lr"] == 7.0
