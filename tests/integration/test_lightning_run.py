"""PyTorch Lightning's own Trainer on ranks that are killed: it goes on in memory, from the last batch."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from everstep_trainer.data.sampler import ElasticSampler
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.runtime.generation_session import TrainingSession

from tests.support.exact_training import SEED, Fault, read_diaries
from tests.support.forked import ForkPool
from tests.support.launched import launched

STEPS, WORLD, BATCH, SAMPLES = 16, 2, 8, 500
pytestmark = [pytest.mark.slow, pytest.mark.frameworks("pytorch_lightning", "lightning")]


def trained(folder: Path, *faults: Fault, **environment: str) -> list[dict[str, Any]]:
    """The diaries of ranks in a folder of their own."""
    folder.mkdir()
    argv = ["--nproc-per-node", str(WORLD), "--standby-delay-s", "0.1", "--hang-threshold-s", "30"]
    argv += ["--preload", environment.get("LIGHTNING_PACKAGE", "pytorch_lightning"), "--state-dir", str(folder / "s")]
    argv += ["-m", "tests.support.lightning_training", str(folder), str(STEPS), *map(str, faults)]
    with launched(folder, *argv, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", **environment) as launcher:
        assert launcher.wait() == 0, launcher.err
    assert "not alike on all ranks" not in launcher.err + launcher.out
    rows = read_diaries(folder)
    assert {row["generation"] for row in rows} == {*range(1, len(faults) + 2)}, launcher.err
    return rows


@pytest.mark.promise("lightning")
@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
@pytest.mark.nightly  # the test below kills ranks of the strategy
def test_lightning_trainer_resumes_from_last_batch(short_path: Path, package: str) -> None:
    faults = [Fault(1, 5, "forward"), Fault(0, 10, "updated")]
    rows = trained(short_path / "killed", *faults, LIGHTNING_PACKAGE=package)
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


def last(rows: list[dict[str, Any]]) -> dict[tuple[int, int, bool], dict[str, Any]]:
    """The last row of each step, rank and kind, without its generation."""
    whole = sorted(rows, key=lambda row: int(row["generation"]))
    return {
        (row["step"], row["rank"], "validated" in row): {k: v for k, v in row.items() if k != "generation"}
        for row in whole
    }


@pytest.mark.promise("lightning")
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_lightning_epochs_equal_undisturbed_run(short_path: Path, kind: str) -> None:
    undisturbed = trained(short_path / "u", LIGHTNING_EPOCHS=kind)
    steps = [row["step"] for row in undisturbed if row["rank"] == 0 and "samples" in row]
    assert steps == [*range(1, 19)], "three epochs of six batches"
    assert sorted(row["step"] for row in undisturbed if row["rank"] == 0 and "validated" in row) == [6, 12, 18]
    faults = [Fault(1, 7, "forward"), Fault(0, 12, "updated")]
    assert last(trained(short_path / "k", *faults, LIGHTNING_EPOCHS=kind)) == last(undisturbed)


@pytest.mark.promise("lightning")
@pytest.mark.nightly
def test_kill_during_accumulation_keeps_gradient_and_scale(short_path: Path) -> None:
    undisturbed = last(trained(short_path / "u", LIGHTNING_ACCUMULATES="4"))
    assert len({row["scale"] for row in undisturbed.values()}) > 2, "the scaler has something to lose"
    faults = [Fault(1, 7, "forward"), Fault(0, 14, "updated")]
    assert last(trained(short_path / "k", *faults, LIGHTNING_ACCUMULATES="4")) == undisturbed


def fitting() -> dict[str, bool]:
    """Tell for each package whether its Trainer takes the integration's classes."""
    warnings.simplefilter("ignore")
    from everstep_trainer.integrations.lightning import EverstepCallback, EverstepEnvironment, everstep_strategy

    fits = {}
    run = Run(RankContext(), TrainingSession())
    for name in ("lightning.pytorch", "pytorch_lightning"):
        package = importlib.import_module(name)
        environments = importlib.import_module(f"{name}.plugins.environments")
        fits[name] = issubclass(EverstepCallback, package.Callback) and issubclass(
            EverstepEnvironment, environments.ClusterEnvironment
        )
        strategies = importlib.import_module(f"{name}.strategies")
        fits[name] &= isinstance(everstep_strategy(run), strategies.DDPStrategy)
    return fits


def test_lightning_classes_fit_both_packages(forks: ForkPool) -> None:
    """Two packages hold the same classes, and a Trainer refuses those of the other one."""
    assert forks.start(fitting).result() == {"lightning.pytorch": True, "pytorch_lightning": True}


@pytest.mark.filterwarnings("ignore")  # Lightning's own: advice about this machine, torch's deprecations
def test_epoch_ending_during_accumulation_repeats_no_batch() -> None:
    from everstep_trainer.integrations.lightning import EverstepCallback, RemainingBatches
    from pytorch_lightning import LightningModule, Trainer

    seen: list[int] = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            seen.append(int(batch[0]))
            return self.layer(batch[0].float()).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-3)

    run = Run(RankContext(), TrainingSession())
    loader = run.loader(torch.utils.data.TensorDataset(torch.arange(100)[:, None]), global_batch=1, seed=SEED)
    quiet = {
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
    }
    trainer = Trainer(
        max_epochs=3,
        limit_train_batches=5,
        accumulate_grad_batches=2,
        accelerator="cpu",
        devices=1,
        callbacks=[EverstepCallback(run)],
        **quiet,
    )
    trainer.fit(Module(), RemainingBatches(run, loader))
    assert seen == [int(loader.indices(step)) for step in range(1, 16)]
    assert run.last_finished_step == trainer.global_step == 9, "the last batch of an epoch ends an update"


def test_fsdp1_strategy_is_refused() -> None:
    from everstep_trainer.integrations.lightning import everstep_strategy
    from pytorch_lightning.strategies import FSDPStrategy

    with pytest.raises(TypeError, match="take ModelParallelStrategy"):
        everstep_strategy(Run(RankContext(), TrainingSession()), FSDPStrategy)
