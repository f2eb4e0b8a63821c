"""The Trainer of transformers with its own batches: its behaviour after a restore at a step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from tests.support.processes.fork_pool import ForkPool
from tests.support.ranks.recorded_session import RecordedSession

pytestmark = [pytest.mark.slow, pytest.mark.frameworks("transformers", "accelerate")]

SAMPLES, BATCH, EPOCHS = 22, 4, 3
Trace = list[tuple[Any, ...]]


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"number": torch.tensor([float(index)])}


class Model(torch.nn.Module):
    """A model that notes each batch with a random number."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(1, 1)
        self._note = note

    def forward(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
        self._note("trains" if self.training else "evaluates", number.flatten().tolist(), float(torch.rand(())))
        return {"loss": self.layer(number / SAMPLES).square().mean()}


def fit(session: RecordedSession, folder: str, **options: Any) -> tuple[Trace, list[int], Trace]:
    """Train in this process; return the events in order, the steps at which they happened, and the final state."""
    warnings.simplefilter("ignore")
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import ExportableState

    from everstep_trainer.integrations.transformers import attach, reset_accelerate

    reset_accelerate()
    trace: Trace = []
    steps: list[int] = []

    def note(*event: Any) -> None:
        trace.append(event)
        steps.append(run.last_finished_step)

    class Stopping(TrainerCallback, ExportableState):
        """Ends training after some updates, which it counts itself."""

        def __init__(self, after: int) -> None:
            self.after, self.updates = after, 0

        def state(self) -> dict[str, Any]:
            return {"args": {"after": self.after}, "attributes": {"updates": self.updates}}

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            note("updated", state.global_step, state.epoch)
            self.updates += 1
            control.should_training_stop |= self.updates == self.after

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            note("epoch ends", state.epoch)

    run = Run(RankContext(), session)
    stopping = Stopping(options.pop("stop_after", -1))
    arguments = TrainingArguments(
        folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=11,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    model = Model(note)
    trainer = Trainer(model, arguments, train_dataset=Numbers(), eval_dataset=Numbers(), callbacks=[stopping])
    attach(trainer, run, seed=5)
    trainer.train()
    end = [(name, parameter.flatten().tolist()) for name, parameter in model.named_parameters()]
    rate = trainer.lr_scheduler.get_last_lr()
    counts = (trainer.state.global_step, trainer.state.max_steps, run.last_finished_step, stopping.updates)
    return trace, steps, [*end, ("rate", *rate), ("counts", *counts)]


CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "epochs": ({}, 18, 18),
    "accumulated": ({"gradient_accumulation_steps": 4}, 18, 6),
    "max-steps": ({"max_steps": 8}, 8, 8),
    "stopped-early": ({"stop_after": 9}, 9, 9),
}
"""Options, and the batches and steps of an undisturbed run."""


def differences(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return what differs between an undisturbed run and runs restored at its steps."""
    session = RecordedSession()
    whole, steps, end = fit(session, folder, **options)
    last = max(session.versions)
    found: dict[str, Any] = {"batches": sum(event[0] == "trains" for event in whole), "steps": last}
    for step in {1, 2, 3, 5, 6, 7, last - 1, last} & session.versions.keys():
        trace, _, restored_end = fit(RecordedSession(session.versions, step), folder, **options)
        expected = [event for event, at in zip(whole, steps, strict=True) if at >= step]
        if trace != expected or restored_end != end:
            found[str(step)] = (trace[:4], expected[:4], restored_end, end)
    return found


def all_differences(folder: str) -> dict[str, Any]:
    return {name: differences(folder, dict(options)) for name, (options, _, _) in CASES.items()}


@pytest.fixture(scope="module")
def found(session_forks: ForkPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The differences of all cases, from one process: the imports take longer than the runs."""
    result: dict[str, Any] = session_forks.start(all_differences, str(tmp_path_factory.mktemp("out"))).result()
    return result


@pytest.mark.parametrize("case", CASES)
def test_transformers_restore_repeats_no_event(found: dict[str, Any], case: str) -> None:
    _, batches, steps = CASES[case]
    assert found[case] == {"batches": batches, "steps": steps}
