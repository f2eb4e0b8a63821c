"""Scripts in which a framework has the loop. Each is imported only by a rank that trains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.integration.training.training_styles.loops import data, small_model
from tests.integration.training.training_styles.style import Work, style

SAMPLES, BATCH = 480, 12
WORDS, LENGTH = 37, 8


def _loader(samples: int = SAMPLES) -> DataLoader[tuple[torch.Tensor, ...]]:
    inputs, targets = data()
    return DataLoader(TensorDataset(inputs[:samples], targets[:samples]), batch_size=BATCH, shuffle=samples == SAMPLES)


def _fit(work: Work, parts: int = 1, **options: Any) -> None:
    """Fit a module with Lightning's Trainer.

    Args:
        work: The run.
        parts: Batches of an update.
        options: Of the Trainer.
    """
    from lightning.pytorch import LightningModule, Trainer, seed_everything

    from everstep_trainer.integrations.lightning import everstep_strategy

    class Regression(LightningModule):  # type: ignore[misc]  # Lightning is not always installed
        """Learns the sum of its inputs."""

        def __init__(self) -> None:
            super().__init__()
            self.net = small_model()

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            work.pause(parts)
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
            self.log("validation", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> dict[str, object]:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=work.steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    seed_everything(17)
    module = Regression()
    trainer = Trainer(
        max_steps=work.steps,
        max_epochs=-1,
        strategy=everstep_strategy(work.run),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=parts,
        **options,
    )
    trainer.fit(module, _loader(), _loader(96))
    rows = [path.read_text() for path in sorted(Path().glob("rows/**/metrics.csv"))] if work.run.rank == 0 else []
    work.finish(module.state_dict(), [optimizer.state_dict() for optimizer in trainer.optimizers], rows)


@style(preload="lightning.pytorch", package="lightning")
def lightning(work: Work) -> None:
    """Lightning's fit, with validation after each epoch."""
    _fit(work, logger=False)


@style(preload="lightning.pytorch", package="lightning")
def lightning_accumulation_and_log(work: Work) -> None:
    """Lightning with two batches in an update, whose CSV log must be the same, too."""
    from lightning.pytorch.loggers import CSVLogger

    _fit(work, parts=2, logger=CSVLogger("rows", name="", flush_logs_every_n_steps=1), log_every_n_steps=1)


class _Texts(Dataset[dict[str, torch.Tensor]]):
    """Token sequences, each a function of its number."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) * 7 + index) % WORDS
        return {"input_ids": tokens, "labels": tokens}


def _train_language_model(work: Work, parts: int, **options: Any) -> None:
    """Train a small GPT-2 with the Trainer of transformers.

    Args:
        work: The run.
        parts: Batches of an update.
        options: Of TrainingArguments.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from everstep_trainer.integrations.transformers import attach

    class PacedTrainer(Trainer):  # type: ignore[misc]  # transformers is not always installed
        """Sleeps in each step."""

        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if model.training:
                work.pause(parts)
            return super().compute_loss(model, *args, **kwargs)

    arguments = TrainingArguments(
        "out",
        max_steps=work.steps,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=parts,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=17,
        **options,
    )
    torch.manual_seed(17)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2))
    trainer = PacedTrainer(model, arguments, train_dataset=_Texts(SAMPLES), eval_dataset=_Texts(24))
    attach(trainer, work.run)
    trainer.train()
    work.finish(model.state_dict(), trainer.optimizer.state_dict(), trainer.lr_scheduler.state_dict())


@style(preload="transformers.trainer", package="transformers")
def transformers(work: Work) -> None:
    """The Trainer of transformers, which evaluates after each epoch."""
    _train_language_model(work, 1, eval_strategy="epoch", weight_decay=0.1)


@style(preload="transformers.trainer", package="transformers")
def transformers_accumulation(work: Work) -> None:
    """The Trainer of transformers, with three batches in an update."""
    _train_language_model(work, 3, max_grad_norm=0.5, warmup_steps=10)


@style(preload="accelerate", package="accelerate")
def accelerate(work: Work) -> None:
    """A loop over accelerate, with two batches in an update."""
    from accelerate import Accelerator

    from everstep_trainer.integrations.accelerate import track

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    inner = small_model()
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=work.steps)
    model, optimizer, loader, schedule = accelerator.prepare(inner, optimizer, _loader(), schedule)
    loader = track(accelerator, work.run, loader, model=model, optimizer=optimizer, schedule=schedule)
    for _ in loader.epochs(max_steps=work.steps):
        for x, y in loader:
            work.pause(2)
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    work.finish(inner.state_dict(), optimizer.state_dict(), schedule.state_dict())
