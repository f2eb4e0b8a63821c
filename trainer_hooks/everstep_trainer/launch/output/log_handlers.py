"""Show and keep the launcher's own log lines."""

from __future__ import annotations

import logging

from everstep.log_lines import SafeFormatter
from everstep_trainer.launch.output.copier import OutputCopier
from everstep_trainer.launch.output.screen import Screen

PROGRAM_PREFIX = "everstep-launch: "
OWN_LOGGERS = ("everstep", "everstep_trainer")


class LauncherLog(logging.Handler):
    """Shows lines from level INFO on, and keeps all, once a copier is there.

    Args:
        is_verbose: Show all.
        screen: The launcher's output.
    """

    def __init__(self, *, is_verbose: bool, screen: Screen | None = None) -> None:
        super().__init__(logging.DEBUG)
        self.screen = screen or Screen()
        self.is_verbose = is_verbose
        self.copier: OutputCopier | None = None
        self._early: list[str] = []
        self.setFormatter(SafeFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """Show and keep a record."""
        try:
            text = self.format(record)
            if record.levelno >= logging.INFO or self.is_verbose:
                self.show(text)
            if self.copier is None:
                self._early.append(text)
            else:
                self.copier.keep_line(text)
        except Exception:  # noqa: BLE001 - as every handler of logging
            self.handleError(record)

    def show(self, text: str) -> None:
        """Show a line that begins with the program's name."""
        if self.copier is None:
            self.screen.stderr.write_line(f"{PROGRAM_PREFIX}{text}\n".encode(errors="replace"))
        else:
            self.copier.show_line(f"{PROGRAM_PREFIX}{text}")

    def note_echo(self) -> None:
        """Note that the terminal has shown ``^C`` where the cursor was."""
        if self.copier is None:
            self.screen.stderr.note_echo()
        else:
            self.copier.note_echo()

    def attach(self, copier: OutputCopier | None) -> None:
        """Let a copier write from now on, or again this handler itself."""
        self.copier = copier
        if copier is not None:
            if self.is_verbose:
                copier.show_kept_lines()
            for line in self._early:
                copier.keep_line(line)
        self._early.clear()


def install_launcher_log(*, is_verbose: bool) -> LauncherLog:
    """Let all loggers of this process use a new LauncherLog, Everstep's own from level DEBUG on."""
    handler = LauncherLog(is_verbose=is_verbose)
    if logging.getLogger().handlers:  # those of a program that calls this one
        return handler
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request of the progress and of the receipt
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.DEBUG)
    return handler


def launcher_log() -> LauncherLog | None:
    """Return the installed handler; None in a program that uses the launcher's parts, such as a test."""
    return next((each for each in logging.getLogger().handlers if isinstance(each, LauncherLog)), None)
