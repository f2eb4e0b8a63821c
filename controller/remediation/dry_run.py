"""The default: what would be done is said in the log, and nothing is done."""

from __future__ import annotations

import logging

from controller.remediation.base import ACTED_ON
from everstep.vocabulary import Verdict

log = logging.getLogger(__name__)


class DryRun:
    """Satisfies ``Remediation``."""

    def verdicts(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            if verdict.decision in ACTED_ON:
                log.info(
                    "dry run, nothing is done: %s of node %s (action %s): %s",
                    verdict.decision,
                    verdict.node,
                    verdict.action,
                    verdict.sentence,
                    extra={"node": verdict.node, "trace": verdict.trace},
                )

    def close(self) -> None:
        pass
