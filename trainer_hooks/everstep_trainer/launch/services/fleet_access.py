"""Let the launcher of a fleet's job read the job from the fleet's controllers, with the job's own token.

Only the launcher of rank 0 asks: a job may have a thousand launchers.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import TypeVar

from everstep.bearer_tokens import job_token
from everstep.client import Client
from everstep.errors import EverstepError
from everstep.wire.v1.local import Welcome
from everstep.wire.v1.training import GenerationSpec

log = logging.getLogger(__name__)

T = TypeVar("T")

RANKS_PER_SECOND = 100
"""A pause between two questions is a second for so many ranks, because an answer is linear in them."""
FAILURE_PAUSE_S = 60.0
"""Seconds until the next question after one that was not answered, or that the token does not allow."""


class FleetAccess:
    """What a launcher may read of its job: nothing before the first generation, or while rank 0 is elsewhere."""

    may_show = True

    def __init__(self, job: str) -> None:
        self._job = job
        self._welcome: Welcome | None = None
        self._token = ""
        self._world_size = 0
        self._has_failed = False

    def update(self, welcome: Welcome, spec: GenerationSpec) -> None:
        """Learn from the agent who the controllers are, and from a generation the job's secret and its ranks."""
        is_here = any(member.rank == 0 for member in spec.members_on(welcome.node))
        self._welcome = welcome if is_here and welcome.controllers else None
        self._token, self._world_size = job_token(self._job, spec.secret), spec.world_size

    @property
    def min_pause_s(self) -> float:
        """Least seconds until the next question."""
        return FAILURE_PAUSE_S if self._has_failed else self._world_size / RANKS_PER_SECOND

    async def ask(self, request: Callable[[Client], T]) -> T | None:
        """Return the leader's answer to a request, made in a thread; None if it is not to be asked, or it failed."""
        welcome, token = self._welcome, self._token
        if welcome is None:
            return None

        def asked() -> T:
            with Client(welcome.controllers, token, tls=_tls(welcome)) as client:
                return request(client)

        try:
            answer = await asyncio.to_thread(asked)
        except (EverstepError, OSError) as error:
            if not self._has_failed:
                log.info("job %s cannot be read from the fleet's controllers: %s", self._job, error)
            self._has_failed = True
            return None
        self._has_failed = False
        return answer


def _tls(welcome: Welcome) -> ssl.SSLContext | None:
    """Return the context for https. Raises OSError if the authority's file cannot be read."""
    return ssl.create_default_context(cafile=welcome.ca_file) if welcome.ca_file else None
