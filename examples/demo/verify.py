"""Holds a run against what it must be: every sample once, and the loss of a run that nothing happened to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from examples.demo.story import Run

LOSS_TOLERANCE = 2e-3
"""Largest difference of the loss of any step, in nats, once the world size has changed (fp32 sums in another order)."""


@dataclass(frozen=True)
class Verified:
    """The figures of summary.json that speak for the whole run. ``max_abs_difference`` is over all steps.

    ``exact_through``: the losses are equal to the last bit up to this step; ``exact_due``: up to here they must be,
    since the world had its full size until then.
    """

    steps: int
    final: float
    uninterrupted_final: float
    max_abs_difference: float
    exact_through: int
    exact_due: int
    seen: int
    repeated: int
    skipped: int

    @property
    def problems(self) -> list[str]:
        """What is not as it must be, in sentences."""
        found = []
        if self.repeated or self.skipped:
            found.append(f"{self.repeated} samples were repeated and {self.skipped} skipped")
        if self.exact_through < self.exact_due:
            found.append(f"the loss of step {self.exact_through + 1} is not equal to the bit, at the same world size")
        if not self.max_abs_difference <= LOSS_TOLERANCE:
            found.append(f"the loss differs by up to {self.max_abs_difference:.2g} from the uninterrupted run")
        return found


def verify(run: Run, reference: Run, steps: int) -> Verified:
    """Compares the steps that stand with the uninterrupted run's. Raises ValueError where steps are missing."""
    ours, theirs = run.standing(), reference.standing()
    for name, steps_found in (("the run", ours), ("the uninterrupted run", theirs)):
        missing = sorted(set(range(1, steps + 1)) - set(steps_found))
        if missing:
            raise ValueError(f"{name} never finished steps {missing[:5]} ({len(missing)} of {steps})")
    differences = {step: abs(ours[step].loss - theirs[step].loss) for step in range(1, steps + 1)}
    smaller = [step for step in range(1, steps + 1) if ours[step].world != theirs[step].world]
    unequal = [step for step, difference in differences.items() if difference > 0]
    repeated = skipped = 0
    for step in range(1, steps + 1):
        seen, due = Counter(ours[step].samples), Counter(theirs[step].samples)
        repeated += (seen - due).total()
        skipped += (due - seen).total()
    return Verified(
        steps=steps,
        final=ours[steps].loss,
        uninterrupted_final=theirs[steps].loss,
        max_abs_difference=max(differences.values()),
        exact_through=min(unequal, default=steps + 1) - 1,
        exact_due=min(smaller, default=steps + 1) - 1,
        seen=sum(len(ours[step].samples) for step in range(1, steps + 1)),
        repeated=repeated,
        skipped=skipped,
    )
