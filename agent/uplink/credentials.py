"""What an agent shows of itself, read anew for each connection, so that it is renewed without a restart."""

from __future__ import annotations

import logging
import ssl

from agent.config import AgentSettings, read_token, tls_context
from everstep.clock import Clock
from everstep.errors import ConfigurationError, EverstepError

log = logging.getLogger(__name__)

RENEWS_AGAIN_AFTER_S = 10.0
"""A token that is refused although it was issued a moment ago is not mended by another one."""


class Credentials:
    """The agent's token, and its side of TLS. Raises ConfigurationError where they cannot be read at first."""

    def __init__(self, settings: AgentSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._renews_from = 0.0
        self._token = read_token(settings.token_file, "agent token")
        self._read = self._stamps()
        self._context = tls_context(settings)

    def token(self) -> str:
        """The file's token; the one before while the file cannot be read. Empty where there is none."""
        try:
            self._token = read_token(self._settings.token_file, "agent token")
        except ConfigurationError as error:
            log.error("%s", error, extra={"node": self._settings.node})
        return self._token

    def tls(self) -> ssl.SSLContext | None:
        """The context to connect with, made anew when one of its files has changed."""
        stamps = self._stamps()
        if stamps != self._read:
            self._read = stamps
            try:
                self._context = tls_context(self._settings)
            except (ConfigurationError, OSError) as error:
                log.error("%s", error, extra={"node": self._settings.node})
        return self._context

    async def renewed(self) -> bool:
        """After our token was refused: whether there is another, in its file or by enrolling anew."""
        now = self._clock.monotonic()
        if now < self._renews_from:
            return False
        self._renews_from = now + RENEWS_AGAIN_AFTER_S
        from agent.enrolment import renew_token  # brings an HTTP client along, which few agents ever need

        try:
            return await renew_token(self._settings, self._token) != self._token
        except EverstepError as error:
            log.error("no other token: %s", error, extra={"node": self._settings.node})
            return False

    def _stamps(self) -> tuple[int, ...]:
        files = (self._settings.ca_file, self._settings.client_certificate, self._settings.client_key)
        return tuple(file.stat().st_mtime_ns if file is not None and file.exists() else 0 for file in files)
