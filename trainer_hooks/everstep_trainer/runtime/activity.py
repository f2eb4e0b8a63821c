"""Tell what this rank's main thread does while it makes no progress, from the signal thread.

The kernel says whether the process works (`everstep.host.process_activity`). Python says more: the collective in which
the main thread waits, the line of the training script, a debugger's prompt, and whether a loop repeats one line.
"""

from __future__ import annotations

import dis
import os
import sys
import sysconfig
import threading
import traceback
from functools import lru_cache
from types import FrameType

import msgspec

import everstep
import everstep_trainer
from everstep.clock import Clock
from everstep.host.process_activity import ActivityWindow, Work, sample_process
from everstep.vocabulary import RankActivity
from everstep_trainer.base import interrupt
from everstep_trainer.base.progress import StepProgress, WorkSection
from everstep_trainer.config import HookSettings

SAMPLE_S = 0.2
"""Seconds between two samples of the process."""
WINDOW_MIN_S, WINDOW_MAX_S = 0.5, 2.0
"""Seconds over which the process is judged: at least, and at most."""
OTHERS_SHARE = 0.02
"""Share of the time for which the program's other threads may use processors while a loop counts as busy.

They could end the loop. A thread that makes many short operations gets little more: a loop in Python keeps the GIL for
5 ms at a time, so operations of 0.3 ms use 6 % of a processor.
"""
ENDED_THREADS_SHARE = 0.05
"""The same for threads that ended meanwhile. Their time is known to 10 ms only, and mixed with that of our threads."""
MAX_FRAMES = 200

_LIBRARIES = tuple(
    {
        f"{os.path.realpath(path)}{os.sep}"
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_path(name))
    }
)
_OWN = tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in (*everstep.__path__, *everstep_trainer.__path__))
_DEBUGGERS = frozenset({"pdb", "bdb", "code", "debugpy", "_pydevd_bundle", "IPython", "ipdb", "pudb", "ptpython"})
_COLLECTIVE_MODULES = (
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "everstep_trainer.parallel",
    "everstep_trainer.restore",
    "everstep_trainer.importers",
    "everstep_trainer.sdc",
    "everstep_trainer.digests",
    "everstep_trainer.snapshot.slot_negotiation",
    "everstep_trainer.slots.fetch",
    "everstep_trainer.slots.local_slots",
    "everstep_trainer.slots.remote_slots",
)
"""Modules whose calls in C++ wait for other ranks, in a collective or at the rendezvous store."""
_FILE_MODULES = ("torch.distributed.checkpoint",)
"""Modules among them whose calls wait for a file system."""


class MainThreadState(msgspec.Struct, frozen=True, kw_only=True):
    """What the main thread does. Fields are as in ``RankStalled``; ``activity`` is None until enough is known."""

    activity: RankActivity | None = None
    activity_s: float = 0.0
    doing: str = ""
    place: str = ""
    place_s: float = 0.0
    operation: str = ""
    section: WorkSection | None = None
    waits_for_all: bool = False
    transfers: bool = False
    may_wait: bool = False


class _Spot(msgspec.Struct, frozen=True):
    """Where the main thread is: its frames and the instruction in each, compared by identity."""

    frames: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, frames: list[FrameType]) -> _Spot:
        return cls(tuple((id(frame), frame.f_lasti) for frame in frames[:MAX_FRAMES]))  # no frame is kept alive


class MainThreadObserver:
    """Follows the main thread from the signal thread, which calls ``observe`` again and again during a stall."""

    def __init__(self, settings: HookSettings, clock: Clock, progress: StepProgress) -> None:
        self._settings, self._clock, self._progress = settings, clock, progress
        self._window = ActivityWindow(min_s=WINDOW_MIN_S, max_s=WINDOW_MAX_S)
        self.reset()

    def reset(self) -> None:
        """Forget what was seen: the rank has made progress."""
        self._window.clear()
        self._sampled_at = float("-inf")
        self._spot: _Spot | None = None
        self._spot_since = self._clock.monotonic()
        self._variables: dict[str, object] | None = None
        self._state = MainThreadState()
        self._since = 0.0
        self.longest_still_s = 0.0

    def observe(self) -> MainThreadState:
        """Look at the main thread and return what it does."""
        now = self._clock.monotonic()
        if now - self._sampled_at < SAMPLE_S:
            return self._state
        self._sampled_at = now
        sample = sample_process(
            os.getpid(), now, without_thread=threading.get_native_id(), background=_everstep_threads()
        )
        if sample is not None:
            self._window.add(sample)
        frames = main_frames()
        spot = _Spot.of(frames)
        if spot != self._spot:
            self._spot, self._spot_since, self._variables = spot, now, None
        state = self._judge(frames, now) if self._window.is_filled else MainThreadState()
        if (state.activity, state.operation) != (self._state.activity, self._state.operation):
            self._since = now if self._state.activity is not None else self._spot_since
        held_s = now - self._since if state.activity is not None else 0.0
        if state.activity is RankActivity.STILL:
            self.longest_still_s = max(self.longest_still_s, held_s)
        place, place_s = script_place(frames), now - self._spot_since
        self._state = msgspec.structs.replace(state, activity_s=held_s, place=place, place_s=place_s)
        return self._state

    def _judge(self, frames: list[FrameType], now: float) -> MainThreadState:
        work, uses_gpu = self._window.work(), self._progress.uses_gpu
        section = self._progress.current_section
        if operation := self._collective(frames, work):
            transfers = work is Work.TRANSFERS or (work in (Work.COMPUTES, Work.STARVED) and not uses_gpu)
            return MainThreadState(
                activity=RankActivity.COLLECTIVE,
                doing=f"waits in {operation}",
                operation=operation,
                waits_for_all=interrupt.has_only_collectives_of_all(),
                transfers=transfers,
            )
        if any(_is_debugger(frame) for frame in frames):
            work = Work.DEBUGGED
        if section is not None:
            return MainThreadState(activity=RankActivity.WORKING, section=section)
        if work is Work.DEBUGGED:
            return MainThreadState(activity=RankActivity.WORKING, doing=work.value)
        if work is Work.COMPUTES and self._is_busy_loop(frames, now):
            doing = "runs a loop in which nothing changes"
            return MainThreadState(activity=RankActivity.BUSY_LOOP, doing=doing)
        if work is None and self._spot_since > self._window.ends[0].at:
            work = Work.MOVES
        if work is not None:
            return MainThreadState(
                activity=RankActivity.WORKING, doing=work.value, may_wait=uses_gpu and work is Work.COMPUTES
            )
        state = self._window.ends[1].state
        waits = "waits for a device or a file system" if state == "D" else "uses no processor and does no I/O"
        return MainThreadState(activity=RankActivity.STILL, doing=waits)

    def _collective(self, frames: list[FrameType], work: Work | None) -> str:
        """Return the collective in which the main thread waits; "" if it is in none."""
        if (operation := interrupt.awaited_operation()) is not None:
            return operation
        if self._progress.world_size < 2 or not frames or work in (Work.COMPUTES, Work.STARVED):
            return ""
        innermost = frames[0]
        if innermost.f_code.co_name == "_engine_run_backward":
            return "backward"  # DistributedDataParallel waits for its all-reduces in C++
        module = innermost.f_globals.get("__name__", "")
        is_collective = module.startswith(_COLLECTIVE_MODULES) and not module.startswith(_FILE_MODULES)
        return innermost.f_code.co_name if is_collective else ""

    def _is_busy_loop(self, frames: list[FrameType], now: float) -> bool:
        """Return whether one loop without a call runs for long, and changes nothing, nor does another thread."""
        if not frames or now - self._spot_since < self._settings.busy_loop_s or not _repeats_without_call(frames[0]):
            return False
        first, last = self._window.ends
        seconds = last.at - first.at
        if last.others_cpu_s - first.others_cpu_s > OTHERS_SHARE * seconds:
            return False
        if (last.cpu_s - last.main_cpu_s) - (first.cpu_s - first.main_cpu_s) > ENDED_THREADS_SHARE * seconds:
            return False
        before, self._variables = self._variables, _comparable(frames[0])
        return before == self._variables


def _is_debugger(frame: FrameType) -> bool:
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package in _DEBUGGERS and not is_script_file(frame.f_code.co_filename)


def _everstep_threads() -> frozenset[int]:
    """Return the kernel ids of Everstep's own threads, whose names tell them apart."""
    return frozenset(
        thread.native_id
        for thread in threading.enumerate()
        if thread.native_id is not None and thread.name.startswith("everstep")
    )


def main_frames() -> list[FrameType]:
    """Return the main thread's Python frames, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


@lru_cache(maxsize=4096)
def is_script_file(path: str) -> bool:
    """Return whether a source file belongs to the training script, not to Python, a library or Everstep."""
    others = (*_LIBRARIES, *_OWN)
    if path.startswith(("<", *others)):  # before links are resolved, which takes a tenth of a millisecond
        return False
    return not os.path.realpath(path).startswith(others)


def script_place(frames: list[FrameType]) -> str:
    """Return the innermost line of the training script, such as ``train.py:16``; if it is on no stack, of a library."""
    files = [(frame.f_code.co_filename, frame.f_lineno) for frame in frames]
    mine = [at for at in files if is_script_file(at[0])] or [at for at in files if not at[0].startswith(_OWN)]
    return f"{os.path.basename(mine[0][0])}:{mine[0][1]}" if mine else ""


def script_stack(limit_lines: int = 10) -> str:
    """Return the main thread's frames in the training script, innermost last, in at most ``limit_lines`` lines."""
    summary = traceback.extract_stack(main_frames()[0])
    mine = [frame for frame in summary if is_script_file(frame.filename)] or list(summary)
    lines = [line for entry in traceback.format_list(mine) for line in entry.rstrip().splitlines()]
    return "\n".join(lines[-limit_lines:])


def _repeats_without_call(frame: FrameType) -> bool:
    """Return whether the frame is at the end of a loop whose body calls nothing."""
    instructions = list(dis.get_instructions(frame.f_code))
    at = next((i for i, instruction in enumerate(instructions) if instruction.offset == frame.f_lasti), None)
    if at is None or "JUMP_BACKWARD" not in instructions[at].opname:
        return False
    begin = instructions[at].argval
    body = (instruction for instruction in instructions[:at] if instruction.offset >= begin)
    return not any(instruction.opname.startswith(("CALL", "PRECALL")) for instruction in body)


def _comparable(frame: FrameType) -> dict[str, object]:
    """Return the frame's variables: plain values as they are, others by identity."""
    plain = (int, float, str, bytes, bool, type(None))
    return {name: value if isinstance(value, plain) else id(value) for name, value in frame.f_locals.items()}
