"""Frameworks' evaluations, saves and logging, in which a rank is not taken for hung."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader, TensorDataset

from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from tests.support.processes.fork_pool import ForkPool
from tests.support.ranks.recorded_session import RecordedSession

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def batches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)


def work_of_lightning(folder: str) -> dict[str, list[str]]:
    """Return the sections of each function of a Trainer."""
    warnings.simplefilter("ignore")
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.loggers import CSVLogger

    from everstep_trainer.integrations.lightning import everstep_strategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.layer(batch[0]).mean()

        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            self.log("score", self.layer(batch[0]).mean())

        test_step = validation_step

        def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return self.layer(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    session = RecordedSession()
    run = Run(RankContext(), session)
    trainer = Trainer(
        max_epochs=1,
        strategy=everstep_strategy(run),
        callbacks=[ModelCheckpoint(dirpath=folder)],
        logger=CSVLogger(folder),
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, found = Module(), {}
    trainer.fit(module, batches(), batches())
    found["fit"], session.sections = session.sections, []
    for name, function in (("validate", trainer.validate), ("test", trainer.test), ("predict", trainer.predict)):
        function(module, batches())
        found[name], session.sections = session.sections, []
    return found


@pytest.mark.frameworks("pytorch_lightning")
def test_lightning_names_its_work(forks: ForkPool, short_path: Any) -> None:
    found = forks.start(work_of_lightning, str(short_path)).result()
    assert set(found["fit"]) == {"preparing data", "validation", "checkpoint", "upload", "logging"}
    assert found["fit"].count("validation") == 1
    for function, name in (("validate", "validation"), ("test", "test"), ("predict", "prediction")):
        assert found[function].count(name) == 1
        assert set(found[function]) - {name} <= {"preparing data", "logging"}


def work_of_fabric() -> list[str]:
    warnings.simplefilter("ignore")
    from lightning_fabric import Fabric

    from everstep_trainer.integrations.fabric import everstep_strategy, track

    session = RecordedSession()
    run = Run(RankContext(), session)
    fabric = Fabric(strategy=everstep_strategy(run))
    fabric.launch()
    model = nn.Linear(1, 1)
    prepared, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    track(fabric, run, batches(), model=prepared, optimizer=optimizer)
    fabric.log("score", 1.0)
    return session.sections


@pytest.mark.frameworks("lightning_fabric")
def test_fabric_names_its_logging(forks: ForkPool) -> None:
    assert forks.start(work_of_fabric).result() == ["logging"]


def work_of_transformers(folder: str) -> list[str]:
    warnings.simplefilter("ignore")
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    from everstep_trainer.integrations.transformers import attach

    class Model(PreTrainedModel):
        config_class = PretrainedConfig

    session = RecordedSession()
    run = Run(RankContext(), session)
    model = Model(PretrainedConfig())
    model.layer = nn.Linear(1, 1)
    trainer = Trainer(model, TrainingArguments(folder, report_to=[], use_cpu=True), train_dataset=[1])
    attach(trainer, run)
    trainer.log({"score": 1.0})
    trainer.save_model(folder)
    return session.sections


@pytest.mark.frameworks("transformers", "accelerate")
def test_transformers_names_its_logging_and_saves(forks: ForkPool, short_path: Any) -> None:
    assert forks.start(work_of_transformers, str(short_path)).result() == ["logging", "saving the model"]


def work_of_deepspeed() -> list[str]:
    import deepspeed

    from everstep_trainer.integrations.deepspeed import reset_process_state, track_engine

    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    reset_process_state()
    model = nn.Linear(2, 1)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    session = RecordedSession()
    run = Run(RankContext(), session)
    engine.save_checkpoint = lambda: None
    run.track = lambda **_: None  # type: ignore[method-assign]  # RecordedSession takes no engine
    track_engine(run, engine)
    engine.monitor.write_events([("score", 1.0, 1)])
    engine.save_checkpoint()
    return session.sections


@pytest.mark.frameworks("deepspeed")
def test_deepspeed_names_its_logging_and_saves(forks: ForkPool) -> None:
    assert forks.start(work_of_deepspeed).result() == ["logging", "checkpoint"]


@pytest.mark.frameworks("torchtitan")
def test_torchtitan_names_its_logging_and_validation() -> None:
    from everstep_trainer.integrations.torchtitan import _name_work

    session = RecordedSession()
    run = Run(RankContext(), session)
    for enable in (True, False):
        parts = {name: SimpleNamespace(log=int, validate=int) for name in ("metrics_processor", "validator")}
        trainer: Any = SimpleNamespace(config=SimpleNamespace(validator=SimpleNamespace(enable=enable)), **parts)
        _name_work(trainer, run)
        trainer.metrics_processor.log()
        trainer.validator.validate()
    assert session.sections == ["logging", "validation", "logging"]


def work_of_megatron() -> list[str]:
    from megatron.core import dist_checkpointing

    from everstep_trainer.integrations.megatron import initialize_megatron

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    session = RecordedSession()
    run = Run(RankContext(), session)
    dist_checkpointing.save = lambda *_: None  # Megatron's own needs a GPU
    initialize_megatron(run)
    dist_checkpointing.save({}, "folder")
    return session.sections


@pytest.mark.frameworks("megatron")
def test_megatron_names_its_checkpoints(forks: ForkPool) -> None:
    assert forks.start(work_of_megatron).result() == ["checkpoint"]
