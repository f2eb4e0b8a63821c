"""The command ``everstep-agent``. SIGTERM or SIGINT shuts it down."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import typer

from everstep.command_line import Flags, Version, exit_on_errors, make_app, takes_settings
from everstep.parent_process import die_with_parent, parent_pid
from everstep.system_clock import SYSTEM_CLOCK
from everstep_agent.config import PROGRAM, AgentSettings, load_settings
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
    if settings.die_with_parent:
        # A signal of its own: when it arrives, the dying parent may still exist with its last threads.
        loop.add_signal_handler(signal.SIGHUP, lose_parent)
        die_with_parent(parent, signal.SIGHUP)
        if os.getppid() != parent:
            lose_parent()  # before taking any lock that the next agent waits for
    if settings.join_token_file is not None:
        # Imports an HTTP client, which an enrolled agent does not need.
        from everstep_agent.uplink.credentials import ensure_token

        await ensure_token(settings, stop)
    if not stop.is_set():
        await Supervisor(settings, SYSTEM_CLOCK, orphaned).run(stop)


app = make_app()


@app.command()
@takes_settings(PROGRAM)
def agent(context: typer.Context, flags: Flags, _version: Version = False) -> None:
    """Run the daemon of one node: it watches the GPUs, keeps checkpoints in memory, and reports to the controller."""
    with exit_on_errors("everstep-agent"):
        settings = load_settings(flags, os.environ)
        log_to_stderr(settings.log_format, settings.log_level)
        asyncio.run(serve(settings, context.obj))


def main() -> None:
    """Run the command and end the process."""
    app(prog_name="everstep-agent", obj=parent_pid())


if __name__ == "__main__":
    main()
