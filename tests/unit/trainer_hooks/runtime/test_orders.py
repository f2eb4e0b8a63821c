"""When a generation is over for a rank."""

from __future__ import annotations

import threading

import pytest
from everstep_trainer.runtime.directives import ReceivedDirectives

from everstep.wire.v1.directives import StopJob
from tests.support.generations import generation


@pytest.fixture
def orders() -> ReceivedDirectives:
    return ReceivedDirectives()


@pytest.mark.promise("stale-refused")
def test_an_older_or_equal_generation_is_dropped(orders):
    assert orders.add_generation(generation(5))
    assert not orders.add_generation(generation(5))
    assert not orders.add_generation(generation(4))
    assert orders.wait_next(0, 0).number == 5


def test_running_generation_is_not_superseded_by_itself(orders):
    orders.add_generation(generation(1))
    assert not orders.is_generation_over(1, 10)
    assert not orders.is_superseded(1)


def test_a_newer_generation_ends_the_running_one_at_once(orders):
    orders.add_generation(generation(2))
    assert orders.is_generation_over(1, 0)
    assert orders.is_superseded(1)


def test_a_boundary_lets_the_step_finish(orders):
    orders.add_generation(generation(2, after_step=7))
    assert [orders.is_generation_over(1, step) for step in (5, 6, 7, 8)] == [False, False, True, True]


def test_loss_overrides_an_earlier_boundary(orders):
    orders.add_generation(generation(2, after_step=100))
    orders.add_generation(generation(3))
    assert orders.is_generation_over(1, 5)


def test_boundary_of_the_next_generation_does_not_delay_a_loss(orders):
    orders.add_generation(generation(2))
    orders.add_generation(generation(3, after_step=100))
    assert orders.is_generation_over(1, 5)
    assert not orders.is_generation_over(2, 5)


def test_a_later_boundary_replaces_an_earlier_one(orders):
    orders.add_generation(generation(2, after_step=10))
    orders.add_generation(generation(3, after_step=12))
    assert not orders.is_generation_over(1, 11)
    assert orders.is_generation_over(1, 12)


def test_the_end_of_the_job_ends_every_generation(orders):
    orders.add_generation(generation(3, after_step=100))
    orders.add_stop(StopJob(job="job", ok=True, reason="done"))
    assert orders.is_generation_over(3, 0)
    assert isinstance(orders.wait_next(3, 0), StopJob)


def test_first_report_of_the_job_end_stands(orders):
    orders.add_stop(StopJob(job="job", ok=False, reason="an error"))
    orders.add_stop(StopJob(job="job", ok=True, reason="done"))
    stop = orders.wait_next(0, 0.0)
    assert isinstance(stop, StopJob)
    assert not stop.ok


def test_waiting_ends_with_a_generation_or_timeout(orders):
    assert orders.wait_next(0, 0.0) is None
    thread = threading.Thread(target=lambda: orders.add_generation(generation(1)))
    thread.start()
    assert orders.wait_next(0, 10).number == 1
    thread.join()
