"""What the dashboard shows, as a table: rows of panels, each with its queries. ``dashboards.build`` makes the file."""

from __future__ import annotations

from dataclasses import dataclass

C = "everstep_controller_"
A = "everstep_agent_"
G = "everstep_gpu_"
V = "everstep_vault_"


@dataclass(frozen=True)
class Panel:
    """One panel: its queries as (PromQL, legend), and its unit by Grafana's name."""

    title: str
    about: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    unit: str = "short"
    bad_above: float | None = None
    stacked: bool = False

    @property
    def width(self) -> int:
        """Columns of Grafana's grid."""
        return 4 if self.kind == "stat" else 8


def _job(metric: str) -> str:
    return f'{C}{metric}{{run=~"$run"}}'


FLEET = (
    Panel("Healthy nodes", "Nodes that may compute.", ((f'sum({C}nodes{{state="healthy"}})', "healthy"),), "stat"),
    Panel(
        "Unhealthy nodes",
        "Quarantined, lost, held, on probation, in repair or suspect.",
        (("everstep:nodes:unfit", "unfit"),),
        "stat",
        bad_above=1,
    ),
    Panel(
        "Critical findings",
        "Active findings of critical severity.",
        ((f'{C}node_findings{{severity="critical"}}', "critical"),),
        "stat",
        bad_above=1,
    ),
    Panel(
        "Eviction breaker",
        "1: automatic eviction is stopped; `everstep status` shows why.",
        ((f"{C}eviction_breaker_open", "open"),),
        "stat",
        bad_above=1,
    ),
    Panel(
        "Evictions left",
        "Nodes that the eviction budget allows to evict now.",
        ((f"{C}eviction_budget_left", "left"),),
        "stat",
    ),
    Panel(
        "Agents connected",
        "Nodes with a session.",
        ((f"{C}agents_connected", "connected"),),
        "stat",
    ),
    Panel(
        "Deferred evictions",
        "Nodes whose eviction is deferred; `everstep budget` shows why.",
        ((f"{C}evictions_deferred", "deferred"),),
        "stat",
        bad_above=1,
    ),
    Panel(
        "Silent nodes",
        "Silent or disconnected nodes that are not lost yet.",
        ((f"{C}nodes_missing_heartbeats", "silent"),),
        "stat",
        bad_above=1,
    ),
    Panel(
        "Correlated silence",
        "1: so many nodes are silent at once that the network is suspected and none of them is declared lost.",
        ((f"{C}correlated_silence", "silent"),),
        "stat",
        bad_above=1,
    ),
    Panel(
        "Open remediations",
        "Cordons, resets, reboots and repairs in progress.",
        ((f"{C}remediations_open", "open"),),
        "stat",
    ),
    Panel(
        "Failed external calls",
        "Failed remediation, alert and observation calls of the last day.",
        ((f"increase({C}external_call_failures_total[1d])", "failed"),),
        "stat",
        bad_above=1,
    ),
    Panel(
        "Unacknowledged directives",
        "Directives that agents have not acknowledged yet.",
        ((f"{C}outbox_depth", "waiting"),),
        "stat",
    ),
    Panel("Nodes by state", "Number of nodes in each state.", ((f"{C}nodes", "{{state}}"),), stacked=True),
    Panel(
        "Verdicts",
        "Verdicts per hour, by decision.",
        ((f"sum by (decision) (increase({C}verdicts_total[1h]))", "{{decision}}"),),
    ),
    Panel("Findings", "Active findings, by severity.", ((f"{C}node_findings", "{{severity}}"),)),
)

JOB = (
    Panel("Step", "Newest step that all ranks finished.", ((_job("job_step"), "{{run}}"),), "stat"),
    Panel("Generation", "Increases by one at each regroup.", ((_job("job_generation"), "{{run}}"),), "stat"),
    Panel("World size", "Ranks of the job.", ((_job("job_world_size"), "{{run}}"),), "stat"),
    Panel("Spares", "Nodes that wait outside the roster.", ((_job("job_spares"), "{{run}}"),), "stat"),
    Panel("Loss", "Newest loss reported by the lowest rank.", ((_job("job_loss"), "{{run}}"),), "stat"),
    Panel(
        "Uncommitted time",
        "Training time since the newest committed version: the most that a node loss or corruption can cost.",
        (('everstep:job:uncommitted_seconds{run=~"$run"}', "{{run}}"),),
        "stat",
        unit="s",
        bad_above=60,
    ),
    Panel("Loss curve", "Newest loss reported by the lowest rank.", ((_job("job_loss"), "{{run}}"),)),
    Panel("Steps per second", "Average over a minute.", (('everstep:job:steps_per_second{run=~"$run"}', "{{run}}"),)),
    Panel("Step time", "Step time of the slowest rank.", ((_job("job_step_seconds"), "{{run}}"),), unit="s"),
    Panel(
        "Step, committed, verified",
        "After a crash the newest complete version is restored, usually the last step and never one before the "
        "committed version; after corruption the newest verified version.",
        (
            (_job("job_step"), "step {{run}}"),
            (_job("job_committed_step"), "committed {{run}}"),
            (_job("job_verified_step"), "verified {{run}}"),
        ),
    ),
    Panel(
        "Parity and storage",
        "Steps of the version protected by parity and of the newest checkpoint on storage.",
        (
            (_job("job_parity_step"), "parity {{run}}"),
            (_job("job_storage_step"), "storage {{run}}"),
        ),
    ),
    Panel(
        "Recoveries",
        "Recovered generations per hour, by reason.",
        ((f'sum by (reason) (increase({C}recoveries_total{{run=~"$run"}}[1h]))', "{{reason}}"),),
    ),
    Panel(
        "Recovery time",
        "Time from the decision to the last rank's first step.",
        (
            (f"histogram_quantile(0.5, sum by (le) (rate({C}recovery_seconds_bucket[1h])))", "median"),
            ("everstep:recovery_seconds:p99", "99 %"),
        ),
        unit="s",
    ),
)

GPUS = (
    Panel(
        "Temperature",
        "GPU temperature, by node and GPU.",
        ((f"{G}temperature_celsius", "{{node}} {{gpu}}"),),
        unit="celsius",
    ),
    Panel("Power", "Power drawn by each GPU.", ((f"{G}power_watts", "{{node}} {{gpu}}"),), unit="watt"),
    Panel(
        "Utilization",
        "Share of time in which a kernel ran.",
        ((f"{G}utilization_ratio", "{{node}} {{gpu}}"),),
        unit="percentunit",
    ),
    Panel(
        "XIDs", "XID errors per hour.", ((f"sum by (node, xid) (increase({G}xids_total[1h]))", "{{node}} XID {{xid}}"),)
    ),
    Panel(
        "Uncorrectable ECC errors",
        "Uncorrectable ECC errors per hour.",
        ((f"sum by (node, gpu) (increase({G}ecc_uncorrectable_total[1h]))", "{{node}} {{gpu}}"),),
    ),
    Panel("Memory used", "Memory used on each GPU.", ((f"{G}memory_used_bytes", "{{node}} {{gpu}}"),), unit="bytes"),
)

CONTROLLER = (
    Panel(
        "Leaders",
        "Leading controllers; without one, nothing is decided.",
        ((f"sum({C}leader)", "leading"),),
        "stat",
        bad_above=2,
    ),
    Panel("Epoch", "Increases by one with each new leader.", ((f"max({C}epoch)", "epoch"),), "stat"),
    Panel(
        "Database outage",
        "Seconds since the database became unavailable.",
        ((f"max({C}database_outage_seconds)", "outage"),),
        "stat",
        unit="s",
        bad_above=1,
    ),
    Panel(
        "Unwritten records",
        "Records in memory that wait for the database.",
        ((f"max({C}database_outage_buffered_bytes)", "unwritten"),),
        "stat",
        unit="bytes",
    ),
    Panel(
        "Journal gaps",
        "Gaps of the last day; events in a gap cannot be replayed.",
        ((f"increase({C}journal_gaps_total[1d])", "gaps"),),
        "stat",
        bad_above=1,
    ),
    Panel(
        "Heartbeats",
        "Heartbeats answered per second.",
        ((f"sum(rate({C}heartbeats_total[1m]))", "heartbeats"),),
        "stat",
        "reqps",
    ),
    Panel("Role", "1: leader, 0: standby.", ((f"{C}leader", "{{instance}}"),)),
    Panel(
        "Nodes contacting standbys",
        "Nodes that repeatedly contact a standby controller.",
        ((f"{C}standby_persistent_nodes", "{{instance}}"),),
    ),
    Panel(
        "Decision and commit time",
        "Time to handle one event, and time until a transaction is durable.",
        (
            (f"histogram_quantile(0.99, sum by (le) (rate({C}event_handling_seconds_bucket[5m])))", "decide, 99 %"),
            (f"histogram_quantile(0.5, sum by (le) (rate({C}commit_seconds_bucket[5m])))", "commit, median"),
            ("everstep:commit_seconds:p99", "commit, 99 %"),
        ),
        unit="s",
    ),
    Panel(
        "Event loop lag",
        "Maximum lag in the last second. Heartbeat deadlines are extended by this time.",
        ((f"{C}loop_lag_seconds", "{{instance}}"),),
        unit="s",
    ),
    Panel("Queue", "Requests waiting for their transaction.", ((f"{C}queue_depth", "{{instance}}"),)),
    Panel(
        "Requests shed",
        "Requests refused per second because the queue was full; agents send them again.",
        ((f"sum by (class) (rate({C}requests_shed_total[5m]))", "{{class}}"),),
    ),
    Panel(
        "Events handled",
        "Events handled per second, by kind.",
        ((f"sum by (kind) (rate({C}events_total[5m]))", "{{kind}}"),),
        stacked=True,
    ),
    Panel(
        "Reports",
        "Reports per second: accepted, repeated, and ignored (for example of an outdated generation).",
        (
            (f"sum(rate({C}reports_total[5m]))", "accepted"),
            (f"sum(rate({C}reports_repeated_total[5m]))", "repeated"),
            (f"sum by (reason) (rate({C}reports_ignored_total[5m]))", "ignored: {{reason}}"),
        ),
    ),
    Panel(
        "Connections cut",
        "Connections closed per hour because an agent or an event-stream client did not read.",
        (
            (f"sum(increase({C}agent_sessions_cut_total[1h]))", "sessions"),
            (f"sum(increase({C}event_streams_cut_total[1h]))", "streams"),
        ),
    ),
    Panel(
        "Requests refused",
        "Requests answered with an error per minute, by route and code.",
        ((f"sum by (route, code) (rate({C}requests_failed_total[5m])) * 60", "{{route}} {{code}}"),),
    ),
    Panel(
        "Requests over a limit",
        "Requests refused per minute because of a per-client limit, and requests in progress.",
        (
            (f"sum by (limit) (rate({C}requests_over_limit_total[5m])) * 60", "{{limit}}"),
            (f"max({C}requests_in_flight)", "in progress"),
        ),
    ),
)

AGENTS = (
    Panel(
        "Requests to the controller",
        "Requests of agents per second, by kind and outcome.",
        ((f"sum by (request, outcome) (rate({A}requests_total[5m]))", "{{request}} {{outcome}}"),),
    ),
    Panel(
        "Seconds without an answer",
        "Seconds since a controller answered, for the ten longest.",
        ((f"topk(10, {A}controller_silent_seconds)", "{{node}}"),),
        unit="s",
    ),
    Panel(
        "Reports waiting",
        "Unacknowledged reports of the ten fullest spools, and reports dropped per hour because a spool was full.",
        (
            (f"topk(10, {A}spool_reports)", "{{node}}"),
            (f"sum(increase({A}spool_dropped_total[1h]))", "lost"),
        ),
    ),
    Panel(
        "Agent memory",
        "Resident memory of the ten largest agent processes.",
        ((f"topk(10, {A}resident_memory_bytes)", "{{node}} {{process}}"),),
        unit="bytes",
    ),
    Panel(
        "Free vault memory",
        "Free memory for checkpoint slots, for the ten nodes with the least.",
        ((f"bottomk(10, {V}free_bytes)", "{{node}}"),),
        unit="bytes",
    ),
    Panel("Vaults down", "Nodes whose vault does not answer.", ((f"count({V}up) - sum({V}up)", "down"),)),
)

ROWS = (("Fleet", FLEET), ("Job", JOB), ("GPUs", GPUS), ("Controller", CONTROLLER), ("Agents", AGENTS))
