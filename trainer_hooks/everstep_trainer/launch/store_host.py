"""The process that holds the rendezvous store, apart from every rank, so that it dies with none of them."""

from __future__ import annotations

import signal

from everstep_trainer.launch.process_setup import set_process_name


def serve_store(descriptors: tuple[int, ...], *, address: str, port: int) -> None:
    """Serves a TCPStore on the listening socket that came along, until the process is ended.

    The launcher keeps the socket too: connections made before this process serves, or while it is being replaced,
    wait in its queue instead of being refused.
    """
    from datetime import timedelta

    import torch.distributed as dist

    (listener,) = descriptors
    set_process_name("everstep-store")
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
