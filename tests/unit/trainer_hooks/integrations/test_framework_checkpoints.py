"""Frameworks' checkpoints and logs beside state restored from memory: the newer state is used, and rows are kept."""

from __future__ import annotations

import csv
import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from tests.support.processes.fork_pool import ForkPool
from tests.support.ranks.recorded_session import RecordedSession

pytestmark = [pytest.mark.slow]
SAMPLES, BATCH, STEPS = 16, 2, 8


class _Lines(logging.Handler):
    """Collects the log lines of the integrations."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("everstep_trainer.integrations").addHandler(self)

    def close(self) -> None:
        logging.getLogger("everstep_trainer.integrations").removeHandler(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"number": torch.tensor([float(index)])}


def train_transformers(
    folder: str, session: RecordedSession, generation: int = 1, checkpoint: str | None = None, *, by_step: bool = False
) -> dict[str, Any]:
    """Train and return what happened; ``by_step``: with batches of ``run.loader``."""
    warnings.simplefilter("ignore")
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    from everstep_trainer.integrations.transformers import attach, reset_accelerate

    class Model(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            torch.manual_seed(1)
            self.layer = torch.nn.Linear(1, 1)
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            """Keep the weights as they were made."""

        def forward(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
            seen.extend(int(value) for value in number.flatten())
            return {"loss": self.layer(number / SAMPLES).square().mean()}

    reset_accelerate()
    seen: list[int] = []
    lines = _Lines()
    run = Run(RankContext(generation=generation, will_restore=generation > 1), session)
    arguments = TrainingArguments(
        folder,
        num_train_epochs=1,
        max_steps=STEPS if by_step else -1,
        per_device_train_batch_size=BATCH,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_steps=3,
    )
    trainer = Trainer(Model(PretrainedConfig()), arguments, train_dataset=Numbers())
    attach(trainer, run, run.loader(Numbers(), global_batch=BATCH, seed=5) if by_step else None, seed=5)
    trainer.train(resume_from_checkpoint=checkpoint)
    lines.close()
    rows = [(row["step"], row["loss"]) for row in trainer.state.log_history if "loss" in row]
    parameters = [parameter.flatten().tolist() for parameter in trainer.model.parameters()]
    return {"seen": seen, "rows": rows, "end": (trainer.state.global_step, parameters), "lines": lines.lines}


def play_transformers(folder: str) -> dict[str, Any]:
    session = RecordedSession()
    whole = train_transformers(folder, session)
    file = f"{folder}/checkpoint-6"
    out = f"{folder}/again"
    return {
        "whole": whole,
        "step": 6,
        "regroup": train_transformers(out, RecordedSession(session.versions, 5), 2, f"{folder}/cut-short"),
        "fresh": train_transformers(out, RecordedSession(), 1, file),
        "older spill": train_transformers(out, RecordedSession(session.versions, 2), 1, file),
        "newer spill": train_transformers(out, RecordedSession(session.versions, 7), 1, file),
    }


@pytest.fixture(scope="module")
def transformers(session_forks: ForkPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result: dict[str, Any] = session_forks.start(play_transformers, str(tmp_path_factory.mktemp("out"))).result()
    return result


@pytest.mark.frameworks("transformers", "accelerate")
@pytest.mark.parametrize(
    ("case", "after"), [("regroup", 5), ("fresh", None), ("older spill", None), ("newer spill", 7)]
)
def test_transformers_continues_newer_state(transformers: dict[str, Any], case: str, after: int | None) -> None:
    whole, found = transformers["whole"], transformers[case]
    after = transformers["step"] if after is None else after
    assert found["seen"] == whole["seen"][after * BATCH :]
    assert found["end"] == whole["end"]
    assert found["rows"] == whole["rows"], "rows before the restore are kept"
    advice = [line for line in found["lines"] if "resume_from_checkpoint" in line]
    assert len(advice) == (case != "fresh")
    end = "is not read" if case == "regroup" else f"it continues after {after}"
    assert all(end in line for line in advice)


def play_transformers_by_step(folder: str) -> list[dict[str, Any]]:
    session = RecordedSession()
    whole = train_transformers(folder, session, by_step=True)
    return [whole, train_transformers(f"{folder}/again", RecordedSession(session.versions, 5), 2, by_step=True)]


@pytest.mark.frameworks("transformers", "accelerate")
def test_transformers_with_loader_keeps_log_rows(forks: ForkPool, tmp_path: Path) -> None:
    whole, again = forks.start(play_transformers_by_step, str(tmp_path)).result()
    assert again["seen"] == whole["seen"][5 * BATCH :]
    assert len(whole["rows"]) == STEPS
    assert again["rows"] == whole["rows"]


def refuse_completions() -> list[str]:
    from everstep_trainer.integrations.transformers import _check_reused_completions

    lines, results = _Lines(), []
    for iterations, per_generation, exact in ((1, 4, True), (2, 4, True), (1, 8, True), (2, 4, False)):
        arguments = {"num_iterations": iterations, "steps_per_generation": per_generation}
        trainer: Any = SimpleNamespace(
            args=SimpleNamespace(gradient_accumulation_steps=4, **arguments), _buffered_inputs=None
        )
        try:
            _check_reused_completions(trainer, exact)
            results.append(f"ok {len(lines.lines)}")
        except ValueError as error:
            results.append(str(error))
    return results


@pytest.mark.frameworks("transformers", "accelerate")
def test_reused_completions_are_refused(forks: ForkPool) -> None:
    default, twice, across, inexact = forks.start(refuse_completions).result()
    assert (default, inexact) == ("ok 0", "ok 1")
    assert "num_iterations=2" in twice
    assert "steps_per_generation=8" in across


def fit_lightning(
    folder: str, session: RecordedSession, generation: int = 1, checkpoint: str | None = None
) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.loggers import CSVLogger

    from everstep_trainer.integrations.lightning import everstep_strategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            seen.extend(int(value) for value in batch[0].flatten())
            loss = self.layer(batch[0] / SAMPLES).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.1)

    seen: list[int] = []
    lines = _Lines()
    run = Run(RankContext(generation=generation, job="job"), session)
    saver = ModelCheckpoint(monitor="loss", mode="max", save_top_k=2, every_n_train_steps=3, save_last=True)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        strategy=everstep_strategy(run, seed=5),
        callbacks=[saver],
        logger=CSVLogger(folder, flush_logs_every_n_steps=1000),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    data = DataLoader(TensorDataset(torch.arange(float(SAMPLES))[:, None]), batch_size=BATCH, shuffle=True)
    trainer.fit(module, data, ckpt_path=checkpoint)
    lines.close()
    with Path(trainer.logger.log_dir, "metrics.csv").open() as file:
        rows = [(row["step"], row["loss"]) for row in csv.DictReader(file)]
    parameters = [parameter.flatten().tolist() for parameter in module.parameters()]
    best = {Path(path).name: float(score) for path, score in saver.best_k_models.items()}
    folder_now = str(Path(saver.dirpath).relative_to(folder))
    end = (trainer.global_step, parameters)
    return {"seen": seen, "rows": rows, "end": end, "best": best, "folder": folder_now, "lines": lines.lines}


def play_lightning(folder: str) -> dict[str, Any]:
    session = RecordedSession()
    whole = fit_lightning(folder, session)
    last = str(Path(folder, whole["folder"], "last.ckpt"))
    return {"whole": whole, "regroup": fit_lightning(folder, RecordedSession(session.versions, 4), 2, last)}


@pytest.mark.frameworks("pytorch_lightning")
def test_lightning_regroup_keeps_state_folder_and_rows(forks: ForkPool, tmp_path: Path) -> None:
    found = forks.start(play_lightning, str(tmp_path)).result()
    whole, again = found["whole"], found["regroup"]
    assert again["seen"] == whole["seen"][4 * BATCH :]
    assert again["end"] == whole["end"]
    assert len(whole["rows"]) == STEPS
    for key in ("rows", "folder"):
        assert again[key] == whole[key], key
    assert list(again["best"].values()) == list(whole["best"].values())
    assert sum("is not loaded" in line for line in again["lines"]) == 1
