"""The command ``everstep-launch``."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence

from everstep.errors import ConfigurationError, EverstepError
from everstep.parent_process import die_with_parent
from everstep.system_clock import SYSTEM_CLOCK
from everstep_trainer.launch.launcher import LauncherOutcome, launch
from everstep_trainer.launch.options import IGNORED_FLAGS, LaunchOptions, parse_options

log = logging.getLogger(__name__)

EXIT_USAGE = 2
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher and return its exit status.

    Returns:
        0 if the job finished, 1 if it failed, 2 for a wrong command line. 128 plus the number of the signal that ended
        it (130 for Ctrl-C). For a script that never calls ``everstep.main``, the status of its first failed process.
    """
    parent = os.getppid()
    logging.basicConfig(level=logging.INFO, format="everstep-launch: %(message)s", stream=sys.stderr)
    try:
        options = parse_options(sys.argv[1:] if argv is None else argv, os.environ)
        for name in options.ignored_flags:
            log.info("--%s changes nothing here: %s", name.replace("_", "-"), IGNORED_FLAGS[name])
        if options.die_with_parent:
            die_with_parent(parent)
        outcome = asyncio.run(_run(options))
    except ConfigurationError as error:
        print(f"everstep-launch: {error}", file=sys.stderr)
        return EXIT_USAGE
    except EverstepError as error:
        print(f"everstep-launch: {error}", file=sys.stderr)
        return 1
    if outcome.exit_status:
        print(f"everstep-launch: {outcome.sentence}", file=sys.stderr)
    return outcome.exit_status


async def _run(options: LaunchOptions) -> LauncherOutcome:
    """Run the launcher until it ends; the first signal ends it in order, a second one at once."""
    loop = asyncio.get_running_loop()
    work = asyncio.create_task(launch(options, SYSTEM_CLOCK, os.environ))
    received: list[signal.Signals] = []

    def end(number: signal.Signals) -> None:
        received.append(number)
        work.cancel()

    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:
            continue  # nohup asked for this
        loop.add_signal_handler(number, end, number)
    try:
        return await work
    except asyncio.CancelledError:
        if not received:
            raise
        return LauncherOutcome(128 + received[0], f"ended by {received[0].name}")


if __name__ == "__main__":
    raise SystemExit(main())
