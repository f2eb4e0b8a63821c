"""Say what no audit covers: once in a process, in one line of rank 0."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

from torch import nn

from everstep.chaos.targets import JOB_VARIABLE
from everstep.receipts.text import format_count
from everstep.vocabulary import AuditKind
from everstep_trainer.launch.output.marks import keep_line
from everstep_trainer.sdc.audit import Audit, AuditSetup
from everstep_trainer.state.tensors import list_names
from everstep_trainer.state.tracked_objects import as_list, strip_wrapper_names

log = logging.getLogger(__name__)

MAX_NAMED = 3
"""Most modules named for one reason."""
DOCS_URL = "https://everstep.readthedocs.io/how-to/audits/"
NOT_TRAINED = "it is not trained"
OUTSIDE = "it uses its parameters between parts that are checked"

_said: set[str] = set()  # in this process, which outlives generations


class Coverage:
    """What the audits of one generation leave out.

    Args:
        name: Of the preset, in the line.
        audits: The audits that look at training.
        setup: The generation.
        gaps: What is left out besides, each a clause of a sentence.
    """

    def __init__(self, name: str, audits: Sequence[Audit], setup: AuditSetup, gaps: Sequence[str] = ()) -> None:
        self._name, self._audits, self._setup, self._gaps = name, audits, setup, gaps

    def say(self) -> None:
        """Log how much is left out, unless this process has logged the same before. Rank 0 alone logs something.

        The whole list goes to the launcher's log, or without a launcher that keeps it into the line itself.
        """
        if self._setup.rank != 0:
            return
        line = self.describe()
        if line in _said:
            return
        _said.add(line)
        shown = self.summarize() if keep_line(line) else line
        if shown:
            log.warning("%s", shown)

    def summarize(self) -> str:
        """Return a short line, which names the command for the list; empty if the list has what every job has."""
        named, missing, gaps = self._find()
        if not missing and not gaps:
            return ""
        checked = f"{len(named) - len(missing)} of {len(named)} modules" if missing else "all modules"
        left = f", {format_count(len(gaps), 'gap')}" if gaps else ""
        job = os.environ.get(JOB_VARIABLE, "JOB")
        return f"audits ({self._name}) check {checked}{left}; list: everstep logs {job} --launcher"

    def describe(self) -> str:
        """Return the line."""
        named, missing, gaps = self._find()
        clauses = ["all modules with parameters are checked"]
        if missing:
            clauses = [f"{len(missing)} of {len(named)} modules with parameters are not checked: {self._list(missing)}"]
        clauses += gaps
        clauses.append("code outside of these modules, such as a loss function, is not checked")
        return f"audits ({self._name}): {'; '.join(clauses)}. See {DOCS_URL}"

    def _find(self) -> tuple[dict[str, nn.Module], dict[str, nn.Module], list[str]]:
        """Return the modules with parameters, those that no audit checks, and what is left out besides."""
        named = _modules_with_parameters(self._setup.objects)
        checked = {id(module) for audit in self._audits for module in audit.checked_modules()}
        missing = {name: module for name, module in named.items() if id(module) not in checked}
        return named, missing, [*self._gaps, *(gap for audit in self._audits for gap in audit.gaps())]

    def _list(self, missing: dict[str, nn.Module]) -> str:
        """Return the names by reason."""
        why = {id(inner): reason for audit in self._audits for inner, reason in audit.left_out_modules()}
        is_replayed = any(audit.kind is AuditKind.PEER_REPLAY and audit.rounds for audit in self._audits)
        known = OUTSIDE if is_replayed else ""
        by_reason: dict[str, list[str]] = {}
        for name, module in missing.items():
            is_trained = any(parameter.requires_grad for parameter in module.parameters())
            reason = why.get(id(module), known if is_trained else NOT_TRAINED)
            by_reason.setdefault(f" ({reason})" if reason else "", []).append(name)
        return ", ".join(f"{list_names(names, MAX_NAMED)}{reason}" for reason, names in by_reason.items())


def _modules_with_parameters(objects: Mapping[str, object]) -> dict[str, nn.Module]:
    """Return the tracked modules that hold parameters of their own, by name."""
    models = [
        (key, item) for key, tracked in objects.items() for item in as_list(tracked) if isinstance(item, nn.Module)
    ]
    found: dict[int, tuple[str, nn.Module]] = {}
    for key, model in models:
        for path, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                name = strip_wrapper_names(path).strip(".")
                name = name if len(models) == 1 and name else ".".join(filter(None, (key, name)))
                found.setdefault(id(module), (name, module))
    return dict(found.values())
