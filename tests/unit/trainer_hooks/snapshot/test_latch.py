"""What the training thread and the copier wait for."""

from __future__ import annotations

import threading

from everstep_trainer.snapshot.job import OneShotSignal


def test_latch_waits_until_set() -> None:
    latch = OneShotSignal()
    assert not latch.wait(0.001)
    assert not latch.is_set()
    latch.set()
    assert latch.wait(0.0)
    assert latch.wait(0.0), "it stays set"


def test_latch_releases_all_waiting_threads() -> None:
    latch, gone = OneShotSignal(), []
    threads = [threading.Thread(target=lambda: gone.append(latch.wait(60.0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    latch.set()
    for thread in threads:
        thread.join(60.0)
    assert gone == [True] * 4


def test_latch_set_by_several_threads_is_set_once() -> None:
    latch, failed = OneShotSignal(), []

    def set_it() -> None:
        try:
            latch.set()
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=set_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not failed
    assert latch.is_set()
