"""Writers that are killed in the middle of what they write, again and again, each followed by a look at what is left.

    python -m tests.support.killed_writer DATABASE_FILE ROUNDS SEED

Every round forks a writer that commits batches one after another and says when each is durable, kills it at a random
moment, and checks the file. Every fourth round looks at a power cut as well: of what was written after the last batch
that was durable, a random part is missing or garbage. Prints the number of batches; ends with an AssertionError
otherwise.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from everstep_controller.store.database import open_database
from everstep_controller.store.rows import AuditRow, Batch, GenerationRow, OutboxRow
from everstep_controller.store.writer import DatabaseWriter

NODES = 5


class Said(msgspec.Struct):
    """A batch is durable, and the log was this long then."""

    batch: int
    log_bytes: int


def batch_of(number: int) -> Batch:
    """One of about 8 KiB over six tables, so that it takes several pages."""
    node = f"n{number % NODES}"
    return Batch(
        number=number,
        nodes={node: f'{{"batch":{number},"filling":"{"x" * 4000}"}}'},
        jobs={"j": str(number)},
        audit=[AuditRow(id=number, at=float(number), kind="test", sentence="x" * 2000)],
        generations=[GenerationRow(job="j", number=number, reason="formed", trace="t", issued_at=0.0, doc="x" * 2000)],
        outbox=[OutboxRow(node="n", seq=number, body="{}")],
        acknowledged={"n": number - 1},
    )


def write_until_killed(path: Path, pipe: int) -> None:
    """The writer: never returns."""
    writer = DatabaseWriter(open_database(f"sqlite:///{path}", migrate=False))
    number = writer.take_over().batch
    log = path.with_name(path.name + "-wal")
    while True:
        number += 1
        writer.commit([batch_of(number)])
        os.write(pipe, msgspec.json.encode(Said(number, log.stat().st_size)) + b"\n")


def kill_one(path: Path, chance: random.Random) -> Said:
    """The last that a writer said before it was killed."""
    hear, say = os.pipe()
    writer = os.fork()
    if writer == 0:
        write_until_killed(path, say)
    os.close(say)
    said = b""
    end = None
    while end is None or (left := end - time.perf_counter()) > 0:
        ready, _, _ = select.select([hear], [], [], 10.0 if end is None else left)
        if ready:
            said += os.read(hear, 1 << 16)
        assert ready or end is not None, "the writer says nothing"
        end = end or time.perf_counter() + chance.uniform(0, 0.008)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    while more := os.read(hear, 1 << 16):
        said += more
    os.close(hear)
    return msgspec.json.decode(said.strip().split(b"\n")[-1], type=Said)


def check(path: Path, durable: int) -> int:
    """Every batch up to ``durable`` is there, at most one more, none in part, none twice. The newest one's number."""
    connection = sqlite3.connect(path)

    def rows(statement: str) -> list[Any]:
        return [row[0] for row in connection.execute(statement)]

    assert rows("PRAGMA integrity_check") == ["ok"]
    (newest,) = rows("SELECT value FROM meta WHERE key = 'batch'")
    assert durable <= newest <= durable + 1, (durable, newest)
    every = list(range(1, newest + 1))
    assert rows("SELECT id FROM audit ORDER BY id") == every
    assert rows("SELECT number FROM generations ORDER BY number") == every
    assert rows("SELECT doc FROM jobs") == [str(newest)]
    assert rows("SELECT seq FROM outbox") == [newest]
    found = sorted(msgspec.json.decode(doc)["batch"] for doc in rows("SELECT doc FROM nodes"))
    assert found == every[-NODES:]
    connection.close()
    return int(newest)


def cut_power(path: Path, said: Said, chance: random.Random) -> None:
    """Checks a copy in which the log's end, after what was durable, is missing from a random place on, or garbage."""
    copy = path.with_name("cut.db")
    log = path.with_name(path.name + "-wal").read_bytes()
    if not log or len(log) < said.log_bytes:
        return  # the log was folded into the file meanwhile
    cut = chance.randint(said.log_bytes, len(log))
    shutil.copy(path, copy)
    garbage = chance.randbytes(len(log) - cut) if chance.random() < 0.5 else b""
    copy.with_name(copy.name + "-wal").write_bytes(log[:cut] + garbage)
    check(copy, said.batch)
    for file in copy.parent.glob("cut.db*"):
        file.unlink()


def main() -> None:
    path, rounds, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    open_database(f"sqlite:///{path}").dispose()
    newest = 0
    for turn in range(rounds):
        said = kill_one(path, chance)
        if turn % 4 == 0:
            cut_power(path, said, chance)
        newest = check(path, said.batch)
    print(newest)


if __name__ == "__main__":
    main()
