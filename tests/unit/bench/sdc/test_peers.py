"""Other detectors: thresholds above undisturbed runs, and the step in which each first fires."""

from __future__ import annotations

from bench.sdc.peers import LOSS_SPIKE, MOMENT_BOUNDS, NOT_FINITE, REPLICA_HASH, StepSignals, Thresholds


def run(**changed: tuple[int, float]) -> list[StepSignals]:
    steps = [StepSignals(1.0 + 0.01 * (step % 3), 2.0 + 0.1 * (step % 2), 0.1, 0.01, 0) for step in range(60)]
    for name, (step, value) in changed.items():
        setattr(steps[step - 1], name, value)
    return steps


THRESHOLDS = Thresholds.fit([[run(), run()]])


def test_undisturbed_run_raises_no_alarm() -> None:
    assert set(THRESHOLDS.first_alarms([run(), run()], []).values()) == {0}


def test_each_peer_fires_in_the_step_of_its_signal() -> None:
    alarms = THRESHOLDS.first_alarms([run(), run(loss=(40, 9.0), second_moment=(50, 1.0))], [49, 50, 51])
    assert (alarms[LOSS_SPIKE], alarms[MOMENT_BOUNDS], alarms[REPLICA_HASH], alarms[NOT_FINITE]) == (40, 50, 50, 0)
