"""Load a site's policy again when its files change. A policy that does not load leaves the old one in force."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from everstep.errors import ConfigurationError
from everstep_agent.findings.rules import load_policy

POLICY_CHECK_S = 5.0
"""Seconds between two looks at a site's policy files. A change is in force after one to two of them."""


class PolicyWatch:
    """A site's policy files, and the policy in force. Raises ConfigurationError if it cannot be loaded at first."""

    def __init__(self, site_files: Iterable[str]) -> None:
        self._files = tuple(map(Path, site_files))
        self._seen = self._tried = self._read()
        self.policy = load_policy(self._files)
        self.error = ""
        """Why the present files are not in force; empty if they are."""

    def check(self) -> bool:
        """Look at the files, and load them if they changed. Returns whether ``policy`` or ``error`` may have changed.

        A change counts once two looks in a row find it, since the first may meet a file that is half written.
        """
        contents = self._read()
        if contents != self._seen:
            self._seen = contents
            return False
        if contents == self._tried:
            return False
        self._tried = contents
        try:
            self.policy, self.error = load_policy(self._files), ""
        except ConfigurationError as error:
            self.error = str(error)
        return True

    def _read(self) -> tuple[bytes | str, ...]:
        """Return the contents, or for an unreadable file the reason."""
        return tuple(map(_content, self._files))


def _content(path: Path) -> bytes | str:
    try:
        return path.read_bytes()
    except OSError as error:
        return str(error)
