"""Pages of segments that are being filled already: made beside that, in threads that end before a segment gives way."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

from agent.vault.memory import populate


class Prefaults:
    """Threads that make the pages of files. Safe to use from any thread.

    One that went on while its file gives memory back would take that again, which by then may be somebody else's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Path, tuple[threading.Thread, threading.Event]] = {}

    def begin(self, path: Path, mapping: mmap.mmap) -> None:
        """Makes the pages of ``mapping``, which is of the file that is or will be ``path``."""
        stopped = threading.Event()
        thread = threading.Thread(target=populate, args=(mapping, stopped), daemon=True, name="populate")
        with self._lock:
            self._running[path] = thread, stopped
            thread.start()

    def end(self, path: Path) -> None:
        """Returns when no more pages of the files ``path``, or of those below that folder, are made."""
        with self._lock:
            ended = [self._running.pop(file) for file in list(self._running) if file.is_relative_to(path)]
        for _, stopped in ended:
            stopped.set()
        for thread, _ in ended:
            thread.join()
