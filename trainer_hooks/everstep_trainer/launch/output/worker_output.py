"""Set up what one launcher shows and keeps, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from everstep.clock import Clock
from everstep.layout.kept_output import AboutOutput, make_output_folder, write_about
from everstep_trainer.launch.options import LaunchOptions
from everstep_trainer.launch.output.copier import OutputCopier
from everstep_trainer.launch.output.log_handlers import launcher_log
from everstep_trainer.launch.output.marks import OUTPUT_VARIABLE
from everstep_trainer.launch.output.screen import Screen

log = logging.getLogger(__name__)


class WorkerOutput:
    """The output of one launcher's workers.

    Args:
        copier: Copies it.
        is_direct: Workers write to the launcher's own stdout and stderr, and nothing is copied.
        folder: What describes the kept output is there; None without one.
        about: That description.
    """

    def __init__(self, copier: OutputCopier, *, is_direct: bool, folder: Path | None, about: AboutOutput) -> None:
        self._copier, self._is_direct, self._folder, self._about = copier, is_direct, folder, about

    def open(self, serial: int, local_rank: int | None) -> tuple[tuple[int, ...], dict[str, str | None]]:
        """Return descriptors for a worker's stdout and stderr, to be closed once they are passed on; and variables."""
        if self._is_direct:
            return (), {OUTPUT_VARIABLE: None}
        stdout, stderr = self._copier.open(serial, local_rank)
        return (stdout, stderr), {OUTPUT_VARIABLE: self._copier.shows_stderr_of(stderr) or None}

    def assign(self, serial: int, local_rank: int) -> None:
        """Note the local rank that a standby has taken over."""
        self._copier.assign(serial, local_rank)

    def stop_showing_ranks(self) -> None:
        """Show nothing more of ranks; it is still kept."""
        self._copier.stop_showing_ranks()

    def note_ranks(self, node: str | None, ranks: Mapping[int, int]) -> None:
        """Describe the kept output by global ranks from now on (by local rank); a slow disk delays nothing."""
        self._about = msgspec.structs.replace(self._about, node=node or "", ranks=dict(ranks))
        if self._folder is not None:
            asyncio.get_running_loop().run_in_executor(None, self._write, self._about)

    def _write(self, about: AboutOutput) -> None:
        assert self._folder is not None
        if about is not self._about:  # a newer one is written instead
            return
        try:
            write_about(self._folder, about)
        except OSError as error:
            log.debug("ranks of the kept output are not noted: %s", error)


@contextlib.contextmanager
def copying_output(
    options: LaunchOptions, state_dir: Path, clock: Clock, labels: Mapping[int, str]
) -> Iterator[WorkerOutput]:
    """Copy and keep output of workers, and the launcher's log, inside the block, on an event loop.

    Raises ConfigurationError if ``--log-dir`` cannot be written. If nothing can be kept, that is logged.
    """
    handler = launcher_log()
    log_files = options.log_files
    printed, is_tee = log_files.printed_local_ranks, log_files.tee != "0"
    is_changed = log_files.log_dir is not None or is_tee or printed is not None
    is_direct = not options.display.keep_output and not is_changed
    about = AboutOutput(job=options.job, started_at=clock.wall(), keeps_ranks=not is_direct)
    with contextlib.ExitStack() as stack:
        folder = None
        try:
            folder, lock = make_output_folder(state_dir, about)
            stack.callback(os.close, lock)
        except OSError as error:
            log.warning("output is not kept for `everstep logs`: %s", error)
        log_dir = Path(log_files.log_dir) / options.job if log_files.log_dir is not None else None
        copier = OutputCopier(
            handler.screen if handler is not None else Screen(),
            clock,
            folder=folder,
            log_dir=log_dir,
            is_tee=is_tee,
            shown=printed,
            labels=labels,
        )
        stack.callback(copier.end)
        if handler is not None:
            handler.attach(copier)
            stack.callback(handler.attach, None)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGWINCH, copier.resize)
        stack.callback(loop.remove_signal_handler, signal.SIGWINCH)
        yield WorkerOutput(copier, is_direct=is_direct, folder=folder, about=about)
