"""What the chain of audits catches of injected faults, in real training on four ranks, and what it costs.

    python -m bench.sdc [--quick] [--cells PATTERN ...] [--per-cell 300] [--once] [--window STEPS] [--json FILE]
                        [--clean THOUSANDS] [--overhead BLOCKS] [--plot PNG]
    python -m bench.sdc --example PNG

Each cell is a model, a preset and a place of faults. A fault is put into one rank of a trained model; the bench trains
on until the chain finds it or the window is over, and goes back to the trained state. The window is as long as the
chain takes to look at all parts of a rank's work: then a version with the fault would count as audited. Records are
kept under out/sdc; another call adds what is missing. Intervals between audits are those that the chain once chose on
this machine.
Faults, their shapes and how often each occurs: `bench.sdc.injection`. Other detectors: `bench.sdc.peers`.
"""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.sdc.cells import CALIBRATION_STEPS, CLEAN_STEPS, MAIN, MEASURED_PRESETS, OTHERS, SEEDS, Measure, choose
from bench.sdc.example import show
from bench.sdc.models import Config
from bench.sdc.ranks import Ranks
from bench.sdc.report import Report
from bench.sdc.store import Store
from bench.table import finish, parser_of

RANKS, WARM_STEPS = 4, 200
QUICK_CALIBRATION_STEPS = 44
"""Steps until the chain has agreed on its intervals once."""
Work = tuple[str, Callable[[], None]]


def main() -> int:
    parser = parser_of("sdc", __doc__)
    parser.add_argument("--cells", nargs="*", default=[], metavar="PATTERN", help="CONFIG/PRESET/SITE, with * and ?")
    parser.add_argument("--per-cell", type=int, default=300, help="injections of each cell")
    parser.add_argument("--once", action="store_true", help="only injections that act once, of which there are few")
    parser.add_argument("--window", type=int, help="steps in which a fault may be found")
    parser.add_argument(
        "--clean", type=int, default=0, metavar="N", help="thousands of undisturbed steps, shared by all models"
    )
    parser.add_argument("--overhead", type=int, default=0, metavar="BLOCKS", help="pairs of blocks of steps to time")
    parser.add_argument("--store", type=Path, default=Path("out/sdc"), help="folder of the records")
    parser.add_argument("--report-only", action="store_true", help="measure nothing; sum up the records")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="write a picture of coverage against overhead")
    parser.add_argument("--example", type=Path, metavar="PNG", help="only draw one run with and without the chain")
    given = parser.parse_args()
    if given.quick:
        given.per_cell, given.window = min(given.per_cell, 3), given.window or 64
        given.cells = given.cells or [f"{MAIN}/standard/gemm_*"]
        given.store /= "quick"  # its intervals are rough
    store = Store(given.store / f"window-{given.window}" if given.window else given.store)
    if not given.report_only:
        warm_steps = 20 if given.quick else WARM_STEPS
        calibration_steps = QUICK_CALIBRATION_STEPS if given.quick else CALIBRATION_STEPS
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the ranks end with the bench
        with Ranks(RANKS, warm_steps) as ranks:
            measures = Measure(ranks, store, calibration_steps, given.window)
            if given.example:
                return finish("One rank computes wrongly", show(ranks, measures, given.example), given.json)
            measure(measures, store, given)
    report = Report(store)
    if given.plot:
        report.draw(given.plot, timed_config(given).name)
    return finish("Silent corruption: faults caught", report.rows(), given.json)


def measure(measures: Measure, store: Store, given: object) -> None:
    """Do what the store does not have yet."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), transient=True) as bar:
        task = bar.add_task("sdc")
        for kind in (work, harm_work, side_work):
            todo = list(kind(measures, store, given))
            bar.update(task, total=len(todo), completed=0)
            for name, do in todo:
                bar.update(task, description=name)
                do()
                bar.advance(task)


def work(measures: Measure, store: Store, given: object) -> Iterator[Work]:
    """Yield what is missing in the store, configuration by configuration."""
    cells = choose(given.cells)
    for config, kind in dict.fromkeys((cell.config, cell.kind) for cell in cells):
        yield f"{config.name}/intervals", lambda c=config, kind=kind: measures.intervals(c, kind)
    for config in dict.fromkeys(cell.config for cell in cells):
        own = [cell for cell in cells if cell.config == config]
        for number in range(given.per_cell):  # cell by cell in turn: all grow alike
            for cell in own:
                if number not in store.records(cell.name) and (not given.once or measures.is_transient(cell, number)):
                    yield cell.name, lambda cell=cell, number=number: measures.injection(cell, number)


def timed_config(given: object) -> Config:
    """Return the configuration whose overhead is measured and drawn: that of the first cell asked for."""
    return next((cell.config for cell in choose(given.cells)), Config.parse(MAIN))


def harm_work(measures: Measure, store: Store, given: object) -> Iterator[Work]:
    """Yield runs that tell what missed faults do."""
    cells = [cell for cell in choose(given.cells) if cell.config.name == MAIN and cell.kind == "standard"]
    if cells:
        main = cells[0].config
        yield f"{MAIN}/seeds", lambda: measures.seeds(main, 2 if given.quick else SEEDS)
    for cell in cells:
        for number in measures.misses_without_loss(cell):
            yield f"{cell.name}: harm", lambda cell=cell, number=number: measures.loss_after_miss(cell, number)


def side_work(measures: Measure, store: Store, given: object) -> Iterator[Work]:
    """Yield false alarms and overhead."""
    config = timed_config(given)
    everyone = [Config.parse(name) for name in (MAIN, *OTHERS)]
    runs = -(-given.clean * 1000 // (CLEAN_STEPS * len(everyone)))
    for one, number in itertools.product(everyone, range(runs)):
        if number not in store.records(f"{one.name}/clean/standard"):
            yield f"{one.name}/clean", lambda one=one, number=number: measures.clean(one, "standard", number)
    if given.overhead:
        for preset in MEASURED_PRESETS:
            for link in ("all", *(measures.intervals(config, preset) if preset == "standard" else ())):
                cell = f"{config.name}/overhead-{preset}/{link}"
                number = len(store.records(cell))
                yield cell, lambda p=preset, link=link, n=number: measures.overhead(config, p, link, n, given.overhead)


if __name__ == "__main__":
    sys.exit(main())
