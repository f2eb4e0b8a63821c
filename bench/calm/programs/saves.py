"""Files that a program writes for itself."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

import everstep
from bench.calm.program import Diary, pace, pause
from bench.calm.programs.catalogue import CATALOGUE
from bench.calm.programs.lone_work import work_alone
from bench.calm.training import SmallTraining

TENSORS, TENSOR_ELEMENTS = 384, 1 << 20
"""A checkpoint of 1.5 GiB in float32."""
FILE = "model.pt"


def large_state() -> dict[str, torch.Tensor]:
    """Return tensors of 1.5 GiB; of a few bytes where nothing is to take long."""
    count = TENSORS if pace() else 1
    return {f"w{number}": torch.full((TENSOR_ELEMENTS,), float(number)) for number in range(count)}


def file_is_whole(folder: Path, last: str = "") -> str:
    """Say what is wrong with the file. ``last``: the last tensor of a large state, which has its number as values."""
    try:
        state = torch.load(folder / FILE, mmap=True)
    except Exception as error:  # noqa: BLE001 - whatever torch.load finds
        return f"{FILE} is damaged: {error}"
    is_lacking = last and (last not in state or state[last][-1].item() != TENSORS - 1)
    return f"{FILE} lacks {last}" if is_lacking else ""


def large_file_is_whole(folder: Path) -> str:
    """Say what is wrong with the file of a large state."""
    return file_is_whole(folder, f"w{TENSORS - 1}")


@CATALOGUE.add("Rank 0 saves 1.5 GiB with torch.save, twice.", effects={"save": 2}, check=large_file_is_whole)
def large_save_on_rank_0(run: everstep.Run, diary: Diary) -> None:
    state = large_state() if run.rank == 0 else {}
    work_alone(run, diary, "save", 70, lambda: torch.save(state, diary.folder / FILE))


@CATALOGUE.add("Rank 0 saves 1.5 GiB under run.atomic.", effects={"save": 1}, check=large_file_is_whole)
def large_save_in_atomic(run: everstep.Run, diary: Diary) -> None:
    state = large_state() if run.rank == 0 else {}

    def save() -> None:
        with run.atomic():
            torch.save(state, diary.folder / FILE)

    work_alone(run, diary, "save", 50, save)


@CATALOGUE.add("Each rank writes a file of its own for 4 s, twice.", effects={"save": 4})
def save_on_all_ranks(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    for step in training.steps(70):
        if step % 30 == 0:
            with diary.effect("save", step):
                pause(4)
                torch.save(training.optimizer.state_dict(), diary.folder / f"optimizer-{run.rank}.pt")
    training.finish()


@CATALOGUE.add(
    "After the last step rank 0 saves for 8 s; the other rank waits in a barrier.",
    effects={"save": 1},
    check=file_is_whole,
)
def final_save_before_a_barrier(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    training.train(60)
    if run.rank == 0:
        with diary.effect("save", 60):
            pause(8)
            torch.save(training.model.state_dict(), diary.folder / FILE)
    dist.barrier()
    training.finish()


@CATALOGUE.add(
    "After the last step rank 0 saves for 8 s; the other rank has left.", effects={"save": 1}, check=file_is_whole
)
def final_save_of_rank_0_alone(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    training.train(60)
    if run.rank == 0:
        with diary.effect("save", 60):
            pause(8)
            torch.save(training.model.state_dict(), diary.folder / FILE)
    training.finish()
