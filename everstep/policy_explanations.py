"""Explanations of a rule: its values with their places, and what really follows from its finding.

Agents and the controller each know their own rules. Their programs print an answer, and ``everstep policy explain``
puts both together.
"""

from __future__ import annotations

from typing import Any

import msgspec

from everstep.vocabulary import Finding, Mode
from everstep.wire.v1.operator_history import PolicyDocument


class ExplainedValue(msgspec.Struct, frozen=True):
    """A value, and the file and line that it comes from."""

    value: Any
    origin: str


class RuleExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One rule of the agents or of the controller."""

    rule: str
    owner: str  # "agent" or "controller"
    section: str  # of the policy file: "rule", "line", ...
    enabled: bool
    values: dict[str, ExplainedValue]
    finding: Finding | None = None  # as an agent's rule makes it; None if it makes none


class Consequence(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from a finding by the agent's and the controller's rule together."""

    rule: str  # the controller's
    policy: str  # where the controller's policy comes from
    agent_mode: Mode
    controller_mode: Mode
    mode: Mode  # that holds
    sentence: str


class ExplanationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """To the controller's program: a rule by its id, or a finding to judge."""

    rule: str = ""
    finding: Finding | None = None
    document: PolicyDocument | None = None  # the policy of a running controller; None: that of the settings
    origin: str = ""  # where the document comes from


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a program, or of both together."""

    explanation: RuleExplanation | None = None
    consequence: Consequence | None = None
    names: tuple[str, ...] = ()  # rules that there are, if the one asked for is unknown
