"""Describe a style of training script, and what all styles do alike."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import everstep

FOLDER_VARIABLE = "KILLS_FOLDER"
"""Variable with the folder in which ranks write down their steps."""

HOLD, HOLD_POLL_S = "hold", 0.02
"""File in that folder while kills are to be made: on a busy machine the run would be over before the last one."""
LAST_STEPS = 6
"""Steps at the end in which ranks wait for it to go."""


@dataclass(frozen=True)
class Work:
    """A run of a style.

    Attributes:
        run: The run.
        steps: Updates in all.
        pace_s: Seconds that each step sleeps, so that there is a time to kill at.
    """

    run: everstep.Run
    steps: int
    pace_s: float

    def pause(self, parts: int = 1, step: int | None = None) -> None:
        """Write down that this rank works on its next step, and sleep; in the last steps until all kills were made.

        Args:
            parts: How often a step calls it.
            step: The step of a script that restores its state by itself; otherwise the run knows it.
        """
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder:
            step = step or self.run.last_finished_step + 1
            with Path(folder, f"steps-{self.run.rank}-{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps([self.run.generation, step]) + "\n")
            while step > self.steps - LAST_STEPS and Path(folder, HOLD).exists():
                time.sleep(HOLD_POLL_S)
        time.sleep(self.pace_s / parts)

    def finish(self, *states: object, step: int | None = None) -> None:
        """Print the last step and a digest of the states of all ranks, on rank 0. A collective.

        Args:
            states: State dictionaries, tensors, and lists of them.
            step: The last step of a script that restores its state by itself.
        """
        mine = digest(states)
        everyone = [mine]
        if self.run.distributed:
            everyone = [""] * self.run.world_size
            dist.all_gather_object(everyone, mine)
        if self.run.rank == 0:
            whole = hashlib.sha256("".join(everyone).encode()).hexdigest()[:16]
            print(f"final step={step or self.run.last_finished_step} parameters={whole}", flush=True)


def digest(state: object) -> str:
    """Return a hash of nested state: every bit of its tensors, and its numbers and strings."""
    hashed = hashlib.sha256()
    for part in _parts(state):
        hashed.update(part)
    return hashed.hexdigest()


def _parts(state: object) -> Iterable[bytes]:
    if isinstance(state, DTensor):
        state = state.to_local()
    if isinstance(state, torch.Tensor):
        yield f"{state.dtype}{tuple(state.shape)}".encode()
        yield state.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(state, Mapping):
        for key in sorted(state, key=str):
            yield str(key).encode()
            yield from _parts(state[key])
    elif isinstance(state, list | tuple):
        for one in state:
            yield from _parts(one)
    else:
        yield repr(state).encode()


TrainingFunction = Callable[[Work], None]


@dataclass(frozen=True)
class Style:
    """A style of training script.

    Attributes:
        name: Name in the table.
        sentence: What it does.
        train: The training function.
        ranks: Number of ranks.
        preload: Module that the launcher imports before it forks ranks.
    """

    name: str
    sentence: str
    train: TrainingFunction
    ranks: int = 2
    preload: str = "torch"


STYLES: dict[str, Style] = {}
"""All styles by name; the modules of the package add theirs."""


def style(sentence: str, *, ranks: int = 2, preload: str = "torch") -> Callable[[TrainingFunction], TrainingFunction]:
    """Return a decorator that adds a training function to the styles, under its own name."""

    def added(train: TrainingFunction) -> TrainingFunction:
        assert train.__name__ not in STYLES, f"there are two styles {train.__name__}"
        STYLES[train.__name__] = Style(train.__name__, sentence, train, ranks, preload)
        return train

    return added
