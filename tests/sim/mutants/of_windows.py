"""Mistakes about maintenance that is planned ahead."""

from __future__ import annotations

from everstep_controller.core.health import maintenance

from tests.sim.mutants.mutant import Mutant, nothing
from tests.sim.mutants.surgery import mistaken, swapped

OF_WINDOWS: tuple[Mutant, ...] = (
    Mutant(
        "a planned window is taken for active at once",
        lambda: mistaken(
            maintenance.order_window,
            "if command.starts_at is not None and command.starts_at > transition.now:",
            "if False:",
        ),
        seeds=(0, 14),
    ),
    Mutant(
        "what was planned is forgotten by who takes over",
        lambda: swapped(maintenance.resume_windows, nothing),
        seeds=(0, 14),
    ),
    Mutant(
        "what was cancelled begins",
        lambda: mistaken(maintenance.cancel_maintenance, "if not _is_planned(one, command)", ""),
        seeds=(38, 49),
    ),
    Mutant(
        "a window begins, and the jobs stay",
        lambda: mistaken(maintenance._begin_windows, "regroup(transition, job, cause)", "pass"),
        seeds=(0, 14),
    ),
    Mutant("maintenance never ends", lambda: swapped(maintenance.end_if_due, nothing), seeds=(0, 14)),
)
