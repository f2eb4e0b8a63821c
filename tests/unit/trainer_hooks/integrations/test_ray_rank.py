"""Ray Train's functions in a rank process, without Ray."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from tests.support.ranks.recorded_session import RecordedSession

pytestmark = [pytest.mark.slow, pytest.mark.frameworks("ray"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def modules() -> Any:
    from everstep_trainer.integrations import ray, ray_rank

    return ray, ray_rank


def test_report_waits_for_the_answer(modules: Any, short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, rank = modules
    received: list[Any] = []

    def forward(message: bytes, services: Any) -> str:
        received.append(msgspec.msgpack.decode(message))
        return "disk full" if received[-1]["checkpoint"] else ""

    monkeypatch.setattr(host, "_forward", forward)
    monkeypatch.setenv("RANK", "0")
    utils = rank.RankTrainFnUtils("experiment", None, short_path / "reports")
    session = RecordedSession()
    run = Run(RankContext(), session)
    with host._collect_reports(short_path / "reports", None):
        utils.report({"loss": np.float32(0.5), "step": 3})
        with pytest.raises(RuntimeError, match="disk full"):
            utils.report({}, checkpoint=type("Checkpoint", (), {"path": str(short_path)}))
        with pytest.raises(ValueError, match="is none"):
            utils.report({}, checkpoint=type("Checkpoint", (), {"path": "elsewhere/bucket"}))
        with pytest.raises(NotImplementedError, match="not ndarray"):
            utils.report({"loss": np.ones(2)})
        monkeypatch.setenv("RANK", "1")
        utils.report({"step": 4})
    assert session.sections == ["report", "report"]
    del run  # of which the reports hold no reference
    assert [report["metrics"] for report in received] == [{"loss": 0.5, "step": 3}, {}]


def test_context_follows_the_generation(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = modules[1].RankTrainFnUtils("experiment", "checkpoint", Path())
    for variable, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(variable, value)
    context = utils.get_context()
    places = (
        context.get_world_rank(),
        context.get_world_size(),
        context.get_local_rank(),
        context.get_local_world_size(),
    )
    assert places == (5, 8, 1, 4)
    assert context.get_experiment_name() == "experiment"
    assert utils.get_checkpoint() == "checkpoint"


def test_training_function_is_known_by_its_parameter(modules: Any) -> None:
    def train(run: Any, folder: str) -> None: ...
    def loop(config: dict[str, Any]) -> None: ...
    def without() -> None: ...

    is_training_function = modules[1].is_training_function
    assert is_training_function(partial(train, folder=""))
    assert not is_training_function(loop)
    assert not is_training_function(without)
