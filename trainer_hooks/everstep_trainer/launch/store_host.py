"""Host the rendezvous store in its own process, so that it outlives every rank."""

from __future__ import annotations

import signal

from everstep_trainer.launch.process_setup import NOTICE_SIGNALS, set_process_name


def serve_store(descriptors: tuple[int, ...], *, address: str, port: int) -> None:
    """Serve a TCPStore on the passed listening socket until the process is ended.

    The launcher keeps the socket open too. Connections made before this process serves, or while it is being replaced,
    wait in the socket's queue instead of being refused.
    """
    from datetime import timedelta

    import torch.distributed as dist

    (listener,) = descriptors
    set_process_name("everstep-store")
    signal.pthread_sigmask(signal.SIG_BLOCK, NOTICE_SIGNALS)
    store = dist.TCPStore(  # type: ignore[attr-defined] # torch does not list what it re-exports
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener,
        use_libuv=True,
    )
    assert store.port == port
    while True:  # the store's own thread does the work; a signal ends the process
        signal.pause()
