"""Injected faults: their distribution, their shapes and bits, and that they are the same on each draw."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from bench.sdc.injection import Corruption, Fault, Injection, Shape, Site, draw, shape_mask

PLAIN = replace(
    draw("cell", Site.PARAMETERS, 0, 4),
    corruption=Corruption.ONE_BIT,
    shape=Shape.SINGLE,
    positions=(0.5,),
    probability=0.0,
    gate=0.0,
    begin=0.0,
)


def fault(injection: Injection, elements: int = 0) -> Fault:
    armed = Fault(injection, elements)
    armed.is_armed = True
    return armed


def test_draw_is_the_same_each_time() -> None:
    assert draw("cell", Site.ATTENTION, 7, 4) == draw("cell", Site.ATTENTION, 7, 4)
    assert draw("cell", Site.ATTENTION, 7, 4).seed != draw("cell", Site.ATTENTION, 8, 4).seed


def test_draws_follow_the_fault_model() -> None:
    drawn = [draw("cell", Site.ATTENTION, number, 4) for number in range(2000)]
    assert sum(one.corruption is Corruption.ONE_BIT for one in drawn) == pytest.approx(760, abs=80)
    assert sum(one.shape is Shape.COLUMN for one in drawn) == pytest.approx(200, abs=50)
    lasting = [one for one in drawn if one.is_permanent]
    assert len(lasting) == pytest.approx(1800, abs=50)
    assert sum(one.gate > 0 for one in lasting) == pytest.approx(600, abs=70)
    assert sum(one.probability < 1e-4 for one in lasting) == pytest.approx(len(lasting) / 2, abs=80)
    assert {len(one.positions) for one in drawn if one.corruption is Corruption.FEW_BITS} == {2, 3, 4}
    assert min(len(one.positions) for one in drawn if one.corruption is Corruption.MANY_BITS) == 5


@pytest.mark.parametrize(
    ("shape", "hit"),
    [
        (Shape.SINGLE, [70]),
        (Shape.TILE, [70, 78, 86, 94]),
        (Shape.STRIPE, list(range(64, 96))),
        (Shape.COLUMN, [6, 22, 38, 54, 70, 86]),
    ],
)
def test_shape_hits_its_elements(shape: Shape, hit: list[int]) -> None:
    assert shape_mask((6, 16), torch.tensor([70]), shape).nonzero().flatten().tolist() == hit


def test_skipped_elements_bring_the_next_activation_nearer() -> None:
    lasting = fault(replace(PLAIN, probability=1e-3))
    assert lasting.elements_until_active() == 0, "not active yet"
    lasting.corrupt(torch.ones(1))
    idle = int(lasting.elements_until_active())
    lasting.skip_ahead(idle)
    assert lasting.elements_until_active() == 0
    lasting.corrupt(torch.ones(1))
    assert (lasting.activations, lasting.seen) == (2, idle + 2)


def test_activations_in_skipped_elements_are_left_out() -> None:
    lasting = fault(replace(PLAIN, probability=0.5))
    lasting.corrupt(torch.ones(1))
    lasting.skip_ahead(1000)
    assert lasting.activations == 1
    assert 0 <= lasting.elements_until_active() < 1000
    lasting.corrupt(torch.ones(1000))
    assert lasting.activations > 400


def test_fault_that_acts_once_is_idle_ever_after() -> None:
    once = fault(PLAIN)
    once.corrupt(torch.ones(1))
    assert once.elements_until_active() == math.inf


def test_shape_ends_with_its_tensor() -> None:
    assert shape_mask((5,), torch.tensor([4]), Shape.TILE).tolist() == [False] * 4 + [True]
    assert bool(shape_mask((5,), torch.tensor([4]), Shape.STRIPE).all())


@pytest.mark.parametrize(
    ("positions", "stratum"),
    [
        ((31 / 32,), "sign"),
        ((31 / 32, 25 / 32), "exponent"),
        ((22 / 32,), "high mantissa"),
        ((0.0, 11 / 32), "low mantissa"),
    ],
)
def test_stratum_is_of_the_heaviest_bit(positions: tuple[float, ...], stratum: str) -> None:
    assert replace(PLAIN, positions=positions).stratum(torch.float32) == stratum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("place", [0.0, 63 / 64])
def test_bits_are_flipped_in_any_dtype(dtype: torch.dtype, place: float) -> None:
    tensor = torch.linspace(1, 2, 8, dtype=dtype)
    before = tensor.clone()
    fault(replace(PLAIN, positions=(place,))).corrupt(tensor)
    differing = before.view(torch.uint8) ^ tensor.view(torch.uint8)
    assert sorted(differing[differing != 0].tolist()) == [128 if place else 1]


def test_strided_tensor_is_corrupted_in_place() -> None:
    tensor = torch.ones(4, 4).t()[1:]
    fault(replace(PLAIN, corruption=Corruption.VALUE, positions=(0.0,))).corrupt(tensor)
    assert tensor[0, 0] == 0.0
    assert int((tensor != 1).sum()) == 1


def test_value_becomes_not_finite() -> None:
    tensor = torch.ones(4)
    fault(replace(PLAIN, corruption=Corruption.NOT_FINITE, positions=(0.1,))).corrupt(tensor)
    assert math.isnan(tensor[0])


def test_fault_that_acts_once_hits_its_place_in_the_step() -> None:
    acting = fault(replace(PLAIN, begin=0.75), elements=16)
    calls = [torch.zeros(4) for _ in range(8)]
    for one in calls:
        acting.corrupt(one)
    assert [int((one != 0).sum()) for one in calls] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert acting.activations == 1


def test_permanent_fault_is_active_with_its_probability() -> None:
    acting = fault(replace(PLAIN, probability=0.01))
    hits = 0
    for _ in range(100):
        acting.corrupt(tensor := torch.zeros(1000))
        hits += int((tensor != 0).sum())
    assert hits == acting.activations == pytest.approx(1000, abs=150)


def test_gate_spares_small_values() -> None:
    tensor = torch.tensor([0.1, 4.0, 0.1, -4.0])
    before = tensor.clone()
    fault(replace(PLAIN, probability=1.0, gate=1.0)).corrupt(tensor)
    assert (tensor != before).tolist() == [False, True, False, True]


def test_gated_fault_waits_for_a_large_value() -> None:
    acting = fault(replace(PLAIN, probability=1e-8, gate=1.5))
    acting.corrupt(torch.ones(4))
    assert acting.activations == 0
    acting.corrupt(tensor := torch.tensor([0.1, 0.1, 0.1, 4.0]))
    assert tensor[3] != 4.0
    assert acting.activations == 1


def test_fault_that_is_not_armed_counts_only() -> None:
    idle = Fault(PLAIN, 4)
    idle.corrupt(tensor := torch.zeros(4))
    assert (idle.seen, idle.activations, float(tensor.sum())) == (4, 0, 0.0)
    assert idle.corrupted(tensor) is tensor
