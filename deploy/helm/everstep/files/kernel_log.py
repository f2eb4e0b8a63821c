"""Copy new records of the kernel log to a named pipe: ``python3 kernel_log.py /dev/kmsg PIPE``.

The agent reads the pipe, and so needs none of the rights that /dev/kmsg demands. Records wait in the kernel while
no process reads the pipe.
"""

from __future__ import annotations

import errno
import os
import sys

MAX_RECORD_BYTES = 8192


def is_of_kernel(record: bytes) -> bool:
    """Return whether the kernel made the record: its facility, the priority without the level's three bits, is 0."""
    priority = record.partition(b",")[0]
    return not priority.isdigit() or int(priority) >> 3 == 0


def text_of(record: bytes) -> bytes:
    """Return the message of a record ``priority,sequence,time,flags;text``, without its property lines."""
    text = record.partition(b";")[2].partition(b"\n")[0]
    return text.replace(rb"\x0a", b"\n") + b"\n"


def main(source: str, pipe: str) -> None:
    log = os.open(source, os.O_RDONLY)
    os.lseek(log, 0, os.SEEK_END)
    out = os.open(pipe, os.O_WRONLY)  # waits for the agent
    while True:
        try:
            record = os.read(log, MAX_RECORD_BYTES)
        except OSError as error:
            if error.errno == errno.EPIPE:
                continue  # overwritten before it was read
            raise
        if not is_of_kernel(record):
            continue
        text = text_of(record)
        try:
            os.write(out, text)
        except BrokenPipeError:  # the agent restarts
            os.close(out)
            out = os.open(pipe, os.O_WRONLY)
            os.write(out, text)


if __name__ == "__main__":
    main(*sys.argv[1:])
