"""Name what is measured, and measure it: one record per number of a cell.

A cell is ``CONFIG/KIND/WHAT``: ``gpt-ddp-float32/standard/gemm_forward`` holds injections at a site under a preset,
``.../peers/SITE`` the same injections before other detectors, ``.../clean/PRESET`` undisturbed steps, and
``.../overhead-PRESET/all`` the time that the preset takes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from bench.processes import RankFailed
from bench.sdc.injection import DETECTORS, Duration, Injection, Site, draw, duration_of
from bench.sdc.judging import Judgement, Outcome, Statement, judge_all, judge_replicas
from bench.sdc.models import Config
from bench.sdc.peers import Thresholds
from bench.sdc.ranks import Ranks
from bench.sdc.store import Store
from bench.sdc.training import ONSET, Result
from everstep_trainer.sdc.presets import PRESETS

MAIN = "gpt-ddp-float32"
OTHERS = (
    "gpt-ddp-bfloat16",
    "gpt-ddp-float32-recompute",
    "gpt-fsdp2-float32",
    "mlp-ddp-float32",
    "convnet-ddp-float32",
)
MODELS = ("vit", "lstm", "moe", "unet")
"""Models of other structures, measured at all places: by permanent and intermittent faults unless others are given."""
WITHOUT_ATTENTION = ("lstm",)
SITES_OF_OTHERS = (Site.GEMM_FORWARD, Site.GEMM_WEIGHT_GRADIENT, Site.ACTIVATIONS, Site.MOMENTS)
PEER_SITES = (Site.GEMM_FORWARD, Site.GEMM_WEIGHT_GRADIENT, Site.PARAMETERS)
MEASURED_PRESETS = ("light", "standard", "paranoid")
CALIBRATION_STEPS = 320
"""Steps until the chain has agreed on its intervals twice."""
CLEAN_STEPS = 2000
"""Undisturbed steps of one record."""


@dataclass(frozen=True)
class Cell:
    """See the module."""

    config: Config
    kind: str
    what: str

    @property
    def name(self) -> str:
        return f"{self.config.name}/{self.kind}/{self.what}"

    @staticmethod
    def parse(name: str) -> Cell:
        """Return the cell of this name. Raises ValueError if there is no such configuration."""
        config, kind, what = name.split("/")
        return Cell(Config.parse(config), kind, what)


def default_cells() -> Iterator[Cell]:
    """Yield the cells that are measured without further choice."""
    main = Config.parse(MAIN)
    for site in Site:
        yield Cell(main, "standard", site)
    for preset in ("light", "paranoid"):
        for site in PEER_SITES:
            yield Cell(main, preset, site)
    for site in PEER_SITES:
        yield Cell(main, "peers", site)
    for name in OTHERS:
        for site in SITES_OF_OTHERS:
            yield Cell(Config.parse(name), "standard", site)


def cells_of_model(model: str, preset: str) -> list[Cell]:
    """Return the cells of a model with faults at all places that it has."""
    config = Config.parse(f"{model}-ddp-float32")
    absent = (*DETECTORS, *([Site.ATTENTION] if model in WITHOUT_ATTENTION else []))
    return [Cell(config, preset, site) for site in Site if site not in absent]


def plan(
    cells: list[Cell], durations: Collection[Duration], count: int, duration: Callable[[Cell, int], Duration]
) -> list[tuple[Cell, int]]:
    """Return ``count`` injections of these durations as cells and numbers, cell by cell in turn.

    Args:
        cells: The places.
        durations: Those to choose.
        count: How many injections.
        duration: Returns that of an injection.
    """
    turns = ((cell, number) for number in itertools.count() for cell in cells)
    chosen = (turn for turn in turns if duration(*turn) in durations)
    return list(itertools.islice(chosen, count))


def drawn(cell: Cell, number: int, ranks: int) -> Injection:
    """Return an injection of a cell: the same under all presets, and without a chain."""
    site = Site(cell.what)
    return draw(f"{cell.config.name}/{site}", site, number, ranks)


def choose(patterns: list[str]) -> list[Cell]:
    """Return the cells whose names match one of the patterns. A whole name needs not be among the default cells."""
    cells = list(default_cells())
    if not patterns:
        return cells
    chosen = [cell for cell in cells if any(fnmatchcase(cell.name, pattern) for pattern in patterns)]
    known = {cell.name for cell in chosen}
    return chosen + [Cell.parse(pattern) for pattern in patterns if "*" not in pattern and pattern not in known]


class Measure:
    """Measures cells on the ranks, and keeps the records in the store.

    Args:
        ranks: The processes.
        store: The records.
        calibration_steps: Steps until intervals are known.
        window: Steps in which a fault may be found; None: those after which the preset's chain would count a version
            with the fault as audited.
    """

    def __init__(
        self, ranks: Ranks, store: Store, calibration_steps: int = CALIBRATION_STEPS, window: int | None = None
    ) -> None:
        self._ranks, self._store, self._calibration_steps = ranks, store, calibration_steps
        self._window = window
        self._windows: dict[tuple[Config, str], int] = {}
        self._thresholds: dict[Config, Thresholds] = {}

    def intervals(self, config: Config, preset: str) -> dict[str, int]:
        """Return the intervals of a preset, as the chain once chose them on this machine."""
        if preset not in PRESETS or preset == "off":
            return {}
        cell = f"{config.name}/intervals/{preset}"
        known = self._store.records(cell)
        if 0 not in known:
            self._store.add(cell, 0, self._ranks.call(config, "intervals", preset, self._calibration_steps)[0])
        return dict(known[0])

    def window(self, config: Config, kind: str = "standard") -> int:
        """Return the steps in which a fault may be found: those of ``standard`` if ``kind`` is no preset."""
        if self._window is not None:
            return self._window
        preset = kind if kind in MEASURED_PRESETS else "standard"
        if (config, preset) not in self._windows:
            intervals = self.intervals(config, preset)
            self._windows[config, preset] = self._ranks.call(config, "steps_until_audited", intervals)[0]
        return self._windows[config, preset]

    def elements(self, config: Config, site: Site) -> int:
        """Return the elements that pass a site in a step, as they were once counted.

        Raises:
            RankFailed: None does.
        """
        cell = f"{config.name}/elements/{site}"
        known = self._store.records(cell)
        if 0 not in known:
            self._store.add(cell, 0, {"elements": self._ranks.call(config, "elements", site)[0]})
        return int(known[0]["elements"])

    def duration(self, cell: Cell, number: int) -> Duration:
        """Return how often the fault of an injection acts."""
        injection = drawn(cell, number, self._ranks.world)
        elements = self.elements(cell.config, injection.site) if injection.recurs else 0
        return duration_of(injection.probability, elements)

    def injection(self, cell: Cell, number: int) -> None:
        """Record one injection."""
        injection = drawn(cell, number, self._ranks.world)
        if cell.kind == "peers":
            self._store.add(cell.name, number, self._before_peers(cell.config, injection))
            return
        intervals = self.intervals(cell.config, cell.kind)
        phase = injection.seed % 9973 / 9973
        began = time.monotonic()
        try:
            window = self.window(cell.config, cell.kind)
            results = self._ranks.call(cell.config, "run", injection, intervals, phase, window)
        except RankFailed as failure:
            record = {"failed": str(failure).strip().splitlines()[-1], "rank": injection.rank, "changed_step": 0}
            self._store.add(cell.name, number, record)
            return
        record = outcome_of(injection, results)
        self._store.add(cell.name, number, {**record, "seconds": round(time.monotonic() - began, 2)})

    def clean(self, config: Config, preset: str, number: int, steps: int = CLEAN_STEPS) -> None:
        """Record undisturbed steps with a chain."""
        intervals = self.intervals(config, preset)
        results = self._ranks.call(config, "run", None, intervals, number * 0.381966 % 1.0, 0, steps)
        alarms = sum(len(result.statements) for result in results) + bool(results[0].replica_digests)
        record = {"steps": results[0].steps, "alarms": alarms}
        audits = sorted({str(said.audit) for result in results for said in result.statements})
        self._store.add(f"{config.name}/clean/{preset}", number, {**record, "audits": audits})

    def overhead(self, config: Config, preset: str, number: int, blocks: int) -> None:
        """Record the time of a step with and without a preset."""
        intervals = self.intervals(config, preset)
        block_steps = min(128, max(16, *intervals.values()))
        off, on = self._ranks.call(config, "time_steps", intervals, blocks, block_steps)[0]
        self._store.add(f"{config.name}/overhead-{preset}/all", number, {"off_s": off, "on_s": on})

    def _before_peers(self, config: Config, injection: Injection) -> dict[str, Any]:
        thresholds = self._thresholds.get(config)
        if thresholds is None:
            clean = [self._ranks.call(config, "run", None, {}, 0.0, self.window(config), signals=True)]
            thresholds = self._thresholds[config] = Thresholds.fit([[step.signals for step in run] for run in clean])
        results = self._ranks.call(config, "run", injection, {}, 0.0, self.window(config), signals=True)
        alarms = thresholds.first_alarms([result.signals for result in results], results[0].differing_steps)
        return {**_about(injection, results), "alarms": alarms}


def _about(injection: Injection, results: list[Result]) -> dict[str, Any]:
    own = results[injection.rank]
    return {
        "rank": injection.rank,
        "corruption": str(injection.corruption),
        "shape": str(injection.shape),
        "probability": injection.probability,
        "gate": injection.gate,
        "elements": own.elements,
        "activations": own.activations,
        "changed_step": own.changed_step,
        "steps": own.steps,
    }


def outcome_of(injection: Injection, results: list[Result]) -> dict[str, Any]:
    """Return the record of an injection from what all ranks saw of it."""
    statements = [Statement(rank, said) for rank, result in enumerate(results) for said in result.statements]
    judgements = judge_all(statements, len(results))
    own = results[injection.rank]
    if own.replica_digests:
        judgements.append(judge_replicas(own.replica_digests, own.steps))
    first = _weightiest(judgements)
    return {
        **_about(injection, results),
        "caught_by": first.audit if first else "",
        "latency": own.steps - ONSET if first else None,
        "outcome": str(first.outcome) if first else "",
        "named": first.rank if first else None,
        "honest_convicted": [
            judgement.audit for judgement in judgements if _is_against_honest(judgement, injection, Outcome.CONVICTED)
        ],
        "honest_strikes": [
            judgement.audit for judgement in judgements if _is_against_honest(judgement, injection, *STRIKES)
        ],
    }


STRIKES = (Outcome.STRIKE, Outcome.AUDITOR_STRIKE)
_WEIGHT = list(Outcome)


def _weightiest(judgements: list[Judgement]) -> Judgement | None:
    return min(judgements, key=lambda one: _WEIGHT.index(one.outcome), default=None)


def _is_against_honest(judgement: Judgement, injection: Injection, *outcomes: Outcome) -> bool:
    return judgement.outcome in outcomes and judgement.rank != injection.rank
