"""The catalogue that all modules of programs add to."""

from __future__ import annotations

from bench.calm.program import Catalogue

CATALOGUE = Catalogue()
