"""The default: what would be done is said in the log, and nothing is done."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from controller.core.effects import Remedy, RemedyKind
from controller.remediation.base import Standing
from everstep.ids import NodeId

log = logging.getLogger(__name__)


class DryRun:
    """Satisfies ``Remediator``; takes everything for done at once."""

    name = "dry_run"
    dry_run = True
    kinds = frozenset(RemedyKind)

    def __init__(self) -> None:
        self._said: set[str] = set()

    def apply(self, remedy: Remedy) -> None:
        if remedy.id in self._said:
            return
        self._said.add(remedy.id)
        log.info(
            "dry run, nothing is done: %s node %s: %s",
            remedy.kind,
            remedy.node,
            remedy.sentence,
            extra={"node": remedy.node, "trace": remedy.trace},
        )

    def is_done(self, remedy: Remedy) -> bool:
        return remedy.id in self._said

    def standing(self, nodes: Sequence[NodeId]) -> dict[NodeId, Standing]:
        return {}

    def close(self) -> None:
        pass
