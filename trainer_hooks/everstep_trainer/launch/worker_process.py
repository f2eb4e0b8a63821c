"""Run the user's script as ``__main__`` in a worker's process, as if a shell had started it."""

from __future__ import annotations

import io
import os
import runpy
import sys
from time import perf_counter

from everstep_trainer.launch.process_setup import keep_freed_memory, raise_oom_score, set_process_name
from everstep_trainer.runtime.assignment import (
    CONTROL_FD_VARIABLE,
    LOCAL_RANK_VARIABLE,
    STARTED_AT_VARIABLE,
    WORKER_PID_VARIABLE,
)


def run(descriptors: tuple[int, ...], *, script: str, module: bool, arguments: list[str]) -> None:
    """Run ``script`` (a file, or a module's name if ``module``) to its end; SystemExit has its status.

    ``descriptors`` are the control socket, and optionally stdout and stderr.
    """
    control, *outputs = descriptors
    local_rank = os.environ.get(LOCAL_RANK_VARIABLE)
    set_process_name("everstep-spare" if local_rank is None else f"everstep-rank{local_rank}")
    os.environ[CONTROL_FD_VARIABLE] = str(control)
    os.environ[WORKER_PID_VARIABLE] = str(os.getpid())
    os.environ[STARTED_AT_VARIABLE] = repr(perf_counter())
    _take_outputs(outputs)
    keep_freed_memory()
    raise_oom_score()
    sys.argv = [script, *arguments]
    try:
        if module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
            runpy.run_path(script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - what the interpreter itself does at the end of a script
        _show(error)
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None


def _take_outputs(outputs: list[int]) -> None:
    for stream, descriptor in zip((sys.stdout, sys.stderr), outputs, strict=False):
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        # A killed process loses what it buffered: keep that to one line.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _show(error: BaseException) -> None:
    """Print the traceback from the script on, without the frames above it, through ``sys.excepthook``."""
    tail = error.__traceback__
    while tail is not None and tail.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        tail = tail.tb_next
    sys.excepthook(type(error), error.with_traceback(tail), tail)  # the built-in hook shows the error's own traceback
