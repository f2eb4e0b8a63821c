"""How a node comes by a token of its own: once, with a join token, and again when its token is refused.

The secret is made here and its hash is sent, so that no answer carries it. It is kept in a file until the controller's
answer has come: an agent that is killed between the two asks again with the same secret and is answered the same, even
where its join token could be used only once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
from pathlib import Path

from agent.config import AgentSettings, read_token, tls_context
from everstep.backoff import Backoff
from everstep.cli.client import Client
from everstep.errors import ConfigurationError, EverstepError, Unavailable
from everstep.tokens import hash_secret, stored_token
from everstep.wire.v1.enrolment import Enrol, Enrolled

log = logging.getLogger(__name__)

REFUSED_RETRY_S = 10.0
"""Between attempts that only a person can make succeed."""
_AWAY = Backoff(floor_s=0.05, ceiling_s=5.0)
_SECRET_CHARACTERS = 64


def may_enrol(settings: AgentSettings) -> bool:
    """Whether this agent has what it takes."""
    return settings.join_token_file is not None and settings.token_file is not None


async def ensure_token(settings: AgentSettings, stop: asyncio.Event) -> None:
    """Returns once there is a token file, or there can be none, or ``stop`` is set. Enrols where the file is missing.

    Raises ConfigurationError where the join token cannot be read or the token cannot be written.
    """
    if not may_enrol(settings) or (settings.token_file is not None and settings.token_file.exists()):
        return
    attempt, said = 0, ""
    while not stop.is_set():
        try:
            await asyncio.to_thread(enrol, settings)
            return
        except ConfigurationError:
            raise
        except EverstepError as error:
            away = isinstance(error, Unavailable)
            if str(error) != said:
                said = str(error)
                log.log(logging.WARNING if away else logging.ERROR, "not enrolled yet: %s", error)
            await _pause(stop, _AWAY.delay_s(attempt, random.random()) if away else REFUSED_RETRY_S)
            attempt += 1


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        pass


async def renew_token(settings: AgentSettings, refused: str) -> str:
    """The token to try next, after the controller did not know ``refused``: the file's, or one enrolled for anew.

    Raises EverstepError where there is none.
    """
    token = read_token(settings.token_file, "agent token")
    if token == refused and may_enrol(settings):
        await asyncio.to_thread(enrol, settings)
        token = read_token(settings.token_file, "agent token")
    return token


def enrol(settings: AgentSettings) -> None:
    """Asks for a credential and writes the token file, whatever it held. Blocks for one request at each controller.

    Raises Unavailable where no controller answers, the controller's own refusal, and ConfigurationError for files.
    """
    assert settings.token_file is not None
    join_token = read_token(settings.join_token_file, "join token")
    kept = settings.token_file.with_name(f".{settings.token_file.name}.enrolling")
    secret = _kept_secret(kept)
    asked = Enrol(node=settings.node, secret_hash=hash_secret(secret))
    enrolled = _ask(settings, join_token, asked)
    write_private(settings.token_file, stored_token(enrolled.credential, secret))
    kept.unlink(missing_ok=True)
    log.info("enrolled as node %s, credential %s", settings.node, enrolled.credential, extra={"node": settings.node})


def _ask(settings: AgentSettings, join_token: str, asked: Enrol) -> Enrolled:
    """The first controller's answer. Raises the refusal of one, or Unavailable where none answers."""
    tls, away = tls_context(settings), Unavailable("no controller is known")
    for url in settings.controllers:
        try:
            return Client(url, join_token, tls=tls).post("/v1/enrol", asked, Enrolled)
        except Unavailable as error:
            away = error
    raise away


def _kept_secret(file: Path) -> str:
    """The secret of an attempt whose outcome is not known, or a new one that the next attempt will find."""
    try:
        secret = file.read_text().strip()
    except OSError:
        secret = ""
    if len(secret) != _SECRET_CHARACTERS:
        secret = secrets.token_hex(_SECRET_CHARACTERS // 2)
        write_private(file, secret)
    return secret


def write_private(file: Path, text: str) -> None:
    """Writes one line for this user's eyes, durably, so that a reader sees all of it or what was there before.

    Raises ConfigurationError where the file cannot be written.
    """
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as out:
            os.fchmod(out.fileno(), 0o600)
            out.write(text + "\n")
            out.flush()
            os.fsync(out.fileno())
        draft.rename(file)
    except OSError as error:
        raise ConfigurationError(f"the token file {file} cannot be written: {error.strerror}") from error
