"""Settings of the agent, ``everstep-agent``."""

from __future__ import annotations

import itertools
import os
import re
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from everstep.bearer_tokens import looks_like_token
from everstep.errors import DECODE_ERRORS, ConfigurationError
from everstep.host.agent_places import default_run_dir, local_node_name
from everstep.host.state_directory import preferred_state_directory
from everstep.ids import check_name
from everstep.settings import Program, SettingsPart, flat_values, with_values
from everstep.wire.v1.agent import Domain, Labels
from everstep.wire.v1.node_status import NODE_SOCKET, JoinFleet
from everstep.wire.v1.transfer import MIN_SEND_BYTES_PER_S

# The parts of the settings. Their names occur in no flag, variable or key of a file.


class Credentials(SettingsPart, frozen=True, kw_only=True):
    """How the agent and the controllers prove who they are."""

    token_file: Path | None = None
    """File with this node's agent token, from ``everstep token issue`` or ``everstep-controller token``. With
    ``join_token_file``, the agent writes it."""
    join_token_file: Path | None = None
    """File with a join token, which enrols this node if the token file is missing or its token is refused."""
    client_certificate: Path | None = None
    """PEM file of a client certificate named ``everstep://agent/NODE``, which replaces the token at https
    controllers."""
    client_key: Path | None = None
    """PEM file of the client certificate's private key."""
    ca_file: Path | None = None
    """PEM file of the authority that signed the certificates of https controllers. Default: the system's
    authorities."""

    @property
    def has_to_enrol(self) -> bool:
        """Whether the agent has no token yet, and gets one by the join token."""
        return self.join_token_file is not None and self.token_file is not None and not self.token_file.exists()


class VaultResources(SettingsPart, frozen=True, kw_only=True):
    """What the vault may use of the node and of the network."""

    segment_dir: Path | None = None
    """Directory on a memory file system where the vault keeps its slots. Default: ``/dev/shm/everstep-UID/NODE``."""
    vault_listen: str = "127.0.0.1:0"
    """``host:port`` for the vaults of other nodes. Port 0 takes any free port."""
    vault_memory_limit_bytes: int | None = None
    """Maximum bytes of all slots on this node. A rank whose slots do not fit trains without checkpoints. Default: what
    the file system and the machine have free."""
    vault_send_bytes_per_s: float | None = None
    """Maximum network rate of all copies of slots to other nodes together. Default: no limit."""

    def problems(self) -> Iterator[str]:
        """Yield each contradiction, with the correction."""
        limit, rate = self.vault_memory_limit_bytes, self.vault_send_bytes_per_s
        if limit is not None and limit <= 0:
            yield (
                f"--vault-memory-limit-bytes {limit} leaves no room for any slot: give a positive number, or omit the "
                "limit"
            )
        if rate is not None and rate < MIN_SEND_BYTES_PER_S:
            yield f"--vault-send-bytes-per-s {rate} must be at least 4 MiB/s: peers abort slower transfers"


class MetricsSettings(SettingsPart, frozen=True, kw_only=True):
    """Where the metrics are served, to which scrapers, and under which names."""

    metrics_listen: str = "127.0.0.1:0"
    """``host:port`` of ``/metrics``. Port 0 takes any free port; an empty text turns the metrics off."""
    metrics_token_file: Path | None = None
    """File with the bearer token that scrapers must send. Default: the agent's own token file. A standalone agent on a
    loopback address needs none."""
    dcgm_names: bool = False
    """Export GPU metrics also under the names of dcgm-exporter, for dashboards that use them."""


class HardwareSettings(SettingsPart, frozen=True, kw_only=True):
    """Where the sensors find the hardware, or what they simulate."""

    virtual: str = ""
    """Simulate GPUs: ``default``, ``default:N`` for N GPUs, or a scenario file. Default: the machine's own GPUs."""
    virtual_control: Path | None = None
    """File that changes the simulated GPUs while the agent runs."""
    kernel_log: str = ""
    """Kernel log to read XIDs from: ``/dev/kmsg``, a file of the kernel's lines alone, or a pipe. ``/dev/null``: none.
    Default: ``/dev/kmsg``; none with simulated GPUs."""
    sysfs_root: Path = Path("/sys")
    """Where the sensors find sysfs. An agent in a container with a network of its own needs the host's, mounted at
    another place, to see the host's network ports."""
    expected_gpus: int | None = None
    """Number of GPUs that this node must have. Default: as many as its PCI bus shows."""

    @property
    def kernel_log_path(self) -> str:
        """The kernel log to read, or "" for none."""
        return self.kernel_log or ("" if self.virtual else "/dev/kmsg")

    def problems(self) -> Iterator[str]:
        """Yield each contradiction, with the correction."""
        if self.virtual_control is not None and not self.virtual:
            yield "--virtual-control changes simulated GPUs, and there are none: give --virtual SCENARIO.toml too"


class BundleSettings(SettingsPart, frozen=True, kw_only=True):
    """Where bundles of logs are kept, and what is in them."""

    bundle_dir: Path | None = None
    """Directory for bundles of logs, which are kept before a node is reset, rebooted or drained: the newest 8, at most
    256 MiB. Default: ``bundles`` in ``state_dir``."""
    bundle_bug_report: bool = False
    """Put the report of ``nvidia-bug-report.sh`` into bundles of logs. It needs root, takes about a minute, and is
    stopped after five."""


class WatchSettings(SettingsPart, frozen=True, kw_only=True):
    """What the sensors watch, and by which rules."""

    site_policy: tuple[str, ...] = ()
    """TOML files, separated by commas, laid over the shipped rules on findings. The agent reads them again within ten
    seconds of a change."""
    watch_paths: tuple[str, ...] = ("/",)
    """Directories, separated by commas, whose file systems the agent watches for free space and inodes. Network file
    systems and ``/dev/shm`` are always watched."""
    watch_units: tuple[str, ...] = ()
    """Units of systemd, separated by commas, such as ``slurmd.service``. One that fails or restarts often is a warning,
    and one that is stopped is shown."""

    def problems(self) -> Iterator[str]:
        """Yield each contradiction, with the correction."""
        for path in self.watch_paths:
            if not path.startswith("/"):
                yield f"--watch-paths {path} is no absolute path: give one such as /scratch"
        for unit in self.watch_units:
            if not re.fullmatch(r"\w[\w:.@\\-]*", unit, re.ASCII):
                yield f"--watch-units {unit} is no name of a unit: give one such as slurmd.service"


class NodePlacement(SettingsPart, frozen=True, kw_only=True):
    """Where the node is, and how people find it."""

    rack: str = ""
    """Failure domain: the rack of this node. Nodes with the same value can be lost together."""
    switch: str = ""
    """Failure domain: the leaf switch of this node. Nodes with the same value can be lost together."""
    power_domain: str = ""
    """Failure domain: the power supply of this node. Nodes with the same value can be lost together."""
    labels: tuple[str, ...] = ()
    """Labels by which people find the node: ``NAME=VALUE``, separated by commas."""

    @property
    def domain(self) -> Domain:
        """The failure domains, as the agent registers them."""
        return Domain(rack=self.rack, switch=self.switch, power=self.power_domain)

    def parse_labels(self) -> dict[str, str]:
        """Return the node's labels. Raises ConfigurationError for one that is not a valid NAME=VALUE."""
        given = ",".join(self.labels)
        if not all("=" in label for label in self.labels):
            raise ConfigurationError(f"--labels {given}: expected NAME=VALUE, separated by commas")
        try:
            found: dict[str, str] = msgspec.convert(dict(label.split("=", 1) for label in self.labels), Labels)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"--labels {given}: {error}") from error
        return found


class NoticeSettings(SettingsPart, frozen=True, kw_only=True):
    """Notices that the node will be reclaimed or maintained."""

    notices: Literal["", "auto", "aws", "gcp", "azure"] = ""
    """Cloud whose metadata service is read for notices of preemption and maintenance; ``auto``: by the machine's DMI
    tables. Default: none is contacted. The file ``notice.json`` in the run directory is always read."""
    notices_url: str = ""
    """Base URL of the metadata service, where it is not at the cloud's own address. Default: ``http://169.254.169.254``."""
    notice_poll_s: float = 5.0
    """Seconds between reads of the metadata service and the notice file. AWS advises 5 s, Azure 1 s."""
    notice_lead_s: float = 600.0
    """Seconds before an event scheduled ahead at which the node is drained. Slow steps need a larger value."""

    def problems(self) -> Iterator[str]:
        """Yield each contradiction, with the correction."""
        parts = urlsplit(self.notices_url)
        if self.notices_url and (parts.scheme != "http" or not parts.hostname):
            yield f"--notices-url {self.notices_url} is no base URL of a metadata service: expected http://HOST:PORT"


class ShutdownSettings(SettingsPart, frozen=True, kw_only=True):
    """When the agent ends, and what its vault does then."""

    die_with_parent: bool = False
    """Shut down, together with the vault, when the process that started the agent ends."""
    stop_vault_on_exit: bool = False
    """Stop the vault and delete its slots when the agent stops. Otherwise the next agent continues to use the vault."""
    vault_survives_kill_of: Literal["", "agent", "parent"] = ""
    """With ``die_with_parent``, keep the vault for the next agent if this process is killed: ``agent`` for the agent
    only, ``parent`` for the agent or the process that started it."""
    vault_linger_s: float = 3600.0
    """Seconds after which a vault exits and frees its memory if neither an agent nor a rank is connected. A larger
    value allows longer upgrades of the agent; a smaller value frees abandoned memory sooner."""

    def problems(self) -> Iterator[str]:
        """Yield each contradiction, with the correction."""
        if self.vault_survives_kill_of and not self.die_with_parent:
            yield (
                "--vault-survives-kill-of applies with --die-with-parent only; without --die-with-parent the vault "
                "always survives, unless --stop-vault-on-exit is given"
            )


class LogSettings(SettingsPart, frozen=True, kw_only=True):
    """The log lines of the agent and its vault."""

    log_format: Literal["text", "json"] = "text"
    """Format of log lines: ``text``, or ``json`` with one object per line."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of log lines."""


class RankWatchSettings(SettingsPart, frozen=True, kw_only=True):
    """When a rank is reported as stopped, unresponsive or lost."""

    tick_interval_s: float = 0.2
    """Seconds between a rank's ticks. A smaller value finds a stopped rank sooner and wakes each rank more often."""
    stopped_after_s: float = 0.5
    """Seconds without a tick after which a rank is reported if the kernel shows its process as stopped."""
    unresponsive_after_s: float = 1.0
    """Seconds without a tick after which any rank is reported, with what its process does. One that works, as in a long
    call that holds Python's global lock, is not replaced."""
    exit_grace_s: float = 0.003
    """Seconds that the report of a lost rank waits for the exit status from its launcher."""

    def problems(self) -> Iterator[str]:
        """Yield each contradiction, with the correction."""
        if self.stopped_after_s < 2 * self.tick_interval_s:
            yield (
                f"--stopped-after-s {self.stopped_after_s} must be at least two ticks ({self.tick_interval_s} s each): "
                "otherwise one late tick raises an alarm"
            )
        if self.unresponsive_after_s < self.stopped_after_s:
            yield (
                f"--unresponsive-after-s {self.unresponsive_after_s} must be at least --stopped-after-s "
                f"{self.stopped_after_s}: otherwise a stopped process is found later than a busy one"
            )


class ReportSettings(SettingsPart, frozen=True, kw_only=True):
    """Reports to the controller, and those that wait for one."""

    report_batch_window_s: float = 0.02
    """Seconds for which checkpoint reports are collected into one request. Urgent reports never wait."""
    spool_max_reports: int = 8192
    """Maximum unsent reports kept while no controller answers. The oldest checkpoint reports are dropped first."""
    spool_max_bytes: int = 8 << 20
    """Maximum bytes of unsent reports, on disk and in memory."""

    def problems(self) -> Iterator[str]:
        """Yield each contradiction, with the correction."""
        if self.spool_max_reports < 64:
            yield "--spool-max-reports must be at least 64, the reports of one second"
        if self.spool_max_bytes < 1 << 20:
            yield f"--spool-max-bytes {self.spool_max_bytes} must be at least 1 MiB, one request"


class ConnectionSettings(SettingsPart, frozen=True, kw_only=True):
    """The session with a controller, and the way to the next one."""

    connect_timeout_s: float = 1.0
    """Seconds for a controller to open a session before the agent tries the next. The time doubles after each failure,
    up to ``answer_timeout_s``, so that a controller that the whole fleet contacts gets to answer."""
    answer_timeout_s: float = 6.0
    """Seconds without an answer to a heartbeat after which the agent tries the next controller. The value must exceed
    the pauses of a controller; its default policy tolerates 5 s."""
    retry_max_busy_s: float = 0.2
    """Longest pause, in seconds, between attempts to reach a controller while a job is on the node."""
    retry_max_idle_s: float = 1.0
    """Longest pause, in seconds, without a job. It keeps an idle fleet from contacting a returning controller all at
    once."""

    def problems(self) -> Iterator[str]:
        """Yield each contradiction, with the correction."""
        if self.retry_max_idle_s < self.retry_max_busy_s:
            yield (
                f"--retry-max-idle-s {self.retry_max_idle_s} must be at least --retry-max-busy-s "
                f"{self.retry_max_busy_s}: an idle node is less urgent"
            )
        if self.answer_timeout_s < self.connect_timeout_s:
            yield (
                f"--answer-timeout-s {self.answer_timeout_s} must be at least --connect-timeout-s "
                f"{self.connect_timeout_s}: a controller opens a session before it answers heartbeats"
            )


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one agent, in parts. ``from_values`` and ``with_values`` take them by name, without the parts."""

    node: str
    """This node's name in the fleet. Default: the host name up to the first dot."""
    controllers: tuple[str, ...] = msgspec.field(name="controller", default=())
    """Base URLs of the controllers, separated by commas. If one does not answer, the agent tries the next."""
    standalone: bool = False
    """Run without a controller: watch the node, serve ``/metrics`` and ``everstep node local``. No job can use the
    agent until ``everstep node join`` connects it to a controller."""
    run_dir: Path
    """Directory for sockets and the ready file, made with mode 0700. Default: ``$XDG_RUNTIME_DIR/everstep/NODE``."""
    state_dir: Path | None = None
    """Directory for what must outlive a reboot, such as the node's profile. Made with mode 0700. Default:
    ``$STATE_DIRECTORY``, ``/var/lib/everstep-agent`` for root, ``~/.local/state/everstep/agent/NODE`` for others,
    and ``run_dir`` with simulated GPUs."""
    credentials: Credentials = Credentials()
    vault: VaultResources = VaultResources()
    metrics: MetricsSettings = MetricsSettings()
    hardware: HardwareSettings = HardwareSettings()
    bundles: BundleSettings = BundleSettings()
    watch: WatchSettings = WatchSettings()
    placement: NodePlacement = NodePlacement()
    notice_sources: NoticeSettings = NoticeSettings()
    shutdown: ShutdownSettings = ShutdownSettings()
    preset: Literal["lab", "production"] = "lab"
    """Preset that supplies defaults: ``lab`` for one machine with free ports, ``production`` for a fleet."""
    logs: LogSettings = LogSettings()
    ranks: RankWatchSettings = RankWatchSettings()
    reports: ReportSettings = ReportSettings()
    connection: ConnectionSettings = ConnectionSettings()
    max_connections: int = 512
    """Maximum connected launchers and ranks. Eight GPUs need nine connections per job."""

    @classmethod
    def from_values(cls, *, node: str, run_dir: Path, **values: Any) -> AgentSettings:
        """Return settings with these values by name. Raises TypeError for a name that no part has."""
        return cls(node=node, run_dir=run_dir).with_values(**values)

    def with_values(self, **values: Any) -> AgentSettings:
        """Return these settings with other values, by name."""
        return with_values(self, values)

    @property
    def agent_socket(self) -> Path:
        return self.run_dir / "agent.sock"

    @property
    def node_socket(self) -> Path:
        return self.run_dir / NODE_SOCKET

    @property
    def vault_socket(self) -> Path:
        return self.run_dir / "vault.sock"

    @property
    def resolved_state_dir(self) -> Path:
        """The directory for what must outlive a reboot, with the default filled in."""
        return self.state_dir or self.run_dir

    @property
    def ready_file(self) -> Path:
        return self.run_dir / "agent.json"

    @property
    def resolved_bundle_dir(self) -> Path:
        return self.bundles.bundle_dir or self.resolved_state_dir / "bundles"

    @property
    def resolved_segment_dir(self) -> Path:
        """The vault's directory, with the default filled in."""
        return self.vault.segment_dir or Path(f"/dev/shm/everstep-{os.getuid()}") / self.node  # noqa: S108 - made 0700

    def validate(self) -> AgentSettings:
        """Return these settings. Raises ConfigurationError, with the correction, for a contradiction."""
        for problem in itertools.chain(_name_problems(self), _address_problems(self), _other_problems(self)):
            raise ConfigurationError(problem)
        return self


PROGRAM = Program("everstep-agent", AgentSettings)

PRESETS = {"lab": {}, "production": {"log_format": "json", "metrics_listen": "127.0.0.1:7703"}}
"""Defaults that each preset changes. ``production`` fixes the port of ``/metrics`` and logs JSON."""


def load_settings(flags: Mapping[str, Any], environ: Mapping[str, str]) -> AgentSettings:
    """Return the validated settings from flags, environment variables, the settings file and the preset. Raises
    ConfigurationError: a value is invalid, or settings contradict each other."""
    given = PROGRAM.read(flags, environ)
    values = {**PRESETS[given.get("preset", "lab")], **given}
    node = values.setdefault("node", local_node_name())
    values.setdefault("run_dir", default_run_dir(node, environ))
    values.setdefault("state_dir", _default_state_dir(values, environ))
    values.setdefault("bundle_dir", Path(values["state_dir"]) / "bundles")
    values["controllers"] = tuple(url.rstrip("/") for url in values.get("controllers", ()))
    settings = AgentSettings.from_values(**values)
    if settings.standalone and not settings.controllers:
        settings = _with_joined_fleet(settings)
    return settings.validate()


def _default_state_dir(values: Mapping[str, Any], environ: Mapping[str, str]) -> Path:
    """Return a directory that survives a reboot; the state of private agents and of simulated GPUs need not."""
    if values.get("virtual") or values.get("die_with_parent"):
        return Path(str(values["run_dir"]))
    if state := environ.get("STATE_DIRECTORY"):
        return Path(state.partition(":")[0])
    if os.geteuid() == 0:
        return Path("/var/lib/everstep-agent")
    return preferred_state_directory(environ) / "agent" / str(values["node"])


# The fleet that a standalone agent has joined, kept in the run directory for its next start.

JOINED_FILE = "joined.json"
"""File in the run directory with the controllers that a standalone agent was told to join."""


def join_settings(settings: AgentSettings, request: JoinFleet) -> AgentSettings:
    """Return the settings of a standalone agent that joins controllers. Raises ConfigurationError."""
    paths = ("token_file", "join_token_file", "ca_file", "client_certificate", "client_key")
    given: dict[str, Any] = {name: Path(text) for name in paths if (text := getattr(request, name))}
    given["controllers"] = tuple(url.rstrip("/") for url in request.controllers)
    return settings.with_values(**given).validate()


def _with_joined_fleet(settings: AgentSettings) -> AgentSettings:
    """Return the settings with the controllers that an earlier run has joined, if there are any."""
    file = settings.run_dir / JOINED_FILE
    try:
        return join_settings(settings, msgspec.json.decode(file.read_bytes(), type=JoinFleet))
    except FileNotFoundError:
        return settings
    except (OSError, *DECODE_ERRORS) as error:
        raise ConfigurationError(f"{file} cannot be used: {error}; remove it to run without a controller") from error


def state_folders(given: Mapping[str, Any], environ: Mapping[str, str]) -> list[Path]:
    """Return the directories in which an agent may keep its state, by the settings that are given to a command."""
    if "state_dir" in given:
        return [Path(given["state_dir"])]
    node = given.get("node") or local_node_name()
    run_dir = Path(given.get("run_dir") or default_run_dir(node, environ))
    return [run_dir, _default_state_dir({"node": node, "run_dir": run_dir}, environ)]


def tls_context(settings: AgentSettings) -> ssl.SSLContext | None:
    """Return the TLS context for https controllers, or None if all URLs are http.

    Trusts ``ca_file`` or the system's authorities, and presents the client certificate if one is set. Raises
    ConfigurationError if the certificate cannot be used.
    """
    if not any(url.startswith("https://") for url in settings.controllers):
        return None
    files = settings.credentials
    context = ssl.create_default_context(cafile=str(files.ca_file) if files.ca_file else None)
    if files.client_certificate is not None:
        try:
            context.load_cert_chain(files.client_certificate, files.client_key)
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
    if not looks_like_token(token):
        raise ConfigurationError(f"{path} does not hold a {description}: expected one line")
    return token


# Checks for contradictory settings.

MAX_SOCKET_PATH_BYTES = 107
"""Maximum length in bytes of a unix socket's path on Linux (``sun_path`` less its terminating zero)."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def parse_listen_address(text: str) -> tuple[str, int]:
    """Split ``host:port`` (port 0 allowed). Raises ConfigurationError if ``text`` has another form."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(f"{text!r} is not an address to listen on: expected host:port, such as 127.0.0.1:0")
    return host.strip("[]"), int(port)


def _name_problems(s: AgentSettings) -> Iterator[str]:
    try:
        check_name(s.node, "node")
    except ValueError as error:
        yield f"{error}; give another with --node"
    longest = len(os.fsencode(s.agent_socket.absolute()))
    if longest > MAX_SOCKET_PATH_BYTES:
        yield (
            f"{s.agent_socket} has {longest} bytes and a unix socket's path may have {MAX_SOCKET_PATH_BYTES}: give a "
            "shorter --run-dir"
        )
    s.placement.parse_labels()
    yield from s.hardware.problems()


def _address_problems(s: AgentSettings) -> Iterator[str]:
    files = s.credentials
    if not s.controllers and not s.standalone:
        yield "an agent needs a controller: give --controller http://HOST:PORT, or --standalone to run without one"
    for url in s.controllers:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            yield f"{url!r} is not a controller's base URL: expected http://HOST:PORT or https://HOST:PORT"
    yield from s.notice_sources.problems()
    if files.ca_file is not None and s.controllers and not any(url.startswith("https://") for url in s.controllers):
        yield "--ca-file applies to https:// controllers only: give an https:// URL with --controller"
    if files.join_token_file is not None and files.token_file is None:
        yield "--join-token-file needs --token-file, the file where the agent stores this node's own token"
    if (files.client_certificate is None) != (files.client_key is None):
        yield "give --client-certificate and --client-key together, or neither"
    host, _ = parse_listen_address(s.vault.vault_listen)
    if host in ("", "0.0.0.0", "::"):  # noqa: S104 - the refusal of it
        why = "is no address that other nodes can connect to"
        yield f"--vault-listen {s.vault.vault_listen} {why}: give this node's own address"
    remote = any(urlsplit(url).hostname not in LOOPBACK for url in s.controllers)
    if s.preset == "production" and remote and host in LOOPBACK:
        yield (
            f"other nodes hold replicas for this node and cannot reach --vault-listen {s.vault.vault_listen}: "
            "give this node's own address, such as --vault-listen 10.0.0.7:7702"
        )
    if s.metrics.metrics_listen:
        metrics_host, _ = parse_listen_address(s.metrics.metrics_listen)
        is_open = s.standalone and metrics_host in LOOPBACK
        if s.metrics.metrics_token_file is None and files.token_file is None and not is_open:
            fix = "give --token-file or --metrics-token-file, or --metrics-listen '' to turn it off"
            yield f"/metrics needs a token: {fix}"


def _other_problems(s: AgentSettings) -> Iterator[str]:
    yield from s.watch.problems()
    for name, value in flat_values(s).items():
        if name.endswith("_s") and name != "vault_send_bytes_per_s" and value <= 0:
            yield f"--{name.replace('_', '-')} must be more than 0 s"
    yield from s.ranks.problems()
    yield from s.connection.problems()
    yield from s.shutdown.problems()
    yield from s.vault.problems()
    yield from s.reports.problems()
    if s.max_connections < 2:
        yield "--max-connections must be at least 2: a launcher and a rank"
