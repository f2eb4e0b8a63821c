"""What a script may hand over, and where."""

from __future__ import annotations

import multiprocessing

import pytest

import everstep
from everstep.errors import ConfigurationError


async def in_a_loop(run):
    raise AssertionError("never reached")


def yields(run):
    yield run


def fails(run):
    raise AssertionError("never reached")


@pytest.mark.parametrize("train", [in_a_loop, yields])
def test_a_function_of_which_a_call_runs_nothing_is_refused(train):
    with pytest.raises(ConfigurationError, match="runs nothing of it"):
        everstep.main(train)


def test_a_spawned_child_that_imports_the_script_does_not_train(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ConfigurationError, match="if __name__ == '__main__':"):
        everstep.main(fails)
