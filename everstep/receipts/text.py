"""Describe a receipt in lines of text, and its figures in words."""

from __future__ import annotations

from everstep.wire.v1.receipts import JobReceipt, ReceiptEviction, ReceiptRecovery

MAX_LISTED_RECOVERIES = 20
"""Recoveries that a receipt's lines name: the newest."""
MAX_LISTED_EVICTIONS = 10
MAX_LISTED_NOTES = 4
MAX_SENTENCE_CHARS = 160


def format_span(seconds: float) -> str:
    """Format seconds in the units that fit: ``830 ms``, ``12.3 s``, ``4 min 10 s``, ``2 h 3 min``, ``5 d``."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 119.95:
        return f"{seconds:.1f} s"
    total = round(seconds)
    if total < 7200:
        return _two_units(total, 60, "min", 1, "s")
    if total < 2 * 86400:
        return _two_units(total, 3600, "h", 60, "min")
    return _two_units(total, 86400, "d", 3600, "h")


def _two_units(total: int, large: int, name: str, small: int, small_name: str) -> str:
    rest = total % large // small
    return f"{total // large} {name}" + (f" {rest} {small_name}" if rest else "")


def format_rough(seconds: float) -> str:
    """Format a span that is an estimate or grows: whole seconds at least."""
    return f"{seconds:.0f} s" if seconds < 119.5 else format_span(seconds)


def format_share(share: float | None) -> str:
    """Format the effective share of time; near 1 with more digits."""
    return "-" if share is None else f"{100 * share:.{3 if share > 0.999 else 2}f} %"


def format_work(receipt: JobReceipt, rank_s: float) -> str:
    """Format rank seconds as GPU-hours, or rank-hours if the nodes have no GPUs; small amounts as seconds."""
    unit = "GPU" if receipt.gpus else "rank"
    if rank_s < 360:
        return f"{rank_s:.1f} {unit}-seconds"
    hours = rank_s / 3600
    return f"{hours:,.{0 if hours >= 100 else 2}f} {unit}-hours"


def format_count(count: int, singular: str, plural: str = "") -> str:
    """Format a count with its noun."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def format_loss(loss: float | None) -> str:
    """Format the last reported loss."""
    return "not reported" if loss is None else f"{loss:.6g}"


def format_sizes(receipt: JobReceipt) -> str:
    """Format the numbers of ranks over time: ``8 -> 6 -> 8``; of many only the first and the last ones."""
    ranks = [str(size.ranks) for size in receipt.sizes] or [str(receipt.ranks)]
    if len(ranks) > 8:
        ranks = [*ranks[:3], "...", *ranks[-4:]]
    return " -> ".join(ranks)


def describe_rest(one: ReceiptRecovery) -> str:
    """Return what happens in the time of a regroup that is in none of its phases."""
    if one.after_step is not None:
        return f"all ranks train on until step {one.after_step}"
    return "directives and reports on their way"


def one_line(sentence: str, limit: int = MAX_SENTENCE_CHARS) -> str:
    """Return a sentence as one line, cut to ``limit`` characters."""
    line = " ".join(sentence.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def repeated_steps(receipt: JobReceipt) -> int | None:
    """Return the steps computed again by all recoveries, as far as known; None if it is known of none."""
    known = [recovery.repeated_steps for recovery in receipt.recoveries if recovery.repeated_steps is not None]
    return sum(known) if known or not receipt.recoveries else None


def describe_eviction(one: ReceiptEviction) -> str:
    """Return why a node left, with the rule and its evidence."""
    because = f" by rule {one.rule}" if one.rule else ""
    return one_line(f"{one.node}: {one.decision}{because}: {one.evidence or one.sentence}")


def comparison(receipt: JobReceipt) -> str:
    """Return a phrase that names the restarts of the comparison."""
    costs = receipt.costs
    every, takes = format_round(costs.checkpoint_interval_s), format_round(costs.restart_s)
    return f"restarts of {takes} from a checkpoint every {every}"


def format_round(seconds: float) -> str:
    """Format a span that a person chose: ``30 min``, ``60 s``, ``90 s``."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def summary_lines(receipt: JobReceipt) -> list[str]:
    """Return the receipt's lines for a terminal: result, recoveries, time, costs, evictions.

    A recovery takes from the decision to regroup until the last rank has finished its first step after it.
    """
    return [_headline(receipt), *_recovery_lines(receipt), *_figure_lines(receipt)]


def _headline(receipt: JobReceipt) -> str:
    counted = format_count(receipt.recovery_count, "recovery", "recoveries")
    if receipt.other_regroups:
        counted += f" and {format_count(receipt.other_regroups, 'other regroup')}"
    lost = f"{receipt.costs.lost_s:.2f} s lost to them"
    return f"job {receipt.job} {receipt.outcome} at step {receipt.steps}: {counted}, {lost}"


def _recovery_lines(receipt: JobReceipt) -> list[str]:
    shown = receipt.recoveries[-MAX_LISTED_RECOVERIES:]
    total = receipt.recovery_count + receipt.other_regroups
    lines = [f"  the last {len(shown)} of them:"] if total > len(shown) else []
    return lines + [_recovery_line(recovery) for recovery in shown]


def _recovery_line(one: ReceiptRecovery) -> str:
    took = "not completed" if one.duration_s is None else f"{one.duration_s:.2f} s"
    again = f"; {format_count(one.repeated_steps, 'step')} computed again" if one.repeated_steps else ""
    planned = "" if one.is_failure else " (no failure)"
    return f"  generation {one.generation}: {took}, {one.reason}{planned}: {one_line(one.sentence)}{again}"


def _figure_lines(receipt: JobReceipt) -> list[str]:
    costs = receipt.costs
    loss = "" if receipt.loss is None else f", last loss {format_loss(receipt.loss)}"
    lines = [f"  {format_span(receipt.duration_s)} on {format_sizes(receipt)} ranks{loss}"]
    if costs.effective_share is not None:
        lines[0] += f", effective time {format_share(costs.effective_share)}"
    if receipt.recovery_count:
        lost, saved = format_work(receipt, costs.lost_rank_s), format_work(receipt, costs.saved_rank_s)
        lines.append(f"  {lost} lost; {saved} saved against {comparison(receipt)}")
    lines += [f"  {describe_eviction(eviction)}" for eviction in receipt.evictions[-MAX_LISTED_EVICTIONS:]]
    lines += [f"  {one_line(note)}" for note in receipt.audit_notes[-MAX_LISTED_NOTES:]]
    lines += [f"  kept: version {version.version} at {version.url}" for version in receipt.versions if version.url][:1]
    return lines
