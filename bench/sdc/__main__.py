"""What the chain of audits catches of injected faults, in real training on four ranks, and what it costs.

    python -m bench.sdc [--quick] [--cells PATTERN ...] [--per-cell 300] [--kinds permanent,transient]
                        [--window STEPS] [--json FILE] [--clean THOUSANDS] [--overhead BLOCKS]
                        [--plot PNG]
    python -m bench.sdc --models vit,lstm,moe,unet [--kinds permanent,intermittent]
                        [--presets light,standard] [--injections N]
    python -m bench.sdc --digests [--quick]

Each cell is a model, a preset and a place of faults. A fault is put into one rank of a trained model; the bench trains
on until the chain finds it or the window is over, and goes back to the trained state. The window is as long as the
chain takes to look at all parts of a rank's work: then a version with the fault would count as audited. Records are
kept under out/sdc; another call adds what is missing. Intervals between audits are those that the chain once chose on
this machine.
``--models`` measures models of other structures, at all places, and prints the share that each preset catches.
A permanent fault acts in each step (on average at least once), an intermittent one in some steps, a transient one once.
``--digests`` measures the rate of digests beside a copy of the same bytes, and the faults that they miss.
Faults, their shapes and how often each occurs: `bench.sdc.injection`. Other detectors: `bench.sdc.peers`.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.sdc import digests
from bench.sdc.cells import (
    CALIBRATION_STEPS,
    CLEAN_STEPS,
    MAIN,
    MEASURED_PRESETS,
    MODELS,
    OTHERS,
    Measure,
    cells_of_model,
    choose,
    plan,
)
from bench.sdc.injection import Duration
from bench.sdc.models import Config
from bench.sdc.ranks import Ranks
from bench.sdc.report import Report
from bench.sdc.store import Store
from bench.table import finish, parser_of

RANKS, WARM_STEPS = 4, 200
INJECTIONS, QUICK_WINDOW = 16, 64
QUICK_CALIBRATION_STEPS = 44
"""Steps until the chain has agreed on its intervals once."""
Work = tuple[str, Callable[[], object]]


def main() -> int:
    parser = parser_of("sdc", __doc__)
    parser.add_argument("--cells", nargs="*", default=[], metavar="PATTERN", help="CONFIG/PRESET/SITE, with * and ?")
    parser.add_argument("--per-cell", type=int, default=300, help="injections of each cell")
    parser.add_argument("--kinds", type=_names(Duration), help="of permanent,intermittent,transient")
    parser.add_argument("--models", type=_names(MODELS), help=f"of {','.join(MODELS)}, in place of --cells")
    parser.add_argument("--presets", type=_names(MEASURED_PRESETS), default=["light", "standard"], help="of --models")
    parser.add_argument("--injections", type=int, default=INJECTIONS, help="of each of --models under each preset")
    parser.add_argument("--window", type=int, help="steps in which a fault may be found")
    parser.add_argument(
        "--clean", type=int, default=0, metavar="N", help="thousands of undisturbed steps, shared by all models"
    )
    parser.add_argument("--overhead", type=int, default=0, metavar="BLOCKS", help="pairs of blocks of steps to time")
    parser.add_argument("--store", type=Path, default=Path("out/sdc"), help="folder of the records")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="write a picture of coverage against overhead")
    parser.add_argument("--digests", action="store_true", help="only measure the digests")
    given = parser.parse_args()
    if given.digests:
        return finish("Digests, and faults of each kind", digests.measure(quick=given.quick), given.json)
    recurring = [Duration.PERMANENT, Duration.INTERMITTENT]
    given.kinds = given.kinds or (recurring if given.models else list(Duration))
    if given.quick:
        given.injections = min(given.injections, 3)
        given.per_cell, given.window = min(given.per_cell, 3), given.window or QUICK_WINDOW
        given.cells = given.cells or [f"{MAIN}/standard/gemm_*"]
        given.store /= "quick"  # its intervals are rough
    store = Store(given.store / f"window-{given.window}" if given.window else given.store)
    warm_steps = 20 if given.quick else WARM_STEPS
    calibration_steps = QUICK_CALIBRATION_STEPS if given.quick else CALIBRATION_STEPS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the ranks end with the bench
    with Ranks(RANKS, warm_steps) as ranks:
        measures = Measure(ranks, store, calibration_steps, given.window)
        measure(measures, store, given)
    report = Report(store)
    if given.plot:
        report.draw(given.plot, timed_config(given).name)
    rows = report.model_rows(given.models, given.presets, given.kinds) if given.models else report.rows()
    return finish("Silent corruption: faults caught", rows, given.json)


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a parser of names with commas between them."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"there is no {', '.join(sorted(unknown))}: choose of {','.join(known)}")
        return names

    return parse


def measure(measures: Measure, store: Store, given: argparse.Namespace) -> None:
    """Do what the store does not have yet."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), transient=True) as bar:
        task = bar.add_task("sdc")
        for kind in (model_work,) if given.models else (work, side_work):
            todo = list(kind(measures, store, given))
            bar.update(task, total=len(todo), completed=0)
            for name, do in todo:
                bar.update(task, description=name)
                do()
                bar.advance(task)


def work(measures: Measure, store: Store, given: argparse.Namespace) -> Iterator[Work]:
    """Yield what is missing in the store, configuration by configuration."""
    cells = choose(given.cells)
    for config, kind in dict.fromkeys((cell.config, cell.kind) for cell in cells):
        yield f"{config.name}/intervals", partial(measures.intervals, config, kind)
    for config in dict.fromkeys(cell.config for cell in cells):
        own = [cell for cell in cells if cell.config == config]
        for number in range(given.per_cell):  # cell by cell in turn: all grow alike
            for cell in own:
                if number in store.records(cell.name):
                    continue
                if len(given.kinds) == len(Duration) or measures.duration(cell, number) in given.kinds:
                    yield cell.name, partial(measures.injection, cell, number)


def model_work(measures: Measure, store: Store, given: argparse.Namespace) -> Iterator[Work]:
    """Yield what is missing of models of other structures, model by model."""
    for model in given.models:
        of_presets = [cells_of_model(model, preset) for preset in given.presets]
        config = of_presets[0][0].config
        for preset in given.presets:
            yield f"{config.name}/intervals", partial(measures.intervals, config, preset)
        plans = [plan(cells, given.kinds, given.injections, measures.duration) for cells in of_presets]
        for cell, number in itertools.chain.from_iterable(zip(*plans, strict=True)):  # presets in turn
            if number not in store.records(cell.name):
                yield cell.name, partial(measures.injection, cell, number)
        for preset in given.presets if given.overhead else ():
            yield overhead_work(measures, store, config, preset, given.overhead)


def timed_config(given: argparse.Namespace) -> Config:
    """Return the configuration whose overhead is measured and drawn: that of the first cell asked for."""
    return next((cell.config for cell in choose(given.cells)), Config.parse(MAIN))


def side_work(measures: Measure, store: Store, given: argparse.Namespace) -> Iterator[Work]:
    """Yield false alarms and overhead."""
    config = timed_config(given)
    everyone = [Config.parse(name) for name in (MAIN, *OTHERS)]
    runs = -(-given.clean * 1000 // (CLEAN_STEPS * len(everyone)))
    for tried_config, number in itertools.product(everyone, range(runs)):
        if number not in store.records(f"{tried_config.name}/clean/standard"):
            yield f"{tried_config.name}/clean", partial(measures.clean, tried_config, "standard", number)
    if given.overhead:
        for preset in MEASURED_PRESETS:
            yield overhead_work(measures, store, config, preset, given.overhead)


def overhead_work(measures: Measure, store: Store, config: Config, preset: str, blocks: int) -> Work:
    """Return one more record of the time that a preset takes."""
    cell = f"{config.name}/overhead-{preset}/all"
    return cell, partial(measures.overhead, config, preset, len(store.records(cell)), blocks)


if __name__ == "__main__":
    sys.exit(main())
