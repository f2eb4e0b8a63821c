"""Run Ray Train's workers as the nodes of an Everstep job, whose ranks survive lost ranks and lost actors.

Example::

    def train(run: everstep.Run) -> None:
        ...
        for step in run.steps(until=10_000):
            ...
            ray.train.report({"loss": loss.item()})

    trainer = TorchTrainer(
        train,
        torch_config=EverstepConfig(),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 8, "GPU": 8}, use_gpu=True),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=100)),
    )
    trainer.fit()

Each Ray worker is an actor that hosts an ``everstep-launch``, so it is one node of the job, with one rank per GPU.
A lost rank is replaced by a standby beside it, and Ray does not see it. A lost actor is replaced by Ray in its place,
while the other actors keep their ranks and their checkpoints in memory (decision 0080). The job's controller runs in an
actor of its own on the driver's node.

The loop is a training function ``train(run)``, or a function of Ray's kind that calls ``everstep.main``. It runs in the
rank processes, which are no Ray actors: ``ray.train.report``, ``get_context`` and ``get_checkpoint`` work there
(``ray_rank``).

Internals of Ray Train that are used here were read in version 2.60: replica groups (as for its TorchftConfig), the
worker group's training function, and the set of workers that reports wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import ray
import ray.cloudpickle
import ray.train
import ray.util
from ray.train.backend import Backend
from ray.train.torch import TorchConfig
from ray.train.v2._internal.execution.checkpoint.report_handler import ReportCallbackHandler
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.util import ObjectRefWrapper
from ray.train.v2.api.report_config import CheckpointUploadMode
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from everstep.errors import ConfigurationError
from everstep.host.parent_process import PARENT_VARIABLE
from everstep.host.private_files import make_private_directories, write_private
from everstep.system_clock import SYSTEM_CLOCK
from everstep_trainer.launch.options import PROGRAM
from everstep_trainer.launch.services.job_rendezvous import LOOPBACK, Endpoint, controller_network
from everstep_trainer.launch.services.private_services import PrivateService, controller_command, resolve_state_dir

log = logging.getLogger(__name__)

_SET_HERE = """
    nnodes nproc_per_node job rdzv_endpoint node_rank job_secret_file node standalone module agent_socket
    die_with_parent
"""
"""Settings of the launcher that follow from the Ray job."""
MAX_PENDING_REPORTS = 16  # Ray takes one in RAY_TRAIN_HEALTH_CHECK_INTERVAL_S (2 s), and a rank must not wait for it
ANSWER_S = 10.0  # for an actor that lives: without an answer it counts as alive, and Ray looks after it
END_WAIT_S = 25.0  # for a launcher that was asked to end: its own waits add up to less


@dataclass
class EverstepConfig(TorchConfig):
    """The ``torch_config`` of a TorchTrainer whose workers are nodes of an Everstep job.

    ``backend``, ``init_method`` and ``timeout_s`` of TorchConfig have no effect: see ``everstep.HookSettings``.

    Args:
        ranks_per_worker: Ranks that each Ray worker hosts. Default: its GPUs, or 1 without GPUs.
        min_workers: Workers with which training continues while others are lost. Default: all, so that survivors wait
            in memory until Ray has replaced the lost actor.
        settings: Settings of ``everstep-launch`` by name, such as ``{"standbys": 2, "spill_to": "s3://..."}``.

    Raises:
        ConfigurationError: A setting is unknown, or follows from the Ray job.
    """

    ranks_per_worker: int | None = None
    min_workers: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.settings:
            if name not in PROGRAM.settings:
                raise ConfigurationError(f"EverstepConfig: everstep-launch has no setting {name!r}")
            if name in _SET_HERE.split():
                raise ConfigurationError(f"EverstepConfig: {name} follows from the Ray job; leave it out")

    @property
    def backend_cls(self) -> type[Backend]:
        return _EverstepBackend

    @property
    def train_func_context(self) -> Any:
        """Return no context: the loop runs in rank processes, which have their device from ``run.device``."""
        return nullcontext


# ---- in Ray Train's controller


@dataclass(frozen=True)
class JobPlan:
    """What the hosts of one job have in common."""

    job: str
    workers: tuple[int, int]  # minimum and maximum
    ranks: int
    settings: Mapping[str, Any]
    endpoint: str  # of the job's controller; "" for one worker, whose launcher runs its own
    secret: str = field(repr=False)

    def flags(self, number: int, folder: Path) -> list[str]:
        """Return the launcher's flags on worker ``number``, whose private files are in ``folder``."""
        low, high = self.workers
        flags = ["--nnodes", f"{low}:{high}", "--nproc-per-node", str(self.ranks), "--job", self.job]
        if high > 1:
            # Not node 0 anywhere: the controller is not a launcher's.
            flags += ["--rdzv-endpoint", self.endpoint, "--node-rank", str(number + 1), "--node", f"ray-{number}"]
            flags += ["--job-secret-file", str(folder / "secret")]
        given = {name: value for name, value in self.settings.items() if name != "preload"}
        preload = self.settings.get("preload", ())
        modules = preload.split(",") if isinstance(preload, str) else [*preload]
        flags += ["--preload", ",".join([__name__, *modules])]
        for name, value in given.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None:
                flags += [f"--{flag}", str(value)]
        return flags


class _EverstepBackend(Backend):
    """Starts the job's services, and has each worker host a launcher instead of the training loop."""

    # Ray replaces the workers that failed, and keeps the others. Each is a replica group of its own.
    has_replica_groups = True
    share_cuda_visible_devices = False  # each host's ranks use the host's devices

    def __init__(self) -> None:
        self._services: Any = None
        self._plan: JobPlan | None = None

    def on_start(self, worker_group: Any, backend_config: EverstepConfig) -> None:
        """Prepare a new worker group. A replaced worker gets what the group's context holds."""
        if not isinstance(worker_group, WorkerGroup):
            return
        here = ray.util.get_node_ip_address()
        is_local = all(worker.metadata.node_ip == here for worker in worker_group.get_workers())
        plan = self._ensure_services(worker_group, backend_config, LOOPBACK if is_local else here)
        _require_reports_of_first_worker(worker_group)
        _Replacements(worker_group)
        context = worker_group.get_worker_group_context()
        if not hasattr(context, "train_fn_ref"):
            raise ConfigurationError(f"Ray {ray.__version__} is not supported: install Ray 2.60")
        hosted = _HostedLoop(plan, self._services, context.train_fn_ref)
        object.__setattr__(context, "train_fn_ref", ObjectRefWrapper(hosted))  # frozen, and read once workers start

    def on_shutdown(self, worker_group: Any, backend_config: EverstepConfig) -> None:
        """End the launchers that still run, and the services once every worker has finished."""
        ended = worker_group.execute_async(_end_launcher)
        ray.wait(ended, num_returns=len(ended), timeout=END_WAIT_S + 1)
        if isinstance(worker_group, WorkerGroup):
            status = worker_group.get_latest_poll_status()
            if status is not None and status.finished and not status.errors:
                self._end_services()

    def _ensure_services(self, worker_group: Any, config: EverstepConfig, address: str) -> JobPlan:
        """Return the plan of the job. Its services outlive a worker group, so that the next one continues."""
        if self._plan is not None and self._services is not None:
            is_reachable = address == LOOPBACK or LOOPBACK not in self._plan.endpoint
            with contextlib.suppress(ray.exceptions.RayActorError):
                if is_reachable and ray.get(self._services.is_running.remote()):
                    return self._plan
            self._end_services()
        run = worker_group._train_run_context
        count = len(worker_group)
        gpus = int(worker_group.get_resources_per_worker().get("GPU", 0))
        job, secret = _job_name(run.run_config.name, run.run_id), secrets.token_hex(32)
        on_this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor: Any = ray.remote(num_cpus=0)(JobServices)
        self._services = actor.options(scheduling_strategy=on_this_node).remote()
        endpoint = ray.get(self._services.start.remote(job, secret, address)) if count > 1 else ""
        workers = (min(config.min_workers or count, count), count)
        ranks = config.ranks_per_worker or max(1, gpus)
        self._plan = JobPlan(job, workers, ranks, dict(config.settings), endpoint, secret)
        return self._plan

    def _end_services(self) -> None:
        services, self._services = self._services, None
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(services.end.remote(), timeout=END_WAIT_S)
        ray.kill(services)


def _job_name(run_name: str, run_id: str) -> str:
    """Return the name of the job: the run's, with a part of its number, so that a later run is another job."""
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", run_name).lstrip("._-")[:40] or "ray"
    return f"{stem}-{run_id[:8]}"


def _require_reports_of_first_worker(worker_group: Any) -> None:
    """Have Ray wait for the reports of its worker 0 alone, which passes on those of the job's rank 0."""
    worker_group.set_required_barrier_ranks([0])
    for callback in worker_group._callbacks:
        if isinstance(callback, ReportCallbackHandler):
            callback.set_required_ranks([0])


class _Replacements:
    """Replaces a worker group's failed workers, together with those that died since Ray looked.

    Ray's own replacement calls all other workers, and the run ends at the first of them that is dead.
    """

    def __init__(self, worker_group: Any) -> None:
        self._group, self._replace = worker_group, worker_group.replace_replica_group
        self._status: Any = None
        self._replaced: set[int] = set()
        """Replica groups replaced after the poll that ``_status`` is of."""
        worker_group.replace_replica_group = self.replace

    def replace(self, index: int) -> None:
        """Replace a replica group, and others that are dead. Raises RayActorError if new workers die."""
        status = self._group.get_latest_poll_status()
        if status is not self._status:
            self._status, self._replaced = status, set()
        if index in self._replaced:
            return
        failed = [index, *self._shut_down_dead(index)]
        refusals = 0
        while failed:
            try:
                self._replace(failed[0])
            except ray.exceptions.RayActorError:
                refusals += 1
                dead = self._shut_down_dead(*failed)
                if not dead or refusals > len(self._group._replica_groups):
                    raise
                failed += dead
            else:
                self._replaced.add(failed.pop(0))

    def _shut_down_dead(self, *known: int) -> list[int]:
        groups = dict(enumerate(self._group._replica_groups))
        found = [n for n, group in groups.items() if n not in known and group.is_active() and _is_dead(group)]
        for number in found:
            groups[number].shutdown()
        return found


def _is_dead(group: Any) -> bool:
    """Return whether one of the actors of a replica group has died."""
    try:
        ray.get([worker.actor.clear_result_queue.remote() for worker in group.get_workers()], timeout=ANSWER_S)
    except ray.exceptions.RayActorError:
        return True
    except ray.exceptions.GetTimeoutError:
        pass  # a busy actor, or one that Ray has not given up yet
    return False


# ---- the job's services, in an actor on the node of Ray Train's controller


class PendingReports:
    """Reports that Ray has not taken yet, the oldest first.

    Above ``limit`` the oldest report without a checkpoint makes room for the newest, except the first one, which may be
    on its way.
    """

    def __init__(self, limit: int = MAX_PENDING_REPORTS) -> None:
        self._limit = limit
        self._waiting: dict[int, tuple[dict[str, Any], Any]] = {}
        self._added = 0

    def add(self, metrics: dict[str, Any], checkpoint: Any) -> None:
        self._added += 1
        self._waiting[self._added] = metrics, checkpoint
        if len(self._waiting) > self._limit:
            later = list(self._waiting.items())[1:-1]
            dropped = next((number for number, (_, found) in later if found is None), None)
            if dropped is not None:
                del self._waiting[dropped]

    def first(self) -> tuple[int, dict[str, Any], Any] | None:
        """Return the oldest report with its number, which stays until it is removed."""
        return next(((number, *report) for number, report in self._waiting.items()), None)

    def remove(self, number: int) -> None:
        self._waiting.pop(number, None)


_SERVE = """
import os, runpy, shutil, sys
parent, folder = os.getppid(), sys.argv.pop(1)
try:
    runpy.run_module("everstep_controller.main", run_name="__main__", alter_sys=True)
finally:
    if os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)
"""
"""A controller that removes its files if its actor was killed."""


class JobServices:
    """Runs the job's controller, and holds the reports of rank 0 until Ray's worker 0 passes them on."""

    def __init__(self) -> None:
        self._reports = PendingReports()
        self._arrived = asyncio.Event()
        self._controller: PrivateService | None = None
        self._folder = Path()

    async def start(self, job: str, secret: str, address: str) -> str:
        """Start the controller on a free port of ``address``; return its endpoint."""
        self._folder = Path(tempfile.mkdtemp(prefix="everstep-ray-"))
        try:
            with socket.create_server((address, 0)) as free:
                endpoint = Endpoint(*free.getsockname()[:2])
            network = controller_network(secret.encode(), job, endpoint)
            await asyncio.to_thread(network.write_credentials, self._folder)
            ready = self._folder / "controller.json"
            self._controller = PrivateService("controller", self._folder / "controller.log", ready, SYSTEM_CLOCK)
            python, *module = controller_command(self._folder, str(endpoint), network)
            command = [python, "-P", "-c", _SERVE, str(self._folder), *module[module.index("serve") :]]
            await self._controller.start(lambda _: command)
        except BaseException:
            await self.end()
            raise
        return str(endpoint)

    async def is_running(self) -> bool:
        return True

    async def end(self) -> None:
        """End the controller and remove its files."""
        if self._controller is not None:
            await self._controller.end()
        if self._folder.name:  # empty before the start: the working directory stays
            shutil.rmtree(self._folder, ignore_errors=True)

    async def add_report(self, metrics: dict[str, Any], checkpoint: Any) -> None:
        self._reports.add(metrics, checkpoint)
        self._arrived.set()

    async def first_report(self, wait_s: float) -> tuple[int, dict[str, Any], Any] | None:
        """Return the oldest report, waiting for one if there is none; it stays until it is removed."""
        if self._reports.first() is None:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), wait_s)
        return self._reports.first()

    async def remove_report(self, number: int) -> None:
        self._reports.remove(number)


# ---- in the workers: actors that host launchers

_launcher: subprocess.Popen[bytes] | None = None
"""The launcher that this actor hosts."""
_LAUNCH = """
import signal
from everstep.host.parent_process import die_with_parent, parent_pid
die_with_parent(parent_pid(), signal.SIGKILL)
from everstep_trainer.launch.command import main
main()
"""
"""A launcher that is killed together with its actor. Its vault then keeps the checkpoints for the next launcher."""


@dataclass(frozen=True)
class _HostedLoop:
    """The function that Ray Train calls in each worker instead of the training loop."""

    plan: JobPlan
    services: Any
    loop: Any  # reference to Ray's wrapper of the loop

    def __call__(self) -> None:
        _host(self.plan, self.services, self.loop.get())


def _host(plan: JobPlan, services: Any, loop: Any) -> None:
    """Run the worker's launcher until the job is over. Raises RuntimeError if the job failed."""
    number = ray.train.get_context().get_world_rank()
    with _private_folder(plan, number) as folder:
        work = {
            "path": sys.path,
            "loop": ray.cloudpickle.dumps(loop),
            "experiment": ray.train.get_context().get_experiment_name(),
            "checkpoint": ray.train.get_checkpoint(),
        }
        (folder / "work").write_bytes(ray.cloudpickle.dumps(work))
        with _collect_reports(folder / "reports", services), _pass_on_reports(services, is_first=number == 0):
            status = _run_launcher([*plan.flags(number, folder), "-m", f"{__name__}_rank", str(folder)])
    if status != 0:
        raise RuntimeError(f"everstep-launch of worker {number} ended with status {status}: see this worker's log")


@contextlib.contextmanager
def _private_folder(plan: JobPlan, number: int) -> Iterator[Path]:
    """Make this worker's folder (mode 0700), instead of one that a killed predecessor left, and remove it at the end.

    Its name is short, since a socket's path has at most 107 bytes. Folders that other killed actors left are removed.
    """
    name = hashlib.sha256(plan.job.encode()).hexdigest()[:8]
    parent = resolve_state_dir(plan.settings.get("state_dir"), os.environ) / "ray"
    make_private_directories(parent)
    host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]  # a home may be shared by machines
    folder = parent / f"{host}-{name}-{number}"
    with contextlib.ExitStack() as stack:
        with _lock(parent / ".lock"):
            for left in parent.glob(f"{host}-*"):  # living ones hold their lock
                with contextlib.suppress(OSError), _lock(left / "lock", fcntl.LOCK_NB):
                    shutil.rmtree(left, ignore_errors=True)
            folder.mkdir(mode=0o700)
            stack.enter_context(_lock(folder / "lock"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        write_private(folder / "secret", plan.secret.encode())
        yield folder


@contextlib.contextmanager
def _lock(path: Path, flags: int = 0) -> Iterator[None]:
    """Hold a lock that ends with this process. With LOCK_NB raises BlockingIOError if another process holds it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | flags)
        yield


def _run_launcher(flags: list[str]) -> int:
    global _launcher  # one per actor
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    _launcher = subprocess.Popen(
        [sys.executable, "-P", "-c", _LAUNCH, *flags], stdin=subprocess.DEVNULL, env=environment
    )
    return _launcher.wait()


def _end_launcher() -> None:
    """End this actor's launcher in order, which frees its checkpoints."""
    if _launcher is not None and _launcher.poll() is None:
        _launcher.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            _launcher.wait(END_WAIT_S)


@contextlib.contextmanager
def _collect_reports(path: Path, services: Any) -> Iterator[None]:
    """Take the reports of rank 0, if it is one of this host's, at the socket ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        threading.Thread(target=_serve_reports, args=(listener, services), name="everstep reports", daemon=True).start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _serve_reports(listener: socket.socket, services: Any) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # the job is over
            return
        with connection, contextlib.suppress(OSError):  # the rank is gone; its successor reports again
            received = connection.makefile("rb").read()
            if received:
                connection.sendall(msgspec.msgpack.encode(_forward(received, services)))


def _forward(received: bytes, services: Any) -> str:
    """Hand one report to the services, and its checkpoint to Ray's storage; return what is wrong with it, or ""."""
    try:
        report = msgspec.msgpack.decode(received)
        checkpoint = report["checkpoint"]
        if checkpoint is not None:
            storage = ray.train.get_context().get_storage()
            name = report["checkpoint_dir_name"] or storage.make_default_checkpoint_dir_name()
            checkpoint = storage.persist_current_checkpoint(ray.train.Checkpoint(checkpoint), name)
        ray.get(services.add_report.remote(report["metrics"], checkpoint))
    except Exception as error:  # noqa: BLE001 - raised in the rank that reported
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def _pass_on_reports(services: Any, *, is_first: bool) -> Iterator[None]:
    """On Ray's worker 0, report to Ray what the job's rank 0 reports; at the end, what is left."""
    if not is_first:
        yield
        return
    over = threading.Event()

    def pass_on() -> None:
        while True:
            found = ray.get(services.first_report.remote(0.2 if over.is_set() else 1.0))
            if found is None:
                if over.is_set():
                    return
                continue
            number, metrics, checkpoint = found
            mode = CheckpointUploadMode.SYNC if checkpoint is None else CheckpointUploadMode.NO_UPLOAD
            try:
                ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=mode)
            except Exception:
                log.exception("Ray Train did not take a report: %s", metrics)
            ray.get(services.remove_report.remote(number))

    thread = threading.Thread(target=pass_on, name="everstep reports to Ray", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
