"""Describe a style of training script, and what all styles do alike."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import everstep

PACE_S = 0.05
"""Seconds that each step sleeps, so that there is a time to kill at."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL of a rank, ``delay_s`` after it has begun a step."""

    rank: int
    step: int
    delay_s: float

    @classmethod
    def parse(cls, text: str) -> Kill:
        rank, step, delay_s = text.split(":")
        return cls(int(rank), int(step), float(delay_s))

    def __str__(self) -> str:
        return f"{self.rank}:{self.step}:{self.delay_s}"


@dataclass(frozen=True)
class Work:
    """A run of a style.

    Attributes:
        run: The run.
        steps: Updates in all.
        kills: Kills of this rank, by their step.
        folder: Folder with a file for each kill that has struck, since a step may be computed again.
    """

    run: everstep.Run
    steps: int
    kills: Mapping[int, Kill]
    folder: Path

    def pause(self, parts: int = 1, step: int | None = None) -> None:
        """Sleep in a step. A kill that is due in it strikes at its moment.

        Args:
            parts: How often a step calls it.
            step: The step of a script that restores its state by itself; otherwise the run knows it.
        """
        kill = self.kills.get(step or self.run.last_finished_step + 1)
        if kill is not None and not (mark := self.folder / f"struck-{kill}").exists():
            mark.touch()
            timer = threading.Timer(kill.delay_s, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        time.sleep(PACE_S / parts)

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
        for part in state:
            yield from _parts(part)
    else:
        yield repr(state).encode()


TrainingFunction = Callable[[Work], None]


@dataclass(frozen=True)
class Style:
    """A style of training script.

    Attributes:
        train: The training function.
        ranks: Number of ranks.
        preload: Module that the launcher imports before it forks ranks.
        package: Package that it needs besides torch.
    """

    train: TrainingFunction
    ranks: int = 2
    preload: str = "torch"
    package: str = ""


STYLES: dict[str, Style] = {}
"""All styles by name; the modules of the package add theirs."""


def style(*, ranks: int = 2, preload: str = "torch", package: str = "") -> Callable[[TrainingFunction], Style]:
    """Return a decorator that adds a training function to the styles, under its own name."""

    def added(train: TrainingFunction) -> Style:
        assert train.__name__ not in STYLES, f"there are two styles {train.__name__}"
        return STYLES.setdefault(train.__name__, Style(train, ranks, preload, package))

    return added
