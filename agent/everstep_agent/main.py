"""The command ``everstep-agent``. SIGTERM or SIGINT shuts it down."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import traceback
from typing import Any

import msgspec

from everstep.errors import exit_on_errors
from everstep.host.parent_process import die_with_parent, parent_pid
from everstep.system_clock import SYSTEM_CLOCK
from everstep_agent.config import AgentSettings, load_settings
from everstep_agent.lifecycle import log_to_stderr
from everstep_agent.supervisor import Supervisor

log = logging.getLogger(__name__)


async def serve(settings: AgentSettings, parent: int) -> None:
    """Run the agent until a signal ends it, or with ``die_with_parent`` until ``parent`` ends."""
    stop, orphaned = asyncio.Event(), asyncio.Event()

    def lose_parent() -> None:
        orphaned.set()
        stop.set()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    if settings.shutdown.die_with_parent:
        # A signal of its own: when it arrives, the dying parent may still exist with its last threads.
        loop.add_signal_handler(signal.SIGHUP, lose_parent)
        die_with_parent(parent, signal.SIGHUP)
        if os.getppid() != parent:
            lose_parent()  # before taking any lock that the next agent waits for
    if settings.credentials.join_token_file is not None and settings.controllers:
        # Imports an HTTP client, which an enrolled agent does not need.
        from everstep_agent.uplink.credentials import ensure_token

        await ensure_token(settings, stop)
    if not stop.is_set():
        await Supervisor(settings, SYSTEM_CLOCK, orphaned).run(stop)


def read_flags() -> dict[str, Any]:
    """Return the settings given on the command line, by name. Ends the process if there is nothing to run.

    A child reads them and ends: the daemon would keep the 12 MiB that Typer loads.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status: Any = 1
        try:
            from everstep_agent.command import app

            app(prog_name="everstep-agent", obj=writing)
        except SystemExit as ended:
            status = ended.code or 0
        finally:
            if isinstance(sys.exc_info()[1], Exception):
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status if isinstance(status, int) else 1)  # the parent's cleanup is not the child's
    os.close(writing)
    with open(reading, "rb") as pipe:
        flags = pipe.read()
    _, wait_status = os.waitpid(child, 0)
    if not flags:
        sys.exit(os.waitstatus_to_exitcode(wait_status))
    return msgspec.msgpack.decode(flags, type=dict[str, Any])


def main() -> None:
    """Run the command and end the process."""
    parent = parent_pid()
    flags = read_flags()
    with exit_on_errors("everstep-agent"):
        settings = load_settings(flags, os.environ)
        log_to_stderr(settings.logs.log_format, settings.logs.log_level)
        asyncio.run(serve(settings, parent))


if __name__ == "__main__":
    main()
