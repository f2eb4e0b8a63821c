"""Explain a rule of the controller, or what follows from a finding: the controller's part of ``everstep policy``.

``python -m everstep_controller.app.explain_command [FILE]`` reads a request from its input and prints JSON. FILE and
the environment have the controller's settings; without them the policy is as shipped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from everstep.errors import ConfigurationError, exit_on_errors
from everstep.policy_explanations import Explanation, ExplanationRequest
from everstep.wire.v1.operator_history import PolicyDocument
from everstep_controller.config import read_settings
from everstep_controller.core.policy import CorePolicy
from everstep_controller.policy.consequences import Origins, explain_consequence, explain_rule, key_origins
from everstep_controller.policy.rulebook import POLICY_FOLDER, policy_from_document


def answer(request: ExplanationRequest, policy: CorePolicy, origin: str, origins: Origins) -> Explanation:
    """Return the consequence of the request's finding, or the rule that it asks for."""
    if request.finding is not None:
        return Explanation(consequence=explain_consequence(policy, request.finding, origin))
    rule = policy.rules.find_rule(request.rule)
    if rule is None:
        names = (rule.id for rules in policy.rules.rules_by_kind.values() for rule in rules)
        return Explanation(names=tuple(names))
    return Explanation(explanation=explain_rule(rule, origins))


def _origins_of_document(document: PolicyDocument, origin: str) -> dict[str, dict[str, str]]:
    """Return the origin of each rule of a running controller, which names no lines."""
    found = {}
    for table in document.rules:
        name = ".".join(filter(None, (str(table["kind"]), str(table.get("name", "")))))
        place = document.origins.get(name, "as shipped")
        found[name] = dict.fromkeys(table, f"{origin}, {place}")
    return found


def run(request: ExplanationRequest, files: Sequence[str]) -> Explanation:
    """Return the answer by the request's document, or by the settings in a file and the environment."""
    if request.document is not None:
        origins = _origins_of_document(request.document, request.origin)
        return answer(request, policy_from_document(request.document), request.origin, origins)
    settings = read_settings({"settings": files[0]} if files else {}, os.environ)
    folders = [POLICY_FOLDER, *([Path(settings.policy_dir)] if settings.policy_dir else [])]
    changed = ", ".join(sorted(set(settings.policy_origins.values())))
    origin = f"the controller's settings ({changed})" if changed else "the controller's policy as shipped"
    return answer(request, settings.policy.validate(), origin, key_origins(folders))


def main(files: Sequence[str]) -> None:
    """Answer the request in the standard input."""
    with exit_on_errors("everstep"):
        try:
            request = msgspec.json.decode(sys.stdin.buffer.read(), type=ExplanationRequest)
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"not a request: {error}") from error
        sys.stdout.buffer.write(msgspec.json.encode(run(request, files)))


if __name__ == "__main__":
    main(sys.argv[1:])
