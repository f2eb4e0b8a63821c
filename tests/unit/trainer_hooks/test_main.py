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
def test_function_running_nothing_when_called_is_refused(train):
    with pytest.raises(ConfigurationError, match="an ordinary function"):
        everstep.main(train)


def test_script_under_the_torchrun_flag_is_refused(monkeypatch):
    monkeypatch.setenv("EVERSTEP_TORCHRUN_SCRIPT", "1")
    with pytest.raises(ConfigurationError, match="omit --torchrun-script"):
        everstep.main(fails)


def test_spawned_child_importing_the_script_does_not_train(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ConfigurationError, match="if __name__ == '__main__':"):
        everstep.main(fails)
