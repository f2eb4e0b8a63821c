"""Write a run's loss and its regroups to Weights & Biases, MLflow, TensorBoard or a tracker of your own.

Example::

    def train(run):
        ...
        track_recoveries(run, WandbTracker(project="pretraining"))
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(until=10_000):
            ...
            run.report(loss=loss)

Rank 0 writes, whichever process holds it: a new process resumes the tracker's run, found by the job's name. All calls
into a tracker happen on a thread of its own. The training thread only fills a queue, and never waits for it. A tracker
that raises an exception is logged once and left out; what the queue cannot hold is dropped.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from everstep_trainer.base.progress import LatestLoss
from everstep_trainer.run import Run
from everstep_trainer.runtime.regroup_record import RegroupRecord

log = logging.getLogger(__name__)

QUEUE_LENGTH = 4096  # losses and marks that may wait for a slow tracker
CLOSE_TIMEOUT_S = 30.0  # at the end of the process, for what still waits

# ---- trackers


class Tracker:
    """Base of trackers. Methods are called on one thread, and may block or raise."""

    @property
    def key(self) -> str:
        """Name of the place that is written to. A process goes on with its open tracker of the same key."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    def open(self, job: str, step: int) -> None:
        """Begin or resume the tracker's run; called again in each generation of a process.

        Args:
            job: Name of the job; empty without Everstep.
            step: First step that is written now. Later ones may have been written before.
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of a step."""
        raise NotImplementedError

    def mark(self, record: RegroupRecord) -> None:
        """Write a mark with the cause of a regroup; its numbers were passed to ``log``."""

    def close(self) -> None:
        """Write what is left: rank 0 moved to another process, or the process ends."""


class WandbTracker(Tracker):
    """Weights & Biases: charts over ``everstep/step``, causes in ``everstep/cause`` and in the run's summary.

    The run's ``id`` is the job's name, resumed if it exists. Tried with wandb 0.31.

    Args:
        options: Arguments of ``wandb.init``, such as project, mode and config.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run: Any = None

    @property
    def key(self) -> str:
        return "wandb:{project}:{id}".format_map({"project": None, "id": None} | self._options)

    def open(self, job: str, step: int) -> None:
        if self._run is not None:
            return
        import wandb  # here, so that a missing package leaves out the tracker alone

        options = dict(self._options)
        if job:
            options = {"id": job, "name": job, "resume": "allow"} | options
        options.setdefault("settings", wandb.Settings(console="off"))  # else it replaces stdout from this thread
        self._run = wandb.init(**options)
        self._run.define_metric("*", step_metric="everstep/step")  # steps computed again go back

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"everstep/step": step, **values})

    def mark(self, record: RegroupRecord) -> None:
        self._run.log({"everstep/step": record.step, "everstep/cause": record.cause})
        self._run.summary[f"everstep/regroup/{record.generation}"] = _sentence(record)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class MlflowTracker(Tracker):
    """MLflow: metrics, and a tag ``everstep.regroup.N`` with the cause of generation N.

    The run is the newest one of the experiment with the tag ``everstep.job``. Tried with MLflow 3.17.

    Args:
        tracking_uri: Address of the server or database; default: MLflow's own settings.
        experiment: Name of the experiment, made if it does not exist.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = "Default") -> None:
        self._uri, self._experiment = tracking_uri, experiment
        self._client: Any = None
        self._run_id = ""

    @property
    def key(self) -> str:
        return f"mlflow:{self._uri}:{self._experiment}"

    def open(self, job: str, step: int) -> None:
        if self._client is not None:
            return
        from mlflow import MlflowClient

        client = MlflowClient(self._uri)
        known = client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known is not None else client.create_experiment(self._experiment)
        found = client.search_runs([experiment], f"tags.`everstep.job` = '{job}'", max_results=1) if job else []
        if found:
            self._run_id = found[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {"everstep.job": job} if job else {}
            self._run_id = client.create_run(experiment, tags=tags, run_name=job or None).info.run_id
        self._client = client

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def mark(self, record: RegroupRecord) -> None:
        self._client.set_tag(self._run_id, f"everstep.regroup.{record.generation}", _sentence(record))

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run_id)


class TensorBoardTracker(Tracker):
    """TensorBoard: scalars, and a text per regroup. Files of all processes lie in one folder.

    Each generation begins a new file with ``purge_step``, so that steps computed again replace the earlier ones. Tried
    with tensorboard 2.21.

    Args:
        folder: Folder of the event files, which every process that may become rank 0 can write.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._writer: Any = None

    @property
    def key(self) -> str:
        return f"tensorboard:{self._folder}"

    def open(self, job: str, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        make: Any = SummaryWriter
        self._writer = make(str(self._folder), purge_step=step if job else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def mark(self, record: RegroupRecord) -> None:
        self._writer.add_text("everstep/cause", _sentence(record), record.step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _sentence(record: RegroupRecord) -> str:
    again = "unknown" if record.repeated_steps is None else str(record.repeated_steps)
    return (
        f"generation {record.generation}, step {record.step}, {record.world_size} ranks: {record.cause} "
        f"({record.lost_s:.1f} s lost, {again} steps computed again)"
    )


def _numbers(record: RegroupRecord) -> dict[str, float]:
    numbers = {
        "everstep/generation": float(record.generation),
        "everstep/world_size": float(record.world_size),
        "everstep/regroups": float(record.regroups),
        "everstep/lost_s": record.lost_s,
        "everstep/total_lost_s": record.total_lost_s,
    }
    if record.repeated_steps is not None:
        numbers["everstep/repeated_steps"] = float(record.repeated_steps)
    return numbers


# ---- the thread of a tracker


class _StepMetrics:
    """Numbers and possibly a mark of one step; a loss may still be on its way from the device."""

    def __init__(self, run: Run, step: int, values: Mapping[str, float]) -> None:
        self.job, self.generation = run.job, run.generation
        self.step, self.values = step, values
        self.loss: LatestLoss | None = None
        self.record: RegroupRecord | None = None


class TrackerThread:
    """Owns a tracker and its thread, over all generations in which this process holds rank 0."""

    def __init__(self, tracker: Tracker, key: str) -> None:
        self._tracker, self._key = tracker, key
        self._pid = os.getpid()
        self._queue: queue.Queue[_StepMetrics | None] = queue.Queue(QUEUE_LENGTH)
        self._generation: int | None = None
        self._has_dropped = self._closing = self._waited = False
        self.failed = False
        self._thread = threading.Thread(target=self._write_all, name="everstep-tracker", daemon=True)
        self._thread.start()
        threading.Thread(target=self._close_at_exit, name="everstep-tracker-end").start()

    @property
    def is_idle(self) -> bool:
        """True if everything that was queued is written, dropped or failed."""
        return self.failed or not self._queue.unfinished_tasks

    def _close_at_exit(self) -> None:
        """Close before handlers of ``atexit`` run, by which packages of trackers end what the tracker needs."""
        threading.main_thread().join()  # ends first; then the interpreter waits for this thread, no daemon
        self.close()

    def put(self, entry: _StepMetrics) -> None:
        """Queue an entry; drop it if the tracker failed or is too slow."""
        if self.failed or self._closing:
            return
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            if not self._has_dropped:
                log.warning("tracker %s is slower than the training: losses and marks are dropped", self._key)
            self._has_dropped = True

    def end(self) -> None:
        """Let the thread write what is queued and close the tracker, without a wait."""
        if not self._closing:
            self._closing = True
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                pass  # the thread sees _closing once the queue is empty

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """As ``end``, and wait at most ``timeout_s``, once."""
        if self._waited or os.getpid() != self._pid:  # a fork of this process has no such thread
            return
        self._waited = True
        self.end()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("tracker %s did not end within %.0f s: its last entries may be lost", self._key, timeout_s)

    def _write_all(self) -> None:
        try:
            while (entry := self._next()) is not None:
                self._write(entry)
                self._queue.task_done()
            self._tracker.close()
        except (Exception, SystemExit):
            self.failed = True
            log.warning("tracker %s failed and is left out; training continues", self._key, exc_info=True)

    def _next(self) -> _StepMetrics | None:
        while True:
            try:
                return self._queue.get(timeout=1.0)
            except queue.Empty:
                if self._closing:
                    return None

    def _write(self, entry: _StepMetrics) -> None:
        if entry.generation != self._generation:
            self._tracker.open(entry.job, entry.step)
            self._generation = entry.generation
        values = dict(entry.values)
        loss = entry.loss.wait() if entry.loss is not None else None
        if loss is not None:
            values["loss"] = loss
        if values:
            self._tracker.log(entry.step, values)
        if entry.record is not None:
            self._tracker.mark(entry.record)


_threads: dict[str, TrackerThread] = {}
"""Those of this process, by the trackers' keys."""


# ---- the line in a training function


def track_recoveries(run: Run, *trackers: Tracker) -> None:
    """Write the reported loss and each regroup to the trackers. Call it on all ranks, before the first step.

    Each regroup becomes a mark with its cause, and the metrics ``everstep/generation``, ``everstep/world_size``,
    ``everstep/regroups``, ``everstep/lost_s``, ``everstep/total_lost_s`` and ``everstep/repeated_steps`` at the first
    step that was finished after it. The loss is rank 0's: report ``run.mean(loss)`` for that of all ranks.

    Args:
        run: The run of the training function.
        trackers: One or more trackers. Making one opens nothing, so any rank may do it.
    """
    if run.rank != 0:
        for key in list(_threads):  # rank 0 moved to another process
            _threads.pop(key).end()
        run.on_regroup(lambda record: None)  # rank 0 may be new, and asks this process for its figures
        return
    for tracker in trackers:
        try:
            key = tracker.key
            if key not in _threads:
                _threads[key] = TrackerThread(tracker, key)
            _connect(run, _threads[key])
        except Exception:
            log.warning("tracker %r failed and is left out; training continues", type(tracker), exc_info=True)


def _connect(run: Run, thread: TrackerThread) -> None:
    is_first = True

    def reported(step: int, loss: torch.Tensor | float) -> None:
        nonlocal is_first
        begun = {"everstep/generation": float(run.generation), "everstep/world_size": float(run.world_size)}
        entry = _StepMetrics(run, step, begun if is_first else {})
        entry.loss, is_first = LatestLoss(), False
        entry.loss.update(loss)
        entry.loss.value()  # reads a tensor on the CPU now, before training may change it
        thread.put(entry)

    def regrouped(record: RegroupRecord) -> None:
        entry = _StepMetrics(run, record.step, _numbers(record))
        entry.record = record
        thread.put(entry)

    run.on_report(reported)
    run.on_regroup(regrouped)
