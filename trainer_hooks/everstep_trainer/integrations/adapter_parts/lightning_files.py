"""Keep what Lightning wrote before a regroup: the folders of loggers, the rows of CSVLogger, and the newer state.

Each generation makes a new Trainer. Left alone, its loggers would take the next free ``version_N`` folder, so that a
ModelCheckpoint without ``dirpath`` forgot its best models, and a CSVLogger would delete its file. Private names were
read in Lightning 2.6.
"""

from __future__ import annotations

import csv
import logging
from typing import Any

import torch.distributed as dist

from everstep_trainer.run import Run

log = logging.getLogger(__name__)

_versions: dict[str, dict[int, Any]] = {}
"""For each job, the versions that its loggers have, by their place. Survivors tell them to new processes."""


def keep_logger_versions(run: Run, loggers: list[Any]) -> None:
    """Give loggers without a version of their own the one that they had in earlier generations. A collective."""
    if not run.job or not any(hasattr(logger, "_get_next_version") for logger in loggers):
        return
    chosen = {place for place, logger in enumerate(loggers) if _chooses_version(logger)}
    ranks = _gathered(run, (chosen, _versions.get(run.job)))
    places = sorted(set().union(*(rank_places for rank_places, _ in ranks)))
    known: dict[int, Any] = next((versions for _, versions in ranks if versions is not None), {})
    if not set(places) <= known.keys():
        (found, *_) = _gathered(run, {place: loggers[place].version for place in places})
        known = found | known
    _versions[run.job] = known
    for place in places:
        loggers[place]._version = known[place]


def _chooses_version(logger: Any) -> bool:
    """Return whether the logger takes the next free version, which it may have looked up already."""
    version = getattr(logger, "_version", "")
    return version is None or (hasattr(logger, "_get_next_version") and version == logger._get_next_version())


def _gathered(run: Run, value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values = [value] * run.world_size
    if run.distributed:
        dist.all_gather_object(values, value)
    return values


class CsvRows:
    """The rows of the Trainer's CSVLoggers, of which a new logger's first use deletes the file; for rank 0."""

    def __init__(self, run: Run, loggers: list[Any]) -> None:
        self._loggers = [logger for logger in loggers if type(logger).__name__ == "CSVLogger"] if run.rank == 0 else []
        self._earlier = [_read_rows(logger) if run.generation > 1 else [] for logger in self._loggers]

    def restore(self, step: int) -> None:
        """Write the rows of steps below ``step`` again: later ones are logged once more."""
        for logger, rows in zip(self._loggers, self._earlier, strict=True):
            kept = [row for row in rows if row.get("step") and float(row["step"]) < step]
            if not kept:
                continue
            experiment = logger.experiment  # deletes the file
            experiment.metrics_keys = list(kept[0])
            with experiment._fs.open(experiment.metrics_file_path, "w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=experiment.metrics_keys)
                writer.writeheader()
                writer.writerows(kept)

    def save(self) -> None:
        """Write the rows of the last step, which a lost rank would take with it."""
        for logger in self._loggers:
            if logger._experiment is not None and logger._experiment.metrics:
                logger.save()


def _read_rows(logger: Any) -> list[dict[str, str]]:
    if logger._experiment is not None:
        return []
    path = f"{logger.log_dir}/metrics.csv"
    if not logger._fs.isfile(path):
        return []
    with logger._fs.open(path, "r", newline="") as file:
        return list(csv.DictReader(file))


def keep_newer_state(run: Run, trainer: Any) -> None:
    """Have ``fit(ckpt_path=...)`` not replace newer state that was restored from memory; call it after ``run.track``.

    After a regroup the state in memory continues. At the start of a run, state of a stored checkpoint of Everstep is
    compared with the file, and the newer one is kept.
    """
    connector = trainer._checkpoint_connector
    path = getattr(connector, "_ckpt_path", None) or trainer.ckpt_path
    loaded = connector._loaded_checkpoint
    is_late = trainer.strategy.restore_checkpoint_after_setup  # the file is read only later
    if run.last_finished_step == 0 or not (loaded or (is_late and path)):
        return
    here, there = trainer.global_step, loaded.get("global_step") if loaded else None
    said = f"update {there}" if there is not None else "an earlier or later update"
    if run.generation == 1 and there is not None and there > here:
        if run.rank == 0:
            message = "fit(ckpt_path=%s): the file has %s and is newer than the restored update %d, so it is loaded"
            log.warning(message, path, said, here)
        connector.restore_model()
        connector.restore_datamodule()
        connector.restore_callbacks()
        return
    if run.rank == 0:
        message = "fit(ckpt_path=%s) is not loaded: the file has %s, and the run continues after update %d from memory"
        log.warning(message, path, said, here)
    connector._loaded_checkpoint = {}
    if is_late:
        connector._restore_modules_and_callbacks = lambda *_, **__: None
