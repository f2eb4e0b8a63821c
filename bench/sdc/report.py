"""Sum up the records of a store: what was caught, how soon, by which audit, at which cost; as rows and as a picture."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench.sdc.cells import MAIN, MEASURED_PRESETS, PEER_SITES, Cell, cells_of_model
from bench.sdc.injection import DETECTORS, MEMORY, Duration, Site, duration_of
from bench.sdc.peers import PEERS
from bench.sdc.store import Store
from bench.table import Row

COMPUTE = (
    Site.GEMM_FORWARD,
    Site.GEMM_INPUT_GRADIENT,
    Site.GEMM_WEIGHT_GRADIENT,
    Site.ATTENTION,
    Site.LOCAL_GRADIENT,
    Site.BEFORE_COLLECTIVE,
    Site.AFTER_COLLECTIVE,
    Site.ACTIVATIONS,
)
MODEL_MARKS = {"light": (95, 98), "standard": (97, 99)}
"""Floor and aim of the share of permanent faults that a preset catches on models of other structures."""
WITHIN_STEPS = (50, 100, 200, 400, 800)
Record = dict[str, Any]
OURS, THEIRS = "#2a6f97", "#b0b7bf"


def wilson(hits: int, of: int) -> tuple[float, float]:
    """Return the 95 % interval of a share."""
    if not of:
        return 0.0, 1.0
    z, share = 1.96, hits / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return max(0.0, middle - half), min(1.0, middle + half)


def share_row(
    name: str, hits: int, of: int, floor: float | None = None, aim: float | None = None, more: str = ""
) -> Row:
    """Return a row with a share in percent and its interval."""
    low, high = wilson(hits, of)
    against = f"{hits} of {of}, {100 * low:.1f} to {100 * high:.1f} %" + (f"; {more}" if more else "")
    value = 100 * hits / of if of else None
    judged = (floor, aim) if of else (None, None)
    return Row(name, value, "%", *judged, against, smaller_is_better=False)


class Report:
    """The figures of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.cells = [Cell.parse(name) for name in store.cells()]

    def rows(self) -> list[Row]:
        """Return all rows that the store has records for."""
        rows = [row for preset in MEASURED_PRESETS for row in self._preset_rows(preset)]
        rows += [self._cell_row(cell) for cell in self.cells if cell.kind in MEASURED_PRESETS]
        return rows + self._peer_rows() + self._clean_rows() + self._overhead_rows()

    def records(self, config: str, kind: str, sites: Iterable[str]) -> list[Record]:
        """Return the injections of these sites that changed parameters."""
        return _changed(r for site in sites for r in self._store.records(f"{config}/{kind}/{site}").values())

    def model_rows(self, models: Iterable[str], presets: Iterable[str], durations: Collection[Duration]) -> list[Row]:
        """Return what presets catch on models of other structures, of injections of these durations."""
        rows, models = [], list(models)
        for preset in presets:
            marks = MODEL_MARKS.get(preset, (None, None))
            everything: list[Record] = []
            for model in models:
                tried = [r for cell in cells_of_model(model, preset) for r in self._store.records(cell.name).values()]
                tried = [r for r in tried if "failed" in r or _duration(r) in durations]
                everything += tried
                rows.append(_found_row(f"{model}, {preset}: faults caught", _changed(tried)))
                cost = self.overhead(f"{model}-ddp-float32", preset)
                if cost is not None:
                    rows.append(Row(f"{model}, {preset}: overhead", cost, "% of a step"))
            changed, name = _changed(everything), f"{preset}, all models"
            for duration in (each for each in Duration if each in durations):
                hits = _hits(_lasting(changed, duration))
                judged = marks if duration is Duration.PERMANENT else (None, None)
                rows.append(share_row(f"{name}: {duration} faults caught", *hits, *judged))
            if len(durations) > 1:
                rows.append(share_row(f"{name}: all of these faults caught", *_hits(changed)))
            rows.append(share_row(f"{name}: of the caught, the rank named", *_named(changed)))
            rows += _honest_rows(name, everything)
        return rows

    def _preset_rows(self, preset: str) -> list[Row]:
        def row(name: str, hits: tuple[int, int], floor: float | None = None, aim: float | None = None) -> Row:
            marks = (floor, aim) if preset == "standard" else (None, None)
            return share_row(f"{preset}: {name}", *hits, *marks)

        whole = self.records(MAIN, preset, (*COMPUTE, *MEMORY))
        if not whole:
            return []
        permanent = _lasting(whole, Duration.PERMANENT)
        rows = [
            row("permanent faults caught", _hits(permanent), 95, 99),
            row("intermittent faults caught", _hits(_lasting(whole, Duration.INTERMITTENT))),
            row("transient faults caught", _hits(_lasting(whole, Duration.TRANSIENT)), 60, 85),
        ]
        for steps in WITHIN_STEPS:
            soon = sum(bool(record["caught_by"]) and record["latency"] <= steps for record in permanent)
            rows.append(row(f"permanent, caught within {steps} steps", (soon, len(permanent))))
        rows.append(row("of the caught, the rank named", _named(_recurring(whole)), 99, 100))
        for text, sites, floor, aim in (("passes and gradients", COMPUTE, 90, 98), ("state", MEMORY, 99.9, 100)):
            some = _lasting(self.records(MAIN, preset, sites), Duration.PERMANENT)
            rows.append(row(f"permanent in {text}", _hits(some), floor, aim))
        cells = (cell for cell in self.cells if cell.kind == preset)
        tried = [record for cell in cells for record in self._store.records(cell.name).values()]
        return rows + _honest_rows(preset, tried)

    def _cell_row(self, cell: Cell) -> Row:
        records = self._store.records(cell.name).values()
        if cell.what in DETECTORS:
            return share_row(cell.name, *_named(r for r in records if "failed" not in r), more="the liar named")
        changed = _changed(records)
        transient = _lasting(changed, Duration.TRANSIENT)
        more = f"; transient: {_caught(transient)} of {len(transient)}" if transient else ""
        return _found_row(cell.name, _recurring(changed), more)

    def _peer_rows(self) -> list[Row]:
        rows = []
        for config in sorted({cell.config.name for cell in self.cells if cell.kind == "peers"}):
            sites = [cell.what for cell in self.cells if cell.kind == "peers" and cell.config.name == config]
            records = self.records(config, "peers", sites)
            for peer in PEERS:
                hits = sum(bool(record["alarms"][peer]) for record in records)
                rows.append(share_row(f"{config}: {peer}", hits, len(records), more="peer"))
            for preset in MEASURED_PRESETS:
                ours = [
                    record
                    for site in sites
                    for number, record in self._store.records(f"{config}/{preset}/{site}").items()
                    if number in self._store.records(f"{config}/peers/{site}")
                ]
                if ours:
                    rows.append(share_row(f"{config}: {preset}, on the same injections", *_hits(_changed(ours))))
        return rows

    def _clean_rows(self) -> list[Row]:
        rows = []
        for cell in (cell for cell in self.cells if cell.kind == "clean"):
            records = self._store.records(cell.name).values()
            steps, alarms = (sum(record[name] for record in records) for name in ("steps", "alarms"))
            name, rate = f"{cell.name}: false alarms", 1e6 * alarms / steps
            rows.append(Row(name, rate, "per 1e6 steps", 0, 0, f"in {steps} steps"))
        return rows

    def overhead(self, config: str, preset: str) -> float | None:
        """Return by how many percent a step takes longer; the median of paired blocks."""
        records = self._store.records(f"{config}/overhead-{preset}/all").values()
        ratios = [on / off for record in records for off, on in zip(record["off_s"], record["on_s"], strict=True)]
        return 100 * (median(ratios) - 1) if ratios else None

    def _overhead_rows(self) -> list[Row]:
        rows = []
        for cell in (cell for cell in self.cells if cell.kind.startswith("overhead-")):
            preset = cell.kind.removeprefix("overhead-")
            marks = (5, 2) if preset == "standard" else (None, None)
            rows.append(Row(cell.name, self.overhead(cell.config.name, preset), "% of a step", *marks))
        return rows

    def draw(self, path: Path, config: str = MAIN) -> None:
        """Write a picture of coverage against overhead, and beside it what other detectors see of the same faults.

        It shows the sites at which all of them are tried. What the other detectors cost is not measured.
        """
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.4), sharey=True, width_ratios=(1, 1.3))
        for preset in MEASURED_PRESETS:
            records = _recurring(self.records(config, preset, PEER_SITES))
            cost = self.overhead(config, preset)
            if records and cost is not None:
                at = max(cost, 0.0)
                share = _draw_share(right, at, *_hits(records), OURS)
                right.annotate(preset, (at, share), xytext=(7, -12), textcoords="offset points", fontsize=9)
        records = _recurring(self.records(config, "peers", PEER_SITES))
        for at, peer in enumerate(PEERS if records else ()):
            _draw_share(left, at, sum(bool(record["alarms"][peer]) for record in records), len(records), THEIRS)
        left.set_xticks(range(len(PEERS)), PEERS, rotation=35, ha="right", fontsize=8)
        left.set_title("other detectors, in each step", fontsize=10)
        left.set_ylabel("permanent and intermittent faults caught, %")
        right.set_title("audits", fontsize=10)
        right.set_xlabel("time added to a step, %")
        right.set_xlim(left=-1)
        right.set_ylim(0, 104)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _draw_share(axes: Axes, at: float, hits: int, of: int, colour: str) -> float:
    """Draw a share with its interval, and return it in percent."""
    share = 100 * hits / of
    low, high = wilson(hits, of)
    errors = [[share - 100 * low], [100 * high - share]]
    axes.errorbar([at], [share], yerr=errors, fmt="o", color=colour, capsize=3)
    return share


def _changed(records: Iterable[Record]) -> list[Record]:
    """Return the injections that changed parameters; a run that failed has none."""
    return [record for record in records if record["changed_step"]]


def _duration(record: Record) -> Duration:
    return duration_of(record["probability"], record["elements"])


def _lasting(records: Iterable[Record], duration: Duration) -> list[Record]:
    """Return the faults of one duration."""
    return [record for record in records if _duration(record) is duration]


def _recurring(records: Iterable[Record]) -> list[Record]:
    """Return the faults that are permanent or intermittent."""
    return [record for record in records if record["probability"]]


def _caught(records: Iterable[Record]) -> int:
    return sum(bool(record["caught_by"]) for record in records)


def _hits(records: Iterable[Record]) -> tuple[int, int]:
    known = list(records)
    return _caught(known), len(known)


def _named(records: Iterable[Record]) -> tuple[int, int]:
    """Return how many faults were named with their rank, and how many were caught."""
    caught = [record for record in records if record["caught_by"]]
    return sum(record["named"] == record["rank"] for record in caught), len(caught)


def _found_row(name: str, changed: list[Record], more: str = "") -> Row:
    """Return a row with the share that was caught, how late, and first by which audits."""
    caught = [record for record in changed if record["caught_by"]]
    by = ", ".join(f"{kind} {count}" for kind, count in Counter(r["caught_by"] for r in caught).most_common())
    late = f"median {median(record['latency'] for record in caught):.0f} steps; " if caught else ""
    return share_row(name, len(caught), len(changed), more=late + by + more)


def _honest_rows(name: str, tried: list[Record]) -> list[Row]:
    ended = [record for record in tried if "failed" not in record]
    convicted, struck = (sum(bool(r[f"honest_{what}"]) for r in ended) for what in ("convicted", "strikes"))
    return [
        Row(f"{name}: honest ranks convicted", convicted, "", 0, 0, f"{len(ended)} injections"),
        Row(f"{name}: honest ranks with a strike", struck, "", 0, 0, "two within 7 days convict"),
        Row(f"{name}: runs ended by an error", len(tried) - len(ended), "", 0, 0),
    ]
