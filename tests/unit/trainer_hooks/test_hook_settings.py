"""Every setting is documented, and contradictions are refused."""

from __future__ import annotations

import ast
import inspect
import itertools
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest

import everstep
from everstep.errors import ConfigurationError
from everstep_trainer import config
from everstep_trainer.config import HookSettings
from everstep_trainer.run import Run


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
def test_a_contradiction_is_refused_by_name(settings: HookSettings, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        settings.validate()


def test_every_setting_has_a_docstring() -> None:
    body = ast.parse(inspect.getsource(config)).body
    fields = next(node.body for node in body if isinstance(node, ast.ClassDef))
    for field, following in itertools.pairwise(fields):
        if isinstance(field, ast.AnnAssign):
            documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            assert documented, f"{ast.unparse(field.target)} has no docstring"


async def in_a_loop(run: Run) -> None:
    raise AssertionError("never reached")


def yields(run: Run) -> Iterator[Run]:
    yield run


def fails(run: Run) -> None:
    raise AssertionError("never reached")


@pytest.mark.parametrize("train", [in_a_loop, yields])
def test_function_running_nothing_when_called_is_refused(train: Any) -> None:
    with pytest.raises(ConfigurationError, match="an ordinary function"):
        everstep.main(train)


def test_script_under_the_torchrun_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_TORCHRUN_SCRIPT", "1")
    with pytest.raises(ConfigurationError, match="omit --torchrun-script"):
        everstep.main(fails)


def test_spawned_child_importing_the_script_does_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ConfigurationError, match="if __name__ == '__main__':"):
        everstep.main(fails)
