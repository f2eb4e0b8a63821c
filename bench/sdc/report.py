"""Sum up the records of a store: what was caught, how soon, by which audit, at which cost; as rows and as a picture."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench.sdc.cells import MAIN, MEASURED_PRESETS, PEER_SITES, Cell, cells_of_model
from bench.sdc.injection import DETECTORS, MEMORY, Site
from bench.sdc.models import Config
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
MANY_PASSES = 6
"""Passes of blocks in a step, roughly: a fault with as many activations a step is active in each pass."""
MODEL_MARKS = {"light": (95, 98), "standard": (97, 99)}
"""Floor and aim of the share that a preset catches on models of other structures."""
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
        rows = []
        for preset in MEASURED_PRESETS:
            rows += self._preset_rows(preset)
        for cell in self.cells:
            if cell.kind in MEASURED_PRESETS:
                rows.append(self._cell_row(cell))
        rows += (
            self._checkpoint_rows() + self._stratum_rows() + self._audit_rows() + self._harm_rows() + self._peer_rows()
        )
        return rows + self._clean_rows() + self._overhead_rows()

    def records(self, config: str, kind: str, sites: Iterable[str]) -> list[Record]:
        """Return the injections of these sites that changed parameters."""
        found = (record for site in sites for record in self._store.records(f"{config}/{kind}/{site}").values())
        return [record for record in found if record["changed_step"]]  # a run that failed has none

    def model_rows(self, models: Iterable[str], presets: Iterable[str], kinds: Iterable[str]) -> list[Row]:
        """Return what presets catch on models of other structures, of injections of these kinds."""
        rows, models = [], list(models)
        for preset in presets:
            marks = MODEL_MARKS.get(preset, (None, None))
            everything: list[Record] = []
            for model in models:
                tried = [r for cell in cells_of_model(model, preset) for r in self._store.records(cell.name).values()]
                tried = [record for record in tried if "failed" in record or _kind(record) in kinds]
                everything += tried
                rows += self._model_rows(f"{model}, {preset}", tried)
                cost = self.overhead(Config.parse(f"{model}-ddp-float32").name, preset, "all")
                if cost is not None:
                    rows.append(Row(f"{model}, {preset}: overhead", cost, "% of a step"))
            changed = [record for record in everything if record["changed_step"]]
            rows.append(share_row(f"{preset}, all models: faults caught", *_hits(changed), *marks))
            frequent = [record for record in changed if record["probability"] * record["elements"] >= 1.0]
            rows.append(share_row(f"{preset}, all models: those that act in each step", *_hits(frequent), *marks))
            named = [record for record in changed if record["caught_by"]]
            right = sum(record["named"] == record["rank"] for record in named)
            rows.append(share_row(f"{preset}, all models: of the caught, the rank named", right, len(named)))
            struck = sum(bool(record.get("honest_strikes") or record.get("honest_convicted")) for record in everything)
            rows.append(Row(f"{preset}, all models: honest ranks with a strike", struck, "", 0, 0))
            failed = sum("failed" in record for record in everything)
            rows.append(Row(f"{preset}, all models: runs ended by an error", failed, "", 0, 0))
        return rows

    def _model_rows(self, name: str, tried: list[Record]) -> list[Row]:
        changed = [record for record in tried if record["changed_step"]]
        latencies = [record["latency"] for record in changed if record["caught_by"]]
        by = Counter(record["caught_by"] for record in changed if record["caught_by"])
        text = ", ".join(f"{kind} {count}" for kind, count in by.most_common())
        late = f"median {median(latencies):.0f} steps; " if latencies else ""
        rows = [share_row(f"{name}: faults caught", *_hits(changed), more=late + text)]
        if seconds := [record["seconds"] for record in tried if "seconds" in record]:
            rows.append(Row(f"{name}: time of an injection", sum(seconds) / len(seconds), "s"))
        return rows

    def _preset_rows(self, preset: str) -> list[Row]:
        judged = preset == "standard"
        marks: Callable[[float, float], tuple[float | None, float | None]] = lambda floor, aim: (  # noqa: E731
            (floor, aim) if judged else (None, None)
        )
        whole = self.records(MAIN, preset, (*COMPUTE, *MEMORY))
        if not whole:
            return []
        lasting, once = _by_duration(whole)
        rows = [
            share_row(f"{preset}: permanent faults caught", _caught(lasting), len(lasting), *marks(95, 99)),
            share_row(f"{preset}: permanent, active in each pass of a block", *_hits(filter(_is_frequent, lasting))),
        ]
        for steps in WITHIN_STEPS:
            soon = sum(bool(record["caught_by"]) and record["latency"] <= steps for record in lasting)
            rows.append(share_row(f"{preset}: permanent, caught within {steps} steps", soon, len(lasting)))
        named = [r for r in lasting if r["caught_by"]]
        right = sum(r["named"] == r["rank"] for r in named)
        rows.append(share_row(f"{preset}: of the caught, the rank named", right, len(named), *marks(99, 100)))
        for text, sites, floor, aim in (("passes and gradients", COMPUTE, 90, 98), ("state", MEMORY, 99.9, 100)):
            some, _ = _by_duration(self.records(MAIN, preset, sites))
            rows.append(share_row(f"{preset}: permanent in {text}", _caught(some), len(some), *marks(floor, aim)))
        rows.append(share_row(f"{preset}: faults that act once", _caught(once), len(once), *marks(60, 85)))
        tried = [
            record for cell in self.cells if cell.kind == preset for record in self._store.records(cell.name).values()
        ]
        everyone = [record for record in tried if "failed" not in record]
        evicted = sum(bool(r["honest_convicted"]) for r in everyone)
        struck = sum(bool(r["honest_strikes"]) for r in everyone)
        rows.append(Row(f"{preset}: honest ranks convicted", evicted, "", 0, 0, f"{len(everyone)} injections"))
        rows.append(Row(f"{preset}: runs ended by an error", len(tried) - len(everyone), "", 0, 0))
        rows.append(Row(f"{preset}: honest ranks with a strike", struck, "", None, None, "two within 7 days convict"))
        return rows

    def _cell_row(self, cell: Cell) -> Row:
        records = [record for record in self._store.records(cell.name).values() if "failed" not in record]
        if cell.what in DETECTORS:
            reported = [record for record in records if record["caught_by"]]
            named = sum(record["named"] == record["rank"] for record in reported)
            return share_row(cell.name, named, len(reported), more="the liar named")
        changed, once = _by_duration(record for record in records if record["changed_step"])
        latencies = [record["latency"] for record in changed if record["caught_by"]]
        by = Counter(record["caught_by"] for record in changed if record["caught_by"])
        text = ", ".join(f"{kind} {count}" for kind, count in by.most_common())
        late = f"median {median(latencies):.0f} steps; " if latencies else ""
        rare = f"; once: {_caught(once)} of {len(once)}" if once else ""
        return share_row(cell.name, *_hits(changed), more=late + text + rare)

    def _checkpoint_rows(self) -> list[Row]:
        rows = []
        for cell in self.cells:
            if cell.kind == "checkpoint":
                changed = [record for record in self._store.records(cell.name).values() if record["changed"]]
                hits = sum(record["caught"] for record in changed)
                rows.append(share_row(f"checkpoint bytes, {cell.what}", hits, len(changed), 99.9, 100))
        return rows

    def _permanent(self) -> list[Record]:
        """Return the permanent faults of all sites: of those that act once, the store may hold more than their part."""
        return _by_duration(self.records(MAIN, "standard", (*COMPUTE, *MEMORY)))[0]

    def _stratum_rows(self) -> list[Row]:
        whole = self._permanent()
        rows = []
        for field in ("stratum", "shape", "corruption"):
            for value in sorted({record[field] for record in whole}):
                rows.append(share_row(f"standard: permanent, {value}", *_hits(r for r in whole if r[field] == value)))
        bounds = (0.0, 1.0, 100.0, math.inf)
        for low, high in itertools.pairwise(bounds):
            some = (record for record in whole if low <= record["probability"] * record["elements"] < high)
            rows.append(share_row(f"standard: permanent, {low:g} to {high:g} activations a step", *_hits(some)))
        return rows if whole else []

    def _audit_rows(self) -> list[Row]:
        whole = self._permanent()
        caught = Counter(record["caught_by"] for record in whole if record["caught_by"])
        return [
            share_row(f"standard: permanent, caught first by {kind}", n, len(whole)) for kind, n in caught.most_common()
        ]

    def _harm_rows(self) -> list[Row]:
        seeds = [record["loss"] for record in self._store.records(f"{MAIN}/seeds/loss").values()]
        missed = [r for site in Site for r in self._store.records(f"{MAIN}/harm/{site}").values()]
        without = [r for site in Site for r in self.records(MAIN, "peers", (site,))]
        if len(seeds) < 2:
            return []
        harmful: Callable[[Record], bool] = lambda r: not min(seeds) <= float(r["final_loss"]) <= max(seeds)  # noqa: E731
        spread = f"loss outside {min(seeds):.4f} to {max(seeds):.4f}"
        return [
            share_row(f"{text}: harm after the window", sum(map(harmful, some)), len(some), more=spread)
            for text, runs in (("standard, missed", missed), ("without a chain", without))
            if (some := [record for record in runs if record["final_loss"] is not None])
        ]

    def _peer_rows(self) -> list[Row]:
        rows = []
        for config in sorted({cell.config.name for cell in self.cells if cell.kind == "peers"}):
            sites = [cell.what for cell in self.cells if cell.kind == "peers" and cell.config.name == config]
            records = self.records(config, "peers", sites)
            for peer in PEERS:
                hits = sum(bool(record["alarms"][peer]) for record in records)
                rows.append(share_row(f"{config}: {peer}", hits, len(records), more="peer"))
            numbers = {site: set(self._store.records(f"{config}/peers/{site}")) for site in sites}
            ours = [
                record
                for site in sites
                for number, record in self._store.records(f"{config}/standard/{site}").items()
                if number in numbers[site] and record["changed_step"]
            ]
            if ours:
                rows.append(share_row(f"{config}: standard, on the same injections", *_hits(ours)))
        return rows

    def _clean_rows(self) -> list[Row]:
        rows = []
        for cell in self.cells:
            if cell.kind == "clean":
                records = self._store.records(cell.name).values()
                steps, alarms = sum(record["steps"] for record in records), sum(record["alarms"] for record in records)
                rows.append(
                    Row(f"{cell.name}: false alarms", 1e6 * alarms / steps, "per 1e6 steps", 0, 0, f"in {steps} steps")
                )
        return rows

    def overhead(self, config: str, preset: str, kind: str) -> float | None:
        """Return by how many percent a step takes longer; the median of paired blocks."""
        records = self._store.records(f"{config}/overhead-{preset}/{kind}").values()
        ratios = [on / off for record in records for off, on in zip(record["off_s"], record["on_s"], strict=True)]
        return 100 * (median(ratios) - 1) if ratios else None

    def _overhead_rows(self) -> list[Row]:
        rows = []
        for cell in self.cells:
            if cell.kind.startswith("overhead-"):
                preset = cell.kind.removeprefix("overhead-")
                judged = (5, 2) if preset == "standard" and cell.what == "all" else (None, None)
                value = self.overhead(cell.config.name, preset, cell.what)
                rows.append(Row(f"{cell.name}", value, "% of a step", *judged))
        return rows

    def draw(self, path: Path, config: str = MAIN) -> None:
        """Write a picture of coverage against overhead, and beside it what other detectors see of the same faults.

        It shows the sites at which all of them are tried. What the other detectors cost is not measured.
        """
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.4), sharey=True, width_ratios=(1, 1.3))
        for preset in MEASURED_PRESETS:
            records, _ = _by_duration(self.records(config, preset, PEER_SITES))
            cost = self.overhead(config, preset, "all")
            if records and cost is not None:
                at = max(cost, 0.0)
                share = _draw_share(right, at, *_hits(records), OURS)
                right.annotate(preset, (at, share), xytext=(7, -12), textcoords="offset points", fontsize=9)
        records, _ = _by_duration(self.records(config, "peers", PEER_SITES))
        for at, peer in enumerate(PEERS if records else ()):
            _draw_share(left, at, sum(bool(record["alarms"][peer]) for record in records), len(records), THEIRS)
        left.set_xticks(range(len(PEERS)), PEERS, rotation=35, ha="right", fontsize=8)
        left.set_title("other detectors, in each step", fontsize=10)
        left.set_ylabel("permanent faults caught, %")
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


def _kind(record: Record) -> str:
    return "permanent" if record["probability"] else "once"


def _by_duration(records: Iterable[Record]) -> tuple[list[Record], list[Record]]:
    """Return the permanent faults, and those that act once."""
    known = list(records)
    return [record for record in known if record["probability"]], [
        record for record in known if not record["probability"]
    ]


def _caught(records: Iterable[Record]) -> int:
    return sum(bool(record["caught_by"]) for record in records)


def _hits(records: Iterable[Record]) -> tuple[int, int]:
    known = list(records)
    return _caught(known), len(known)


def _is_frequent(record: Record) -> bool:
    is_frequent: bool = record["probability"] * record["elements"] >= MANY_PASSES
    return is_frequent
