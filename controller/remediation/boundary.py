"""Where calls to the outside leave our own thread: whatever they raise, somebody goes on and says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from everstep.errors import EverstepError, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")


class Unexpected(Unavailable):
    """The outside, or what speaks to it, failed in a way that nobody has thought of."""


def guarded(call: Callable[..., T], *arguments: object) -> T:
    """What ``call`` returns. Raises what it raises of ours, and Unexpected for anything else, which is logged."""
    try:
        return call(*arguments)
    except EverstepError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        log.exception("a call to the outside failed unexpectedly, to be tried again: %s", what)
        raise Unexpected(what) from error
