"""Load a site's policy again when its files change. A policy that does not load leaves the old one in force."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from everstep.errors import ConfigurationError
from everstep_agent.policy.rules import FindingPolicy, load_policy

POLICY_CHECK_S = 5.0
"""Seconds between two looks at a site's policy files. A change is in force after one to two of them."""


class PolicyWatch:
    """A site's policy files, and the policy in force.

    ``last_texts`` are the files' contents that were last in force, by path. They stay in force if an agent starts with
    files that do not load. Raises ConfigurationError about the files if neither can be loaded.
    """

    def __init__(self, site_files: Iterable[str], last_texts: Mapping[str, str] = {}) -> None:
        self._files = tuple(map(Path, site_files))
        self._seen = self._tried = self._read()
        self.error = ""
        """Why the present files are not in force; empty if they are."""
        try:
            self.policy = self._load(self._texts_of(self._tried))
        except ConfigurationError as error:
            last = self._load_last(last_texts)
            if last is None:
                raise
            self.policy, self.error = last, str(error)

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
            self.policy, self.error = self._load(self._texts_of(contents)), ""
        except ConfigurationError as error:
            self.error = str(error)
        return True

    def _load_last(self, texts: Mapping[str, str]) -> FindingPolicy | None:
        """Return the policy that was last in force; None if it is of other files, or of another release's form."""
        if texts.keys() != set(map(str, self._files)):
            return None
        with contextlib.suppress(ConfigurationError):
            return self._load(texts)
        return None

    def _load(self, texts: Mapping[str, str]) -> FindingPolicy:
        policy = load_policy(self._files, texts=texts)
        self.texts = dict(texts)
        """The files' contents that are in force, by path."""
        return policy

    def _texts_of(self, contents: tuple[bytes | str, ...]) -> dict[str, str]:
        """Return the files that could be read; the loader reads the others itself, and says what is wrong."""
        found = {}
        for path, content in zip(self._files, contents, strict=True):
            with contextlib.suppress(UnicodeDecodeError):
                if isinstance(content, bytes):
                    found[str(path)] = content.decode()
        return found

    def _read(self) -> tuple[bytes | str, ...]:
        """Return the contents, or for an unreadable file the reason."""
        return tuple(map(_content, self._files))


def _content(path: Path) -> bytes | str:
    try:
        return path.read_bytes()
    except OSError as error:
        return str(error)
