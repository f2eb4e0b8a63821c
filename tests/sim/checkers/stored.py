"""What the database holds of nodes and jobs, which is all that a controller that takes over knows of them."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from everstep_controller.store.rows import Batch

T = TypeVar("T")


class Stored:
    """Documents by name, as they were written; a checker decodes what it looks at."""

    def __init__(self) -> None:
        self._nodes: dict[str, str] = {}
        self._jobs: dict[str, str] = {}

    def note(self, batch: Batch) -> None:
        """The batch became durable."""
        for node in batch.forgotten_nodes:
            self._nodes.pop(node, None)
        for job in batch.forgotten_jobs:
            self._jobs.pop(job, None)
        self._nodes |= batch.nodes
        self._jobs |= batch.jobs

    def nodes(self, kind: type[T]) -> dict[str, T]:
        return {name: msgspec.json.decode(doc, type=kind) for name, doc in self._nodes.items()}

    def jobs(self, kind: type[T]) -> dict[str, T]:
        return {name: msgspec.json.decode(doc, type=kind) for name, doc in self._jobs.items()}
