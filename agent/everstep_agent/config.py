"""Read the agent's settings from the command line, the environment, a preset, and the defaults, in this order.

An environment variable (``EVERSTEP_AGENT_`` and the field's name in capitals) supplies what the command line omits and
never overrides it. ``everstep-agent --help`` prints the descriptions in this module.
"""

from __future__ import annotations

import argparse
import os
import socket
import ssl
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from everstep import __version__
from everstep.bearer_tokens import looks_like_token
from everstep.errors import ConfigurationError
from everstep.ids import check_name
from everstep.settings import unknown_variables
from everstep.wire.v1.agent import Labels
from everstep_agent.vault.settings import MIN_SEND_BYTES_PER_S

ENVIRONMENT_PREFIX = "EVERSTEP_AGENT_"
SOCKET_VARIABLE = "EVERSTEP_AGENT_SOCKET"
"""Names the agent's socket for launchers; tolerated in the environment because a user's profile may set it."""


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one agent, made by ``from_command_line``, or by tests with keyword arguments."""

    node: Annotated[str, _doc("this node's name in the fleet (default: the host's name up to the first dot)")]
    controllers: Annotated[
        tuple[str, ...], _doc("controller base URLs, separated by commas; the next is tried when one does not answer")
    ]
    run_dir: Annotated[
        Path, _doc("directory for sockets and the ready file, made 0700 (default: $XDG_RUNTIME_DIR/everstep/NODE)")
    ]
    token_file: Annotated[
        Path | None,
        _doc(
            "file with this node's agent token (from `everstep token issue` or `everstep-controller token`; with "
            "--join-token-file the agent writes it)"
        ),
    ] = None
    join_token_file: Annotated[
        Path | None,
        _doc("file with a join token, to enrol this node where the token file is missing or its token is refused"),
    ] = None
    client_certificate: Annotated[
        Path | None,
        _doc("PEM file of a client certificate named everstep://agent/NODE, in place of a token at https controllers"),
    ] = None
    client_key: Annotated[Path | None, _doc("PEM file of the client certificate's key")] = None
    ca_file: Annotated[
        Path | None, _doc("PEM file of the authority that signed https controllers (default: the system's)")
    ] = None
    segment_dir: Annotated[
        Path | None,
        _doc("where the vault keeps slots: a directory on a memory file system (default: /dev/shm/everstep-UID/NODE)"),
    ] = None
    vault_listen: Annotated[str, _doc("host:port for other nodes' vaults; port 0 takes a free one")] = "127.0.0.1:0"
    vault_memory_limit_bytes: Annotated[
        int | None,
        _doc(
            "bytes that all slots on this node may take; more is refused, and that rank trains on without checkpoints "
            "(default: what the file system and the machine have free)"
        ),
    ] = None
    vault_send_bytes_per_s: Annotated[
        float | None,
        _doc("most that all copies of slots to other nodes may take of the network together (default: all there is)"),
    ] = None
    metrics_listen: Annotated[
        str, _doc("host:port of /metrics; port 0 takes a free one, an empty string turns it off")
    ] = "127.0.0.1:0"
    metrics_token_file: Annotated[
        Path | None, _doc("file with the bearer token that scrapers show (default: the agent's own token file)")
    ] = None
    dcgm_names: Annotated[
        bool, _doc("also show GPU metrics under dcgm-exporter's names, for dashboards made for it")
    ] = False
    virtual: Annotated[
        str, _doc("virtual GPUs in place of the machine's own: a scenario file, or default, or default:N for N GPUs")
    ] = ""
    virtual_control: Annotated[Path | None, _doc("file that steers the virtual GPUs while the agent runs")] = None
    kernel_log: Annotated[
        str, _doc("kernel log to read XIDs from: /dev/kmsg, a file or a pipe (default: /dev/kmsg; none with --virtual)")
    ] = ""
    expected_gpus: Annotated[
        int | None, _doc("how many GPUs this node should have (default: as many as its PCI bus shows)")
    ] = None
    site_policy: Annotated[
        tuple[str, ...], _doc("TOML files, separated by commas, whose policy rules replace ours of the same id")
    ] = ()
    rack: Annotated[str, _doc("failure domain: nodes with equal words lose their rack together")] = ""
    switch: Annotated[str, _doc("failure domain: nodes with equal words lose their leaf switch together")] = ""
    power_domain: Annotated[str, _doc("failure domain: nodes with equal words lose their power together")] = ""
    labels: Annotated[
        tuple[str, ...], _doc("your own words for the node, NAME=VALUE separated by commas, by which people find it")
    ] = ()
    die_with_parent: Annotated[
        bool, _doc("end in order when the process that started the agent ends, and take the vault along")
    ] = False
    stop_vault_on_exit: Annotated[
        bool, _doc("at the end also end the vault and unlink its slots; without it the next agent takes the vault over")
    ] = False
    vault_survives_kill_of: Annotated[
        str,
        _doc(
            "with --die-with-parent: whose kill the vault outlives, for the next agent over this run directory: agent "
            "(this process's), or parent (that too, of whoever started it)"
        ),
    ] = ""
    vault_linger_s: Annotated[
        float,
        _doc(
            "seconds that the vault serves on while neither an agent nor a rank is connected to it; then it ends and "
            "frees its memory. Longer bears a longer upgrade, shorter frees sooner what nobody comes back for"
        ),
    ] = 3600.0
    preset: Annotated[str, _doc("defaults to begin with: lab or production")] = "lab"
    log_format: Annotated[str, _doc("text, or json (one object a line)")] = "text"
    log_level: Annotated[str, _doc("debug, info, warning or error")] = "info"

    tick_interval_s: Annotated[
        float,
        _doc(
            "seconds between a rank's ticks; shorter finds a stopped rank sooner and costs each rank that many wakeups"
        ),
    ] = 0.2
    stopped_after_s: Annotated[
        float,
        _doc("seconds without a tick after which a rank whose process the kernel shows as stopped is reported"),
    ] = 0.5
    unresponsive_after_s: Annotated[
        float,
        _doc(
            "seconds without a tick after which any rank is reported; below it a long hold of Python's lock is normal"
        ),
    ] = 1.0
    exit_grace_s: Annotated[
        float, _doc("seconds a lost rank's report waits for its launcher's word on the exit status")
    ] = 0.003
    report_batch_window_s: Annotated[
        float, _doc("seconds that checkpoint reports are gathered into one request; urgent reports never wait")
    ] = 0.02
    spool_max_reports: Annotated[
        int, _doc("unsent reports kept while the controller is away; the oldest checkpoint reports give way first")
    ] = 8192
    spool_max_bytes: Annotated[int, _doc("bytes of unsent reports kept, on disk and in memory")] = 8 << 20
    connect_timeout_s: Annotated[
        float,
        _doc(
            "seconds for a controller to open a session before the next is tried; twice as long after each time that "
            "one did not, up to --answer-timeout-s, so that one that is called by a whole fleet gets to answer"
        ),
    ] = 1.0
    answer_timeout_s: Annotated[
        float,
        _doc(
            "seconds without an answer to a beat after which a controller counts as gone and the next is tried; "
            "longer than the pauses that it may take (5 s are borne by the defaults of its policy)"
        ),
    ] = 6.0
    retry_max_busy_s: Annotated[
        float, _doc("longest pause between attempts at an absent controller while a job is on the node, seconds")
    ] = 0.2
    retry_max_idle_s: Annotated[
        float, _doc("the same without a job, seconds; spares a returning controller the whole idle fleet at once")
    ] = 1.0
    max_connections: Annotated[
        int, _doc("launchers and ranks that may be connected at once (eight GPUs need nine for each job)")
    ] = 512

    @property
    def agent_socket(self) -> Path:
        return self.run_dir / "agent.sock"

    @property
    def vault_socket(self) -> Path:
        return self.run_dir / "vault.sock"

    @property
    def kernel_log_path(self) -> str:
        """The kernel log to read, or "" for none."""
        return self.kernel_log or ("" if self.virtual else "/dev/kmsg")

    @property
    def ready_file(self) -> Path:
        return self.run_dir / "agent.json"

    @property
    def resolved_segment_dir(self) -> Path:
        """The vault's directory, with the default filled in."""
        return self.segment_dir or Path(f"/dev/shm/everstep-{os.getuid()}") / self.node  # noqa: S108 - made 0700

    def validate(self) -> AgentSettings:
        """Return these settings. Raises ConfigurationError, with the correction, for a contradiction."""
        check_settings(self, tuple(PRESETS))
        return self


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "lab": MappingProxyType({}),
        "production": MappingProxyType({"log_format": "json", "metrics_listen": "127.0.0.1:7703"}),
    }
)
"""``lab`` runs on one machine with free ports; ``production`` fixes Prometheus' port and logs JSON."""

_OPTIONS = {"controllers": "--controller"}


def tls_context(settings: AgentSettings) -> ssl.SSLContext | None:
    """Return the TLS context for https controllers, or None if all URLs are http.

    Trusts ``ca_file`` or the system's authorities, and presents the client certificate if one is set. Raises
    ConfigurationError if the certificate cannot be used.
    """
    if not any(url.startswith("https://") for url in settings.controllers):
        return None
    context = ssl.create_default_context(cafile=str(settings.ca_file) if settings.ca_file else None)
    if settings.client_certificate is not None:
        try:
            context.load_cert_chain(settings.client_certificate, settings.client_key)
        except OSError as error:
            raise ConfigurationError(f"the client certificate cannot be used: {error}") from error
    return context


def read_token(path: Path | None, description: str) -> str:
    """Return the token in a file, or "" without a file. Raises ConfigurationError if the file holds none."""
    if path is None:
        return ""
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"cannot read the {description} file {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        token = ""
    raise_if(not looks_like_token(token), f"{path} does not hold a {description}: expected one line")
    return token


def from_command_line(
    arguments: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> AgentSettings:
    """Return the validated settings of a command line.

    Raises ConfigurationError; argparse exits the process on unknown options.
    """
    given = {k: v for k, v in vars(_parser().parse_args(arguments)).items() if v is not None}
    environment = _from_environment(os.environ if environ is None else environ)
    chosen = {**environment, **given}
    preset = PRESETS.get(str(chosen.get("preset", "lab")), {})
    chosen = {**preset, **chosen}
    chosen.setdefault("node", socket.gethostname().partition(".")[0])
    chosen.setdefault("controllers", ())
    chosen.setdefault("run_dir", _default_run_dir(chosen["node"]))
    return AgentSettings(**chosen).validate()


def _default_run_dir(node: str) -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR") or ("/run" if os.getuid() == 0 else f"/tmp/everstep-{os.getuid()}")  # noqa: S108 - made 0700
    return Path(base) / "everstep" / node


def _field_types() -> dict[str, tuple[Any, str]]:
    """Return each field's plain type and description."""
    fields = {}
    for name, hint in typing.get_type_hints(AgentSettings, include_extras=True).items():
        kind, meta = typing.get_args(hint)[:2]
        optional = type(None) in typing.get_args(kind)
        plain = next(a for a in typing.get_args(kind) if a is not type(None)) if optional else kind
        fields[name] = (plain, str(meta.description))
    return fields


def _convert(name: str, kind: Any, text: str) -> Any:
    try:
        if kind is bool:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
        if typing.get_origin(kind) is tuple:
            return tuple(part.strip().rstrip("/") for part in text.split(",") if part.strip())
        return kind(text)
    except (ValueError, KeyError):
        raise ConfigurationError(f"{name}={text!r} is not a {getattr(kind, '__name__', 'list')}") from None


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    names = {ENVIRONMENT_PREFIX + field.upper(): (field, kind) for field, (kind, _) in _field_types().items()}
    wrong = unknown_variables(environ, ENVIRONMENT_PREFIX, names, others=(SOCKET_VARIABLE,))
    raise_if(bool(wrong), f"{', '.join(wrong)}: no such setting; known are {', '.join(sorted(names))}")
    return {names[n][0]: _convert(n, names[n][1], text) for n, text in environ.items() if n in names}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="everstep-agent",
        description="The per-node daemon: watches the GPUs, holds checkpoints, and speaks for the node's ranks.",
        epilog=f"Each option can also be set as {ENVIRONMENT_PREFIX}NAME in the environment.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    for name, (kind, description) in _field_types().items():
        option = _OPTIONS.get(name, "--" + name.replace("_", "-"))
        if kind is bool:
            parser.add_argument(option, dest=name, action="store_true", default=None, help=description)
        else:
            parser.add_argument(
                option, dest=name, type=_argument(name, kind), help=description.replace("%", "%%"), metavar="X"
            )
    return parser


def _argument(name: str, kind: Any) -> typing.Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return _convert(name, kind, text)
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


# Checks for contradictory settings.

MAX_SOCKET_PATH_BYTES = 107
"""Maximum length in bytes of a unix socket's path on Linux (``sun_path`` less its terminating zero)."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check_settings(settings: AgentSettings, presets: Collection[str]) -> None:
    """Raise ConfigurationError for the first contradiction."""
    _check_names(settings, presets)
    _check_addresses(settings)
    _check_times(settings)
    _check_sizes(settings)


def parse_listen_address(text: str) -> tuple[str, int]:
    """Split ``host:port`` (port 0 allowed). Raises ConfigurationError if ``text`` has another form."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(f"{text!r} is not an address to listen on: expected host:port, such as 127.0.0.1:0")
    return host.strip("[]"), int(port)


def parse_labels(settings: AgentSettings) -> dict[str, str]:
    """Return the node's labels. Raises ConfigurationError for one that is not a valid NAME=VALUE."""
    told = ",".join(settings.labels)
    parts = [label.partition("=") for label in settings.labels]
    raise_if(any(not equals for _, equals, _ in parts), f"--labels {told}: give NAME=VALUE")
    try:
        found: dict[str, str] = msgspec.convert({name: value for name, _, value in parts}, Labels)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"--labels {told}: {error}") from error
    return found


def raise_if(is_invalid: bool, message: str) -> None:
    """Raise ConfigurationError with ``message`` if ``is_invalid``."""
    if is_invalid:
        raise ConfigurationError(message)


def _check_names(s: AgentSettings, presets: Collection[str]) -> None:
    try:
        check_name(s.node, "node")
    except ValueError as error:
        raise ConfigurationError(f"{error}; give another with --node") from error
    longest = len(os.fsencode(s.agent_socket.absolute()))
    raise_if(
        longest > MAX_SOCKET_PATH_BYTES,
        f"{s.agent_socket} has {longest} bytes and a unix socket's path may have {MAX_SOCKET_PATH_BYTES}: "
        "give a shorter --run-dir",
    )
    parse_labels(s)
    raise_if(s.preset not in presets, f"--preset {s.preset!r} is not one of {', '.join(presets)}")
    raise_if(s.log_format not in ("text", "json"), f"--log-format {s.log_format!r} is neither text nor json")
    levels = ("debug", "info", "warning", "error")
    raise_if(s.log_level not in levels, f"--log-level {s.log_level!r} is not one of {', '.join(levels)}")
    raise_if(
        s.virtual_control is not None and not s.virtual,
        "--virtual-control steers virtual GPUs and there are none: give --virtual SCENARIO.toml too",
    )


def _check_addresses(s: AgentSettings) -> None:
    raise_if(not s.controllers, "an agent needs a controller: give --controller http://HOST:PORT")
    for url in s.controllers:
        parts = urlsplit(url)
        raise_if(
            parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"),
            f"{url!r} is not a controller's base URL: expected http://HOST:PORT or https://HOST:PORT",
        )
    raise_if(
        s.ca_file is not None and not any(url.startswith("https://") for url in s.controllers),
        "--ca-file is for https:// controllers and none is given",
    )
    raise_if(
        s.join_token_file is not None and s.token_file is None,
        "--join-token-file needs --token-file: where the node's own token is to be kept",
    )
    raise_if(
        (s.client_certificate is None) != (s.client_key is None),
        "--client-certificate and --client-key belong together: give both or none",
    )
    host, _ = parse_listen_address(s.vault_listen)
    raise_if(
        host in ("", "0.0.0.0", "::"),  # noqa: S104 - the refusal of it
        f"--vault-listen {s.vault_listen} cannot be told to other nodes: name the address they reach this node by",
    )
    remote = any(urlsplit(url).hostname not in LOOPBACK for url in s.controllers)
    raise_if(
        s.preset == "production" and remote and host in LOOPBACK,
        f"--vault-listen {s.vault_listen} is out of other nodes' reach, and they hold this node's replicas: "
        "give the address they reach this node by, such as --vault-listen 10.0.0.7:7702",
    )
    if s.metrics_listen:
        parse_listen_address(s.metrics_listen)
        raise_if(
            s.metrics_token_file is None and s.token_file is None,
            "/metrics needs a token: give --token-file or --metrics-token-file, or --metrics-listen '' to turn it off",
        )


def _check_times(s: AgentSettings) -> None:
    for name in _POSITIVE_SECONDS:
        raise_if(getattr(s, name) <= 0, f"--{name.replace('_', '-')} must be more than 0 s")
    raise_if(
        s.stopped_after_s < 2 * s.tick_interval_s,
        f"--stopped-after-s {s.stopped_after_s} is under two ticks of {s.tick_interval_s} s: one late tick "
        "would be an alarm",
    )
    raise_if(
        s.unresponsive_after_s < s.stopped_after_s,
        f"--unresponsive-after-s {s.unresponsive_after_s} is under --stopped-after-s {s.stopped_after_s}, "
        "so a stopped process would be found later than a busy one",
    )
    raise_if(
        s.retry_max_idle_s < s.retry_max_busy_s,
        f"--retry-max-idle-s {s.retry_max_idle_s} is under --retry-max-busy-s {s.retry_max_busy_s}: an idle "
        "node may wait longer",
    )
    raise_if(
        s.answer_timeout_s < s.connect_timeout_s,
        f"--answer-timeout-s {s.answer_timeout_s} is under --connect-timeout-s {s.connect_timeout_s}: "
        "a controller has to open a session before it can answer in it",
    )


def _check_sizes(s: AgentSettings) -> None:
    raise_if(
        s.vault_survives_kill_of not in ("", "agent", "parent"),
        f"--vault-survives-kill-of {s.vault_survives_kill_of}: agent or parent",
    )
    raise_if(
        bool(s.vault_survives_kill_of) and not s.die_with_parent,
        "--vault-survives-kill-of belongs to --die-with-parent; without that a vault is left anyway, unless "
        "--stop-vault-on-exit is given",
    )
    limit = s.vault_memory_limit_bytes
    raise_if(
        limit is not None and limit <= 0,
        f"--vault-memory-limit-bytes {limit} leaves no room for any slot: give more, or leave it out",
    )
    rate = s.vault_send_bytes_per_s
    raise_if(
        rate is not None and rate < MIN_SEND_BYTES_PER_S,
        f"--vault-send-bytes-per-s {rate} is under 4 MiB: a peer would give a transfer up that stands still",
    )
    raise_if(s.spool_max_reports < 64, "--spool-max-reports under 64 loses reports in the first second of an absence")
    raise_if(
        s.spool_max_bytes < 1 << 20, f"--spool-max-bytes {s.spool_max_bytes} is under 1 MiB, the size of one request"
    )
    raise_if(s.max_connections < 2, "--max-connections must leave room for a launcher and a rank")


_POSITIVE_SECONDS = (
    "vault_linger_s",
    "tick_interval_s",
    "stopped_after_s",
    "unresponsive_after_s",
    "exit_grace_s",
    "report_batch_window_s",
    "connect_timeout_s",
    "answer_timeout_s",
    "retry_max_busy_s",
    "retry_max_idle_s",
)
