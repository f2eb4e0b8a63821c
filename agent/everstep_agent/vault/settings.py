"""Settings of a vault process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from everstep.errors import ConfigurationError
from everstep.ids import NodeId
from everstep.wire.v1.transfer import MIN_SEND_BYTES_PER_S

MAX_SOCKET_PATH_BYTES = 107
"""Maximum length in bytes of a unix socket's path on Linux (``sun_path`` less its terminating zero)."""

Positive = Annotated[float, Meta(gt=0)]


class VaultSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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

    node: NodeId
    run_dir: Path
    segment_dir: Path
    listen: str = "127.0.0.1:0"
    memory_limit: Annotated[int, Meta(gt=0)] | None = None
    die_with_parent: bool = False
    linger_s: Positive | None = None
    scrub_interval_s: Annotated[float, Meta(ge=0)] = 10.0
    scrub_bytes_per_s: Positive = 200e6
    streams: Annotated[int, Meta(ge=1, le=16)] = 2
    bytes_per_stream: int = 32 << 20
    send_bytes_per_s: Annotated[float, Meta(ge=MIN_SEND_BYTES_PER_S)] | None = None
    connect_timeout_s: Positive = 2.0
    io_timeout_s: Positive = 10.0
    request_timeout_s: Positive = 60.0
    idle_timeout_s: Positive = 600.0
    unknown_job_retry_s: float = 1.0
    max_connections: int = 512
    worker_threads: int = 32
    log_format: str = "text"
    log_level: str = "info"

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
            raise ConfigurationError(f"listen address {self.listen!r} is not host:port, such as 127.0.0.1:0")
        return host.strip("[]"), int(port)

    def validate(self) -> VaultSettings:
        """Return these settings. Raises ConfigurationError for an address or a path that cannot be used."""
        if self.listen_address[0] in ("0.0.0.0", "::"):  # noqa: S104 - the refusal of it
            raise ConfigurationError(
                f"listen address {self.listen} cannot be announced to other nodes: "
                "use the address by which they reach this node"
            )
        length = len(os.fsencode(self.socket_path.absolute()))
        if length > MAX_SOCKET_PATH_BYTES:
            raise ConfigurationError(
                f"the path {self.socket_path} has {length} bytes, but a unix socket's path may have "
                f"{MAX_SOCKET_PATH_BYTES}: use a shorter --run-dir"
            )
        return self


def encode_settings(settings: VaultSettings) -> str:
    """Return the settings as a JSON object, for the vault's command line."""
    return msgspec.json.encode(settings, enc_hook=str).decode()


def decode_settings(text: str) -> VaultSettings:
    """Return the settings in a JSON object. Raises ConfigurationError."""
    try:
        return msgspec.json.decode(text, type=VaultSettings, dec_hook=lambda kind, value: kind(value)).validate()
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"vault settings: {error}") from error
