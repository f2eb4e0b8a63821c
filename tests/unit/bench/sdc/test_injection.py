"""Injected faults: their distribution, their shapes and bits, and that they are the same on each draw."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from bench.sdc.injection import Corruption, Duration, Fault, Injection, Shape, Site, draw, duration_of, shape_mask

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


def test_draws_follow_the_fault_model() -> None:
    drawn = [draw("cell", Site.ATTENTION, number, 4) for number in range(2000)]
    assert sum(fault.corruption is Corruption.ONE_BIT for fault in drawn) == pytest.approx(760, abs=80)
    assert sum(fault.shape is Shape.COLUMN for fault in drawn) == pytest.approx(200, abs=50)
    recurring = [fault for fault in drawn if fault.recurs]
    assert len(recurring) == pytest.approx(1800, abs=50)
    assert sum(fault.gate > 0 for fault in recurring) == pytest.approx(600, abs=70)
    assert sum(fault.probability < 1e-4 for fault in recurring) == pytest.approx(len(recurring) / 2, abs=80)
    assert {len(fault.positions) for fault in drawn if fault.corruption is Corruption.FEW_BITS} == {2, 3, 4}
    assert min(len(fault.positions) for fault in drawn if fault.corruption is Corruption.MANY_BITS) == 5


@pytest.mark.parametrize(
    ("probability", "duration"),
    [
        (1.0, Duration.PERMANENT),
        (0.001, Duration.PERMANENT),
        (0.0009, Duration.INTERMITTENT),
        (0.0, Duration.TRANSIENT),
    ],
)
def test_duration_follows_activations_in_a_step(probability: float, duration: Duration) -> None:
    assert duration_of(probability, elements=1000) is duration


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


def test_transient_fault_is_idle_ever_after() -> None:
    transient = fault(PLAIN)
    transient.corrupt(torch.ones(1))
    assert transient.elements_until_active() == math.inf


def test_transient_fault_hits_its_place_in_the_step() -> None:
    acting = fault(replace(PLAIN, begin=0.75), elements=16)
    calls = [torch.zeros(4) for _ in range(8)]
    for tensor in calls:
        acting.corrupt(tensor)
    assert [int((tensor != 0).sum()) for tensor in calls] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert acting.activations == 1


def test_gate_spares_small_values() -> None:
    tensor = torch.tensor([0.1, 4.0, 0.1, -4.0])
    before = tensor.clone()
    fault(replace(PLAIN, probability=1.0, gate=1.0)).corrupt(tensor)
    assert (tensor != before).tolist() == [False, True, False, True]
