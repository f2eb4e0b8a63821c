"""Run a script that knows torchrun, and not Everstep, as a rank of a job (``--torchrun-script``).

This module is the training function of such a job. In each generation every rank starts the script with torchrun's
variables and waits for its end. When a rank or a node is lost, the others end their scripts, and all start again in the
next generation, from the script's own checkpoint. A script that ends by a signal takes its rank with it, so that the
controller sees what it sees of any rank.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from types import FrameType

import torch.distributed as dist

import everstep
from everstep.host.parent_process import die_with_parent
from everstep.host.processes import has_signal_handler
from everstep.printable_text import valid_unicode
from everstep_trainer.config import HookSettings
from everstep_trainer.launch.assignment import TORCHRUN_SCRIPT_VARIABLE
from everstep_trainer.launch.children import execute_program, execute_script
from everstep_trainer.launch.forking.process_setup import NOTICE_SIGNALS
from everstep_trainer.launch.processes import TORCHRUN_SCRIPT_MODULE, ScriptCommand

UNLIMITED_S = 10 * 365 * 86400.0
LEAVE_MARGIN_S = 5.0
FORWARDED = (signal.SIGTERM, signal.SIGINT, *NOTICE_SIGNALS)


class ScriptFailed(Exception):
    """The script ended with an exit status other than 0."""


def run_script(command: ScriptCommand, run: everstep.Run) -> None:
    """Run the script once, as this rank of the generation.

    Raises ScriptFailed if it ends with an exit status other than 0. Ends this process by the same signal if one ended
    the script.
    """
    run.seed_step(1)
    run.step_finished()  # a generation has resumed once all ranks have finished a step
    argv = [sys.executable, "-P", "-m", TORCHRUN_SCRIPT_MODULE, "--parent", str(os.getpid()), command.to_json()]
    process = subprocess.Popen(argv, env=os.environ | _script_environment(command, run.rank))
    name = valid_unicode(os.path.basename(command.script))
    with _ended_with(process, command.grace_s), run.alone(name, limit_s=UNLIMITED_S):
        status = process.wait()
    if status < 0:
        _end_by_signal(signal.Signals(-status))
    if status:
        raise ScriptFailed(f"{command.script} ended with exit status {status}")


def _script_environment(command: ScriptCommand, rank: int) -> dict[str, str]:
    """Return the variables that differ from those of the rank: a rendezvous of the script's own, at rank 0's node."""
    place = [command.address, str(_free_port(command.address))] if rank == 0 else ["", ""]
    dist.broadcast_object_list(place, src=0)
    return {
        "MASTER_ADDR": place[0],
        "MASTER_PORT": place[1],
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_MAX_RESTARTS": str(command.max_restarts),
        TORCHRUN_SCRIPT_VARIABLE: "1",
    }


def _end_by_signal(number: signal.Signals) -> None:
    """End this process as the script was ended: the launcher and the controller see the cause."""
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _free_port(address: str) -> int:
    """Return a port that is free now; the script of rank 0 listens there."""
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((address, 0), family=family) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def _ended_with(process: subprocess.Popen[bytes], grace_s: float) -> Iterator[None]:
    """Pass signals on to the script in the block, and end the script at the block's end if it still runs."""

    def forward(number: int, frame: FrameType | None) -> None:
        if number not in NOTICE_SIGNALS or has_signal_handler(process.pid, signal.Signals(number)):
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> None:
    """Run as a rank, or with ``--parent`` as its script's process, which ends with the rank."""
    parser = argparse.ArgumentParser(prog="everstep-torchrun-script")
    parser.add_argument("--parent", type=int)
    parser.add_argument("command")
    options = parser.parse_args()
    command = ScriptCommand.from_json(options.command)
    if options.parent is not None:
        die_with_parent(options.parent, signal.SIGKILL)
        if command.no_python:
            execute_program(command.script, list(command.arguments))
        execute_script(command.script, module=command.module, arguments=list(command.arguments))
        return
    logging.getLogger("everstep_trainer.run").setLevel(logging.ERROR)  # "nothing is tracked" is meant for other scripts
    # gloo: a rank itself must not take memory of the GPU that its script uses.
    settings = HookSettings(backend="gloo", leave_timeout_s=command.grace_s + LEAVE_MARGIN_S)
    everstep.main(partial(run_script, command), settings=settings)


if __name__ == "__main__":
    main()
