"""Database writers that are killed in the middle of a write, with a check of the file after each kill.

    python -m tests.unit.controller.store.killed_writer DATABASE_FILE ROUNDS SEED

Each round forks a writer that commits batches one after another and reports each durable batch, kills it at a random
moment, and checks the file. Every fourth round also simulates a power cut: a random part of the log after the last
durable batch is missing or garbage. The program prints the number of batches, or ends with an AssertionError.
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
from everstep_controller.store.rows import Batch, EventLogRow, GenerationRow, OutboxRow
from everstep_controller.store.writer import DatabaseWriter

NODES = 5


class DurableBatch(msgspec.Struct):
    """A writer's report of a durable batch, with the length of the log at that time."""

    batch: int
    log_bytes: int


def batch_of(number: int) -> Batch:
    """Return a batch of about 8 KiB over six tables, which takes several pages."""
    node = f"n{number % NODES}"
    return Batch(
        number=number,
        nodes={node: f'{{"batch":{number},"filling":"{"x" * 4000}"}}'},
        jobs={"j": str(number)},
        event_log=[EventLogRow(id=number, at=float(number), kind="test", sentence="x" * 2000)],
        generations=[GenerationRow(job="j", number=number, reason="formed", trace="t", issued_at=0.0, doc="x" * 2000)],
        outbox=[OutboxRow(node="n", seq=number, body="{}")],
        acknowledged={"n": number - 1},
    )


def write_until_killed(path: Path, pipe: int) -> None:
    """Write batches until the process is killed."""
    writer = DatabaseWriter(open_database(f"sqlite:///{path}", migrate=False))
    number = writer.take_over().batch
    log = path.with_name(path.name + "-wal")
    while True:
        number += 1
        writer.commit([batch_of(number)])
        os.write(pipe, msgspec.json.encode(DurableBatch(number, log.stat().st_size)) + b"\n")


def kill_one(path: Path, chance: random.Random) -> DurableBatch:
    """Kill a writer, and return its last message."""
    reading, writing = os.pipe()
    writer = os.fork()
    if writer == 0:
        write_until_killed(path, writing)
    os.close(writing)
    received = b""
    end = None
    while end is None or (left := end - time.perf_counter()) > 0:
        ready, _, _ = select.select([reading], [], [], 10.0 if end is None else left)
        if ready:
            received += os.read(reading, 1 << 16)
        assert ready or end is not None, "the writer reports nothing"
        end = end or time.perf_counter() + chance.uniform(0, 0.008)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    while more := os.read(reading, 1 << 16):
        received += more
    os.close(reading)
    return msgspec.json.decode(received.strip().split(b"\n")[-1], type=DurableBatch)


def check(path: Path, durable: int) -> int:
    """Check that all batches up to ``durable`` and at most one more are stored whole and once; return the newest."""
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


def cut_power(path: Path, last: DurableBatch, chance: random.Random) -> None:
    """Check a copy whose log, after the last durable batch, is cut or garbage from a random place on."""
    copy = path.with_name("cut.db")
    log = path.with_name(path.name + "-wal").read_bytes()
    if not log or len(log) < last.log_bytes:
        return  # the log was merged into the file meanwhile
    cut = chance.randint(last.log_bytes, len(log))
    shutil.copy(path, copy)
    garbage = chance.randbytes(len(log) - cut) if chance.random() < 0.5 else b""
    copy.with_name(copy.name + "-wal").write_bytes(log[:cut] + garbage)
    check(copy, last.batch)
    for file in copy.parent.glob("cut.db*"):
        file.unlink()


def main() -> None:
    path, rounds, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    open_database(f"sqlite:///{path}").dispose()
    newest = 0
    for number in range(rounds):
        last = kill_one(path, chance)
        if number % 4 == 0:
            cut_power(path, last, chance)
        newest = check(path, last.batch)
    print(newest)


if __name__ == "__main__":
    main()
