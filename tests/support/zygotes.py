"""Import modules once, and fork a zygote of ``everstep_trainer.launch.forking`` for each pool that asks for one."""

from __future__ import annotations

import argparse
import os
import signal
import socket

from everstep_trainer.launch.forking.fork_messages import ControlChannel, ForkServerReady, StartForkServer
from everstep_trainer.launch.forking.forkserver import ForkServer, Zygote, preload, run_child
from everstep_trainer.launch.forking.process_setup import set_process_name

from everstep.parent_process import die_with_parent


def main() -> None:
    """Returns only in children, as the fork server's own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--orders", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--preload", nargs="*", default=[])
    options = parser.parse_args()
    die_with_parent(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps zygotes
    preload(options.preload)
    channel: ControlChannel[StartForkServer] = ControlChannel(socket.socket(fileno=options.orders), StartForkServer)
    while received := channel.receive():
        orders, out, err = received[1]
        parent = os.getpid()
        if os.fork() == 0:
            die_with_parent(parent)
            channel.close()
            os.dup2(out, 1)
            os.dup2(err, 2)
            serve(orders)
            return
        for descriptor in (orders, out, err):
            os.close(descriptor)


def serve(orders: int) -> None:
    """What the fork server's ``main`` does once everything is imported."""
    set_process_name("everstep-zygote")
    control = Zygote(ControlChannel(socket.socket(fileno=orders), StartForkServer)).serve()
    control.send(ForkServerReady())
    run_child(*ForkServer(control).serve())


if __name__ == "__main__":
    main()
