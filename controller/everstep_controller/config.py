"""Settings of the controller, ``everstep-controller``, and its files with secrets."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import msgspec

from everstep import oidc
from everstep.bearer_tokens import TokenRole, check_secret, split_secrets
from everstep.errors import ConfigurationError
from everstep.ids import split_address
from everstep.settings import Program, SettingsPart, with_values
from everstep.vocabulary import Mode
from everstep_controller.core.policy import CorePolicy
from everstep_controller.policy.rulebook import override_rules, read_rules, shipped_rulebook


def _address(address: str) -> tuple[str, int]:
    """Return host and port; port 0 means any free port. Raise ValueError for another form."""
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), 0) if port == "0" and host else split_address(address)


def is_http_url(url: str) -> bool:
    """Return whether ``url`` is an http or https URL with a host and a valid port."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


LOGIN_CALLBACK = "/v1/login/callback"
"""Path of the redirect URI of the web page's login."""


class OidcSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Login of people by an OpenID Connect provider. Without an issuer nothing of it exists."""

    issuer: str = ""
    """URL of the OpenID Connect provider whose tokens people may use, exactly as in its metadata. https, or http on
    loopback. It needs the packages of ``everstep[oidc]``. Empty: tokens and certificates only."""
    client_id: str = ""
    """Client of the provider that stands for this controller. Tokens must be made for it."""
    client_secret_file: str = ""
    """File with the client's secret, readable by its owner only. Empty: a public client, which has none."""
    command_client_id: str = ""
    """Public client with which ``everstep login`` logs in. Empty: ``oidc_client_id``, if that has no secret."""
    audiences: tuple[str, ...] = ()
    """Further audiences for which tokens are accepted, such as that of an API. The clients are always accepted."""
    redirect_uri: str = ""
    """URL to which the provider sends browsers back, registered there: the address at which people open the web page,
    and ``/v1/login/callback``. https, or http on loopback. Empty: no login on the web page."""
    scopes: tuple[str, ...] = ("openid", "profile", "email")
    """Scopes that logins ask for. Some providers need one more for groups, or ``offline_access`` to refresh tokens."""
    role_claim: str = "groups"
    """Claim of tokens that decides the role: a text or a list. A dot leads into an object: ``realm_access.roles``."""
    roles: tuple[str, ...] = ()
    """Roles by value of that claim, as ``VALUE=ROLE`` with the role ``viewer`` or ``operator``. Of several roles a
    person has the stronger one. A person without a role is refused."""
    name_claim: str = "preferred_username"
    """Claim with a readable name, shown before the subject and the issuer. Empty: none."""
    clock_skew_s: float = 60.0
    """Seconds that the provider's clock may differ from this machine's."""
    session_s: float = 3600.0
    """Seconds that a login on the web page lasts. A role that is taken away at the provider holds so long."""
    ca_file: str = ""
    """PEM file of the authority that signed the provider's certificate. Empty: the system's authorities."""

    def role_of(self, values: Iterable[str]) -> TokenRole | None:
        """Return the strongest role of the claim's values, or None."""
        given = set(values)
        found = {role for value, _, role in (role.rpartition("=") for role in self.roles) if value in given}
        return next((role for role in (TokenRole.OPERATOR, TokenRole.VIEWER) if role in found), None)

    def token_audiences(self) -> tuple[str, ...]:
        """Return all accepted audiences."""
        return tuple(filter(None, (self.client_id, self.command_client_id, *self.audiences)))

    def command_client(self) -> str:
        """Return the public client for commands; empty if there is none."""
        return self.command_client_id or ("" if self.client_secret_file else self.client_id)

    def contradictions(self) -> Iterator[str]:
        """Yield a message for each value that is invalid or contradicts another."""
        if not self.issuer:
            changed = (name for name in self.__struct_fields__ if getattr(self, name) != getattr(OidcSettings(), name))
            yield from (f"oidc_{name} needs oidc_issuer" for name in changed)
            return
        for name in ("issuer", "redirect_uri"):
            try:
                oidc.check_url(getattr(self, name) or self.issuer, f"oidc_{name}")
            except ConfigurationError as error:
                yield str(error)
        if urlsplit(self.issuer).query:
            yield "oidc_issuer must not have a query"
        if self.redirect_uri and (urlsplit(self.redirect_uri).path, urlsplit(self.redirect_uri).query) != (
            LOGIN_CALLBACK,
            "",
        ):
            yield f"oidc_redirect_uri must end in {LOGIN_CALLBACK}"
        if not self.client_id:
            yield "oidc_client_id is missing: register a client for this controller with the provider"
        if "openid" not in self.scopes:
            yield "oidc_scopes must contain openid"
        mapped = [role.rpartition("=") for role in self.roles]
        if not mapped or any(not value or role not in _LOGIN_ROLES for value, _, role in mapped):
            yield f"oidc_roles must be a list of VALUE=ROLE with a role of {', '.join(_LOGIN_ROLES)}"
        if not self.role_claim:
            yield "oidc_role_claim is missing"
        if not 0 <= self.clock_skew_s <= 600 or not 60 <= self.session_s <= 86400:
            yield "oidc_clock_skew_s must be 0 to 600, and oidc_session_s 60 to 86400"


_LOGIN_ROLES = (TokenRole.VIEWER, TokenRole.OPERATOR)


def _invalid_urls(settings: SettingsPart, *names: str) -> Iterator[str]:
    for name in names:
        if (value := getattr(settings, name)) and not is_http_url(value):
            yield f"{name} must be http or https, with a host, not {value!r}"


class ListenSettings(SettingsPart, frozen=True, kw_only=True):
    """Addresses that the controller serves on."""

    listen: str = "127.0.0.1:7700"
    """``host:port`` to serve on. The default is loopback; use TLS before you serve other machines.
    Port 0 takes any free port, which the ready file names."""
    operators_listen: str = ""
    """``host:port`` of a second listener for the same routes, meant for people, dashboards and health checks. Its
    requests do not queue behind agents. On the first listener, a whole fleet that reconnects goes first, at 0.2 ms
    per agent. Empty: no second listener."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to listen on; port 0 means any free port."""
        return _address(self.listen)

    @property
    def operators_address(self) -> tuple[str, int] | None:
        """Host and port of the second listener, or None."""
        return _address(self.operators_listen) if self.operators_listen else None

    def contradictions(self) -> Iterator[str]:
        """Yield a message for each value that is invalid or contradicts another."""
        for name in ("listen", "operators_listen"):
            try:
                _address(getattr(self, name) or self.listen)
            except ValueError as error:
                yield f"{name}: {error}"


class StorageSettings(SettingsPart, frozen=True, kw_only=True):
    """The database that keeps the state."""

    database: str = "sqlite:///everstep-controller.db"
    """URL of the database: ``sqlite:///PATH`` for one machine, ``postgresql://...`` for a fleet."""
    database_password_file: str = ""
    """File with PostgreSQL's password, readable by its owner only. It keeps the password out of command lines. Empty:
    the password is in ``database``, or none is needed."""

    def contradictions(self) -> Iterator[str]:
        """Yield a message for each value that is invalid or contradicts another."""
        url = urlsplit(self.database)
        if self.database_password_file and (url.scheme.startswith("sqlite") or not url.username):
            yield "database_password_file needs a database of the form postgresql://USER@HOST/NAME"
        if self.database_password_file and url.password:
            yield "database and database_password_file both contain a password: remove it from the URL of the database"


class ProcessSettings(SettingsPart, frozen=True, kw_only=True):
    """Start, name and end of the controller's process."""

    ready_file: str = ""
    """File written once requests are served: JSON with ``pid`` and ``address``. Empty: none."""
    migrate: bool = True
    """Update the database's schema at start. Off: an old schema is refused, for sites that migrate separately."""
    check_database: bool = True
    """Check a SQLite file at start and refuse a damaged one, which takes some seconds per GiB. Off: damage shows only
    when a damaged page is read."""
    die_with_parent: bool = False
    """End when the parent process ends: for tests, demonstrations and private controllers."""
    name: str = ""
    """Name of this controller, shown to agents and in the lease. It must be unique. Empty: the advertised address."""


class TlsSettings(SettingsPart, frozen=True, kw_only=True):
    """Encryption of all routes, and client certificates."""

    tls_certificate: str = ""
    """PEM file of the server's certificate chain. With ``tls_key``, all routes use HTTPS."""
    tls_key: str = ""
    """PEM file of the certificate's private key."""
    tls_client_ca: str = ""
    """PEM file of the authorities that sign client certificates. A certificate that names
    ``everstep://agent/NODE``, ``everstep://operator/NAME`` or ``everstep://viewer/NAME`` replaces a token. Clients with
    a token need no certificate. Empty: client certificates are ignored."""

    def contradictions(self) -> Iterator[str]:
        """Yield a message for each value that is invalid or contradicts another."""
        if bool(self.tls_certificate) != bool(self.tls_key):
            yield "give tls_certificate and tls_key together, or neither"
        if self.tls_client_ca and not self.tls_certificate:
            yield "tls_client_ca needs tls_certificate and tls_key: clients send certificates over TLS only"


class RequestLimitSettings(SettingsPart, frozen=True, kw_only=True):
    """Limits of what one client may ask for."""

    agent_requests_per_s: float = 400.0
    """Requests per second, or session frames per second, allowed for one agent. An agent normally needs two, and one
    more for each of up to 200 reports per second in a storm. A faulty agent at this rate costs a few per cent of a
    core."""
    agent_reports_per_s: float = 1000.0
    """Reports per second allowed for one agent, at up to 1024 per request: five times a storm in its kernel log.
    Further reports wait in the agent's spool; none is lost."""
    requests_per_s: float = 200.0
    """Requests per second allowed for one operator, viewer or job's trainers. A dashboard needs ten, a script fifty."""
    failed_authentications_per_s: float = 20.0
    """Requests per second with a wrong token from one address that still get a detailed error. A fleet behind one
    address with expired tokens tries about one tenth of its nodes per second. This never limits valid tokens."""
    request_burst_s: float = 5.0
    """Burst allowed for each of these limits, in seconds of its rate: after a restart all clients return at once."""
    max_concurrent_requests: int = 16
    """Requests of one operator, viewer or job's trainers that may be queued, handled or sent at the same time; more get
    status 429. A dashboard has one or two. Displays that share a token share this limit."""
    max_unsent_answer_bytes: int = 32 << 20
    """Bytes of responses to one such client that may wait to be sent; a further response becomes status 429. A view of
    a thousand nodes takes some 200 KB."""
    operator_event_loop_share: float = 0.5
    """Share of the event loop's time that such responses may take while heartbeats and reports of agents wait. After
    each slice of a response, agents get the loop for as long as the share demands. Larger values answer people sooner
    under heavy reading, and agents later."""

    def contradictions(self) -> Iterator[str]:
        """Yield a message for each value that is invalid or contradicts another."""
        rates = (self.agent_requests_per_s, self.agent_reports_per_s, self.requests_per_s)
        burst = self.request_burst_s * min(self.agent_requests_per_s, self.requests_per_s)
        if min(*rates, self.failed_authentications_per_s) <= 0 or burst < 1:
            yield (
                "agent_requests_per_s, agent_reports_per_s, requests_per_s and failed_authentications_per_s must be "
                "positive, and request_burst_s long enough for one request"
            )
        limits = (self.max_concurrent_requests, self.max_unsent_answer_bytes)
        if min(limits) < 1 or not 0 < self.operator_event_loop_share <= 1:
            yield (
                "max_concurrent_requests and max_unsent_answer_bytes must be at least 1, and "
                "operator_event_loop_share more than 0 and at most 1"
            )


class TransactionSettings(SettingsPart, frozen=True, kw_only=True):
    """Transactions that decide and store, and what waits for them."""

    max_commit_batch: int = 256
    """Maximum requests in one transaction. Larger raises throughput in a storm, and delays a batch's first."""
    queue_limit: int = 20_000
    """Requests that may wait for a transaction. Beyond this limit, agents are asked to retry and keep their spools."""
    commit_timeout_s: float = 2.0
    """Seconds until a transaction is aborted and the database counts as unavailable. The controller decides nothing
    meanwhile: with a longer value a hung database delays a regroup, with a shorter value a slow one counts as down."""
    outage_buffer_bytes: int = 64 << 20
    """Approximate bytes of decisions kept in memory while the database is unavailable. Beyond this limit, agents are
    asked to retry and keep their spools. A regroup of 1,000 ranks takes some 100 KiB."""

    def contradictions(self) -> Iterator[str]:
        """Yield a message for each value that is invalid or contradicts another."""
        if self.max_commit_batch < 1 or self.queue_limit < 1:
            yield "max_commit_batch and queue_limit must be at least 1"
        if self.commit_timeout_s <= 0:
            yield "commit_timeout_s must be positive"
        if self.outage_buffer_bytes < 1 << 20:
            yield "outage_buffer_bytes must be at least 1048576"


class ClockSettings(SettingsPart, frozen=True, kw_only=True):
    """Trust in the machine's clock at the start."""

    max_clock_ahead_days: float = 7.0
    """Days that the machine's clock may be ahead of the database's newest time at start; beyond that the start is
    refused. A clock that is months ahead would expire credentials and delete history. A running controller records the
    time every minute, so this also limits how long no controller may have run. 0: accept any clock."""
    trust_clock: bool = False
    """Trust the machine's clock at this start, however far it differs from the database's newest time. If the database
    is ahead, its times are set back. Use it for one start only, after an earlier start with a wrong clock."""

    def contradictions(self) -> Iterator[str]:
        """Yield a message for each value that is invalid or contradicts another."""
        if self.max_clock_ahead_days < 0:
            yield "max_clock_ahead_days must not be negative; 0 accepts any clock"


class RetentionSettings(SettingsPart, frozen=True, kw_only=True):
    """How much history is written and kept."""

    retention_days: float = 90.0
    """Days for which the event log, verdicts, and closed findings and remediations are kept. Records needed for
    a start, and each node's newest verdict, are kept at any age."""
    retention_max_events: int = 2_000_000
    """Maximum entries of the event log, about half a KiB each. The oldest go first, at any age."""
    retention_max_events_by_people: int = 200_000
    """Maximum entries of the event log caused by people (orders and changes of credentials), in addition to
    ``retention_max_events``. They are kept at any age, and entries caused by nodes never displace them."""
    retention_max_history_rows: int = 200_000
    """Maximum verdicts, findings and remediations each, a few KiB per record. The oldest that may be deleted go first,
    at any age."""
    events_per_node_burst: int = 500
    """Burst of entries of one kind from one node in the event log. More are counted in ``events.suppressed``, and the
    decisions are made all the same. A node that is repaired and retried for weeks writes dozens."""
    events_per_node_per_s: float = 0.1
    """Further entries per second of one kind from one node. At this rate one kind of one node fills
    ``retention_max_events`` in seven months."""
    retention_generations_per_job: int = 1000
    """Maximum rosters kept per job, a few KiB each, or up to some MiB in a fleet of 10,000 nodes."""

    def contradictions(self) -> Iterator[str]:
        """Yield a message for each value that is invalid or contradicts another."""
        rows = (self.retention_max_events, self.retention_max_events_by_people, self.retention_max_history_rows)
        if self.retention_days <= 0 or min(rows) < 1000 or self.retention_generations_per_job < 16:
            yield (
                "retention_days must be positive, retention_max_events, retention_max_events_by_people and "
                "retention_max_history_rows at least 1000, retention_generations_per_job at least 16"
            )
        if self.events_per_node_burst < 1 or self.events_per_node_per_s <= 0:
            yield "events_per_node_burst must be at least 1 and events_per_node_per_s positive"


class LeadershipSettings(SettingsPart, frozen=True, kw_only=True):
    """How controllers take over from each other, and how one ends."""

    lease_s: float = 5.0
    """Seconds that a leader's lease lasts without renewal, over PostgreSQL. After that time another controller replaces
    a leader that is paused or cut off from the database; a leader that died is replaced at once. Shorter replaces
    sooner, and gives a leader less time to reconnect to a database that moved."""
    lease_renew_s: float = 1.0
    """Seconds between renewals; at most a third of ``lease_s``, so that one renewal may fail."""
    resign_after_s: float = 15.0
    """Seconds until a leader over PostgreSQL resigns because its nodes contact a standby and hardly any reaches the
    leader. The lease then goes to that standby. Each further resignation within an hour waits twice as long. Shorter
    moves sooner, and gives a fleet less time to find a new leader. 0: never."""
    advertise: str = ""
    """``host:port`` by which others reach this controller; standbys announce it. Empty: the address served."""
    stop_grace_s: float = 0.5
    """Seconds that running requests may take after the controller is asked to stop."""

    def contradictions(self) -> Iterator[str]:
        """Yield a message for each value that is invalid or contradicts another."""
        if not 0.2 <= self.lease_renew_s <= self.lease_s / 3:
            yield (
                f"lease_renew_s ({self.lease_renew_s}) must be at least 0.2 and at most a third of lease_s "
                f"({self.lease_s}), so that one renewal may fail"
            )
        if 0 != self.resign_after_s < self.lease_s:
            yield (
                f"resign_after_s ({self.resign_after_s}) must be 0, or at least lease_s ({self.lease_s}): nodes need "
                "time to find a new leader"
            )
        if self.stop_grace_s < 0:
            yield "stop_grace_s must not be negative"


class RemediationSettings(SettingsPart, frozen=True, kw_only=True):
    """The system that drains, reboots and repairs nodes."""

    remediation_backend: Literal["dry_run", "webhook", "slurm", "kubernetes"] = "dry_run"
    """Backend that drains nodes, reboots them and hands them to repair: ``dry_run`` only logs each action, ``webhook``
    posts to ``webhook_url``, ``slurm`` calls ``scontrol``, ``kubernetes`` calls its API."""
    webhook_url: str = ""
    """URL to which remediation requests are posted."""
    webhook_secret_file: str = ""
    """File with the secret that signs these requests, readable by its owner only."""
    webhook_reports_cordons: bool = False
    """Whether the webhook's receiver can report the nodes that people have cordoned."""
    slurm_conf: str = ""
    """Slurm's configuration file. Empty: Slurm's default."""
    kubeconfig: str = ""
    """Kubeconfig file for reaching Kubernetes. Empty: the service account of the controller's pod."""
    kubernetes_evict_pods: bool = False
    """Evict a cordoned node's pods. Off: the pods' owners see the taint and decide."""

    def contradictions(self) -> Iterator[str]:
        """Yield a message for each value that is invalid or contradicts another."""
        webhook = self.remediation_backend == "webhook"
        if webhook != bool(self.webhook_url) or webhook != bool(self.webhook_secret_file):
            yield "give remediation_backend = webhook, webhook_url and webhook_secret_file together, or none of them"
        yield from _invalid_urls(self, "webhook_url")


class NotificationSettings(SettingsPart, frozen=True, kw_only=True):
    """What is sent to the site's own systems: alerts and traces."""

    alert_url: str = ""
    """URL to which alerts are posted, in the format of Alertmanager's webhooks. Empty: none."""
    alert_token_file: str = ""
    """File with a bearer token for ``alert_url``, readable by its owner only. Empty: no token."""
    docs_url: str = "https://everstep.readthedocs.io/"
    """Address of this documentation, to which alerts link. Set it where the site serves the documentation itself.
    Empty: no links."""
    otlp_endpoint: str = ""
    """URL to which each recovery is posted as one OpenTelemetry trace, by OTLP over HTTP, such as
    ``http://collector:4318/v1/traces``. It needs the packages of ``everstep[otel]``. Empty: none."""

    def contradictions(self) -> Iterator[str]:
        """Yield a message for each value that is invalid or contradicts another."""
        if self.alert_token_file and not self.alert_url:
            yield "alert_token_file needs alert_url"
        yield from _invalid_urls(self, "alert_url", "docs_url", "otlp_endpoint")


class JournalSettings(SettingsPart, frozen=True, kw_only=True):
    """The journal of events and decisions."""

    journal_dir: str = ""
    """Directory for the journal of events and decisions, used to replay incidents and to try policy changes on the
    past. Empty: no journal."""
    journal_bytes: int = 1 << 30
    """Maximum bytes of the journal; the oldest days go first. A training fleet of 1,000 nodes writes some 100 MB per
    day."""
    journal_days: float = 8.0
    """Days of journal to keep: by default a week, and the day being written."""

    def contradictions(self) -> Iterator[str]:
        """Yield a message for each value that is invalid or contradicts another."""
        if self.journal_bytes < 1 or self.journal_days <= 0:
            yield "journal_bytes and journal_days must be positive; omit journal_dir to keep no journal"


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one controller. Settings of the decision core are in ``policy``."""

    preset: Literal["production", "lab"] = "production"
    """Preset that supplies defaults: ``production`` for a fleet, ``lab`` for one machine and demonstrations, where
    everything happens within seconds."""
    listeners: ListenSettings = ListenSettings()
    storage: StorageSettings = StorageSettings()
    secret_file: str = ""
    """File with the fleet's secret, readable by its owner only. Anybody with the secret can mint any token. The file
    may hold several secrets, one per line: the first mints tokens, all verify them. It is reread when it changes."""
    process: ProcessSettings = ProcessSettings()
    tls: TlsSettings = TlsSettings()
    request_limits: RequestLimitSettings = RequestLimitSettings()
    heartbeat_interval_s: float = 1.0
    """Seconds between an agent's heartbeats. Shorter finds silence sooner; 12,500 nodes at 1 s cost under one core."""
    transactions: TransactionSettings = TransactionSettings()
    clock: ClockSettings = ClockSettings()
    retention: RetentionSettings = RetentionSettings()
    leadership: LeadershipSettings = LeadershipSettings()
    remediation: RemediationSettings = RemediationSettings()
    notifications: NotificationSettings = NotificationSettings()
    journal: JournalSettings = JournalSettings()
    launcher_state_dir: str = ""
    """State directory of launchers that run on this machine as this user (``everstep-launch --state-dir``). Operators
    then read the last lines of their ranks on the web page. A launcher gives it to its private controller. Empty: the
    page names the node and the command instead."""
    policy_dir: str = ""
    """Directory with the site's own verdict rules (``*.toml``), which override the shipped ones key by key. Empty:
    none."""
    oidc: OidcSettings = OidcSettings()
    """Login of people by an OpenID Connect provider."""
    policy: CorePolicy = CorePolicy()
    """Settings of the decision core."""
    policy_origins: dict[str, str] = {}
    """Source of each policy value that differs from the default, for people: by dotted name, and by id for rules."""

    @classmethod
    def from_preset(cls, name: str) -> Self:
        """Return the settings of the preset ``production`` or ``lab``."""
        if name == "lab":
            leadership = LeadershipSettings(resign_after_s=5.0)
            return cls(preset="lab", policy=CorePolicy.lab_preset(), heartbeat_interval_s=0.5, leadership=leadership)
        return cls()

    def validate(self) -> Self:
        """Return the settings. Raises ConfigurationError for values that contradict each other."""
        for message in self._contradictions():
            raise ConfigurationError(message)
        self.policy.validate()
        return self

    def _contradictions(self) -> Iterator[str]:
        yield from self.listeners.contradictions()
        yield from self.storage.contradictions()
        if not self.secret_file:
            yield "secret_file is missing: give --secret-file (make one: `openssl rand -hex 32 > F; chmod 600 F`)"
        suspect_after_s = self.policy.liveness.suspect_after_s
        if not 0 < self.heartbeat_interval_s < suspect_after_s / 2:
            yield (
                f"heartbeat_interval_s ({self.heartbeat_interval_s}) must be positive and less than half of "
                f"policy.liveness.suspect_after_s ({suspect_after_s}): one late heartbeat makes no node suspect"
            )
        yield from self.tls.contradictions()
        yield from self.request_limits.contradictions()
        yield from self.transactions.contradictions()
        yield from self.clock.contradictions()
        yield from self.retention.contradictions()
        yield from self.leadership.contradictions()
        yield from self.journal.contradictions()
        yield from self.remediation.contradictions()
        if self.policy.remediation.mode is Mode.ENFORCE and self.remediation.remediation_backend == "dry_run":
            yield (
                "policy.remediation.mode = enforce needs a remediation_backend that resets and reboots nodes: dry_run "
                "only logs actions"
            )
        yield from self.notifications.contradictions()
        yield from self.oidc.contradictions()


PROGRAM = Program("everstep-controller", ControllerSettings, excluded=("policy_rules", "policy_origins"))


def load_settings(flags: Mapping[str, Any], environ: Mapping[str, str]) -> ControllerSettings:
    """Return the validated settings from flags, environment variables, the settings file and the preset.

    Raises ConfigurationError if a name is unknown, a value has the wrong type, or settings contradict each other.
    """
    return read_settings(flags, environ).validate()


def read_settings(flags: Mapping[str, Any], environ: Mapping[str, str]) -> ControllerSettings:
    """Return the settings as ``load_settings``, whether they contradict each other or not."""
    given = PROGRAM.given(flags, environ)
    values = PROGRAM.by_attribute(given)
    preset = ControllerSettings.from_preset(values.get("preset", "production"))
    shipped, chosen = CorePolicy().values(), preset.policy
    origins = {name: f"preset {preset.preset}" for name, value in chosen.values().items() if value != shipped[name]}
    for name, setting in given.items():
        group, *field = PROGRAM.settings[name].path
        if group == "policy":
            origins[".".join(field)] = setting.source
    policy = chosen.with_values(**values.pop("policy", {}))
    settings = with_values(preset, values)
    site_rules = read_rules(Path(settings.policy_dir)) if settings.policy_dir else {}
    rules = override_rules(shipped_rulebook(), site_rules.values())
    for rule, table in site_rules.items():
        keys = ", ".join(key for key in table if key not in ("kind", "name"))
        origins[".".join(filter(None, rule))] = f"{settings.policy_dir}: {keys}"
    policy = msgspec.structs.replace(policy, rules=rules)
    return msgspec.structs.replace(settings, policy=policy, policy_origins=origins)


def read_secret(path: str) -> bytes:
    """Return the secret in a file. Raises ConfigurationError if it is missing, too short, or readable by others."""
    return check_secret(_read_private(path))


def read_secrets(path: str) -> tuple[bytes, ...]:
    """Return the fleet's secrets in a file, one per line. The first mints, all verify. Raises as ``read_secret``."""
    return split_secrets(_read_private(path))


def read_password(path: str) -> str:
    """Return the password in a file. Raises ConfigurationError if it is missing, empty, or readable by others."""
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
                "and make a new secret if another user may have read it"
            )
        return file.read(4096).strip()
