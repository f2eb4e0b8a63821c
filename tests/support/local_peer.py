"""A rank's process for tests of the agent's socket: says Hello, ticks, and lives until somebody ends it.

``python -m tests.support.local_peer SOCKET JOB LOCAL_RANK GENERATION RANK [LAST_WORD]``: with a last word it says
goodbye by it and ends at once. Prints ``ready`` when the agent has welcomed it; ends when the agent does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time

from everstep.wire.framing import FrameDecoder, encode_frame
from everstep.wire.v1.local import MAX_FRAME_BYTES, ConnectionRole, FromAgent, Goodbye, Hello, RankHeartbeat

TICK_S = 0.02


def main() -> None:
    path, job, local_rank, generation, rank, *last_word = sys.argv[1:]
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    agent.connect(path)
    agent.sendall(
        encode_frame(
            Hello(protocols=(1,), role=ConnectionRole.RANK, job=job, pid=os.getpid(), local_rank=int(local_rank))
        )
    )
    decoder: FrameDecoder[FromAgent] = FrameDecoder(FromAgent, MAX_FRAME_BYTES)
    while not decoder.feed(agent.recv(65536)):
        pass
    tick = encode_frame(RankHeartbeat(generation=int(generation), rank=int(rank), step=1, step_s=0.1))
    agent.sendall(tick)
    print("ready", flush=True)
    if last_word:
        agent.sendall(encode_frame(Goodbye(detail=last_word[0])))
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:
            agent.sendall(tick)
            time.sleep(TICK_S)


if __name__ == "__main__":
    main()
