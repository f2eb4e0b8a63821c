"""Run what the fork server forks: a worker with the user's script, the rendezvous store, and the count of ranks."""

from __future__ import annotations

import io
import os
import runpy
import signal
import sys
import traceback
from datetime import timedelta
from time import perf_counter
from typing import NoReturn

from everstep.chaos.targets import JOB_VARIABLE
from everstep_trainer.launch.assignment import (
    CONTROL_FD_VARIABLE,
    LOCAL_RANK_VARIABLE,
    STARTED_AT_VARIABLE,
    TORCHRUN_SCRIPT_VARIABLE,
    WORKER_PID_VARIABLE,
)
from everstep_trainer.launch.forking.process_setup import (
    NOTICE_SIGNALS,
    keep_freed_memory,
    raise_oom_score,
    set_process_name,
)
from everstep_trainer.launch.forking.process_title import set_first_title
from everstep_trainer.launch.output.marks import mark_warnings, show_line


def serve_store(descriptors: tuple[int, ...], *, address: str, port: int) -> None:
    """Serve a TCPStore on the passed listening socket until the process is ended; it outlives every rank.

    The launcher keeps the socket open too. Connections made before this process serves, or while it is being replaced,
    wait in the socket's queue instead of being refused.
    """
    import torch.distributed as dist

    (listener,) = descriptors
    set_process_name("everstep-store")
    signal.pthread_sigmask(signal.SIG_BLOCK, NOTICE_SIGNALS)
    store = dist.TCPStore(  # type: ignore[attr-defined] # torch does not list what it re-exports
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener,
        use_libuv=True,
    )
    assert store.port == port
    while True:  # the store's own thread does the work; a signal ends the process
        signal.pause()


def write_rank_count(descriptors: tuple[int, ...], *, kind: str) -> None:
    """Write the number of ranks for ``gpu``, ``cpu`` or ``auto`` to the descriptor, as decimal text (gpu may be 0).

    Counting may initialize CUDA, so this process does nothing else.
    """
    (answer,) = descriptors
    os.write(answer, str(count_ranks(kind)).encode())


def count_ranks(kind: str) -> int:
    """Return the CUDA devices for ``gpu``, the cores for ``cpu``, devices or else cores for ``auto``, as torchrun."""
    import torch

    devices = torch.cuda.device_count() if kind in ("gpu", "auto") else 0
    return devices if kind == "gpu" or devices else os.cpu_count() or 1


def run_script(
    descriptors: tuple[int, ...], *, script: bytes, module: bool, no_python: bool, arguments: list[bytes], name: bytes
) -> None:
    """Run ``script`` (a file, or a module's name if ``module``) as ``__main__``, as if a shell had started it.

    With ``no_python`` the program ``script`` takes the place of this process.

    Raises SystemExit with the script's status. ``name`` is the script's in the title of the process.
    ``descriptors`` are the control socket, and optionally stdout and stderr.
    """
    control, *outputs = descriptors
    local_rank = os.environ.get(LOCAL_RANK_VARIABLE)
    set_process_name("everstep-spare" if local_rank is None else f"everstep-rank{local_rank}")
    static_rank = os.environ.get("RANK")  # of a single node
    role = "standby" if local_rank is None else f"rank {static_rank}" if static_rank else f"local rank {local_rank}"
    set_first_title(role, os.environ.get(JOB_VARIABLE, ""), os.fsdecode(name))
    os.environ[CONTROL_FD_VARIABLE] = str(control)
    os.environ[WORKER_PID_VARIABLE] = str(os.getpid())
    os.environ[STARTED_AT_VARIABLE] = repr(perf_counter())
    for stream, descriptor in zip((sys.stdout, sys.stderr), outputs, strict=False):
        if stream is not None:  # else its number is another file's in the whole program
            os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a killed process loses what it buffered: keep that to one line
            stream.reconfigure(line_buffering=True)
    raise_oom_score()
    if no_python:
        os.environ[TORCHRUN_SCRIPT_VARIABLE] = "1"
        execute_program(os.fsdecode(script), [os.fsdecode(argument) for argument in arguments])
    mark_warnings()
    keep_freed_memory()
    execute_script(os.fsdecode(script), module=module, arguments=[os.fsdecode(argument) for argument in arguments])


def execute_program(program: str, arguments: list[str]) -> NoReturn:
    """Replace this process by a program from here or PATH. Raises SystemExit if that is impossible."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the program would too
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(program, [program, *arguments])  # noqa: S606 - the program that the user named
    except OSError as error:
        show_line(f"--no-python: the program {program} cannot be run: {error}")
        raise SystemExit(126) from None


def execute_script(script: str, *, module: bool, arguments: list[str]) -> None:
    """Run ``script`` as ``__main__`` with ``sys.argv``. Raises SystemExit with its status, if that is not 0."""
    local_rank = os.environ.get(LOCAL_RANK_VARIABLE)
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
    except KeyboardInterrupt as error:  # Ctrl-C ends all ranks: a line of each is enough
        name = "a standby" if local_rank is None else f"local rank {local_rank}"
        show_line(f"{name} was interrupted at {_script_line(error)}")
        raise SystemExit(130) from None
    except BaseException as error:  # noqa: BLE001 - what the interpreter itself does at the end of a script
        _show(error)
        raise SystemExit(1) from None


def _script_line(error: BaseException) -> str:
    """Return the file and line of the innermost frame that is the user's own."""
    libraries = (sys.prefix, sys.base_prefix, "<", os.path.dirname(os.path.dirname(__file__)))
    found = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [f"{file}:{line}" for file, line in found if not file.startswith(libraries)]
    return own[-1] if own else "an import"


def _show(error: BaseException) -> None:
    """Print the traceback from the script on, without the frames above it, through ``sys.excepthook``."""
    tail = error.__traceback__
    while tail is not None and tail.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        tail = tail.tb_next
    sys.excepthook(type(error), error.with_traceback(tail), tail)  # the built-in hook shows the error's own traceback
