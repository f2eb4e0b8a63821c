"""The fleet's secret as it stands in its file, watched: to rotate it needs no restart."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable

from controller.config import read_secrets
from everstep.clock import Clock
from everstep.errors import ConfigurationError
from everstep.tokens import Identity, check_secret, verify_any

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Seconds between two looks at the file's date: a look costs 2 us, and nobody rotates faster."""

Secrets = tuple[bytes, ...]


def fingerprint(secret: bytes) -> str:
    """Names a secret in logs and identities, and tells nothing of it."""
    return "secret-" + hashlib.sha256(b"everstep/1 fingerprint\0" + secret).hexdigest()[:12]


class Keyring:
    """The secrets that minted tokens are verified under: the first is for minting.

    Args:
        secrets: what it begins with; each of 16 bytes or more. Raises ConfigurationError.
        read: reads them again; raises ConfigurationError, and then those known stay.
        stamp: changes when there is something new to read.

    Attributes:
        secrets, names: those that hold, and their fingerprints.
        changes: how often others came to hold; what was verified before may be worth nothing then.
    """

    def __init__(
        self, secrets: Secrets, *, read: Callable[[], Secrets] | None = None, stamp: Callable[[], object] | None = None
    ) -> None:
        self._read = read
        self._stamp = stamp
        self._seen = stamp() if stamp is not None else None
        self._look_at = 0.0
        self.changes = 0
        self._take(secrets)

    @classmethod
    def of_file(cls, path: str) -> Keyring:
        """The secrets in a file, read again when it changes. Raises ConfigurationError where it cannot be used now."""

        def stamp() -> object:
            try:
                found = os.stat(path)
            except OSError:
                return None
            return found.st_mtime_ns, found.st_ino, found.st_size

        return cls(read_secrets(path), read=lambda: read_secrets(path), stamp=stamp)

    def _take(self, secrets: Secrets) -> None:
        self.secrets = tuple(check_secret(secret) for secret in secrets)
        self._names = {secret: fingerprint(secret) for secret in self.secrets}
        self.names = frozenset(self._names.values())

    def verify(self, token: str) -> Identity:
        """Who a minted token speaks for. Raises AuthenticationError."""
        identity, secret = verify_any(self.secrets, token)
        return Identity(identity.role, identity.subject, self._names[secret])

    def refresh(self, clock: Clock) -> int:
        """Reads the file again if it has changed, looking once a second at most. Returns ``changes``."""
        if self._read is not None and self._stamp is not None and clock.monotonic() >= self._look_at:
            self._look_at = clock.monotonic() + LOOK_EVERY_S
            stamp = self._stamp()
            if stamp != self._seen:
                self._seen = stamp
                self._read_again(self._read)
        return self.changes

    def _read_again(self, read: Callable[[], Secrets]) -> None:
        before = self.secrets
        try:
            self._take(read())
        except ConfigurationError as error:
            log.error("the fleet's secrets stay as they were: %s", error)
        if self.secrets != before:
            self.changes += 1
            log.info("the fleet's secrets are %s now", ", ".join(self._names.values()))
