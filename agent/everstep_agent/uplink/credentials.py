"""Obtain a node's own token: once, with a join token, and again when the token is refused.

The secret is generated here and only its hash is sent, so that no answer carries it. It is kept in a file until the
controller's answer has come. An agent that is killed between the two asks again with the same secret and gets the same
answer, even if its join token could be used only once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import ssl
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from everstep.bearer_tokens import hash_secret, stored_token
from everstep.clock import Backoff, Clock
from everstep.errors import ConfigurationError, EverstepError, Unavailable
from everstep.host.private_files import write_private
from everstep.wire.v1.enrolment import Enrolled
from everstep_agent.config import AgentSettings, read_token, tls_context

if TYPE_CHECKING:
    from everstep.client.exchange import Call

log = logging.getLogger(__name__)

REFUSED_RETRY_S = 10.0
"""Seconds between attempts that only a person can make succeed."""
_UNREACHABLE_BACKOFF = Backoff(floor_s=0.05, ceiling_s=5.0)
_SECRET_CHARACTERS = 64


async def ensure_token(settings: AgentSettings, stop: asyncio.Event) -> None:
    """Enrol if the token file is missing; return once it exists, cannot exist, or ``stop`` is set. Raises
    ConfigurationError if the join token cannot be read, or the token cannot be written."""
    if not settings.credentials.has_to_enrol:
        return
    attempt, logged = 0, ""
    while not stop.is_set():
        try:
            await asyncio.to_thread(enrol, settings)
            return
        except ConfigurationError:
            raise
        except EverstepError as error:
            away = isinstance(error, Unavailable)
            if str(error) != logged:
                logged = str(error)
                log.log(logging.WARNING if away else logging.ERROR, "not enrolled yet: %s", error)
            pause_s = _UNREACHABLE_BACKOFF.delay_s(attempt, random.random()) if away else REFUSED_RETRY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await stop.wait()
            attempt += 1


async def renew_token(settings: AgentSettings, refused_token: str) -> str:
    """Return the token to try after ``refused_token``: the file's, or a newly enrolled one. Raises EverstepError."""
    files = settings.credentials
    token = read_token(files.token_file, "agent token")
    if token == refused_token and files.join_token_file is not None:
        await asyncio.to_thread(enrol, settings)
        token = read_token(files.token_file, "agent token")
    return token


def enrol(settings: AgentSettings) -> None:
    """Request a credential and overwrite the token file. Blocks for one request at each controller. Raises Unavailable,
    ConfigurationError, EverstepError."""
    from everstep.client import calls, exchange  # most agents have their token and never enrol

    token_file = settings.credentials.token_file
    assert token_file is not None
    join_token = read_token(settings.credentials.join_token_file, "join token")
    secret_file = token_file.with_name(f".{token_file.name}.enrolling")
    secret = _load_or_create_secret(secret_file)
    call = calls.enrol(settings.node, hash_secret(secret))
    tls = tls_context(settings)
    controllers = exchange.Controllers(settings.controllers)
    enrolled = exchange.send_to_leader(controllers, lambda url: _send(url, call, join_token, tls))
    _write_line(token_file, stored_token(enrolled.credential, secret))
    secret_file.unlink(missing_ok=True)
    log.info("enrolled as node %s, credential %s", settings.node, enrolled.credential, extra={"node": settings.node})


def _send(url: str, call: Call[Enrolled], token: str, tls: ssl.SSLContext | None) -> Enrolled:
    """Return the answer of one controller. Raises its refusal, or NoAnswer, since enrolment may be repeated.

    The standard library serves one request in an agent's life. httpx would take 12 MiB for it.
    """
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    from everstep.client.exchange import no_answer

    place = urlsplit(url)
    host, timeout_s = place.hostname or "", call.timeout_s
    if place.scheme == "https":
        connection: HTTPConnection = HTTPSConnection(host, place.port, timeout=timeout_s, context=tls)
    else:
        connection = HTTPConnection(host, place.port, timeout=timeout_s)
    with contextlib.closing(connection):
        try:
            connection.request(call.method, call.target, call.content, call.headers(token))
            response = connection.getresponse()
            return call.read(response.status, response.read(), url)
        except (OSError, HTTPException) as error:
            raise no_answer(url, error) from error


def _load_or_create_secret(file: Path) -> str:
    """Return the secret of an attempt with unknown outcome, or a new one that the next attempt will find."""
    try:
        secret = file.read_text().strip()
    except OSError:
        secret = ""
    if len(secret) != _SECRET_CHARACTERS:
        secret = secrets.token_hex(_SECRET_CHARACTERS // 2)
        _write_line(file, secret)
    return secret


def _write_line(file: Path, text: str) -> None:
    """Write one line durably. Raises ConfigurationError if the file cannot be written."""
    try:
        write_private(file, text.encode() + b"\n", durable=True)
    except OSError as error:
        raise ConfigurationError(f"the token file {file} cannot be written: {error.strerror}") from error


# Credentials of an agent, read again for each connection, so that renewal needs no restart.

MIN_RENEWAL_INTERVAL_S = 10.0
"""Seconds between renewals: if a token issued a moment ago is refused, another one does not help."""


class AgentCredentials:
    """The agent's token, and its side of TLS. Raises ConfigurationError if they cannot be read at first."""

    def __init__(self, settings: AgentSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._next_renewal_at = 0.0
        self._token = read_token(settings.credentials.token_file, "agent token")
        self._loaded_stamps = self._file_stamps()
        self._context = tls_context(settings)

    def token(self) -> str:
        """Return the file's token, the previous one while the file cannot be read, or "" for none."""
        try:
            self._token = read_token(self._settings.credentials.token_file, "agent token")
        except ConfigurationError as error:
            log.error("%s", error, extra={"node": self._settings.node})
        return self._token

    def tls(self) -> ssl.SSLContext | None:
        """Return the context to connect with, made again when one of its files has changed."""
        stamps = self._file_stamps()
        if stamps != self._loaded_stamps:
            self._loaded_stamps = stamps
            try:
                self._context = tls_context(self._settings)
            except (ConfigurationError, OSError) as error:
                log.error("%s", error, extra={"node": self._settings.node})
        return self._context

    async def renew(self) -> bool:
        """Look for another token after a refusal, in the file or by enrolling again. Returns whether there is one."""
        now = self._clock.monotonic()
        if now < self._next_renewal_at:
            return False
        self._next_renewal_at = now + MIN_RENEWAL_INTERVAL_S
        try:
            return await renew_token(self._settings, self._token) != self._token
        except EverstepError as error:
            log.error(
                "the token was refused and no other one is available: %s", error, extra={"node": self._settings.node}
            )
            return False

    def _file_stamps(self) -> tuple[int, ...]:
        given = self._settings.credentials
        files = (given.ca_file, given.client_certificate, given.client_key)
        return tuple(file.stat().st_mtime_ns if file is not None and file.exists() else 0 for file in files)
