"""Lightning's Trainer with epochs of the script's own: batches, hooks and validation after a restore at any step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from tests.support.processes.fork_pool import ForkPool
from tests.support.ranks.recorded_session import RecordedSession

pytestmark = [pytest.mark.slow, pytest.mark.frameworks("pytorch_lightning")]

SAMPLES, BATCH, EPOCHS = 22, 4, 3
Trace = list[tuple[Any, ...]]


def fit(session: RecordedSession, **options: Any) -> tuple[Trace, list[int], Trace]:
    """Train in this process; return the events in order, the steps at which they happened, and the final state."""
    warnings.simplefilter("ignore")
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.callbacks import EarlyStopping

    from everstep_trainer.integrations.lightning import everstep_strategy

    trace: Trace = []
    steps: list[int] = []

    def note(*event: Any) -> None:
        trace.append(event)
        steps.append(run.last_finished_step)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            note("batch", self.current_epoch, batch_idx, batch[0].flatten().tolist(), float(torch.rand(())))
            return self.layer(batch[0].float()).mean()

        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            note("validation", self.current_epoch, batch_idx)
            self.log("score", self.layer(batch[0].float()).mean())

        def on_train_epoch_start(self) -> None:
            note("epoch starts", self.current_epoch)

        def on_train_epoch_end(self) -> None:
            note("epoch ends", self.current_epoch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            updates = int(self.trainer.estimated_stepping_batches)
            note("updates", updates)
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=updates)]

    class Counter(Callback):
        def __init__(self) -> None:
            self.batches = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.batches += 1

        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.batches = state["batches"]

    run = Run(RankContext(), session)
    counter = Counter()
    data = TensorDataset(torch.arange(SAMPLES)[:, None])
    stopping = EarlyStopping("score", patience=options.pop("patience", 100), mode=options.pop("mode", "min"))
    trainer = Trainer(
        max_epochs=EPOCHS,
        strategy=everstep_strategy(run, seed=5),
        callbacks=[counter, stopping],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **options,
    )
    module = Module()
    trainer.fit(module, DataLoader(data, batch_size=BATCH, shuffle=True), DataLoader(data, batch_size=11))
    assert not torch.distributed.is_initialized()
    end = [(name, parameter.flatten().tolist()) for name, parameter in module.named_parameters()]
    loop = trainer.fit_loop.epoch_loop
    counts = (trainer.current_epoch, trainer.global_step, loop.total_batch_idx, loop._batches_that_stepped)
    return trace, steps, [*end, ("callback", counter.batches), ("counts", *counts), ("step", run.last_finished_step)]


CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "epochs": ({}, 18, 18),
    "accumulated": ({"accumulate_grad_batches": 4}, 18, 6),
    "validated-within": ({"val_check_interval": 2}, 18, 18),
    "validated-across": ({"val_check_interval": 4, "check_val_every_n_epoch": None}, 18, 18),
    "limited": ({"limit_train_batches": 3, "check_val_every_n_epoch": 2}, 9, 9),
    "max-steps": ({"max_steps": 8}, 8, 8),
    "stopped-early": ({"patience": 1, "mode": "max"}, 12, 12),
}
"""Options of the Trainer, and the batches and steps of an undisturbed run."""


def differences(options: dict[str, Any]) -> dict[str, Any]:
    """Return what differs between an undisturbed run and runs restored at its steps."""
    session = RecordedSession()
    whole, steps, end = fit(session, **options)
    found: dict[str, Any] = {"batches": sum(event[0] == "batch" for event in whole), "steps": max(session.versions)}
    last = max(session.versions)
    for step in {1, 2, 3, 5, 6, 7, last - 1, last} & session.versions.keys():
        trace, _, restored_end = fit(RecordedSession(session.versions, step), **options)
        rest = [event for event in trace if event[0] != "updates"]
        expected = [event for event, at in zip(whole, steps, strict=True) if at >= step and event[0] != "updates"]
        begins = whole[steps.index(step) - 1] if step in steps else None
        if begins is not None and begins[0] == "epoch starts":
            expected.insert(0, begins)
        if rest != expected or restored_end != end:
            found[str(step)] = (rest[:4], expected[:4], restored_end, end)
    return found


def all_differences() -> dict[str, Any]:
    return {name: differences(dict(options)) for name, (options, _, _) in CASES.items()}


@pytest.fixture(scope="module")
def found(session_forks: ForkPool) -> dict[str, Any]:
    """The differences of all cases, from one process: Lightning's import takes longer than its runs."""
    result: dict[str, Any] = session_forks.start(all_differences).result()
    return result


@pytest.mark.parametrize("case", CASES)
def test_lightning_restore_repeats_no_event(found: dict[str, Any], case: str) -> None:
    _, batches, steps = CASES[case]
    assert found[case] == {"batches": batches, "steps": steps}
