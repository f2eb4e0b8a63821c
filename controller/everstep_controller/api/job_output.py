"""Read what the ranks of a job printed last from the files that launchers keep on the controller's machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from everstep.errors import NotFound, Unavailable
from everstep.layout.kept_output import KeptLine, KeptOutput, kept_outputs, rank_file, tail
from everstep.printable_text import plain_line
from everstep.wire.v1.operator import JobOutput, OutputLine, RankOutput
from everstep.wire.v1.training import GenerationSpec, Member

DEFAULT_LINES = 20
MAX_RANKS = 16
"""Ranks in one answer: those that printed last."""
MAX_NAMED_NODES = 8
MAX_ANSWER_BYTES = 512 << 10
"""Bytes of text in one answer, shared by its ranks."""
MAX_LINE_CHARS = 8 << 10
READ_TIMEOUT_S = 2.0
"""Longest wait for the disk, or the file server of a home directory."""


class OutputReader:
    """Reads the files on a thread of its own, so that a disk that hangs delays nothing else.

    Args:
        state_dir: State directory of this user's launchers; empty: none.
    """

    def __init__(self, state_dir: str) -> None:
        self._state_dir = Path(state_dir) if state_dir else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="output of ranks")

    async def read(self, job: str, generation: GenerationSpec | None, rank: int | None, lines: int) -> JobOutput:
        """Return the newest lines of each rank on this machine, or of one rank.

        Args:
            job: The job, whose name is valid.
            generation: Its present or last generation.
            rank: Only this rank.
            lines: Most lines of each rank.

        Raises:
            NotFound: The job has no such rank.
            Unavailable: The disk does not answer in time, or cannot be read.
        """
        if generation is None:
            return JobOutput(job=job, sentence=f"Job {job} has no ranks yet.")
        if rank is not None and rank >= generation.world_size:
            raise NotFound(f"job {job} has no rank {rank}: its last one is {generation.world_size - 1}")
        nodes = generation.seats if rank is None else (generation.node_of(rank),)
        if self._state_dir is None:
            return _elsewhere(JobOutput(job=job), rank, nodes)
        asked = asyncio.get_running_loop().run_in_executor(
            self._thread, _read, self._state_dir, generation, nodes, rank, lines
        )
        try:
            return await asyncio.wait_for(asked, READ_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(f"{self._state_dir} does not answer within {READ_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise Unavailable(f"the output of job {job} in {self._state_dir} cannot be read: {error}") from error

    def close(self) -> None:
        """Start no further reads."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _read(state_dir: Path, generation: GenerationSpec, nodes: Sequence[str], rank: int | None, lines: int) -> JobOutput:
    job = generation.job
    folders = _by_node(kept_outputs(state_dir, job))
    here = [node for node in nodes if node in folders]
    files = {
        member: folders[node].path / rank_file(member.local_rank)
        for node in here
        if folders[node].about.keeps_ranks
        for member in generation.members_on(node)
        if rank in (None, member.rank)
    }
    chosen = sorted(sorted(files, key=lambda member: _changed_at(files[member]))[-MAX_RANKS:], key=_rank)
    budget = MAX_ANSWER_BYTES // max(1, len(chosen))
    ranks = tuple(
        RankOutput(rank=member.rank, node=member.node, lines=_shown(tail("", files[member], lines, budget), budget))
        for member in chosen
    )
    answer = JobOutput(job=job, ranks=ranks, kept_ranks=len(files))
    if elsewhere := [node for node in nodes if node not in folders]:
        return _elsewhere(answer, rank, elsewhere)
    silent = [node for node in here if not folders[node].about.keeps_ranks]
    return _not_kept(answer, silent) if silent else answer


def _by_node(outputs: Iterable[KeptOutput]) -> dict[str, KeptOutput]:
    """Return one folder for each node: of the launcher that runs, of this host, or else the newest."""
    ordered = sorted(outputs, key=lambda each: (each.is_running, each.is_of_this_host, each.about.started_at))
    return {each.about.node: each for each in ordered}


def _rank(member: Member) -> int:
    return member.rank


def _changed_at(file: Path) -> float:
    with contextlib.suppress(OSError):
        return file.lstat().st_mtime
    return 0.0


def _shown(lines: list[KeptLine], max_bytes: int) -> tuple[OutputLine, ...]:
    """Return the newest lines whose text fits into ``max_bytes``."""

    def fitting() -> Iterator[OutputLine]:
        left = max_bytes
        for line in reversed(lines):
            text = plain_line(line.text)[:MAX_LINE_CHARS]
            left -= len(text.encode(errors="replace"))
            if left < 0:
                return
            yield OutputLine(at=line.at, text=text)

    return tuple(reversed(list(fitting())))


# ---- what the answer does not have


def _elsewhere(answer: JobOutput, rank: int | None, nodes: Sequence[str]) -> JobOutput:
    subject = "Other ranks are" if answer.ranks else "The ranks are" if rank is None else f"Rank {rank} is"
    sentence = (
        f"{subject} on {_named(nodes)}, where the launcher keeps the output. To read it there, as the user who "
        "started the launcher:"
    )
    command = f"everstep logs {answer.job}" + ("" if rank is None else f" --rank {rank}")
    return msgspec.structs.replace(answer, sentence=sentence, command=command)


def _not_kept(answer: JobOutput, nodes: Sequence[str]) -> JobOutput:
    sentence = f"No output of ranks on {_named(nodes)} is kept: the launcher has --no-keep-output."
    return msgspec.structs.replace(answer, sentence=sentence)


def _named(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:MAX_NAMED_NODES]) + (", ..." if len(nodes) > MAX_NAMED_NODES else "")
