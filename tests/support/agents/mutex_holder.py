"""A process that holds a robust mutex, for tests of how its end is seen.

    python -m tests.support.agents.mutex_holder DESCRIPTOR WHO

WHO is ``main`` or ``thread``: which thread holds it. The process prints ``held`` and its pid as its own namespace
numbers it, and obeys lines from stdin until that ends: ``fork`` (a child that ends), ``exec`` (a shell in its place,
which says ``ready``), ``end-thread``, ``unmap``, ``exit CODE``. It answers each with ``done``, unless it is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading

from everstep.host.robust_mutex import HeldMutex


def main() -> None:
    descriptor, who = int(sys.argv[1]), sys.argv[2]
    held, let_go = threading.Event(), threading.Event()
    mutexes: list[HeldMutex] = []

    def hold() -> None:
        mutexes.append(HeldMutex(descriptor))
        held.set()

    def hold_in_thread() -> None:
        hold()
        let_go.wait()

    if who == "main":
        hold()
    else:
        thread = threading.Thread(target=hold_in_thread, daemon=True)
        thread.start()
        held.wait()
    print("held", os.getpid(), flush=True)
    for line in sys.stdin:
        match line.split():
            case ["fork"]:
                child = os.fork()
                if not child:
                    os._exit(0)
                os.waitpid(child, 0)
            case ["exec"]:
                os.execvp("sh", ["sh", "-c", "echo ready; cat"])
            case ["end-thread"]:
                let_go.set()
                thread.join()
            case ["unmap"]:
                ctypes.CDLL(None).munmap(mutexes[0]._mutex, ctypes.c_size_t(mmap.PAGESIZE))
            case ["exit", code]:
                os._exit(int(code))
        print("done", flush=True)


if __name__ == "__main__":
    main()
