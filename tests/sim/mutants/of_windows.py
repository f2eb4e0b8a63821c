"""Mistakes about maintenance that is planned ahead."""

from __future__ import annotations

from controller.core import holds
from tests.sim.mutants.mutant import Mutant, nothing
from tests.sim.mutants.surgery import mistaken, swapped

OF_WINDOWS: tuple[Mutant, ...] = (
    Mutant(
        "a planned window is taken for active at once",
        lambda: mistaken(
            holds.order_maintenance, "if order.starts_at is not None and order.starts_at > turn.now:", "if False:"
        ),
        seeds=(0, 14),
    ),
    Mutant(
        "what was planned is forgotten by who takes over", lambda: swapped(holds.look_ahead, nothing), seeds=(0, 14)
    ),
    Mutant(
        "what was cancelled begins",
        lambda: mistaken(holds.cancel, "if not _is_planned(one, order)", ""),
        seeds=(38, 49),
    ),
    Mutant("a window begins, and the jobs stay", lambda: swapped(holds._leave, nothing), seeds=(0, 14)),
    Mutant("maintenance never ends", lambda: swapped(holds.check_end, nothing), seeds=(0, 14)),
)
