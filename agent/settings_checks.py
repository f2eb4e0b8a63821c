"""Contradictions in the agent's settings, each refused with its mend."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from agent.vault.settings import SLOWEST_SEND_BYTES_PER_S
from everstep.errors import ConfigurationError
from everstep.ids import check_name
from everstep.wire.v1.agent import Labels

if TYPE_CHECKING:
    from agent.config import AgentSettings

LONGEST_SOCKET_PATH = 107
"""Bytes a unix socket's path may have on Linux (sun_path less its terminating zero)."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check(settings: AgentSettings, presets: Collection[str]) -> None:
    """Raises ConfigurationError for the first contradiction."""
    _check_names(settings, presets)
    _check_addresses(settings)
    _check_times(settings)
    _check_sizes(settings)


def listen_address(text: str) -> tuple[str, int]:
    """``host:port`` to listen on, port 0 allowed. Raises ConfigurationError where it is not one."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(f"{text!r} is not an address to listen on: expected host:port, such as 127.0.0.1:0")
    return host.strip("[]"), int(port)


def labels_of(settings: AgentSettings) -> dict[str, str]:
    """The node's labels. Raises ConfigurationError for one that is not NAME=VALUE, or cannot be."""
    told = ",".join(settings.labels)
    parts = [label.partition("=") for label in settings.labels]
    refuse(any(not equals for _, equals, _ in parts), f"--labels {told}: give NAME=VALUE")
    try:
        found: dict[str, str] = msgspec.convert({name: value for name, _, value in parts}, Labels)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"--labels {told}: {error}") from error
    return found


def refuse(condition: bool, message: str) -> None:
    """Raises ConfigurationError with ``message`` where ``condition`` holds."""
    if condition:
        raise ConfigurationError(message)


def _check_names(s: AgentSettings, presets: Collection[str]) -> None:
    try:
        check_name(s.node, "node")
    except ValueError as error:
        raise ConfigurationError(f"{error}; give another with --node") from error
    longest = len(os.fsencode(s.agent_socket.absolute()))
    refuse(
        longest > LONGEST_SOCKET_PATH,
        f"{s.agent_socket} has {longest} bytes and a unix socket's path may have {LONGEST_SOCKET_PATH}: "
        "give a shorter --run-dir",
    )
    labels_of(s)
    refuse(s.preset not in presets, f"--preset {s.preset!r} is not one of {', '.join(presets)}")
    refuse(s.log_format not in ("text", "json"), f"--log-format {s.log_format!r} is neither text nor json")
    levels = ("debug", "info", "warning", "error")
    refuse(s.log_level not in levels, f"--log-level {s.log_level!r} is not one of {', '.join(levels)}")
    refuse(
        s.virtual_control is not None and not s.virtual,
        "--virtual-control steers virtual GPUs and there are none: give --virtual SCENARIO.toml too",
    )


def _check_addresses(s: AgentSettings) -> None:
    refuse(not s.controllers, "an agent needs a controller: give --controller http://HOST:PORT")
    for url in s.controllers:
        parts = urlsplit(url)
        refuse(
            parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"),
            f"{url!r} is not a controller's base URL: expected http://HOST:PORT or https://HOST:PORT",
        )
    refuse(
        s.ca_file is not None and not any(url.startswith("https://") for url in s.controllers),
        "--ca-file is for https:// controllers and none is given",
    )
    refuse(
        s.join_token_file is not None and s.token_file is None,
        "--join-token-file needs --token-file: where the node's own token is to be kept",
    )
    refuse(
        (s.client_certificate is None) != (s.client_key is None),
        "--client-certificate and --client-key belong together: give both or none",
    )
    host, _ = listen_address(s.vault_listen)
    refuse(
        host in ("", "0.0.0.0", "::"),  # noqa: S104 - the refusal of it
        f"--vault-listen {s.vault_listen} cannot be told to other nodes: name the address they reach this node by",
    )
    remote = any(urlsplit(url).hostname not in LOOPBACK for url in s.controllers)
    refuse(
        s.preset == "production" and remote and host in LOOPBACK,
        f"--vault-listen {s.vault_listen} is out of other nodes' reach, and they hold this node's replicas: "
        "give the address they reach this node by, such as --vault-listen 10.0.0.7:7702",
    )
    if s.metrics_listen:
        listen_address(s.metrics_listen)
        refuse(
            s.metrics_token_file is None and s.token_file is None,
            "/metrics needs a token: give --token-file or --metrics-token-file, or --metrics-listen '' to turn it off",
        )


def _check_times(s: AgentSettings) -> None:
    for name in _SECONDS:
        refuse(getattr(s, name) <= 0, f"--{name.replace('_', '-')} must be more than 0 s")
    refuse(
        s.silence_s < 2 * s.tick_interval_s,
        f"--silence-s {s.silence_s} is under two ticks of {s.tick_interval_s} s: one late tick would be an alarm",
    )
    refuse(
        s.unresponsive_after_s < s.silence_s,
        f"--unresponsive-after-s {s.unresponsive_after_s} is under --silence-s {s.silence_s}, "
        "so a stopped process would be found later than a busy one",
    )
    refuse(
        s.retry_idle_s < s.retry_busy_s,
        f"--retry-idle-s {s.retry_idle_s} is under --retry-busy-s {s.retry_busy_s}: an idle node may wait longer",
    )
    refuse(
        s.answer_timeout_s < s.connect_timeout_s,
        f"--answer-timeout-s {s.answer_timeout_s} is under --connect-timeout-s {s.connect_timeout_s}: "
        "a controller has to open a session before it can answer in it",
    )


def _check_sizes(s: AgentSettings) -> None:
    refuse(s.leave_vault not in ("", "agent", "parent"), f"--leave-vault {s.leave_vault}: agent or parent")
    refuse(
        bool(s.leave_vault) and not s.die_with_parent,
        "--leave-vault belongs to --die-with-parent; without that a vault is left anyway, unless --stop-vault is given",
    )
    limit = s.vault_memory_limit_bytes
    refuse(
        limit is not None and limit <= 0,
        f"--vault-memory-limit-bytes {limit} leaves no room for any slot: give more, or leave it out",
    )
    rate = s.vault_send_bytes_per_s
    refuse(
        rate is not None and rate < SLOWEST_SEND_BYTES_PER_S,
        f"--vault-send-bytes-per-s {rate} is under 4 MiB: a peer would give a transfer up that stands still",
    )
    refuse(s.spool_reports < 64, "--spool-reports under 64 loses reports in the first second of an absence")
    refuse(s.spool_bytes < 1 << 20, f"--spool-bytes {s.spool_bytes} is under 1 MiB, the size of one request")
    refuse(s.max_connections < 2, "--max-connections must leave room for a launcher and a rank")


_SECONDS = (
    "vault_linger_s",
    "tick_interval_s",
    "silence_s",
    "unresponsive_after_s",
    "exit_grace_s",
    "seal_window_s",
    "connect_timeout_s",
    "answer_timeout_s",
    "retry_busy_s",
    "retry_idle_s",
)
