"""Points of the commit protocol at which processes kill themselves when a file requests it.

The environment variable ``EVERSTEP_TEST_KILL_POINTS`` names a folder. A process with that variable passes kill points
if it is forked by warm_programs.py, or has the folder kill_points_site on its PYTHONPATH. At each point it looks for
the file ``ROLE@NODE.POINT`` in the folder, and kills itself once for each such file. The functions of the programs are
wrapped, so the programs contain no code for this.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

FOLDER = "EVERSTEP_TEST_KILL_POINTS"
NODE = "DEMO_NODE"
_ROLES = {
    "everstep_agent.vault.process": "vault",
    "everstep_agent.main": "agent",
    "everstep_controller.main": "controller",
}


@dataclass(frozen=True)
class Point:
    """A point before or after a call of ``function`` of ``module`` in a process with ``role``.

    With ``since`` the point counts only if a function of that name was called since the last time.
    """

    name: str
    role: str
    module: str
    function: str
    after: bool
    since: str = ""


_COMMIT = "_commit"
POINTS = (
    Point("filling", "rank", "everstep.layout.slots", "SegmentView.begin", after=True),
    Point("filled", "rank", "everstep.layout.slots", "SegmentView.seal", after=False),
    Point("sealed", "rank", "everstep.layout.slots", "SegmentView.seal", after=True),
    Point(
        "vault-notified", "rank", "everstep_trainer.snapshot.reports", "SealReporter.replicate_and_report", after=True
    ),
    Point("safe", "rank", "everstep_trainer.snapshot.reports", "SealReporter._report", after=False),
    Point("agent-notified", "rank", "everstep_trainer.snapshot.reports", "SealReporter._report", after=True),
    Point("copy-requested", "vault", "everstep_agent.vault.transfer.sending", "Replicator.replicate", after=False),
    Point("copy-offered", "vault", "everstep_agent.vault.transfer.receiving", "SlotReceiver.begin", after=True),
    Point(
        "bytes-received", "vault", "everstep_agent.vault.transfer.receiving", "SlotReceiver.receive_part", after=True
    ),
    Point("copy-whole", "vault", "everstep_agent.vault.transfer.receiving", "SlotReceiver.finish", after=False),
    Point("copy-sealed", "vault", "everstep_agent.vault.transfer.receiving", "SlotReceiver.finish", after=True),
    Point("copy-acknowledged", "vault", "everstep_agent.vault.transfer.sending", "SlotSender.send", after=True),
    Point("seal-received", "agent", "everstep_agent.jobs.registry", "JobRegistry._forward", after=False),
    Point("seal-forwarded", "agent", "everstep_agent.jobs.registry", "JobRegistry._forward", after=True),
    Point(
        "commit-notice-received",
        "agent",
        "everstep_agent.jobs.registry",
        "JobRegistry._forward_version_notice",
        after=False,
    ),
    Point(
        "commit-notice-forwarded",
        "agent",
        "everstep_agent.jobs.registry",
        "JobRegistry._forward_version_notice",
        after=True,
    ),
    Point("seal-counted", "controller", "everstep_controller.core.checkpoints.commits", "record_seal", after=False),
    Point("committed", "controller", "everstep_controller.core.checkpoints.commits", _COMMIT, after=True),
    Point(
        "commit-storing",
        "controller",
        "everstep_controller.store.writer",
        "DatabaseWriter.commit",
        after=False,
        since=_COMMIT,
    ),
    Point(
        "commit-stored",
        "controller",
        "everstep_controller.store.writer",
        "DatabaseWriter.commit",
        after=True,
        since=_COMMIT,
    ),
)
"""The points, in the order of the states FILLING, SEALED, REPLICATED and COMMITTED.

A version on which all ranks agree is VERIFIED with its commit.
"""

_passed: set[str] = set()


def file_name(point: Point, node: str) -> str:
    """Return the file that requests to kill the process of ``node``. The controller has no node."""
    return f"{point.role}@{'' if point.role == 'controller' else node}.{point.name}"


def install() -> None:
    """Wrap the modules that hold points: those that are imported already, and others as they are imported."""
    if FOLDER in os.environ:
        sys.meta_path.insert(0, _Finder())
        for name in _Finder.wanted & sys.modules.keys():
            _wrap(sys.modules[name])


def is_installed() -> bool:
    """Return whether this process passes kill points, by its own environment or that of the process that forked it."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def _role() -> str:
    return next((role for module, role in _ROLES.items() if module in sys.orig_argv), "rank")


def _pass(point: Point) -> None:
    if point.since and point.since not in _passed:
        return
    request = os.path.join(os.environ[FOLDER], file_name(point, os.environ.get(NODE, "")))
    try:
        os.rename(request, f"{request}.struck")
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def _wrapped(function: Callable[..., Any], points: Sequence[Point]) -> Callable[..., Any]:
    before, after = ([p for p in points if p.after is late] for late in (False, True))

    def pass_all(some: list[Point]) -> None:
        for point in some:
            _pass(point)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def waits(*args: Any, **kwargs: Any) -> Any:
            pass_all(before)
            result = await function(*args, **kwargs)
            pass_all(after)
            return result

        return waits

    @functools.wraps(function)
    def calls(*args: Any, **kwargs: Any) -> Any:
        pass_all(before)
        result = function(*args, **kwargs)
        _passed.add(function.__name__)
        pass_all(after)
        for point in after:
            _passed.discard(point.since)
        return result

    return calls


def _wrap(module: ModuleType) -> None:
    here = [p for p in POINTS if p.module == module.__name__ and p.role == _role()]
    for name in {p.function for p in here}:
        owner: Any = module
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        real = getattr(owner, last)
        wrapped = _wrapped(real, [p for p in here if p.function == name])
        importers = [
            importer for key, importer in sys.modules.items() if key.startswith("everstep_") and owner is module
        ]
        for place in (owner, *(importer for importer in importers if vars(importer).get(last) is real)):
            setattr(place, last, wrapped)


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _wrap(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Finder(importlib.abc.MetaPathFinder):
    wanted = frozenset(p.module for p in POINTS)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.wanted:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec
