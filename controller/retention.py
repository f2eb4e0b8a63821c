"""Deleting old history in the background, a bite at a time between the loop's own transactions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from controller.store.retention import BITE, Keep, prune
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
            while await store.write(lambda connection: prune(connection, keep())) >= BITE:
                await asyncio.sleep(BETWEEN_BITES_S)
        except (Unavailable, SQLAlchemyError) as error:
            log.warning("old history was not deleted, to be tried again in %.0f s: %s", ROUND_S, error)
