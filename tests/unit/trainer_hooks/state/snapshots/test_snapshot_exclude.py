"""Exclusions from snapshots by name, and the description of changes in the tracked tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from everstep.errors import NotRestorable
from everstep.layout.manifests import Box, TensorInfo, full_box
from everstep_trainer.slots.shares import build_manifest, divide_state
from everstep_trainer.state.layout import Layout, TensorPart
from everstep_trainer.state.tensors import describe_layout_change
from everstep_trainer.state.tracked_state import TrackedState


def trained(exclude: list[str] | None = None) -> tuple[nn.ModuleDict, torch.optim.Optimizer, TrackedState]:
    model = nn.ModuleDict({"teacher": nn.BatchNorm1d(3), "head": nn.Linear(3, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrackedState({"model": model, "optimizer": optimizer}, exclude or ())
    update(model, optimizer)
    return model, optimizer, state


def update(model: nn.ModuleDict, optimizer: torch.optim.Optimizer) -> None:
    model["head"](model["teacher"](torch.randn(4, 3))).sum().backward()
    optimizer.step()


def catalog_of(state: TrackedState) -> tuple[TensorInfo, ...]:
    """Return the catalog of a slot with this state."""
    return build_manifest(0, [state.layout(state.tensors(), 0, 1)], divide_state([Layout(())], ["n1"], 1)[0], 0).catalog


def test_excluded_state_is_not_restored_from_earlier_versions() -> None:
    catalog = build_manifest(
        0, [trained()[2].layout(trained()[2].tensors(), 0, 1)] * 1, divide_state([Layout(())], ["n1"], 1)[0], 0
    )
    stored = catalog.catalog
    model = nn.ModuleDict({"teacher": nn.BatchNorm1d(3), "head": nn.Linear(3, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrackedState({"model": model, "optimizer": optimizer}, ["*teacher*"])
    targets = state.restore_targets(stored)
    found = {stored[index].name for index, _ in targets}
    assert found == {tensor.name for tensor in stored if "teacher" not in tensor.name}
    assert model["teacher"].weight not in optimizer.state
    for _, target in targets:
        target.local.zero_()
    update(model, optimizer)
    assert state.is_complete()


def test_unmatched_exclude_pattern_is_refused_with_near_names() -> None:
    with pytest.raises(
        ValueError, match=r"exclude='model\.techer\.weight' matches none of 7 .* model\.teacher\.weight"
    ):
        trained(["model.techer.weight"])


def test_partial_exclusion_of_optimizer_state_is_refused() -> None:
    state = trained(["*.exp_avg"])[2]
    with pytest.raises(ValueError, match=r"matches only exp_avg of the state of optimizer\.model\.teacher\.weight"):
        state.tensors()


def layout(**shapes: tuple[int, ...]) -> Layout:
    return Layout(tuple(TensorPart(name, "float32", 4, shape, full_box(shape)) for name, shape in shapes.items()))


def test_new_missing_and_changed_tensors_are_named() -> None:
    description = describe_layout_change(layout(a=(2,), b=(3, 4), c=(1,)), layout(a=(2,), b=(3, 5), d=(1,)))
    assert description == "new: d; gone: c; changed: b (float32 [3, 4] equal, now float32 [3, 5] equal)"
    part = TensorPart("a", "float32", 4, (4, 2), Box((2, 0), (2, 2)))
    assert "of it [2, 2] at [2, 0]" in describe_layout_change(layout(a=(4, 2)), Layout((part,)))
    many = describe_layout_change(Layout(()), layout(**{f"t{i}": (1,) for i in range(9)}))
    assert many == "new: t0, t1, t2, t3, t4 and 4 more"
    assert describe_layout_change(layout(a=(2,)), layout(a=(2,))) == ""


def test_restore_into_another_model_names_the_differences() -> None:
    stored = catalog_of(TrackedState({"model": nn.Linear(3, 2)}))
    words = r"2 tensors are new \(model\.0\.weight.*2 stored tensors are missing here \(model\.bias"
    with pytest.raises(NotRestorable, match=words):
        TrackedState({"model": nn.Sequential(nn.Linear(3, 2))}).restore_targets(stored)
