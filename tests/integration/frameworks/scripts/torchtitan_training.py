"""torchtitan's Trainer in a training function. Its ranks log each step, and die at requested points.

    everstep-launch ... -m tests.integration.frameworks.scripts.torchtitan_training FOLDER UNTIL [RANK:STEP:POINT ...]

TITAN_OPTIONS: further settings of torchtitan. TITAN_SHARED: let ranks share one stream of data. TITAN_GATE: the step in
which ranks write a file ``gate-WORLD-RANK`` into the folder, and wait for a file ``go``.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torchtitan.config import ConfigManager

import everstep
from everstep_trainer.integrations.torchtitan import build_trainer
from examples.final_line import digest
from tests.support.ranks.exact_training import Fault, FaultInjector, StepLog, fingerprint, main

sys.path.append(str(Path(__file__).parents[4] / "examples"))  # the example imports its neighbours, as a script does
from examples.train_torchtitan import LAYERS, RECIPE, ByteTokenizer, LastLoss


class Recorder(LastLoss):
    """Log a step once it is computed: its loss, its samples and the tokens so far."""

    def __init__(self, run: everstep.Run, folder: Path, faults: Sequence[Fault]) -> None:
        super().__init__(0.0)
        self.step_log, self.injector, self.folder = (
            StepLog(folder, run),
            FaultInjector(faults, folder, run.rank),
            folder,
        )
        self.samples: list[str] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        super().log(metrics, step)
        rates = {key: value for key, value in metrics.items() if key.startswith("lr/")}
        seen = int(metrics["n_tokens_seen"])
        self.step_log.write(step, loss=self.loss.hex(), samples=self.samples, tokens=seen, **rates)
        self.samples = []
        self.injector.at("updated")


class MicrobatchedSchedule:
    """A schedule of torch 2.13 that takes microbatches as torchtitan 0.3 gives them, as later schedules do."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def step(self, **options: Any) -> None:
        self._schedule._stage.has_backward = True
        self._schedule._stage.clear_runtime_states()
        self._schedule._step_microbatches(**options)


def train(run: everstep.Run, folder: str, until: int, faults: Sequence[Fault]) -> None:
    torch.set_num_threads(1)
    options = shlex.split(os.environ.get("TITAN_OPTIONS", ""))
    steps = ["--training.steps", str(until), "--dump_folder", folder]
    config = ConfigManager().parse_args([*RECIPE, *steps, *options])
    config.tokenizer = ByteTokenizer.Config()
    del config.model_spec.model.layers[LAYERS:]
    recorder = Recorder(run, Path(folder), faults)
    trainer = build_trainer(config, run, shared_stream="TITAN_SHARED" in os.environ, recorder=recorder)
    trainer.metrics_processor.logger = recorder
    if trainer.parallel_dims.pp_enabled and torch.__version__ < "2.14":
        trainer.pp_schedule = MicrobatchedSchedule(trainer.pp_schedule)
    inputs_of = trainer.post_dataloading_process

    def process(inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> Any:
        if str(trainer.step) == os.environ.get("TITAN_GATE"):
            (Path(folder) / f"gate-{run.world_size}-{run.rank}").touch()
            while not (Path(folder) / "go").exists():
                time.sleep(0.01)
        recorder.samples.append(fingerprint([inputs["input"], labels]))
        recorder.injector.step = trainer.step
        return inputs_of(inputs, labels)

    trainer.post_dataloading_process = process
    block = next(iter(trainer.model_parts[0].layers.values()))
    block.register_forward_pre_hook(lambda *_: recorder.injector.at("forward"))
    block.register_full_backward_hook(lambda *_: recorder.injector.at("backward"))
    try:
        trainer.train()
        parameters = digest(named for part in trainer.model_parts for named in part.named_parameters())
    finally:
        trainer.close()
    (Path(folder) / f"final-{run.rank}").write_text(f"{trainer.step} {recorder.loss.hex()} {parameters}")


if __name__ == "__main__":
    main(train, sys.argv[1:])
