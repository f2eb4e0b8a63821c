"""Keep the last matrix products that ranks of this node computed wrongly, for probes to try again."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path

import msgspec

from everstep.clock import Clock
from everstep.errors import DECODE_ERRORS
from everstep.wire.v1.local import WrongProduct
from everstep_agent.lifecycle import write_atomically

log = logging.getLogger(__name__)

KEPT_PRODUCTS = 4
"""Products of a node that are kept. A faulty GPU makes many; the newest ones stand for the others."""
PAUSE_S = 1.0
"""Seconds between two products that are kept, as the file is written for each."""
ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class WrongProductStore:
    """The products in a file, so that they outlive the agent.

    Args:
        path: The file. One that cannot be read counts as empty.
        clock: Times the pause between two products.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._clock = path, clock
        self._next_at = 0.0
        self._kept: deque[WrongProduct] = deque(maxlen=KEPT_PRODUCTS)
        try:
            found = msgspec.json.decode(path.read_bytes(), type=list[WrongProduct])
        except FileNotFoundError:
            return
        except (OSError, *DECODE_ERRORS) as error:
            log.warning("%s cannot be read, so probes do not try the products in it: %s", path, error)
            return
        self._kept.extend(product for product in found if _is_whole(product))

    @property
    def products(self) -> tuple[WrongProduct, ...]:
        """The products, the oldest one first."""
        return tuple(self._kept)

    def add(self, product: WrongProduct) -> None:
        """Keep a product, in place of the oldest one if there are many. One soon after another is not kept."""
        if self._clock.monotonic() < self._next_at:
            return
        if not _is_whole(product):
            log.warning("%s is not kept for probes: its operands have another size than it says", product.work)
            return
        self._next_at = self._clock.monotonic() + PAUSE_S
        self._kept.append(product)
        try:
            write_atomically(self._path, list(self._kept))
        except OSError as error:
            log.warning("%s cannot be written, so its products are lost with the agent: %s", self._path, error)


def _is_whole(product: WrongProduct) -> bool:
    size = ELEMENT_BYTES[product.dtype]
    return (
        len(product.left) == product.rows * product.inner * size
        and len(product.right) == product.inner * product.columns * size
    )
