"""Describe an ordinary program, and let its ranks write down what they do."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import everstep

FOLDER_VARIABLE = "CALM_FOLDER"
"""Variable with the folder of the ranks' notes."""
PACE_VARIABLE = "CALM_PACE"
"""Variable with the factor of all pauses. 0: the same training without any pause, for losses to compare with."""

TrainingFunction = Callable[["everstep.Run", "Diary"], None]
Surroundings = Callable[[Path], AbstractContextManager[Mapping[str, str]]]
"""Context beside the program, in the bench's process, which yields variables for the program's environment."""


@dataclass(frozen=True)
class Program:
    """A program that does nothing wrong.

    Attributes:
        name: Name in the table.
        sentence: What it does.
        train: The training function.
        ranks: Number of ranks.
        options: Options of everstep-launch; none, as a rule.
        effects: How often each side effect is asked for. Each must be done exactly as often.
        check: Looks at the folder afterwards, and says what is wrong there; empty if nothing is.
        beside: What happens beside the program.
        is_comparable: Losses and final parameters must equal those under torchrun.
        terminate_at_step: Step after which the launcher gets SIGTERM; 0: never.
        status: Exit status that is right.
        jobs: How many of it run at once.
        shared_memory: Size of /dev/shm, in a mount namespace; empty: the machine's.
        limit_s: Longest run.
    """

    name: str
    sentence: str
    train: TrainingFunction
    ranks: int = 2
    options: tuple[str, ...] = ()
    effects: Mapping[str, int] = field(default_factory=dict)
    check: Callable[[Path], str] | None = None
    beside: Surroundings | None = None
    is_comparable: bool = True
    terminate_at_step: int = 0
    status: int = 0
    jobs: int = 1
    shared_memory: str = ""
    limit_s: float = 150.0


class Catalogue:
    """Programs by name, in the order in which they were added."""

    def __init__(self) -> None:
        self.programs: dict[str, Program] = {}

    def add(self, sentence: str, **options: Any) -> Callable[[TrainingFunction], TrainingFunction]:
        """Return a decorator that adds a training function under its own name."""

        def added(train: TrainingFunction) -> TrainingFunction:
            self.insert(train.__name__, sentence, train, **options)
            return train

        return added

    def audit(self, preset: str, *names: str) -> None:
        """Add programs once more, with audits of this preset."""
        for name in names:
            fields = {**vars(self.programs[name]), "name": f"{name}_under_{preset}"}
            self.insert(**{**fields, "options": ("--sdc", preset, *fields["options"])})

    def insert(self, name: str, *fields: Any, **options: Any) -> None:
        """Add a program with these fields."""
        assert name not in self.programs, f"there are two programs {name}"
        self.programs[name] = Program(name, *fields, **options)


class Diary:
    """The notes of a rank: one JSON line for each, in a file of its process."""

    def __init__(self, run: everstep.Run) -> None:
        self.folder = Path(os.environ[FOLDER_VARIABLE])
        self._run = run
        self._file = (self.folder / f"notes-{run.rank}-{os.getpid()}.jsonl").open("a", buffering=1)

    def note(self, kind: str, **values: object) -> None:
        """Write one line."""
        place = {"rank": self._run.rank, "generation": self._run.generation, "pid": os.getpid(), "at": time.time()}
        self._file.write(json.dumps({"kind": kind, **place, **values}) + "\n")

    @contextlib.contextmanager
    def effect(self, name: str, step: int) -> Iterator[None]:
        """Note a side effect when it begins, and when it is complete."""
        self.note("effect begun", name=name, step=step)
        yield
        self.note("effect", name=name, step=step)

    def loss(self, step: int, loss: torch.Tensor) -> None:
        """Note the loss of a step."""
        self.note("step", step=step, loss=loss.item())

    def final(self, *modules: torch.nn.Module) -> None:
        """Note a digest of the parameters and buffers at the end."""
        digest = hashlib.sha256()
        for module in modules:
            for name, value in sorted(module.state_dict().items()):
                digest.update(name.encode() + value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        self.note("final", digest=digest.hexdigest()[:16])


def pace() -> float:
    """Return the factor of pauses."""
    return float(os.environ.get(PACE_VARIABLE, "1"))


def pause(seconds: float) -> None:
    """Sleep."""
    time.sleep(seconds * pace())


def compute(seconds: float) -> None:
    """Keep a core busy with products of matrices, as a validation does."""
    deadline = time.monotonic() + seconds * pace()
    weight = torch.full((256, 256), 1e-3)
    with torch.no_grad():
        while time.monotonic() < deadline:
            weight.mm(weight)
