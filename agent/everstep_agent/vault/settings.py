"""Settings of a vault process."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from everstep.errors import ConfigurationError
from everstep.ids import check_name

MAX_SOCKET_PATH_BYTES = 107
"""Maximum length in bytes of a unix socket's path on Linux (``sun_path`` less its terminating zero)."""


MIN_SEND_BYTES_PER_S = 4 << 20


class VaultSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one vault.

    Attributes:
        node: This node's name.
        run_dir: Directory of ``vault.sock`` and ``vault.json``.
        segment_dir: A directory on a memory file system.
        listen: host:port for other vaults, port 0 for a free one. Other nodes must be able to reach the host.
        memory_limit: Bytes for all files under ``segment_dir`` together; None leaves the limit to the file system and
            the free memory. While a larger segment replaces a smaller one, both count.
        linger_s: Seconds without a connected supervisor or rank before the vault ends and frees all slots; None for no
            limit. Longer survives a longer absence; shorter frees an abandoned job's memory sooner.
        scrub_interval_s: Seconds between the starts of two rounds over all sealed slots; 0 turns scrubbing off. Shorter
            finds a flipped bit sooner.
        scrub_bytes_per_s: Maximum reading rate of a round. 200 MB/s is under 1 % of one core's hashing rate (34 GB/s);
            a round over more than interval times rate takes longer than the interval.
        streams: TCP connections that carry one large payload together. One stream is limited by one core on each side
            (2 to 3 GB/s on loopback); more help until the cores or the wire are full.
        bytes_per_stream: Payload bytes that justify a further stream; below that the hand-over costs more than it
            saves.
        send_bytes_per_s: Maximum network rate of all copies to other vaults together; None for no limit. A limit leaves
            the wire to the training's collectives; one below a step's changes costs versions, since only the newest is
            sent.
        connect_timeout_s: Seconds for a peer to accept; a dead machine answers nothing.
        io_timeout_s: Seconds without a byte in a transfer before the peer is given up. Longer tolerates a peer starved
            of CPU; shorter frees its slot sooner.
        request_timeout_s: Seconds for a request in the middle of a transfer, and for an answer that takes work first (a
            peer making its segment).
        idle_timeout_s: Seconds for the next request on an authenticated connection.
        unknown_job_retry_s: Seconds during which a peer that does not know the job yet is asked again; a generation
            reaches the nodes within tens of milliseconds of one another.
        max_connections: Maximum number of authenticated connections; each job and peer may use ``streams`` for each
            rank that replicates at once.
        worker_threads: Threads for requests that move bytes or make files.
    """

    node: str
    run_dir: Path
    segment_dir: Path
    listen: str = "127.0.0.1:0"
    memory_limit: int | None = None
    die_with_parent: bool = False
    linger_s: float | None = None
    scrub_interval_s: float = 1.0
    scrub_bytes_per_s: float = 200e6
    streams: int = 2
    bytes_per_stream: int = 32 << 20
    send_bytes_per_s: float | None = None
    connect_timeout_s: float = 2.0
    io_timeout_s: float = 10.0
    request_timeout_s: float = 60.0
    idle_timeout_s: float = 600.0
    unknown_job_retry_s: float = 1.0
    max_connections: int = 512
    worker_threads: int = 32

    @property
    def socket_path(self) -> Path:
        return self.run_dir / "vault.sock"

    @property
    def ready_file(self) -> Path:
        return self.run_dir / "vault.json"

    @property
    def listen_address(self) -> tuple[str, int]:
        """``listen`` as a pair; port 0 allowed. Raises ConfigurationError."""
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ConfigurationError(f"--listen {self.listen!r} is not host:port, such as 127.0.0.1:0")
        return host.strip("[]"), int(port)

    def validate(self) -> VaultSettings:
        """Return these settings. Raises ConfigurationError, with the correction, for a contradiction."""
        _raise_if(_bad_name(self.node), f"--node {self.node!r} cannot name a node")
        host, _ = self.listen_address
        _raise_if(
            host in ("0.0.0.0", "::"),  # noqa: S104 - the refusal of it
            f"--listen {self.listen} cannot be told to other nodes: name the address they reach this node by",
        )
        length = len(os.fsencode(self.socket_path.absolute()))
        _raise_if(
            length > MAX_SOCKET_PATH_BYTES,
            f"{self.socket_path} has {length} bytes, a unix socket's path may have {MAX_SOCKET_PATH_BYTES}: "
            "give a shorter --run-dir",
        )
        _raise_if(self.memory_limit is not None and self.memory_limit <= 0, "--memory-limit must be more than 0 bytes")
        _raise_if(
            self.linger_s is not None and self.linger_s <= 0, "--linger must be more than 0 s; leave it out to stay"
        )
        _raise_if(self.scrub_interval_s < 0, "--scrub-interval must not be negative; 0 turns scrubbing off")
        _raise_if(self.scrub_bytes_per_s <= 0, "scrub_bytes_per_s must be more than 0; --scrub-interval 0 turns it off")
        _raise_if(not 1 <= self.streams <= 16, f"--streams must be 1 to 16, not {self.streams}")
        _raise_if(
            self.send_bytes_per_s is not None and self.send_bytes_per_s < MIN_SEND_BYTES_PER_S,
            f"--send-rate must be at least {MIN_SEND_BYTES_PER_S} bytes a second: a peer gives a transfer up that "
            "stands still",
        )
        _raise_if(
            self.request_timeout_s < self.io_timeout_s or self.idle_timeout_s < self.request_timeout_s,
            "time-outs must grow from io_timeout_s over request_timeout_s to idle_timeout_s",
        )
        _raise_if(min(self.connect_timeout_s, self.io_timeout_s) <= 0, "time-outs must be more than 0 s")
        return self


def _bad_name(node: str) -> bool:
    try:
        check_name(node, "node")
    except ValueError:
        return True
    return False


def _raise_if(condition: bool, message: str) -> None:
    if condition:
        raise ConfigurationError(message)
