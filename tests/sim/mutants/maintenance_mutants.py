"""Mutants of planned maintenance."""

from __future__ import annotations

from everstep_controller.core import maintenance
from tests.sim.mutants.mutant import Mutant, do_nothing
from tests.sim.mutants.patching import edited_function, replaced_function

MAINTENANCE_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a planned window is active at once",
        lambda: edited_function(
            maintenance.order_window,
            "if command.starts_at is not None and command.starts_at > transition.now:",
            "if False:",
        ),
        seeds=(0, 14),
    ),
    Mutant(
        "a new controller forgets planned windows",
        lambda: replaced_function(maintenance.resume_windows, do_nothing),
        seeds=(0, 14),
    ),
    Mutant(
        "a cancelled window begins",
        lambda: edited_function(maintenance.cancel_maintenance, "if not _is_planned(window, command)", ""),
        seeds=(38, 49),
    ),
    Mutant(
        "jobs stay on nodes whose window begins",
        lambda: edited_function(maintenance._begin_windows, "regroup(transition, job, cause)", "pass"),
        seeds=(0, 14),
    ),
    Mutant("maintenance never ends", lambda: replaced_function(maintenance.end_if_due, do_nothing), seeds=(0, 14)),
)
