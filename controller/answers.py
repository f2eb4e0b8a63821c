"""What became of stimuli: told to whoever waits for it once it is durable, refused where nothing can be promised."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from controller.intake import Waiting
from controller.keeping import Absence
from controller.transaction import Transaction
from everstep.errors import EverstepError, Unavailable

T = TypeVar("T")
Stimulus = Callable[[Transaction, float], T]
"""Runs events in a transaction at a time; what it returns is what its submitter gets once all is durable. It raises
EverstepError only before anything was changed."""

AnyWaiting = Waiting[Stimulus[Any]]

TOLD_AT_ONCE = 16
"""Answers that are sent in one turn of the event loop: half a millisecond's work."""
UNPROMISED = (
    "the database is away, so this is kept in memory only, and not promised: send it again; what was ordered may count "
    "when the database is back"
)


class Result(NamedTuple):
    """What became of a stimulus. ``forgettable``: see ``Transaction``."""

    waiting: AnyWaiting
    value: Any
    error: EverstepError | None
    forgettable: bool

    def tell(self, away: Absence | None) -> None:
        """Answers, with a refusal where a promise is asked for that an absent database does not let us give."""
        done = self.waiting.done
        if done.done():
            return  # its client is gone; what it asked for is done all the same
        if self.error is not None:
            done.set_exception(self.error)
        elif away is None or self.forgettable:
            done.set_result(self.value)
        else:
            done.set_exception(Unavailable(f"{UNPROMISED}: {away.reason}"))


async def tell_all(results: Iterable[Result], away: Absence | None) -> None:
    """Each answer is put together and sent by the callback of its future, in the event loop's next turn."""
    for number, result in enumerate(results, 1):
        result.tell(away)
        if number % TOLD_AT_ONCE == 0:
            await asyncio.sleep(0)
