"""What the dashboard shows, as a table: rows of panels, each with its queries. ``dashboards.build`` makes the file."""

from __future__ import annotations

from dataclasses import dataclass

C = "everstep_controller_"
A = "everstep_agent_"
G = "everstep_gpu_"
V = "everstep_vault_"


@dataclass(frozen=True)
class Panel:
    """One panel: its queries as (PromQL, legend), its unit by Grafana's name, and how wide and high it is."""

    title: str
    about: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 8
    height: int = 7
    bad_above: float | None = None
    stacked: bool = False


def _job(metric: str) -> str:
    return f'{C}{metric}{{run=~"$run"}}'


FLEET = (
    Panel("Fit nodes", "Nodes that may compute.", ((f'sum({C}nodes{{state="healthy"}})', "healthy"),), "stat", width=4),
    Panel(
        "Unfit nodes",
        "Quarantined, lost, held, on probation, in repair, suspect.",
        (("everstep:nodes:unfit", "unfit"),),
        "stat",
        width=4,
        bad_above=1,
    ),
    Panel(
        "Critical findings",
        "Raised and not cleared.",
        ((f'{C}node_findings{{severity="critical"}}', "critical"),),
        "stat",
        width=4,
        bad_above=1,
    ),
    Panel(
        "Eviction breaker",
        "1: automatic eviction is stopped, and says why in `everstep status`.",
        ((f"{C}eviction_breaker_open", "open"),),
        "stat",
        width=4,
        bad_above=1,
    ),
    Panel("Evictions left", "What the budget allows now.", ((f"{C}eviction_budget_left", "left"),), "stat", width=4),
    Panel(
        "Agents connected",
        "Nodes with a session.",
        ((f"{C}agents_connected", "connected"),),
        "stat",
        width=4,
    ),
    Panel(
        "Held evictions",
        "Convicted nodes that stay: `everstep budget` says what holds each.",
        ((f"{C}evictions_deferred", "held"),),
        "stat",
        width=4,
        bad_above=1,
    ),
    Panel(
        "Silent nodes",
        "Over their deadline or cut off, and not lost yet.",
        ((f"{C}nodes_missing_heartbeats", "silent"),),
        "stat",
        width=4,
        bad_above=1,
    ),
    Panel(
        "Silent together",
        "1: so many at once that the network is suspected and nobody is lost for it.",
        ((f"{C}correlated_silence", "together"),),
        "stat",
        width=4,
        bad_above=1,
    ),
    Panel(
        "Open remedies",
        "Cordons, resets, reboots and tickets under way.",
        ((f"{C}remediations_open", "open"),),
        "stat",
        width=4,
    ),
    Panel(
        "Failed remedies",
        "Given up in the last day, alerts that were not taken included.",
        ((f"increase({C}external_call_failures_total[1d])", "failed"),),
        "stat",
        width=4,
        bad_above=1,
    ),
    Panel(
        "Directives waiting",
        "Pushed and not acknowledged.",
        ((f"{C}outbox_depth", "waiting"),),
        "stat",
        width=4,
    ),
    Panel("Nodes by state", "Where each node stands.", ((f"{C}nodes", "{{state}}"),), stacked=True),
    Panel(
        "Verdicts", "Judgements per hour.", ((f"sum by (decision) (increase({C}verdicts_total[1h]))", "{{decision}}"),)
    ),
    Panel("Findings", "Raised and not cleared, by severity.", ((f"{C}node_findings", "{{severity}}"),)),
)

JOB = (
    Panel("Step", "Newest step that all ranks finished.", ((_job("job_step"), "{{run}}"),), "stat", width=4),
    Panel("Generation", "Rises by one at each regroup.", ((_job("job_generation"), "{{run}}"),), "stat", width=4),
    Panel("World size", "Ranks that take part.", ((_job("job_world_size"), "{{run}}"),), "stat", width=4),
    Panel("Spares", "Nodes that wait.", ((_job("job_spares"), "{{run}}"),), "stat", width=4),
    Panel("Loss", "As the lowest rank reports it.", ((_job("job_loss"), "{{run}}"),), "stat", width=4),
    Panel(
        "Time at risk",
        "Computed and not committed yet: what the loss of a node with its memory, or corruption, could cost at most.",
        (('everstep:job:uncommitted_seconds{run=~"$run"}', "{{run}}"),),
        "stat",
        unit="s",
        width=4,
        bad_above=60,
    ),
    Panel("Loss curve", "Newest loss.", ((_job("job_loss"), "{{run}}"),)),
    Panel("Steps per second", "Over a minute.", (('everstep:job:steps_per_second{run=~"$run"}', "{{run}}"),)),
    Panel("Step time", "The slowest rank's.", ((_job("job_step_seconds"), "{{run}}"),), unit="s"),
    Panel(
        "Step, committed, verified",
        "A crash restores the newest whole version, mostly the last step, and never one before the committed one; "
        "corruption the newest known to be clean.",
        (
            (_job("job_step"), "step {{run}}"),
            (_job("job_committed_step"), "committed {{run}}"),
            (_job("job_verified_step"), "verified {{run}}"),
        ),
    ),
    Panel(
        "Beyond memory",
        "Step of the version that parity keeps, and of the newest checkpoint on storage.",
        (
            (_job("job_parity_step"), "parity {{run}}"),
            (_job("job_storage_step"), "storage {{run}}"),
        ),
    ),
    Panel(
        "Recoveries",
        "Generations per hour, by reason.",
        ((f'sum by (reason) (increase({C}recoveries_total{{run=~"$run"}}[1h]))', "{{reason}}"),),
    ),
    Panel(
        "Recovery time",
        "Decision to the last rank's first step.",
        (
            (f"histogram_quantile(0.5, sum by (le) (rate({C}recovery_seconds_bucket[1h])))", "median"),
            ("everstep:recovery_seconds:p99", "99 %"),
        ),
        unit="s",
    ),
)

GPUS = (
    Panel("Temperature", "By node and GPU.", ((f"{G}temperature_celsius", "{{node}} {{gpu}}"),), unit="celsius"),
    Panel("Power", "Drawn now.", ((f"{G}power_watts", "{{node}} {{gpu}}"),), unit="watt"),
    Panel(
        "Utilization",
        "Share of time a kernel ran.",
        ((f"{G}utilization_ratio", "{{node}} {{gpu}}"),),
        unit="percentunit",
    ),
    Panel("XIDs", "Per hour.", ((f"sum by (node, xid) (increase({G}xids_total[1h]))", "{{node}} XID {{xid}}"),)),
    Panel(
        "Uncorrectable ECC errors",
        "Per hour.",
        ((f"sum by (node, gpu) (increase({G}ecc_uncorrectable_total[1h]))", "{{node}} {{gpu}}"),),
    ),
    Panel("Memory used", "Of each GPU.", ((f"{G}memory_used_bytes", "{{node}} {{gpu}}"),), unit="bytes"),
)

CONTROLLER = (
    Panel("Leaders", "One, or nothing is decided.", ((f"sum({C}leader)", "leading"),), "stat", width=4, bad_above=2),
    Panel("Epoch", "Rises by one with each new leader.", ((f"max({C}epoch)", "epoch"),), "stat", width=4),
    Panel(
        "Database away",
        "For how long it could not be written.",
        ((f"max({C}database_outage_seconds)", "away"),),
        "stat",
        unit="s",
        width=4,
        bad_above=1,
    ),
    Panel(
        "Waiting for it",
        "Decisions in memory.",
        ((f"max({C}database_outage_buffered_bytes)", "waiting"),),
        "stat",
        unit="bytes",
        width=4,
    ),
    Panel(
        "Journal gaps",
        "In the last day: what fell into one cannot be replayed.",
        ((f"increase({C}journal_gaps_total[1d])", "gaps"),),
        "stat",
        width=4,
        bad_above=1,
    ),
    Panel(
        "Heartbeats", "Per second.", ((f"sum(rate({C}heartbeats_total[1m]))", "heartbeats"),), "stat", "reqps", width=4
    ),
    Panel("Role", "1 leads, 0 stands by.", ((f"{C}leader", "{{instance}}"),)),
    Panel(
        "Knocks",
        "Nodes that come again and again to one that stands by.",
        ((f"{C}standby_persistent_nodes", "{{instance}}"),),
    ),
    Panel(
        "Time to decide and to commit",
        "The core's time per event; a transaction, until it is durable.",
        (
            (f"histogram_quantile(0.99, sum by (le) (rate({C}event_handling_seconds_bucket[5m])))", "decide, 99 %"),
            (f"histogram_quantile(0.5, sum by (le) (rate({C}commit_seconds_bucket[5m])))", "commit, median"),
            ("everstep:commit_seconds:p99", "commit, 99 %"),
        ),
        unit="s",
    ),
    Panel(
        "Loop lag",
        "Worst lateness in the last second. Silence is forgiven for as long as this.",
        ((f"{C}loop_lag_seconds", "{{instance}}"),),
        unit="s",
    ),
    Panel("Queue", "What waits for its transaction.", ((f"{C}queue_depth", "{{instance}}"),)),
    Panel(
        "Shed",
        "Refused per second because too much waited; agents keep it and send it again.",
        ((f"sum by (class) (rate({C}requests_shed_total[5m]))", "{{class}}"),),
    ),
    Panel(
        "Events handled",
        "Per second, by kind.",
        ((f"sum by (kind) (rate({C}events_total[5m]))", "{{kind}}"),),
        stacked=True,
    ),
    Panel(
        "Reports",
        "Per second: taken, sent twice, and dropped by rule (of a life or generation that is over).",
        (
            (f"sum(rate({C}reports_total[5m]))", "taken"),
            (f"sum(rate({C}reports_repeated_total[5m]))", "repeated"),
            (f"sum by (reason) (rate({C}reports_ignored_total[5m]))", "ignored: {{reason}}"),
        ),
    ),
    Panel(
        "Connections cut",
        "Per hour: agents that did not read their pushes, readers of the event stream that took nothing.",
        (
            (f"sum(increase({C}agent_sessions_cut_total[1h]))", "sessions"),
            (f"sum(increase({C}event_streams_cut_total[1h]))", "streams"),
        ),
    ),
    Panel(
        "Requests refused",
        "Per minute, by route and reason.",
        ((f"sum by (route, code) (rate({C}requests_failed_total[5m])) * 60", "{{route}} {{code}}"),),
    ),
    Panel(
        "Requests over a limit",
        "Per minute, refused since their bearer had too much at once; and how many are under way.",
        (
            (f"sum by (limit) (rate({C}requests_over_limit_total[5m])) * 60", "{{limit}}"),
            (f"max({C}requests_in_flight)", "under way now"),
        ),
    ),
)

AGENTS = (
    Panel(
        "Words to the controller",
        "Per second, by request and outcome.",
        ((f"sum by (request, outcome) (rate({A}requests_total[5m]))", "{{request}} {{outcome}}"),),
    ),
    Panel(
        "Unanswered",
        "Seconds since a controller answered, the ten that wait longest.",
        ((f"topk(10, {A}controller_silent_seconds)", "{{node}}"),),
        unit="s",
    ),
    Panel(
        "Reports waiting",
        "In spools, the ten fullest; and reports lost over their bounds, per hour.",
        (
            (f"topk(10, {A}spool_reports)", "{{node}}"),
            (f"sum(increase({A}spool_dropped_total[1h]))", "lost"),
        ),
    ),
    Panel(
        "Memory",
        "Of an agent's processes, the ten largest.",
        ((f"topk(10, {A}resident_memory_bytes)", "{{node}} {{process}}"),),
        unit="bytes",
    ),
    Panel(
        "Vaults: room",
        "Left for checkpoint slots, the ten with the least.",
        ((f"bottomk(10, {V}free_bytes)", "{{node}}"),),
        unit="bytes",
    ),
    Panel("Vaults: down", "Nodes whose vault does not serve.", ((f"count({V}up) - sum({V}up)", "down"),)),
)

ROWS = (("Fleet", FLEET), ("Job", JOB), ("GPUs", GPUS), ("Controller", CONTROLLER), ("Agents", AGENTS))
