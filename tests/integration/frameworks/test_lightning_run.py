"""PyTorch Lightning's own Trainer on ranks that are killed: it goes on in memory, from the last batch."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.session.generation_session import TrainingSession
from tests.integration.frameworks.framework_run import run_training
from tests.support.processes.fork_pool import ForkPool
from tests.support.ranks.exact_training import SEED, Fault

STEPS, WORLD, BATCH, SAMPLES = 16, 2, 8, 500
pytestmark = [pytest.mark.slow, pytest.mark.frameworks("pytorch_lightning", "lightning")]


def trained(folder: Path, *faults: Fault, **environment: str) -> list[dict[str, Any]]:
    """Return the step logs of ranks in an own folder."""
    options = ["--preload", "pytorch_lightning"]
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    rows, printed = run_training(
        folder, "lightning_training", STEPS, *faults, ranks=WORLD, options=options, **environment
    )
    assert "not alike on all ranks" not in printed
    return rows


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
    from pytorch_lightning import LightningModule, Trainer

    from everstep_trainer.integrations.lightning import EverstepCallback, RemainingBatches

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
    from pytorch_lightning.strategies import FSDPStrategy

    from everstep_trainer.integrations.lightning import everstep_strategy

    with pytest.raises(TypeError, match="take ModelParallelStrategy"):
        everstep_strategy(Run(RankContext(), TrainingSession()), FSDPStrategy)


def test_averages_of_callbacks_are_tracked_as_modules() -> None:
    from pytorch_lightning.callbacks import StochasticWeightAveraging

    from everstep_trainer.integrations.lightning import _StrategyCallback

    callback = StochasticWeightAveraging(swa_lrs=0.01)
    callback._average_model = average = torch.nn.Linear(2, 2)
    trainer: Any = SimpleNamespace(callbacks=[callback], datamodule=None)
    found = _StrategyCallback(Run(RankContext(), TrainingSession()))._all_extra_objects(trainer)
    assert found["StochasticWeightAveraging_average"] is average
    state = found["StochasticWeightAveraging"].state_dict()
    assert "average_model_state" not in state, "a callback's state is limited to some megabytes"
    before = average.weight.clone()
    found["StochasticWeightAveraging"].load_state_dict(state | {"latest_update_epoch": 7})
    assert callback._latest_update_epoch == 7
    assert torch.equal(average.weight, before)
