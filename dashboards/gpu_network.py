"""The dashboard of the hardware: GPUs, NVLink, PCIe and network ports, always the ten that stand out."""

from __future__ import annotations

from dashboards.panels import (
    IN_RACK,
    INFORMATIVE,
    NODE,
    RACK,
    C,
    Dashboard,
    G,
    P,
    Panel,
    above,
    below,
    bottom,
    busiest,
    here,
    highest,
    lowest,
    never,
    top,
)

GPU = "{{node}} GPU {{gpu}}"
PORT = "{{node}} {{port}}"
XIDS = "everstep:gpu:xids_last_hour"
INVOLUNTARY = here(f"{G}throttled_gpus", 'reason!="power_cap"')

NOW = (
    Panel(
        "GPUs",
        "GPUs that can be read, on the chosen nodes.",
        ((f"sum({here(f'{G}up')})", "up"),),
        "stat",
    ),
    Panel(
        "Lost GPUs",
        "GPUs that are lost or cannot be read. Most need a reset or a reboot: `everstep node show NODE`.",
        ((f"sum(1 - ({here(f'{G}up')}))", "lost"),),
        "stat",
        thresholds=never(),
    ),
    Panel(
        "Slowed GPUs",
        "GPUs that the hardware or heat slows down. The panels below say for which reason, and where.",
        ((f"sum(({here(f'{G}throttled_by_hardware')}) or ({here(f'{G}throttled_by_heat')}))", "slowed"),),
        "stat",
        thresholds=above(1, 8),
    ),
    Panel(
        "XIDs",
        "XID errors of the last hour. The panel XIDs names them; the findings page of the documentation explains each.",
        ((f"sum({here(XIDS)}) or vector(0)", "XIDs"),),
        "stat",
        thresholds=above(1, 10),
    ),
    Panel(
        "NVLinks down",
        "NVLinks that are down on the chosen nodes. One link down makes every collective of its node slower.",
        ((f"sum({here(f'{G}nvlinks_down')})", "down"),),
        "stat",
        thresholds=never(),
    ),
    Panel(
        "Ports down",
        "InfiniBand and Ethernet ports that are not active, empty sockets included.",
        ((f"sum(1 - ({here(f'{P}up')}))", "down"),),
        "stat",
        thresholds=above(1, 8),
    ),
)

HEAT = (
    Panel(
        "Hottest GPUs",
        "Temperature of the ten hottest GPUs. One rack on top: check its cooling; one GPU: its heat sink.",
        ((highest(f"{G}temperature_celsius"), GPU),),
        unit="celsius",
        thresholds=above(80, 87),
    ),
    Panel(
        "Hottest memory",
        "Memory temperature of the ten hottest GPUs. HBM slows down at 95 degrees and above.",
        ((highest(f"{G}memory_temperature_celsius"), GPU),),
        unit="celsius",
        thresholds=above(90, 95),
    ),
    Panel(
        "Least margin",
        "Degrees left until a GPU slows down, for the ten with the least. At 0 the GPU throttles.",
        ((lowest(f"{G}temperature_margin_celsius"), GPU),),
        unit="celsius",
        thresholds=below(2, 10),
    ),
    Panel(
        "Highest power",
        "Power drawn by the ten GPUs that draw most. Far below the limit in training: the GPU waits.",
        ((highest(f"{G}power_watts"), GPU),),
        unit="watt",
        thresholds=above(700, 1000),
    ),
    Panel(
        "Power by rack",
        "Power of all GPUs, for the ten racks that draw most. Compare with what the rack may draw.",
        ((top(f"sum by (rack) ({G}power_watts * on (node) group_left (rack) {IN_RACK})"), "{{rack}}"),),
        unit="watt",
        thresholds=INFORMATIVE,
    ),
    Panel(
        "GPUs slowed, by reason",
        "GPUs that slow down against their will. Thermal: cooling. Power brake: the rack's power. Power cap: the limit "
        "is reached, which is normal under full load.",
        ((f"sum by (reason) ({here(f'{G}throttled_gpus')})", "{{reason}}"),),
        stacked=True,
    ),
)

SPEED = (
    Panel(
        "Lowest SM clocks",
        "Clock of the ten slowest GPUs. Lower than the others under load: throttled, or a clock limit was left set.",
        ((lowest(f"{G}sm_clock_hertz"), GPU),),
        unit="hertz",
        thresholds=below(5e8, 1e9),
    ),
    Panel(
        "Lowest memory clocks",
        "Memory clock of the ten slowest GPUs. It should be the same on all GPUs of a model.",
        ((lowest(f"{G}memory_clock_hertz"), GPU),),
        unit="hertz",
        thresholds=below(5e8, 1e9),
    ),
    Panel(
        "Least utilized",
        "Share of time in which a kernel ran, for the ten lowest. One GPU at 0 while its run trains: its rank hangs.",
        ((lowest(f"{G}utilization_ratio"), GPU),),
        unit="percentunit",
        thresholds=INFORMATIVE,
    ),
    Panel(
        "Utilization of the fleet",
        "Mean share of time in which a kernel ran and in which memory was read or written.",
        (
            (f"avg({here(f'{G}utilization_ratio')})", "kernels"),
            (f"avg({here(f'{G}memory_utilization_ratio')})", "memory"),
        ),
        unit="percentunit",
    ),
    Panel(
        "Nodes with slowed GPUs",
        "Nodes with the most GPUs that slow down for heat, a power brake or a hardware reason.",
        ((top(f"sum by (node) ({INVOLUNTARY})"), "{{node}}"),),
        "bargauge",
        thresholds=above(1, 4),
    ),
    Panel(
        "Fullest memory",
        "Share of memory in use on the ten fullest GPUs. Near 100 %: the next larger batch fails.",
        (
            (
                top(f"({here(f'{G}memory_used_bytes')}) / on (node, gpu) {G}memory_total_bytes"),
                GPU,
            ),
        ),
        "bargauge",
        "percentunit",
        above(0.95, 0.99),
    ),
)

ERRORS = (
    Panel(
        "XIDs per hour",
        "XID errors of the last hour, for the ten nodes and XIDs with the most. The first one of a GPU counts too.",
        ((top(f"sum by (node, xid) ({here(XIDS)}) > 0"), "{{node}} XID {{xid}}"),),
        thresholds=above(1, 5),
        no_value="No XID",
    ),
    Panel(
        "Uncorrectable memory errors per hour",
        "The ten GPUs with the most. Each ends the process that used the memory; the GPU then needs a reset.",
        ((busiest(f"{G}ecc_uncorrectable_total"), GPU),),
        thresholds=never(),
    ),
    Panel(
        "Correctable memory errors per hour",
        "The ten GPUs with the most. They cost nothing by themselves; a steep rise comes before uncorrectable ones.",
        ((busiest(f"{G}ecc_correctable_total"), GPU),),
        thresholds=above(100, 1000),
    ),
    Panel(
        "Remapped rows",
        "Memory rows remapped after uncorrected errors, for the ten GPUs with the most. Many: have the GPU replaced.",
        ((highest(f"{G}remapped_rows_uncorrectable"), GPU),),
        thresholds=above(4, 8),
    ),
    Panel(
        "Row remapping",
        "GPUs whose remapping waits for a reset, and GPUs on which it failed. Pending: reset. Failed: replace the GPU.",
        (
            (f"sum({here(f'{G}row_remap_pending')})", "pending"),
            (f"sum({here(f'{G}row_remap_failed')})", "failed"),
        ),
        thresholds=never(),
    ),
    Panel(
        "Lost GPUs by node",
        "GPUs that are lost or cannot be read, for the ten nodes with the most.",
        ((top(f"sum by (node) (1 - ({here(f'{G}up')}))"), "{{node}}"),),
        "bargauge",
        thresholds=never(),
    ),
)

LINKS = (
    Panel(
        "NVLinks down by node",
        "The ten nodes with the most. Reset the GPUs; a link that stays down needs service.",
        ((top(f"sum by (node) ({here(f'{G}nvlinks_down')})"), "{{node}}"),),
        "bargauge",
        thresholds=never(),
    ),
    Panel(
        "NVLink errors per hour",
        "Replays, recoveries and CRC errors of the ten GPUs with the most. Growth without a pause: a bad link.",
        ((busiest(f"{G}nvlink_errors_total"), GPU),),
        thresholds=above(10, 100),
    ),
    Panel(
        "Narrowest PCIe links",
        "Lanes in use by the ten GPUs with the fewest. Fewer than 16: reseat the GPU or its riser.",
        ((lowest(f"{G}pcie_link_width"), GPU),),
        thresholds=below(8, 16),
    ),
    Panel(
        "Slowest PCIe generations",
        "Generation in use by the ten GPUs with the lowest. An idle GPU lowers it; under load it should be the slot's.",
        ((lowest(f"{G}pcie_link_generation"), GPU),),
        thresholds=below(3, 4),
    ),
    Panel(
        "PCIe replays per hour",
        "Packets sent again by the ten GPUs with the most. A steady rate: a bad contact or a bad riser.",
        ((busiest(f"{G}pcie_replays_total"), GPU),),
        thresholds=above(10, 100),
    ),
    Panel(
        "Processes on a GPU",
        "Compute processes of the ten GPUs with the most. More than the run's own: a process was left behind.",
        ((highest(f"{G}processes"), GPU),),
        thresholds=above(4, 8),
    ),
)

NETWORK = (
    Panel(
        "Ports down by node",
        "InfiniBand and Ethernet ports that are not active, for the ten nodes with the most. A port that was active "
        "before also makes a finding.",
        ((top(f"sum by (node) (1 - ({here(f'{P}up')}))"), "{{node}}"),),
        "bargauge",
        thresholds=never(),
    ),
    Panel(
        "Slowest ports",
        "Negotiated rate of the ten slowest active ports. Lower than its neighbours: cable or transceiver.",
        ((bottom(f"({here(f'{P}rate_bits_per_second')}) and on (node, port) {P}up == 1"), PORT),),
        "bargauge",
        "bps",
        below(1e10, 1e11),
    ),
    Panel(
        "Port errors per hour",
        "Errors of the ten ports with the most. Clean or replace the cable; then compare both ends.",
        ((busiest(f"{P}errors_total", "node, port"), PORT),),
        thresholds=above(10, 100),
    ),
    Panel(
        "Link losses per hour",
        "Times that a link went down, for the ten ports with the most. Each one stops a collective for seconds.",
        ((busiest(f"{P}link_downs_total", "node, port"), PORT),),
        thresholds=above(1, 3),
    ),
    Panel(
        "Probes per hour",
        "Probes by result. A failed one names its nodes in `everstep events`; two failures of one node speak for it.",
        ((f"sum by (result) (increase({C}probes_total[1h]))", "{{result}}"),),
    ),
    Panel(
        "Newest probe",
        "Lowest bandwidth of the newest all-reduce or memory probe, at its largest size. Compare with an earlier one "
        "of as many nodes.",
        ((f"max({C}probe_bandwidth_bytes_per_second)", "bandwidth"),),
        unit="Bps",
    ),
    Panel(
        "Latency of the newest probe",
        "Longest median latency of a member in the newest probe, at its smallest size.",
        ((f"max({C}probe_latency_seconds)", "latency"),),
        unit="s",
        thresholds=above(0.01, 0.1),
    ),
)

GPU_NETWORK = Dashboard(
    "gpu-network",
    "Everstep: GPU and network",
    "Which GPU is hot, slow or faulty, and which link is down.",
    (RACK, NODE),
    (
        ("Now", NOW),
        ("Heat and power", HEAT),
        ("Speed", SPEED),
        ("Errors", ERRORS),
        ("NVLink and PCIe", LINKS),
        ("Network and probes", NETWORK),
    ),
)
