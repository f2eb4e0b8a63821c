"""The dashboard for the person on call: which node is out, why, since when, and what comes next."""

from __future__ import annotations

from dashboards.panels import INFORMATIVE, NODE, ONE, RACK, A, C, Dashboard, Panel, V, above, below, here, never, top

GRAVE = here(f"{A}findings", 'severity!="info"')
FIRING = 'ALERTS{alertname=~"Everstep.*", alertstate="firing"}'

NOW = (
    Panel(
        "Firing alerts",
        "Alerts of Everstep that fire. The table below names them; the runbook has a heading for each.",
        ((f"count({FIRING}) or vector(0)", "firing"),),
        "stat",
        thresholds=above(1, 3),
    ),
    Panel(
        "Needs a person",
        "Matters that no automatic action will settle: the list of `everstep status`. The table below names them.",
        ((f"sum({C}needs)", "open"),),
        "stat",
        thresholds=above(1, 5),
    ),
    Panel(
        "Unhealthy nodes",
        "Quarantined, lost, held, on probation, in repair or suspect. The table below says why.",
        (("everstep:nodes:unfit", "unhealthy"),),
        "stat",
        thresholds=above(1, 10),
    ),
    Panel(
        "Leaders",
        "Controllers that lead. Without one nothing is decided: start a controller. Two may show for a scrape or two "
        "after a failover; only one of them can write.",
        ((f"sum({C}leader)", "leading"),),
        "stat",
        thresholds=ONE,
    ),
    Panel(
        "Database outage",
        "Seconds since the database became unavailable. Running jobs still regroup; nothing else is decided. Repair "
        "the database; everything decided meanwhile is then written.",
        ((f"max({C}database_outage_seconds)", "outage"),),
        "stat",
        "s",
        above(1, 30),
    ),
    Panel(
        "Eviction breaker",
        "1: automatic eviction is stopped, because more nodes failed than the budget allows. `everstep status` shows "
        "why; reset the breaker once the cause is known.",
        ((f"max({C}eviction_breaker_open)", "open"),),
        "stat",
        thresholds=never(),
    ),
    Panel(
        "Evictions left",
        "Nodes that the eviction budget allows to evict now. At 0 the next eviction is deferred: `everstep budget`.",
        ((f"min({C}eviction_budget_left)", "left"),),
        "stat",
        thresholds=below(1, 2),
    ),
    Panel(
        "Deferred evictions",
        "Nodes whose eviction is deferred. `everstep budget` shows the reason; `everstep node evict` evicts anyway.",
        ((f"max({C}evictions_deferred)", "deferred"),),
        "stat",
        thresholds=above(1, 5),
    ),
    Panel(
        "Silent nodes",
        "Silent or disconnected nodes that are not lost yet. Many at once: look at the network before the nodes.",
        ((f"max({C}nodes_missing_heartbeats)", "silent"),),
        "stat",
        thresholds=above(1, 5),
    ),
    Panel(
        "Correlated silence",
        "1: so many nodes are silent at once that the network is suspected and none of them is declared lost. Check "
        "network and power.",
        ((f"max({C}correlated_silence)", "silent"),),
        "stat",
        thresholds=never(),
    ),
    Panel(
        "Outbreaks",
        "Findings that so many nodes show that none is evicted for it. Suspect a driver, an image or a switch: "
        "`everstep status` names the finding.",
        ((f"max({C}outbreaks)", "outbreaks"),),
        "stat",
        thresholds=never(),
    ),
    Panel(
        "Open remediations",
        "Cordons, resets, reboots and repairs in progress. `everstep remediations` lists them.",
        ((f"max({C}remediations_open)", "open"),),
        "stat",
        thresholds=INFORMATIVE,
    ),
    Panel(
        "Failed external calls",
        "Failed remediation, alert and observation calls of the last day. `everstep remediations` shows why.",
        ((f"sum(increase({C}external_call_failures_total[1d]))", "failed"),),
        "stat",
        thresholds=above(1, 10),
    ),
)

NODES = (
    Panel(
        "Nodes out of service",
        "The hundred nodes whose state changed last. Rule: what took the node out. Next: what it waits for; the page "
        "Monitoring of the documentation says what to do for each word. `everstep node show NODE` has the evidence.",
        ((f'{C}node_unfit_since_timestamp_seconds{{rack=~"$rack", node=~"$node"}} * 1000', ""),),
        "table",
        "dateTimeAsIso",
        no_value="No node is out of service",
        columns=(
            ("node", "Node"),
            ("rack", "Rack"),
            ("state", "State"),
            ("rule", "Rule"),
            ("next", "Next"),
            ("reason", "Reason"),
        ),
        value="Since",
    ),
    Panel(
        "What needs a person",
        "Matters that no automatic action will settle, with the time since which they stand. `everstep status` has the "
        "command to begin with.",
        ((f"max without (instance, job) ({C}need_since_timestamp_seconds) * 1000", ""),),
        "table",
        "dateTimeAsIso",
        no_value="Nothing needs a person",
        columns=(
            ("subject", "Subject"),
            ("kind", "Kind"),
            ("gpu", "GPU"),
            ("finding", "Finding"),
            ("reason", "Reason"),
        ),
        value="Since",
    ),
    Panel(
        "Alerts",
        "Alerts that fire, with the time since which their condition holds. The runbook has a heading for each name.",
        ((f'ALERTS_FOR_STATE{{alertname=~"Everstep.*"}} * 1000 and ignoring (alertstate) {FIRING}', ""),),
        "table",
        "dateTimeAsIso",
        no_value="No alert fires",
        columns=(
            ("alertname", "Alert"),
            ("severity", "Severity"),
            ("run", "Run"),
            ("node", "Node"),
            ("gpu", "GPU"),
            ("finding", "Finding"),
            ("instance", "Instance"),
        ),
        value="Since",
    ),
)

HISTORY = (
    Panel(
        "Nodes by state",
        "Number of nodes in each state. A growing share of quarantine or repair shrinks jobs: look at what the nodes "
        "have in common.",
        ((f"max by (state) ({C}nodes)", "{{state}}"),),
        stacked=True,
    ),
    Panel(
        "Verdicts per hour",
        "Verdicts by decision. Many evictions in one hour have a common cause more often than not.",
        ((f"sum by (decision) (increase({C}verdicts_total[1h]))", "{{decision}}"),),
        thresholds=INFORMATIVE,
    ),
    Panel(
        "Racks with unhealthy nodes",
        "The ten racks with the most unhealthy nodes. Several in one rack: check its power, cooling and switch first.",
        ((top(f'max by (rack) ({C}rack_unfit_nodes{{rack=~"$rack"}})'), "{{rack}}"),),
        "bargauge",
        thresholds=above(1, 3),
    ),
    Panel(
        "Findings by severity",
        "Active findings of the fleet. `everstep findings --active` lists them; critical ones take nodes out.",
        ((f"max by (severity) ({C}node_findings)", "{{severity}}"),),
        thresholds=above(1, 10),
    ),
    Panel(
        "Nodes with the most findings",
        "Warnings and critical findings of the ten nodes with the most. `everstep node show NODE` has the evidence.",
        ((top(f"sum by (node) ({GRAVE})"), "{{node}}"),),
        "bargauge",
        thresholds=above(1, 3),
    ),
    Panel(
        "Recoveries per hour",
        "Recovered generations of all runs, by reason. Select a run on the dashboard Job for its phases.",
        ((f"sum by (reason) (increase({C}recoveries_total[1h]))", "{{reason}}"),),
    ),
)

DECIDING = (
    Panel(
        "Role of each controller",
        "1: leader, 0: standby. A line that changes often: the leader's host or its network fails.",
        ((f"{C}leader", "{{instance}}"),),
        thresholds=INFORMATIVE,
    ),
    Panel(
        "Targets that do not answer",
        "Controllers and agents that Prometheus cannot scrape. An agent that does not answer and whose node is healthy "
        "has a wrong token or a closed port.",
        (('sum by (job) (1 - up{job=~"everstep-.*"})', "{{job}}"),),
        thresholds=above(1, 5),
    ),
    Panel(
        "Agents without an answer",
        "Seconds since a controller answered, for the ten longest. One node: its network. All: the controller.",
        ((top(here(f"{A}controller_silent_seconds")), "{{node}}"),),
        "bargauge",
        "s",
        above(5, 30),
    ),
    Panel(
        "Nodes at a standby",
        "Nodes that repeatedly contact a standby controller, and leaders of the last hour that resigned because no "
        "node reached them. Check the network before the leader.",
        (
            (f"max({C}nodes_contacting_standby)", "nodes"),
            (f"max({C}leader_resignations)", "resignations"),
        ),
        thresholds=never(),
    ),
    Panel(
        "Clock difference",
        "Controller time minus the machine's clock. More than a minute: set the clock (runbook, EverstepClockWrong).",
        ((f"{C}time_ahead_of_clock_seconds", "{{instance}}"),),
        unit="s",
        thresholds=((None, "red"), (-60, "green"), (60, "red")),
    ),
    Panel(
        "Vaults that do not serve",
        "Nodes whose vault does not answer: their jobs keep no new checkpoints there. The agent's log says why.",
        ((f"sum(1 - ({here(f'{V}up')}))", "down"),),
        thresholds=never(),
    ),
)

ON_CALL = Dashboard(
    "on-call",
    "Everstep: on call",
    "Which node is out of service, why, since when, and what comes next.",
    (RACK, NODE),
    (
        ("Now", NOW),
        ("Which node, why, since when, what next", NODES),
        ("What happened", HISTORY),
        ("Can Everstep decide?", DECIDING),
    ),
)
