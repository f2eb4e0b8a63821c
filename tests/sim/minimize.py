"""Find the faults that a failure needs, by delta debugging (Zeller and Hildebrandt, 2002)."""

from __future__ import annotations

from collections.abc import Callable

from tests.sim.faults.plan import Plan


def smallest_plan(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """Return a plan with few faults for which ``fails`` is true. No single fault can be removed."""
    numbers = [number for number, _ in plan.faults]
    chunk_count = 2
    while len(numbers) >= 1:
        size = -(-len(numbers) // chunk_count)
        chunks = [numbers[i : i + size] for i in range(0, len(numbers), size)]
        remaining = _without_chunk(plan, numbers, chunks, fails)
        if remaining is not None:
            numbers, chunk_count = remaining, max(2, chunk_count - 1)
        elif chunk_count >= len(numbers):
            break
        else:
            chunk_count = min(len(numbers), chunk_count * 2)
    return plan.only(numbers)


def _without_chunk(
    plan: Plan, numbers: list[int], chunks: list[list[int]], fails: Callable[[Plan], bool]
) -> list[int] | None:
    """Return the numbers without one chunk if the plan still fails, or None if every chunk is needed."""
    for chunk in chunks:
        remaining = [number for number in numbers if number not in chunk]
        if fails(plan.only(remaining)):
            return remaining
    return None
