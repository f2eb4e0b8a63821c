"""The command line of the agent is read in a child, and arrives as it was given."""

from __future__ import annotations

import math
import sys

import pytest
from everstep_agent.main import read_flags


def test_flags_arrive_from_the_child_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["everstep-agent", "--node", "n1", "--vault-linger-s", "inf", "--run-dir", "/r"])
    assert read_flags() == {"node": "n1", "vault_linger_s": math.inf, "run_dir": "/r"}


def test_wrong_flag_ends_with_the_childs_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["everstep-agent", "--no-such-flag"])
    with pytest.raises(SystemExit) as ended:
        read_flags()
    assert ended.value.code == 2
