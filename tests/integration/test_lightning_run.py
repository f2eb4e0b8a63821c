"""PyTorch Lightning's own Trainer on ranks that are killed: it goes on in memory, from the last batch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.exact_training import SEED, Fault, read_diaries
from tests.support.launched import launched
from trainer_hooks.data import ElasticSampler

STEPS, WORLD, BATCH, SAMPLES = 16, 2, 8, 500
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("pytorch_lightning") is None, reason="no Lightning here")]


def test_a_trainer_whose_ranks_are_killed_goes_on_from_the_last_batch(short_path: Path) -> None:
    faults = [Fault(1, 5, "forward"), Fault(0, 10, "updated")]
    argv = [
        "--nproc-per-node",
        str(WORLD),
        "--standby-delay-s",
        "0.1",
        "--hang-threshold-s",
        "30",
        "--state-dir",
        str(short_path / "s"),
    ]
    argv += ["-m", "tests.support.lightning_training", str(short_path), str(STEPS), *map(str, faults)]
    with launched(short_path, *argv, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo") as launcher:
        assert launcher.wait() == 0, launcher.err
    assert "not alike on all ranks" not in launcher.err + launcher.out
    rows = read_diaries(short_path)
    assert {row["generation"] for row in rows} == {1, 2, 3}, launcher.err
    sampler = ElasticSampler(SAMPLES, global_batch=BATCH, seed=SEED)
    for step in range(1, STEPS + 1):
        of_step = sorted((r for r in rows if r["step"] == step), key=lambda r: (r["generation"], r["rank"]))
        last = [row for row in of_step if row["generation"] == of_step[-1]["generation"]]
        seen, expected = [i for row in last for i in row["samples"]], sampler.global_indices(step).tolist()
        if len(last) == WORLD:
            assert seen == expected
        else:
            assert step in {fault.step - n for fault in faults for n in (0, 1)}, "a rank died before it wrote"
            assert set(seen) <= set(expected)
        assert len({row["state"] for row in of_step}) == len({row["rate"] for row in of_step}) == 1, "the same on all"
    assert len({row["rate"] for row in rows}) == STEPS, "the schedule went on"
