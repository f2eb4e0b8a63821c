"""Deleting old history in the background, a bite at a time between the loop's own transactions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from controller.store.retention import BITE, Choose, Keep, chores, prune_events
from controller.store.threads import Store
from everstep.errors import Unavailable

log = logging.getLogger(__name__)

ROUND_S = 60.0
BETWEEN_BITES_S = 0.05
"""So that deleting a long history takes a tenth of the database's time at most."""


async def retaining(store: Store, keep: Callable[[], Keep], *, first_s: float = ROUND_S) -> None:
    """Runs until cancelled.

    Args:
        keep: what stays, as of now.
        first_s: when to begin: a controller that has just taken over has other things to do.
    """
    wait_s = first_s
    while True:
        await asyncio.sleep(wait_s)
        wait_s = ROUND_S
        try:
            await _round(store, keep())
        except (Unavailable, SQLAlchemyError) as error:
            log.warning("old history was not deleted, to be tried again in %.0f s: %s", ROUND_S, error)


async def _round(store: Store, keep: Keep) -> None:
    while await store.write(lambda connection: prune_events(connection, keep)) >= BITE:
        await asyncio.sleep(BETWEEN_BITES_S)
    for chore in await store.look(lambda connection: chores(connection, keep)):
        await _done(store, chore)


async def _done(store: Store, chore: Choose) -> None:
    while (bite := await store.look(chore)) is not None:
        await store.write(bite.take)
        await asyncio.sleep(BETWEEN_BITES_S)
