"""A rank's process for tests of the agent's socket, which sends Hello and heartbeats until it is killed.

    python -m tests.support.agents.rank_peer SOCKET JOB LOCAL_RANK GENERATION RANK [GOODBYE]

The process prints ``ready`` after the agent's answer to Hello, and ends when the agent ends. It holds a robust mutex in
the agent's memory. With GOODBYE it sends that text as Goodbye, and ends at once. With the GOODBYE ``fork`` it sends
none: it forks a child that keeps the connection open, and prints its pid.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time

from everstep.host.robust_mutex import HeldMutex
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep.wire.v1.local import MAX_FRAME_BYTES, ConnectionRole, FromAgent, Goodbye, Hello, RankHeartbeat

TICK_S = 0.02
LONG_S = 3600.0


def main() -> None:
    path, job, local_rank, generation, rank, *goodbye = sys.argv[1:]
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    agent.connect(path)
    agent.sendall(
        encode_frame(
            Hello(protocols=(1,), role=ConnectionRole.RANK, job=job, pid=os.getpid(), local_rank=int(local_rank))
        )
    )
    decoder: FrameDecoder[FromAgent] = FrameDecoder(FromAgent, MAX_FRAME_BYTES)
    mutexes: list[HeldMutex] = []
    while True:
        data, descriptors, _, _ = socket.recv_fds(agent, 65536, 1)
        mutexes += map(HeldMutex, descriptors)
        if decoder.feed(data):
            break
    tick = encode_frame(RankHeartbeat(generation=int(generation), rank=int(rank), step=1, step_s=0.1))
    agent.sendall(tick)
    print("ready", flush=True)
    if goodbye == ["fork"]:
        if not (child := os.fork()):
            time.sleep(LONG_S)
        print(child, flush=True)
    elif goodbye:
        agent.sendall(encode_frame(Goodbye(detail=goodbye[0])))
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:
            agent.sendall(tick)
            time.sleep(TICK_S)


if __name__ == "__main__":
    main()
