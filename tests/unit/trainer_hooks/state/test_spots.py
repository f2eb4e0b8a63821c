"""Writes that torch does not count are detected by a few bytes of each tensor."""

from __future__ import annotations

import pytest
import torch

from everstep_trainer.state import spots as module
from everstep_trainer.state.spots import Spots


def tensors() -> list[torch.Tensor]:
    return [
        torch.randn(300, 200),
        torch.randn(16, 8, 3, 3).contiguous(memory_format=torch.channels_last),
        torch.randn(50, 40).t(),
        torch.randn(30, 20)[:, 3:7],
        torch.empty(0, 5),
        torch.randn(()),
        torch.randn(20).to(torch.bfloat16),
        torch.arange(7) % 2 == 0,
    ]


@pytest.fixture(params=[True, False], ids=["native", "python"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(module, "copy_hash", None)


@pytest.mark.usefixtures("native")
def test_spots_name_each_changed_tensor() -> None:
    found = tensors()
    spots = Spots(found)
    before = spots.read()
    assert spots.changed(before, spots.read()) == []
    for index, tensor in enumerate(found):
        if tensor.numel():
            raw = tensor.clone()
            tensor.data.copy_(~raw if raw.dtype == torch.bool else raw + 1)
            assert spots.changed(before, spots.read()) == [index]
            tensor.data.copy_(raw)
    assert spots.changed(before, spots.read()) == []


def test_resized_storage_is_not_read() -> None:
    tensor = torch.zeros(1000)
    spots = Spots([tensor.detach()])
    assert spots.is_in_place()
    tensor.untyped_storage().resize_(0)
    assert not spots.is_in_place()
