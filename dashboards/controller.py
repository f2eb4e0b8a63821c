"""The dashboard of the controller: does it keep up with its agents, its database and its own memory."""

from __future__ import annotations

from dashboards.panels import ONE, A, C, Dashboard, Panel, above, never, top

OF_CONTROLLERS = f"and on (instance) {C}leader"

NOW = (
    Panel(
        "Leaders",
        "Controllers that lead. Without one nothing is decided: start a controller.",
        ((f"sum({C}leader)", "leading"),),
        "stat",
        thresholds=ONE,
    ),
    Panel(
        "Epoch",
        "Increases by one with each new leader. Often: the lease or the leader's host is unstable.",
        ((f"max({C}epoch)", "epoch"),),
        "stat",
    ),
    Panel(
        "Sessions",
        "Agents with a session. Fewer than nodes: see the agents without an answer on the dashboard On call.",
        ((f"max({C}agents_connected)", "sessions"),),
        "stat",
    ),
    Panel(
        "Heartbeats per second",
        "Heartbeats answered. About one per node and interval; much less: agents do not reach the controller.",
        ((f"sum(rate({C}heartbeats_total[$__rate_interval]))", "heartbeats"),),
        "stat",
        "reqps",
    ),
    Panel(
        "Database outage",
        "Seconds since the database became unavailable. Repair it; decisions are written afterwards.",
        ((f"max({C}database_outage_seconds)", "outage"),),
        "stat",
        "s",
        above(1, 30),
    ),
    Panel(
        "Event loop lag",
        "Maximum lag in the last second. Heartbeat deadlines are extended by it. Over half a second: the controller "
        "needs more CPU time.",
        ((f"max({C}loop_lag_seconds)", "lag"),),
        "stat",
        "s",
        above(0.1, 0.5),
    ),
)

TRANSACTIONS = (
    Panel(
        "Time to decide and to commit",
        "Time to handle one event, and time until a transaction is durable. Slow commits: the database's disk or load.",
        (
            (f"histogram_quantile(0.99, sum by (le) (rate({C}event_handling_seconds_bucket[5m])))", "decide, 99 %"),
            (f"histogram_quantile(0.5, sum by (le) (rate({C}commit_seconds_bucket[5m])))", "commit, median"),
            ("everstep:commit_seconds:p99", "commit, 99 %"),
        ),
        unit="s",
        thresholds=above(0.1, 0.5),
    ),
    Panel(
        "Transactions per second",
        "Transactions written, and events in them.",
        (
            (f"sum(rate({C}commit_seconds_count[5m]))", "transactions"),
            (f"sum(rate({C}commit_events_sum[5m]))", "events"),
        ),
    ),
    Panel(
        "Events handled",
        "Events handled per second, by kind. One kind that grows alone: see which node sends it in `everstep events`.",
        ((f"sum by (kind) (rate({C}events_total[5m]))", "{{kind}}"),),
        stacked=True,
    ),
    Panel(
        "Queue",
        "Requests waiting for their transaction, and directives that agents have not acknowledged.",
        (
            (f"max({C}queue_depth)", "requests"),
            (f"max({C}outbox_depth)", "directives"),
        ),
        thresholds=above(1000, 5000),
    ),
    Panel(
        "Requests shed",
        "Requests refused per second because the queue was full. Agents send them again, so decisions are late.",
        ((f"sum by (class) (rate({C}requests_shed_total[5m]))", "{{class}}"),),
        thresholds=never(0.1),
    ),
    Panel(
        "Event loop lag over time",
        "Maximum lag in the last second. Every recovery takes that much longer.",
        ((f"{C}loop_lag_seconds", "{{instance}}"),),
        unit="s",
        thresholds=above(0.1, 0.5),
    ),
)

DATABASE = (
    Panel(
        "Database",
        "1 while the database cannot be written. `everstep status` shows the cause.",
        ((f"max({C}database_unavailable)", "unavailable"),),
        thresholds=never(),
    ),
    Panel(
        "Unwritten records",
        "Bytes in memory that wait for the database. At `outage_buffer_bytes` (64 MiB) the leader ends.",
        ((f"max({C}database_outage_buffered_bytes)", "unwritten"),),
        unit="bytes",
        thresholds=above(16 << 20, 48 << 20),
    ),
    Panel(
        "Journal gaps",
        "Gaps per hour; events in a gap cannot be replayed. Make room in `journal_dir`, or use a faster disk.",
        ((f"increase({C}journal_gaps_total[1h])", "{{instance}}"),),
        thresholds=never(),
    ),
)

AGENTS = (
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
        "Requests of agents",
        "Requests to controllers per second, by kind and outcome, as agents count them.",
        ((f"sum by (request, outcome) (rate({A}requests_total[5m]))", "{{request}} {{outcome}}"),),
    ),
    Panel(
        "Reports waiting at agents",
        "Unacknowledged reports of the ten fullest spools. A spool that is full drops reports.",
        ((top(f"{A}spool_reports"), "{{node}}"),),
        "bargauge",
        thresholds=above(1000, 5000),
    ),
    Panel(
        "Reports dropped per hour",
        "Reports dropped because a spool was full. See whether a controller was away for long, or "
        "what a node reports without end.",
        ((f"sum(increase({A}spool_dropped_total[1h]))", "dropped"),),
        thresholds=never(),
    ),
    Panel(
        "Connections cut",
        "Connections closed per hour because an agent or an event-stream client did not read.",
        (
            (f"sum(increase({C}agent_sessions_cut_total[1h]))", "sessions"),
            (f"sum(increase({C}event_streams_cut_total[1h]))", "streams"),
        ),
        thresholds=above(1, 10),
    ),
    Panel(
        "Event log entries suppressed",
        "Event log entries per hour that a node's rate limit suppressed. Some node reports without end.",
        ((f"sum(increase({C}events_suppressed_total[1h]))", "suppressed"),),
        thresholds=above(1, 100),
    ),
)

PEOPLE = (
    Panel(
        "Requests refused",
        "Requests answered with an error per minute, by route and code.",
        ((f"sum by (route, code) (rate({C}requests_failed_total[5m])) * 60", "{{route}} {{code}}"),),
        thresholds=above(10, 100),
        no_value="No request was refused",
    ),
    Panel(
        "Requests over a limit",
        "Requests refused per minute because of a per-client limit. Raise the limit for a program that needs it.",
        ((f"sum by (limit) (rate({C}requests_over_limit_total[5m])) * 60", "{{limit}}"),),
        thresholds=above(1, 60),
    ),
    Panel(
        "Requests in progress",
        "Requests of people and programs, and open event streams.",
        (
            (f"max({C}requests_in_flight)", "requests"),
            (f"max({C}event_streams)", "streams"),
        ),
    ),
)

RESOURCES = (
    Panel(
        "Memory",
        "Resident memory of each leading controller. Steady growth over days: keep a journal and report it.",
        ((f"process_resident_memory_bytes {OF_CONTROLLERS}", "{{instance}}"),),
        unit="bytes",
        thresholds=above(2 << 30, 4 << 30),
    ),
    Panel(
        "CPU",
        "Cores in use by each leading controller. The event loop has one core: near 1 it is the limit.",
        ((f"rate(process_cpu_seconds_total[$__rate_interval]) {OF_CONTROLLERS}", "{{instance}}"),),
        thresholds=above(0.7, 0.95),
    ),
    Panel(
        "Open files",
        "File descriptors in use as a share of the limit: one per session and stream. Raise `LimitNOFILE`.",
        ((f"process_open_fds / process_max_fds {OF_CONTROLLERS}", "{{instance}}"),),
        unit="percentunit",
        thresholds=above(0.7, 0.9),
    ),
    Panel(
        "Buffers",
        "Bytes of answers and event streams that clients have not read yet.",
        (
            (f"max({C}answers_buffered_bytes)", "answers"),
            (f"max({C}event_streams_buffered_bytes)", "streams"),
        ),
        unit="bytes",
        thresholds=above(64 << 20, 256 << 20),
    ),
    Panel(
        "Agent memory",
        "Resident memory of the ten largest agent processes.",
        ((top(f"{A}resident_memory_bytes"), "{{node}} {{process}}"),),
        "bargauge",
        "bytes",
        above(512 << 20, 2 << 30),
    ),
    Panel(
        "Sensor polls",
        "Duration of the newest sensor poll, for the ten slowest nodes. Seconds: a driver call hangs.",
        ((top(f"{A}sensor_poll_seconds"), "{{node}}"),),
        "bargauge",
        "s",
        above(1, 5),
    ),
)

CONTROLLER = Dashboard(
    "controller",
    "Everstep: controller",
    "Does the controller keep up with its agents, its database and its memory.",
    (),
    (
        ("Now", NOW),
        ("Transactions", TRANSACTIONS),
        ("Database and journal", DATABASE),
        ("Agents", AGENTS),
        ("People and programs", PEOPLE),
        ("Resources", RESOURCES),
    ),
)
