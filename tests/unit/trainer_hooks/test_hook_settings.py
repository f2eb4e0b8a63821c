"""Every knob is documented, and contradictions are refused."""

from __future__ import annotations

import ast
import inspect
import itertools

import pytest
from everstep_trainer import config
from everstep_trainer.config import HookSettings

from everstep.errors import ConfigurationError


def test_default_settings_are_valid():
    assert HookSettings().validate() == HookSettings()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (HookSettings(backend="mpi"), "backend"),
        (HookSettings(join_timeout_s=0), "join_timeout_s"),
        (HookSettings(hang_factor=1.0), "hang_factor"),
        (HookSettings(first_step_allowance_s=0.5), "first_step_allowance_s"),
        (HookSettings(error_attribution_grace_s=40.0), "error_attribution_grace_s"),
        (HookSettings(interrupt_after_s=3.0), "interrupt_after_s"),
        (HookSettings(outbox_frames=-1), "outbox_frames"),
    ],
)
def test_a_contradiction_is_refused_by_name(settings, says):
    with pytest.raises(ConfigurationError, match=says):
        settings.validate()


def test_every_setting_has_a_docstring():
    body = ast.parse(inspect.getsource(config)).body
    fields = next(node.body for node in body if isinstance(node, ast.ClassDef))
    for field, following in itertools.pairwise(fields):
        if isinstance(field, ast.AnnAssign):
            documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            assert documented, f"{ast.unparse(field.target)} has no docstring"
