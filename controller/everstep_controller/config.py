"""The controller's settings: explicit arguments first, then a settings file, the environment, a preset."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import msgspec

from everstep.bearer_tokens import check_secret, split_secrets
from everstep.errors import ConfigurationError
from everstep.ids import split_address
from everstep.settings import unknown_variables
from everstep.vocabulary import Mode
from everstep_controller.core.policy import CorePolicy
from everstep_controller.rulebook import with_rules

ENVIRONMENT_PREFIX = "EVERSTEP_CONTROLLER_"
POLICY_PREFIX = ENVIRONMENT_PREFIX + "POLICY_"
SECRETS_COMMAND = ENVIRONMENT_PREFIX + "COMMAND"
"""By which deploy/make-secrets.sh is told where this program is."""
PRESETS = ("production", "lab")


def _address(place: str) -> tuple[str, int]:
    """Host and port; port 0 is any. Raises ValueError."""
    host, _, port = place.rpartition(":")
    return (host.strip("[]"), 0) if port == "0" and host else split_address(place)


def is_http_url(url: str) -> bool:
    """Whether something can be sent to ``url``: http or https, a host, and no port that there is none of."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one controller runs. The decisions' own knobs are in ``policy``."""

    listen: str = "127.0.0.1:7700"
    """``host:port`` to serve on. Loopback by default: to be reached from elsewhere is a decision, and wants TLS.
    Port 0 takes any free port; the ready file says which."""
    operators_listen: str = ""
    """``host:port`` of a second door to the same routes, for people, dashboards and health checks: whoever comes by it
    does not stand in line with agents. At the first a whole fleet that comes back at once is let in before them, 0.2 ms
    for each. Empty: none."""
    database: str = "sqlite:///everstep-controller.db"
    """Where everything is kept: ``sqlite:///PATH`` for one machine, ``postgresql://...`` for a fleet."""
    database_password_file: str = ""
    """A file with PostgreSQL's password, readable by its owner only, so that it stands in no command line. Empty: the
    password is in ``database``, or none is asked for."""
    secret_file: str = ""
    """A file with the fleet's secret, readable by its owner only. Whoever holds it can mint any token. It may hold
    several, one a line: the first mints, all verify; it is read again when it changes."""
    ready_file: str = ""
    """Written when requests are served: JSON with ``pid`` and ``address``. Empty: none."""
    migrate: bool = True
    """Bring the database's schema up to date at start. Off: an old schema is refused, for sites that migrate apart."""
    check_database: bool = True
    """Read a SQLite file once at start and refuse a damaged one: some seconds a GiB. Off: damage shows when it is
    met."""
    die_with_parent: bool = False
    """End when the process that started this one ends: for tests, demonstrations and private controllers."""
    name: str = ""
    """How the controller calls itself, to agents and in the lease; no two may share it. Empty: as it is advertised."""
    tls_certificate: str = ""
    """PEM file of the server's certificate chain; with ``tls_key`` all routes are HTTPS."""
    tls_key: str = ""
    """PEM file of the certificate's key."""
    tls_client_ca: str = ""
    """PEM file of the authorities that sign client certificates. A certificate of theirs that names
    ``everstep://agent/NODE``, ``everstep://operator/NAME`` or ``everstep://viewer/NAME`` stands for a token; none is
    asked of those who show a token. Empty: certificates count for nothing."""
    agent_requests_per_s: float = 400.0
    """Requests, or frames of a session, that one agent may send a second. It needs two, and in a storm of 200 reports a
    second one for each; an agent gone wild at this rate costs a few per cent of a core."""
    agent_reports_per_s: float = 1000.0
    """Reports that one agent may send a second, at up to 1024 a request: five times a storm of its kernel log. What is
    more waits in the agent's spool, and none is lost."""
    requests_per_s: float = 200.0
    """The same for one operator, viewer or job's trainers. A dashboard asks ten times a second, a script fifty."""
    failed_authentications_per_s: float = 20.0
    """Requests with a wrong token that one address may send a second and still be told why. A fleet behind one address
    whose tokens have expired tries about one tenth of its nodes a second. Right tokens pass whatever others do."""
    request_burst_s: float = 5.0
    """Seconds' worth of each of these limits that may come at once: a restart brings everybody at the same moment."""
    max_concurrent_requests: int = 16
    """Requests of one operator, viewer or job's trainers that may wait, be worked on, or be sent at a time; more are
    answered 429. A dashboard has one or two; displays that share a token share these."""
    max_unsent_answer_bytes: int = 32 << 20
    """Bytes of answers to one of them that may wait until it has taken them; an answer that comes on top is 429. A
    thousand nodes are some 200 KB."""
    answer_loop_share: float = 0.5
    """Of the event loop's time, what answers to all of them may take while agents' beats and reports wait for it too:
    after each slice of an answer the loop is theirs for as long as that took. Larger answers people sooner while
    somebody reads much, and agents later."""
    heartbeat_interval_s: float = 1.0
    """Seconds between an agent's beats. Shorter finds silence sooner; 12,500 nodes at 1 s cost well under a core."""
    max_commit_batch: int = 256
    """Most requests that share one transaction: larger is more throughput under a storm, longer for its first."""
    queue_limit: int = 20_000
    """Requests that may wait for a transaction; beyond it agents are told to come again, and their spools hold."""
    commit_timeout_s: float = 2.0
    """Seconds a transaction may take before it is broken off and the database counts as away. Nothing is decided while
    one is written: longer makes a database that hangs delay a regroup, shorter takes a slow one for a dead one."""
    outage_buffer_bytes: int = 64 << 20
    """About how many bytes of decisions are kept in memory while the database is away; beyond it agents are told to
    come again, and their spools hold. A regroup of 1,000 ranks is some 100 KiB."""
    max_clock_ahead_days: float = 7.0
    """Days that the machine's clock may be ahead of the newest time in the database when the controller starts. Beyond
    that the clock is taken for wrong, and the start is refused: a clock that is months ahead would end credentials and
    delete history by age. A running controller notes the time every minute, so this is how long none may have run.
    0: any clock is believed."""
    trust_clock: bool = False
    """Believe the machine's clock at this start, however far it is from the newest time in the database. Where the
    database is ahead, because an earlier start had a clock that was, its times are set back. Meant for one start."""
    retention_days: float = 90.0
    """Days for which the audit log, verdicts, and findings and remedies that are over are kept. What a controller
    starts from is kept whatever its age, and so is each node's newest verdict."""
    retention_events: int = 2_000_000
    """Most lines of the audit log, about half a KiB each; the oldest go first, however young."""
    retention_orders: int = 200_000
    """Most lines of the audit log that people wrote (orders, and changes of credentials), in addition. They are kept
    whatever their age, and nothing that a node says pushes them out."""
    retention_rows: int = 200_000
    """Most verdicts, most findings and most remedies, a few KiB each; the oldest that may go at all go first, however
    young."""
    node_events_burst: int = 500
    """Lines of each kind that one node may put into the audit log at once. What is more is counted
    (``events.suppressed``), and decided all the same. A node that is repaired and tried for weeks writes dozens."""
    node_events_per_s: float = 0.1
    """How many more of each kind it may write a second. At this rate one kind of one node takes seven months to fill
    ``retention_events``; a whole storm is rather ``node_events_burst``."""
    retention_generations: int = 1000
    """Most rosters of each job that are kept, a few KiB each, up to some MiB in a fleet of 10,000 nodes."""
    lease_s: float = 5.0
    """Seconds for which a leader leads without renewing, over PostgreSQL: after so long a controller that was stopped,
    or cut off from the database, is followed by another. (One that died is followed at once.) Shorter follows sooner,
    and gives a leader less time to find a database that moved."""
    lease_renew_s: float = 1.0
    """Seconds between two renewals; at most a third of ``lease_s``, so that one may fail."""
    resign_after_s: float = 15.0
    """Seconds for which a leader goes on, over PostgreSQL, while it hears nearly none of its nodes and they knock at
    another controller; then it gives the lease up for that one. Twice as long after each time within an hour. Shorter
    moves sooner, and gives a fleet less time to find a leader that is new. 0: never."""
    advertise: str = ""
    """``host:port`` by which others reach this controller, told by the controllers that stand by. Empty: as served."""
    stop_grace_s: float = 0.5
    """Seconds that requests under way may take once the controller is told to stop."""
    remediation: Literal["dry_run", "webhook", "slurm", "kubernetes"] = "dry_run"
    """Who drains, reboots and hands to repair: nobody (the log says what would be done), a receiver of your own at
    ``webhook_url``, Slurm by ``scontrol``, or Kubernetes."""
    webhook_url: str = ""
    """Where remedies are posted."""
    webhook_secret_file: str = ""
    """A file with the secret that signs those posts, readable by its owner only."""
    webhook_reports_cordons: bool = False
    """Whether that receiver can tell which nodes people have taken out of service."""
    slurm_conf: str = ""
    """Slurm's configuration file. Empty: Slurm's own default."""
    kubeconfig: str = ""
    """How to reach Kubernetes. Empty: as the pod that the controller runs in."""
    kubernetes_evict: bool = False
    """Whether a cordoned node's pods are evicted as well. Off: whoever runs them sees the taint and decides."""
    alert_url: str = ""
    """Where to post what stands wrong, in the form of Alertmanager's webhooks. Empty: nowhere."""
    alert_token_file: str = ""
    """A file with a bearer token for ``alert_url``, readable by its owner only. Empty: none is sent."""
    journal_dir: str = ""
    """A directory for the journal of events and decisions, by which an incident is replayed and a change of policy is
    tried on the past. Empty: none is kept."""
    journal_bytes: int = 1 << 30
    """Most bytes the journal takes; the oldest days go first. A fleet of 1,000 nodes that trains writes some 100 MB a
    day."""
    journal_days: float = 8.0
    """Days the journal goes back: a week, and the one that is being written."""
    policy_dir: str = ""
    """A directory with the site's own rules on findings (``*.toml``), over the shipped ones key by key. Empty: none."""
    policy: CorePolicy = CorePolicy()
    """How decisions are made."""

    @classmethod
    def preset(cls, name: str) -> Self:
        """``production`` or ``lab``. Raises ConfigurationError for another name."""
        if name == "production":
            return cls()
        if name == "lab":
            return cls(policy=CorePolicy.lab(), heartbeat_interval_s=0.5, resign_after_s=5.0)
        raise ConfigurationError(f"there is no preset {name!r}: use {' or '.join(PRESETS)}")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to listen on; port 0 is any."""
        return _address(self.listen)

    @property
    def operators_address(self) -> tuple[str, int] | None:
        """The same of the second door, where there is one."""
        return _address(self.operators_listen) if self.operators_listen else None

    def validate(self) -> Self:
        """Returns the settings. Raises ConfigurationError for values that contradict each other."""
        for name in ("listen", "operators_listen"):
            try:
                _address(getattr(self, name) or self.listen)
            except ValueError as error:
                raise ConfigurationError(f"{name}: {error}") from error
        for wrong, mend in self._contradictions():
            if wrong:
                raise ConfigurationError(mend)
        self.policy.validate()
        return self

    def _contradictions(self) -> tuple[tuple[bool, str], ...]:
        webhook = self.remediation == "webhook"
        url = urlsplit(self.database)
        return (
            (
                bool(self.database_password_file) and (url.scheme.startswith("sqlite") or not url.username),
                "database_password_file is for postgresql://USER@HOST/NAME, and the database is another",
            ),
            (
                bool(self.database_password_file) and bool(url.password),
                "the password stands in the database's URL and in database_password_file: take it out of the URL",
            ),
            (not self.secret_file, "no secret: give --secret-file (make one: `openssl rand -hex 32 > F; chmod 600 F`)"),
            (
                bool(self.tls_certificate) != bool(self.tls_key),
                "tls_certificate and tls_key belong together: give both or none",
            ),
            (
                not 0 < self.heartbeat_interval_s < self.policy.suspect_after_s / 2,
                f"heartbeat_interval_s ({self.heartbeat_interval_s}) must be positive and less than half of "
                f"suspect_after_s ({self.policy.suspect_after_s}): one late beat must not make a suspect",
            ),
            (
                bool(self.tls_client_ca) and not self.tls_certificate,
                "tls_client_ca needs tls_certificate and tls_key: without TLS nobody shows a certificate",
            ),
            (
                min(
                    self.agent_requests_per_s,
                    self.agent_reports_per_s,
                    self.requests_per_s,
                    self.failed_authentications_per_s,
                )
                <= 0
                or self.request_burst_s * min(self.agent_requests_per_s, self.requests_per_s) < 1,
                "agent_requests_per_s, agent_reports_per_s, requests_per_s and failed_authentications_per_s must be "
                "positive, and request_burst_s long enough for one request",
            ),
            (
                min(self.max_concurrent_requests, self.max_unsent_answer_bytes) < 1
                or not 0 < self.answer_loop_share <= 1,
                "max_concurrent_requests and max_unsent_answer_bytes must be at least 1, and "
                "answer_loop_share more than 0 and at most 1",
            ),
            (self.max_commit_batch < 1 or self.queue_limit < 1, "max_commit_batch and queue_limit must be at least 1"),
            (
                self.commit_timeout_s <= 0 or self.stop_grace_s < 0,
                "commit_timeout_s must be positive and stop_grace_s not negative",
            ),
            (
                self.retention_days <= 0
                or min(self.retention_events, self.retention_orders, self.retention_rows) < 1000
                or self.retention_generations < 16,
                "retention_days must be positive, retention_events, retention_orders and retention_rows at least 1000, "
                "retention_generations at least 16",
            ),
            (self.max_clock_ahead_days < 0, "max_clock_ahead_days must not be negative; 0 believes any clock"),
            (
                self.node_events_burst < 1 or self.node_events_per_s <= 0,
                "node_events_burst must be at least 1 and node_events_per_s positive",
            ),
            (self.outage_buffer_bytes < 1 << 20, "outage_buffer_bytes must be at least 1048576"),
            (
                not 0.2 <= self.lease_renew_s <= self.lease_s / 3,
                f"lease_renew_s ({self.lease_renew_s}) must be at least 0.2 and at most a third of lease_s "
                f"({self.lease_s}): one renewal may fail",
            ),
            (
                self.resign_after_s != 0 and self.resign_after_s < self.lease_s,
                f"resign_after_s ({self.resign_after_s}) must be 0, or at least lease_s ({self.lease_s}): nodes need a "
                "moment to come to a leader that is new",
            ),
            (
                self.journal_bytes < 1 or self.journal_days <= 0,
                "journal_bytes and journal_days must be positive; no journal_dir keeps none",
            ),
            (
                webhook != bool(self.webhook_url) or webhook != bool(self.webhook_secret_file),
                "remediation = webhook, webhook_url and webhook_secret_file belong together: give all or none",
            ),
            (
                bool(self.alert_token_file) and not self.alert_url,
                "alert_token_file is for alert_url, and there is none",
            ),
            (
                self.policy.remediation_mode is Mode.ENFORCE and self.remediation == "dry_run",
                "policy.remediation_mode = enforce asks for resets and reboots, and remediation = dry_run carries none "
                "out: "
                "name what does",
            ),
            (
                webhook and not is_http_url(self.webhook_url),
                f"webhook_url must be http or https, with a host, not {self.webhook_url!r}",
            ),
            (
                bool(self.alert_url) and not is_http_url(self.alert_url),
                f"alert_url must be http or https, with a host, not {self.alert_url!r}",
            ),
        )


def load_settings(
    given: Mapping[str, Any], *, preset: str = "production", file: Path | None = None, environment: Mapping[str, str]
) -> ControllerSettings:
    """Settings from what was given explicitly, then ``file`` (TOML), then the environment, then the preset.

    Environment variables are ``EVERSTEP_CONTROLLER_`` and a setting's name in capitals; for the policy's knobs,
    ``EVERSTEP_CONTROLLER_POLICY_``. Raises ConfigurationError for a wrong name, a wrong type or a contradiction.
    """
    _check_environment(environment)
    base = ControllerSettings.preset(preset)
    values: dict[str, Any] = {name: getattr(base, name) for name in base.__struct_fields__ if name != "policy"}
    policy: dict[str, Any] = msgspec.structs.asdict(base.policy)
    values |= _from_environment(environment, ENVIRONMENT_PREFIX, ControllerSettings)
    policy |= _from_environment(environment, POLICY_PREFIX, CorePolicy)
    if file is not None:
        written = _read_toml(file)
        policy |= written.pop("policy", {})
        values |= written
    values |= given
    try:
        settings = msgspec.convert({**values, "policy": policy}, ControllerSettings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"a setting is wrong: {error}") from error
    site = Path(settings.policy_dir) if settings.policy_dir else None
    return msgspec.structs.replace(settings, policy=with_rules(settings.policy, site)).validate()


def _from_environment(environment: Mapping[str, str], prefix: str, kind: type[msgspec.Struct]) -> dict[str, str]:
    names = _variables(prefix, kind)
    return {names[key]: value for key, value in environment.items() if key in names}


def _variables(prefix: str, kind: type[msgspec.Struct]) -> dict[str, str]:
    """Fields by the names of their environment variables."""
    return {prefix + name.upper(): name for name in kind.__struct_fields__ if name not in ("policy", "rules")}


def _check_environment(environment: Mapping[str, str]) -> None:
    """Raises ConfigurationError for a variable that would be a setting, were it spelled as one."""
    known = _variables(ENVIRONMENT_PREFIX, ControllerSettings) | _variables(POLICY_PREFIX, CorePolicy)
    if wrong := unknown_variables(environment, ENVIRONMENT_PREFIX, known, others=(SECRETS_COMMAND,)):
        near = get_close_matches(wrong[0], known, n=1)
        mend = f"do you mean {near[0]}?" if near else "docs/how-to/tune.md says where settings are read"
        raise ConfigurationError(f"{', '.join(wrong)}: no such setting; {mend}")


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigurationError(f"the settings file {file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the settings file {file} is not TOML: {error}") from error


def read_secret(path: str) -> bytes:
    """The secret in a file, without the white space around it.

    Raises ConfigurationError where it is missing, too short, or open to other users' eyes.
    """
    return check_secret(_read_private(path))


def read_secrets(path: str) -> tuple[bytes, ...]:
    """The fleet's secrets in a file, one a line: the first mints, all verify. Raises as ``read_secret``."""
    return split_secrets(_read_private(path))


def read_password(path: str) -> str:
    """The password in a file, without the white space around it.

    Raises ConfigurationError where it is missing, empty, or open to other users' eyes.
    """
    try:
        password = _read_private(path).decode()
    except UnicodeDecodeError:
        raise ConfigurationError(f"the password in {path} is not text") from None
    if not password:
        raise ConfigurationError(f"the password file {path} is empty")
    return password


def _read_private(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigurationError(
            f"the secret file {path!r} cannot be read: {error.strerror}; make one: "
            "`(umask 077; openssl rand -hex 32 > secret)`"
        ) from error
    with os.fdopen(descriptor, "rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise ConfigurationError(
                f"the secret file {path} can be read by other users (mode {mode:04o}): `chmod 600 {path}`, "
                "and make a new secret if somebody may have read it"
            )
        return file.read(4096).strip()
