"""A terminal that runs the commands of a document, and a comparison of their output with the document."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from tests.support.documents.markdown import FENCE
from tests.support.processes.process_table import descendants, is_running

DEADLINE_S = 180.0  # on a busy machine an agent needs a minute to load torch, and probes again after another
"""Seconds within which commands end and their output appears, on a slow machine."""
READS = re.compile(r"^everstep (status|nodes|events|orders|logs|runs|job show)\b", re.MULTILINE)
"""Commands that change nothing, so that they can be repeated until they print the lines of the document."""


class Block(NamedTuple):
    """A fenced block of a document."""

    language: str
    text: str


def sections(document: str) -> dict[int, list[Block]]:
    """Return the fenced blocks of a document by the number of their heading, ``## 1. Title``."""
    parts = re.split(r"^## (\d+)\. .*$", document, flags=re.MULTILINE)
    return {
        int(number): [Block(*found) for found in FENCE.findall(text)]
        for number, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def unwrapped(output: str) -> list[str]:
    """Return the lines of an output, with indented lines that begin in lower case joined to the line before."""
    return re.sub(r"\n {2,}(?=[a-z])", " ", output).splitlines()


def general(line: str) -> str:
    """Replace the parts of a line that differ between runs: durations, identifiers, and numbers with several digits.

    Counts of ranks and nodes and numbers of generations have one digit, and are kept.
    """
    line = re.sub(r"\b[0-9a-f]{8}[0-9a-f]*\b", "ID", line)
    line = re.sub(r"(?<![\w.:])\d+(\.\d+)? ?(us|ms|s|min|h|d)\b", "TIME", line)
    line = re.sub(r"(?<![\w.])(\d+(\.\d+)+|\d{2,})\b", "NUMBER", line)
    return " ".join(line.split())


def missing_lines(shown: str, printed: str) -> list[str]:
    """Return the lines that a document shows and that were not printed. ``...`` in a line stands for any text."""
    lines = [general(line) for line in unwrapped(printed)]

    def is_printed(line: str) -> bool:
        known = (re.escape(part.strip()) for part in general(line).split("..."))
        pattern = re.compile(".*".join(known) + "$")
        return any(pattern.search(printed_line) for printed_line in lines)

    return [line for line in unwrapped(shown) if line.strip() and not is_printed(line)]


class Terminal:
    """A bash that runs blocks of commands one after another, in one directory."""

    def __init__(self, directory: Path, name: str, environment: Mapping[str, str]) -> None:
        self._output = directory / f"{name}.terminal"
        self._blocks = 0
        with self._output.open("wb") as output:
            self._bash = subprocess.Popen(
                ["bash"],
                cwd=directory,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill the shell and its descendants."""
        for pid in filter(is_running, [self._bash.pid, *descendants(self._bash.pid)]):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._bash.stdin is not None:
            self._bash.stdin.close()
        self._bash.wait()

    def begin(self, commands: str) -> None:
        """Start commands without waiting for their end."""
        assert self._bash.stdin is not None
        self._bash.stdin.write(f"{commands.rstrip()}\n".encode())
        self._bash.stdin.flush()

    def run(self, commands: str) -> str:
        """Run commands to their end, and return their output."""
        self._blocks += 1
        marker, before = f"--- end of block {self._blocks}", len(self.printed())
        self.begin(f"{commands.rstrip()}\necho '{marker}'")
        return self.until(lambda printed: marker in printed[before:], commands)[before:].partition(marker)[0]

    def printed(self) -> str:
        """Return the output so far."""
        return self._output.read_text()

    def until(self, condition: Callable[[str], bool], description: str) -> str:
        """Wait until the output meets a condition, and return the output."""
        deadline = time.perf_counter() + DEADLINE_S
        while not condition(printed := self.printed()):
            if time.perf_counter() > deadline:
                raise AssertionError(f"not printed within {DEADLINE_S:.0f} s: {description}\nprinted:\n{printed}")
            time.sleep(0.05)
        return printed

    def show(self, commands: str, shown: Sequence[str]) -> None:
        """Run commands, and repeat those that only read until all lines of the document were printed."""
        printed = first = self.run(commands)
        reads = "\n".join(line for line in commands.splitlines() if READS.match(line))
        deadline = time.perf_counter() + DEADLINE_S
        while missing := [line for block in shown for line in missing_lines(block, printed)]:
            if time.perf_counter() > deadline or not reads:
                raise AssertionError(
                    f"shown by the document but not printed:\n{missing}\nprinted first:\n{first}\nlast:\n{printed}"
                )
            time.sleep(1.0)  # each command loads Python anew
            printed = self.run(reads)
