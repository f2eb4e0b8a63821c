"""Draw faults from the published fault model, and corrupt tensors as such a fault does.

Bits: one 38 %, two to four 30 %, five or more 22 %, the value replaced 9 %, NaN or infinity 1 %. Space: a single
element 35 %, a periodic tile of four 35 %, a stripe of 32 lanes 20 %, a column 10 %. Time: 90 % recur with a
probability per element, log-uniform from 1e-8 to 1, of which a third hits large values only; 10 % are transient.

Time counts from the first activation. A fault that has not been active has corrupted nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np
import torch

RARELY, ALWAYS = 1e-8, 1.0
STRIPE = 32
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Site(StrEnum):
    """The place at which a fault acts on its rank."""

    GEMM_FORWARD = "gemm_forward"
    GEMM_INPUT_GRADIENT = "gemm_input_gradient"
    GEMM_WEIGHT_GRADIENT = "gemm_weight_gradient"
    ATTENTION = "attention"
    LOCAL_GRADIENT = "local_gradient"
    BEFORE_COLLECTIVE = "before_collective"
    AFTER_COLLECTIVE = "after_collective"
    UPDATE = "update"
    PARAMETERS = "parameters"
    MOMENTS = "moments"
    ACTIVATIONS = "activations"
    LYING_DIGEST = "lying_digest"
    LYING_REPLAY = "lying_replay"


MEMORY = (Site.UPDATE, Site.PARAMETERS, Site.MOMENTS)
"""Faults in state that lasts from step to step."""
DETECTORS = (Site.LYING_DIGEST, Site.LYING_REPLAY)
"""Faults of the chain itself. They change no parameter."""


class Corruption(StrEnum):
    """The change of a value."""

    ONE_BIT = "one bit"
    FEW_BITS = "two to four bits"
    MANY_BITS = "five bits or more"
    VALUE = "value replaced"
    NOT_FINITE = "NaN or infinity"


class Duration(StrEnum):
    """How often a fault acts, in the words of the field."""

    PERMANENT = "permanent"
    """In each step: on average at least once."""
    INTERMITTENT = "intermittent"
    """In some steps: on average less than once in a step."""
    TRANSIENT = "transient"
    """Once."""


class Shape(StrEnum):
    """Which elements are hit together."""

    SINGLE = "single"
    TILE = "tile of four"
    STRIPE = "stripe of 32"
    COLUMN = "column"


CORRUPTIONS = {
    Corruption.ONE_BIT: 0.38,
    Corruption.FEW_BITS: 0.30,
    Corruption.MANY_BITS: 0.22,
    Corruption.VALUE: 0.09,
    Corruption.NOT_FINITE: 0.01,
}
SHAPES = {Shape.SINGLE: 0.35, Shape.TILE: 0.35, Shape.STRIPE: 0.20, Shape.COLUMN: 0.10}
RECURRING, GATED = 0.9, 1 / 3


@dataclass(frozen=True)
class Injection:
    """One fault, fixed by its cell and number."""

    cell: str
    number: int
    site: Site
    rank: int
    corruption: Corruption
    shape: Shape
    positions: tuple[float, ...]
    """Places of the flipped bits in a word, 0 (lowest) to 1; or, for a value, what it is replaced by."""
    probability: float
    """Of an activation per element; 0: the fault is transient."""
    gate: float
    """Smallest magnitude that is hit, in root mean squares of its tensor; 0: any."""
    begin: float
    """Place of the first activation among the elements of a step, from 0 to 1."""
    seed: int

    @property
    def recurs(self) -> bool:
        """Whether the fault is permanent or intermittent."""
        return self.probability > 0.0

    def mask(self, dtype: torch.dtype) -> int:
        """Return the flipped bits of a word of this dtype."""
        width = dtype.itemsize * 8
        places = {min(width - 1, int(place * width)) for place in self.positions}
        return sum(1 << place for place in places)


def duration_of(probability: float, elements: int) -> Duration:
    """Return how often a fault acts.

    Args:
        probability: Of an activation per element.
        elements: Elements that pass the fault's site in a step.
    """
    if not probability:
        return Duration.TRANSIENT
    return Duration.PERMANENT if probability * elements >= 1.0 else Duration.INTERMITTENT


def draw(cell: str, site: Site, number: int, ranks: int) -> Injection:
    """Return the injection of this number in a cell; the same on each call."""
    digest = hashlib.blake2b(f"{cell}:{number}".encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "big") >> 1
    random = np.random.default_rng(seed)
    corruption = _choose(random, CORRUPTIONS)
    bits = {Corruption.FEW_BITS: (2, 5), Corruption.MANY_BITS: (5, 13)}.get(corruption, (1, 2))
    count = int(random.integers(*bits))
    recurs = bool(random.random() < RECURRING)
    probability = math.exp(random.uniform(math.log(RARELY), math.log(ALWAYS)))
    gated = recurs and bool(random.random() < GATED)
    return Injection(
        cell=cell,
        number=number,
        site=site,
        rank=int(random.integers(ranks)),
        corruption=corruption,
        shape=_choose(random, SHAPES),
        positions=tuple(round(float(place), 6) for place in random.choice(64, count, replace=False) / 64),
        probability=probability if recurs else 0.0,
        gate=float(random.uniform(0.5, 2.5)) if gated else 0.0,
        begin=float(random.random()),
        seed=seed,
    )


Choice = TypeVar("Choice", bound=StrEnum)


def _choose(random: np.random.Generator, shares: Mapping[Choice, float]) -> Choice:
    return list(shares)[int(random.choice(len(shares), p=list(shares.values())))]


class Fault:
    """An injection at work on its rank.

    Args:
        injection: What to do; None only counts elements.
        elements: Elements that pass the site in a step, among which the first activation is placed.
    """

    def __init__(self, injection: Injection | None, elements: int) -> None:
        self._injection = injection
        self.is_armed = False
        self.seen = 0
        """Elements that have passed the site."""
        self.activations = 0
        if injection is not None:
            self._random = np.random.default_rng(injection.seed + 1)
            self._next: int | None = int(injection.begin * elements)

    def corrupt(self, tensor: torch.Tensor) -> None:
        """Corrupt ``tensor`` in place, unseen by autograd, where the fault is active."""
        self.seen += tensor.numel()
        if self._injection is None or not self.is_armed or not tensor.is_floating_point():
            return
        at = self._positions(tensor.numel())
        if len(at):
            self._hit(tensor.data, torch.from_numpy(at), self._injection)

    def corrupted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a corrupted copy of ``tensor``, or ``tensor`` itself where the fault is not active."""
        before = self.activations
        copy = tensor.detach().clone() if self.is_armed else tensor
        self.corrupt(copy)
        return copy if self.activations > before else tensor

    def elements_until_active(self) -> float:
        """Return how many elements pass until the fault is active again; 0 before its first activation."""
        if self._injection is None or not self.activations:
            return 0
        return math.inf if self._next is None else self._next

    def skip_ahead(self, elements: int) -> None:
        """Count ``elements`` as passed in steps that are left out, where the fault corrupts nothing."""
        self.seen += elements
        if self._injection is None or self._next is None:
            return
        self._next -= elements
        if self._next < 0:  # gaps between activations follow a law without memory
            probability = self._injection.probability
            self._next = int(self._random.geometric(probability)) - 1 if probability else None

    def happens(self) -> bool:
        """Return whether the fault is active in one more event, which counts as one element."""
        self.seen += 1
        if self._injection is None or not self.is_armed or not len(self._positions(1)):
            return False
        self.activations += 1
        return True

    def _positions(self, count: int) -> np.ndarray:
        """Return where the fault is active in the next ``count`` elements."""
        assert self._injection is not None
        if self._next is None or self._next >= count:
            self._next = None if self._next is None else self._next - count
            return np.empty(0, np.int64)
        first, probability = self._next, self._injection.probability
        if not probability:
            self._next = None
            return np.array([first], np.int64)
        found, last = [np.array([first], np.int64)], first
        while last < count:
            gaps = self._random.geometric(probability, int((count - last) * probability * 1.1) + 16)
            more = last + np.cumsum(gaps)
            found.append(more)
            last = int(more[-1])
        at = np.concatenate(found)
        self._next = int(at[at >= count][0]) - count
        return at[at < count]

    def _hit(self, tensor: torch.Tensor, at: torch.Tensor, injection: Injection) -> None:
        flat = tensor.reshape(-1)  # a copy unless the tensor is contiguous
        if injection.gate:
            at = self._large_enough(flat.float(), at, injection.gate)
            if not len(at):
                return
        self.activations += len(at)
        hit = shape_mask(tuple(tensor.shape), at, injection.shape)
        _change(flat, hit, injection)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))

    def _large_enough(self, flat: torch.Tensor, at: torch.Tensor, gate: float) -> torch.Tensor:
        """Return where the fault hits; for its first activation, the next place that is large enough."""
        is_large = flat.abs() >= gate * flat.square().mean().sqrt()
        if self.activations or bool(is_large[at].any()):
            return at[is_large[at]]
        found = is_large[int(at[0]) :].nonzero().flatten()[:1] + at[0]
        if not len(found):
            self._next = 0
        return found


def shape_mask(size: tuple[int, ...], at: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return which elements of a flattened tensor are hit if the fault is active at ``at``."""
    count, columns = math.prod(size), size[-1] if size else 1
    hit = torch.zeros(count, dtype=torch.bool)
    if shape is Shape.COLUMN:
        hit.view(-1, columns)[:, (at % columns).unique()] = True
    elif shape is Shape.STRIPE:
        lanes = ((at // STRIPE * STRIPE).unique()[:, None] + torch.arange(STRIPE)).flatten()
        hit[lanes[lanes < count]] = True
    elif shape is Shape.TILE:
        tile = (at[:, None] + torch.arange(4) * 8).flatten()
        hit[tile[tile < count]] = True
    else:
        hit[at] = True
    return hit


def _change(flat: torch.Tensor, hit: torch.Tensor, injection: Injection) -> None:
    place = injection.positions[0]
    if injection.corruption is Corruption.NOT_FINITE:
        flat[hit] = math.nan if place < 0.5 else math.inf
    elif injection.corruption is Corruption.VALUE:
        if place < 1 / 3:
            flat[hit] = 0.0
        elif place < 2 / 3:
            flat[hit] = flat.roll(1)[hit]
        else:
            flat[hit] = flat.abs().max() * 2.0 * place
    else:
        width = flat.element_size() * 8
        mask = injection.mask(flat.dtype)
        signed = mask - (1 << width) if mask >> (width - 1) else mask
        flat.view(_WORDS[flat.element_size()])[hit] ^= signed
