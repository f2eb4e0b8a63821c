"""Programs that do nothing wrong: what ordinary training scripts do on a day without a fault."""

from __future__ import annotations

from bench.calm.program import Program
from bench.calm.programs import changes_of_state, endings, interpreter, lone_work, pace, saves
from bench.calm.programs.catalogue import CATALOGUE

__all__ = ["PROGRAMS", "changes_of_state", "endings", "interpreter", "lone_work", "pace", "saves"]

CATALOGUE.audit("light", "lone_validation_of_4s", "adversarial_pair", "batch_norm")
CATALOGUE.audit("standard", "hooks_registered_in_the_step", "fake_quantisation", "accumulation", "adversarial_pair")
PROGRAMS: dict[str, Program] = CATALOGUE.programs
