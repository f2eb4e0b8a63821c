"""``everstep-agent``: the daemon of one node. SIGTERM or SIGINT ends it in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence

from everstep.errors import ConfigurationError, EverstepError
from everstep.parent_process import die_with_parent, parent_pid
from everstep.system_clock import SYSTEM_CLOCK
from everstep_agent.config import AgentSettings, from_command_line
from everstep_agent.lifecycle import log_to_stderr
from everstep_agent.supervisor import Supervisor

log = logging.getLogger(__name__)

EXIT_UNUSABLE = 2
"""Exit status for settings that a person must correct; a service manager should not retry."""

EXIT_FAILED = 1


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parent = parent_pid()
    try:
        settings = from_command_line(arguments)
        log_to_stderr(settings.log_format, settings.log_level)
        asyncio.run(serve(settings, parent))
    except ConfigurationError as error:
        print(f"everstep-agent: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except (EverstepError, OSError) as error:
        print(f"everstep-agent: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
