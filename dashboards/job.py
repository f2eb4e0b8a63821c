"""The dashboard of a training run: does it train, what did recoveries cost, who is late, what would be lost."""

from __future__ import annotations

from dashboards.panels import RUN, C, Dashboard, G, Panel, V, above, below, bottom, never, of_run, top

LATE = top(of_run("job_rank_lateness_seconds"))

NOW = (
    Panel(
        "State",
        "State of the run. Paused: it has fewer nodes than its minimum and continues by itself when one comes.",
        ((f"{of_run('job_state')} == 1", "{{run}} {{state}}"),),
        "stat",
        names_series=True,
        no_value="No such run",
    ),
    Panel(
        "Effective time",
        "Share of the last hour in which all ranks trained, without recoveries and pauses. Steps that are computed "
        "again count as training. Below 95 %: see the recoveries and their phases.",
        (('everstep:job:effective_share{run=~"$run"}', "{{run}}"),),
        "stat",
        "percentunit",
        below(0.8, 0.95),
    ),
    Panel(
        "Step",
        "Newest step that all ranks finished.",
        ((of_run("job_step"), "{{run}}"),),
        "stat",
    ),
    Panel(
        "Would be lost",
        "Training time since the newest committed version: the most that a lost node or corruption can cost. Over a "
        "minute: a vault or a peer does not acknowledge, see `everstep events --job NAME`.",
        (('everstep:job:uncommitted_seconds{run=~"$run"}', "{{run}}"),),
        "stat",
        "s",
        above(10, 60),
    ),
    Panel(
        "Ranks",
        "Ranks of the current generation. Fewer than planned: nodes are out, see the dashboard On call.",
        ((of_run("job_world_size"), "{{run}}"),),
        "stat",
    ),
    Panel(
        "Spares",
        "Nodes that wait outside the roster. At 0 the next lost node makes the run smaller.",
        ((of_run("job_spares"), "{{run}}"),),
        "stat",
        thresholds=((None, "orange"), (1, "green")),
    ),
)

PROGRESS = (
    Panel(
        "Loss",
        "Newest loss reported by the lowest rank. A jump at a recovery: compare with the restored version in "
        "`everstep job show NAME`.",
        ((of_run("job_loss"), "{{run}}"),),
    ),
    Panel(
        "Steps per second",
        "Average over a minute. 0 while the state is running: the run is stalled.",
        (('everstep:job:steps_per_second{run=~"$run"}', "{{run}}"),),
    ),
    Panel(
        "Time for a step",
        "Step time of the slowest rank. Growth without a new generation: look for late ranks below.",
        ((of_run("job_step_seconds"), "{{run}}"),),
        unit="s",
    ),
    Panel(
        "Step, committed, verified",
        "After a crash the newest complete version is restored, never one before the committed version. After "
        "corruption it is the newest verified version. The lines should run in parallel.",
        (
            (of_run("job_step"), "step {{run}}"),
            (of_run("job_committed_step"), "committed {{run}}"),
            (of_run("job_verified_step"), "verified {{run}}"),
        ),
    ),
    Panel(
        "Time by activity",
        "Share of time spent on training, recovering, pauses and forming. Anything but training is lost time.",
        (
            (
                f"sum by (activity) (rate({of_run('job_seconds_total')}[5m])) / "
                f"scalar(sum(rate({of_run('job_seconds_total')}[5m])) > 0)",
                "{{activity}}",
            ),
        ),
        unit="percentunit",
        stacked=True,
    ),
    Panel(
        "Errors of the training function",
        "Exceptions raised by the script, per hour. These are the script's: `everstep events --job NAME` has the text.",
        ((f"sum by (run) (increase({of_run('user_errors_total')}[1h]))", "{{run}}"),),
        thresholds=never(),
    ),
)

RECOVERIES = (
    Panel(
        "Recoveries per hour",
        "Recovered generations, by reason. `everstep job show NAME` lists each with its cause.",
        ((f"sum by (reason) (increase({of_run('recoveries_total')}[1h]))", "{{reason}}"),),
        thresholds=above(3, 10),
    ),
    Panel(
        "Phases of the newest recovery",
        "Seconds of each phase, of the slowest rank. The runbook (EverstepSlowRecovery) says where to look for each.",
        ((f"max by (phase) ({of_run('job_recovery_phase_seconds')})", "{{phase}}"),),
        "bargauge",
        "s",
        above(1, 5),
    ),
    Panel(
        "Recovery time",
        "Time from the decision to the last rank's first step, of all runs in the last hour.",
        (
            (f"histogram_quantile(0.5, sum by (le) (rate({C}recovery_seconds_bucket[1h])))", "median"),
            ("everstep:recovery_seconds:p99", "99 %"),
        ),
        unit="s",
        thresholds=above(2, 5),
    ),
    Panel(
        "Phases over time",
        "The same phases at each recovery. One that grows from recovery to recovery points at memory or storage.",
        ((f"max by (phase) ({of_run('job_recovery_phase_seconds')})", "{{phase}}"),),
        unit="s",
        stacked=True,
    ),
    Panel(
        "Newest recovery",
        "Time since the newest recovery was decided. Very long before the first one.",
        ((f"time() - max by (run) ({of_run('job_recovery_timestamp_seconds')})", "{{run}}"),),
        unit="s",
    ),
    Panel(
        "Generation",
        "Increases by one at each regroup.",
        ((of_run("job_generation"), "{{run}}"),),
    ),
)

LATENESS = (
    Panel(
        "Late ranks",
        "Own seconds per step above the run's median, for the ten slowest ranks: all others wait for them. One node "
        "stays on top: look at its clocks and links on the dashboard GPU and network.",
        ((LATE, "{{run}} rank {{rank}} on {{node}}"),),
        "bargauge",
        "s",
        above(0.05, 0.5),
    ),
    Panel(
        "Cost of the latest rank",
        "Lateness of the slowest rank as a share of the step time: what the run would gain without it.",
        (
            (
                f"max by (run) ({of_run('job_rank_lateness_seconds')}) / on (run) ({of_run('job_step_seconds')} > 0)",
                "{{run}}",
            ),
        ),
        unit="percentunit",
        thresholds=above(0.1, 0.3),
    ),
    Panel(
        "Own time of a rank",
        "Median of the ranks' own seconds per step, without waiting for others. Far below the step time: ranks mostly "
        "wait, for a late rank or for the network.",
        (
            (of_run("job_rank_busy_median_seconds"), "own time {{run}}"),
            (of_run("job_step_seconds"), "step {{run}}"),
        ),
        unit="s",
    ),
    Panel(
        "Clocks of late nodes",
        "Lowest SM clock of the nodes that have one of the ten slowest ranks. Lower than elsewhere: the GPU throttles.",
        ((f"min by (node) ({G}sm_clock_hertz) and on (node) {LATE}", "{{node}}"),),
        unit="hertz",
        thresholds=below(5e8, 1e9),
    ),
)

AT_RISK = (
    Panel(
        "Uncommitted time",
        "Training time since the newest committed version. It rises and falls with each commit.",
        (('everstep:job:uncommitted_seconds{run=~"$run"}', "{{run}}"),),
        unit="s",
        thresholds=above(10, 60),
    ),
    Panel(
        "Age of the stored checkpoint",
        "Time since the newest checkpoint on storage was complete: what the loss of all the run's nodes costs.",
        ((f"time() - {of_run('job_storage_timestamp_seconds')}", "{{run}}"),),
        unit="s",
        thresholds=above(3600, 14400),
        no_value="The run stores no checkpoints outside memory",
    ),
    Panel(
        "Parity and storage",
        "Steps of the version protected by parity and of the newest checkpoint on storage.",
        (
            (of_run("job_parity_step"), "parity {{run}}"),
            (of_run("job_storage_step"), "storage {{run}}"),
        ),
        no_value="The run asks for neither parity nor storage",
    ),
    Panel(
        "Failed versions",
        "Versions that could not be written to storage, and consecutive versions without parity. `everstep checkpoints "
        "NAME` has the last failure.",
        (
            (of_run("job_spills_failed"), "storage {{run}}"),
            (of_run("job_parity_failures"), "parity {{run}}"),
        ),
        thresholds=above(1, 3),
    ),
)

CHECKPOINTS = (
    Panel(
        "Committed bytes per second",
        "Bytes of committed versions: the state that becomes safe. 0 while the run steps: commits lag.",
        ((f"rate({of_run('job_committed_bytes_total')}[$__rate_interval])", "{{run}}"),),
        unit="Bps",
    ),
    Panel(
        "Vault traffic",
        "Bytes per second of all vaults of the fleet: copies to peers, reads by ranks, parity and storage.",
        tuple(
            (f"sum(rate({V}{name}_bytes_total[$__rate_interval]))", name)
            for name in ("replicated", "fetched", "served", "parity", "spilled", "scrubbed")
        ),
        unit="Bps",
    ),
    Panel(
        "Least free vault memory",
        "Free memory for checkpoint slots, for the ten nodes with the least. At 0 no new slot fits: raise "
        "`vault_memory_limit_bytes`, or give the node more memory.",
        ((bottom(f"{V}free_bytes"), "{{node}}"),),
        "bargauge",
        "bytes",
        below(1 << 30, 8 << 30),
    ),
    Panel(
        "Corrupt bytes",
        "Slots and transfers whose bytes did not hash to their digest, per hour. Repeats on one node: suspect its "
        "memory.",
        (
            (top(f"increase({V}corrupt_slots_total[1h])"), "slots {{node}}"),
            (top(f"increase({V}corrupt_transfers_total[1h])"), "transfers {{node}}"),
        ),
        thresholds=above(1, 3),
    ),
)

JOB = Dashboard(
    "job",
    "Everstep: job",
    "Does the run train, what did recoveries cost, which rank is late, what would be lost.",
    (RUN,),
    (
        ("Does it train?", NOW),
        ("Progress", PROGRESS),
        ("What did recoveries cost?", RECOVERIES),
        ("Which rank do the others wait for?", LATENESS),
        ("What would be lost?", AT_RISK),
        ("Checkpoints", CHECKPOINTS),
    ),
)
