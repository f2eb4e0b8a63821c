"""Render a receipt as one HTML file, without scripts and without addresses that a browser would load."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from html import escape as escape_html
from pathlib import Path

from everstep.printable_text import escape_control
from everstep.receipts.text import (
    comparison,
    describe_rest,
    format_count,
    format_loss,
    format_share,
    format_sizes,
    format_span,
    format_work,
    repeated_steps,
)
from everstep.vocabulary import RECOVERY_PHASES
from everstep.wire.v1.receipts import JobReceipt, ReceiptRecovery

STYLE = Path(__file__).with_name("page.css")
"""Style of reports: this page, and that of the demo."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def escape(text: str) -> str:
    """Return text for HTML, without characters that would show it in another order."""
    return escape_html(escape_control(text))


def render_page(receipt: JobReceipt) -> str:
    """Return the page."""
    title = escape(f"Everstep receipt: {receipt.job}")
    kind = {"finished": "ok", "failed": "no"}.get(receipt.outcome, "why")
    began, ended = _time(receipt.began_at), _time(receipt.ended_at)
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE.read_text()}</style></head><body>\n"
        f'<h1>{escape(receipt.job)} <span class="{kind}">{receipt.outcome}</span></h1>\n'
        f'<p class="lead">{escape(receipt.sentence)}<br>{began} to {ended}, Everstep {escape(receipt.release)}</p>\n'
        f"{_cards(receipt)}\n{_strip(receipt)}\n{_recoveries(receipt)}\n{_evictions(receipt)}\n"
        f"{_audit_notes(receipt)}\n"
        f"{_sizes(receipt)}\n{_versions(receipt)}\n"
        "</body></html>\n"
    )


def _time(at: float) -> str:
    """Return a time in UTC, since the page may be read elsewhere."""
    return f"{datetime.datetime.fromtimestamp(at, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


def _card(name: str, value: str, note: str = "", kind: str = "") -> str:
    below = f"<small>{escape(note)}</small>" if note else ""
    return f'<div class="card {kind}"><span>{escape(name)}</span><b>{escape(value)}</b>{below}</div>'


def _cards(receipt: JobReceipt) -> str:
    costs, again = receipt.costs, repeated_steps(receipt)
    until = f"of {receipt.until_step:,}" if receipt.until_step else ""
    unit = "GPU" if receipt.gpus else "Rank"
    cards = [
        _card("Steps", f"{receipt.steps:,}", until),
        _card("Duration", format_span(receipt.duration_s)),
        _card("Ranks", format_sizes(receipt).replace("->", "→"), f"on {format_count(receipt.nodes, 'node')}"),
        _card("Last loss", format_loss(receipt.loss)),
        _card("Effective time", format_share(costs.effective_share), "of the time since the first step", "good"),
        _card(
            "Recoveries",
            f"{receipt.recovery_count:,}",
            f"and {format_count(receipt.other_regroups, 'other regroup')}" if receipt.other_regroups else "",
        ),
        _card("Steps computed again", "not known" if again is None else f"{again:,}"),
        _card("Time lost", format_span(costs.lost_s), "with repeated steps"),
        _card(f"{unit} time lost", format_work(receipt, costs.lost_rank_s)),
        _card(f"{unit} time saved", format_work(receipt, costs.saved_rank_s), "against restarts", "good"),
    ]
    said = ""
    if receipt.recovery_count:
        said = (
            f'<p class="why">The same failures would have cost {format_span(costs.restart_lost_s)} with '
            f"{escape(comparison(receipt))}: each restart, and the work since the last checkpoint.</p>"
        )
    return f'<div class="cards">{"".join(cards)}</div>{said}'


def _strip(receipt: JobReceipt) -> str:
    """Draw the run from its beginning to its end, with what recoveries took."""
    if not receipt.recoveries or receipt.duration_s <= 0:
        return ""
    marks = []
    for recovery in receipt.recoveries:
        left = 100 * max(0.0, recovery.decided_at - receipt.began_at) / receipt.duration_s
        width = min(100 - left, 100 * recovery.lost_s / receipt.duration_s)
        title = escape(f"generation {recovery.generation}, after {format_span(recovery.decided_at - receipt.began_at)}")
        marks.append(f'<i style="left:{left:.2f}%;width:{width:.3f}%" title="{title}"></i>')
    label = escape(f"{format_count(receipt.recovery_count, 'recovery', 'recoveries')} over the run")
    return (
        f'<h2>Run</h2><div class="strip" role="img" aria-label="{label}">{"".join(marks)}</div>'
        '<p class="keys"><span><i style="background:var(--good)"></i>start and training</span>'
        '<span><i style="background:var(--bad)"></i>recovery</span></p>'
    )


def _table(heads: str, rows: Iterable[str], kind: str = "") -> str:
    """Return a table; a head that begins with ``>`` is of a column of numbers."""
    cells = "".join(
        f'<th class="n">{head[1:]}</th>' if head.startswith(">") else f"<th>{head}</th>" for head in heads.split("|")
    )
    return f'<div class="wide"><table class="{kind}"><tr>{cells}</tr>{"".join(rows)}</table></div>'


def _recoveries(receipt: JobReceipt) -> str:
    if not receipt.recoveries:
        return '<h2>Recoveries</h2><p class="why">None.</p>'
    longest = max([recovery.duration_s or 0.0 for recovery in receipt.recoveries] + [1e-9])
    rows = [_recovery_row(recovery, receipt, longest) for recovery in receipt.recoveries]
    used = [phase for phase in RECOVERY_PHASES if any(recovery.phases_s.get(phase) for recovery in receipt.recoveries)]
    keys = "".join(
        f'<span><i style="background:var(--p-{RECOVERY_PHASES.index(phase)})"></i>{phase.replace("_", " ")}</span>'
        for phase in used
    )
    total = receipt.recovery_count + receipt.other_regroups
    more = f'<p class="why">The newest of {total:,}.</p>' if total > len(receipt.recoveries) else ""
    at_boundary = any(recovery.after_step is not None for recovery in receipt.recoveries)
    rest = "training on until a boundary, or directives" if at_boundary else "directives and reports"
    heads = ">generation|>after|cause|phases of the slowest rank|>took|>steps again|>ranks"
    return f'<h2>Recoveries</h2>{more}{_table(heads, rows)}<p class="keys">{keys}<span><i></i>{rest}</span></p>'


def _recovery_row(one: ReceiptRecovery, receipt: JobReceipt, longest: float) -> str:
    took = "not completed" if one.duration_s is None else format_span(one.duration_s)
    cause = one.reason.replace("_", " ")
    cause = f"<b>{escape(cause)}</b>" + ("" if one.is_failure else " (no failure)")
    again = "–" if one.repeated_steps is None else f"{one.repeated_steps:,}"
    return (
        f'<tr><td class="n">{one.generation}</td>'
        f'<td class="n">{format_span(max(0.0, one.decided_at - receipt.began_at))}</td>'
        f'<td class="sentence">{cause}<br>'
        f'<span class="why">{escape(one.sentence)}</span></td>'
        f'<td>{_phase_bar(one, longest)}</td><td class="n">{took}</td>'
        f'<td class="n">{again}</td><td class="n">{one.ranks:,}</td></tr>'
    )


def _phase_bar(one: ReceiptRecovery, longest: float) -> str:
    known = [(phase, one.phases_s[phase]) for phase in RECOVERY_PHASES if one.phases_s.get(phase)]
    rest = max(0.0, (one.duration_s or 0.0) - sum(seconds for _, seconds in known))
    # Phases are by ranks' clocks, and may be longer than the recovery.
    scale = 100 / max(longest, rest + sum(seconds for _, seconds in known))
    parts = [
        f'<i style="width:{seconds * scale:.2f}%;background:var(--p-{RECOVERY_PHASES.index(phase)})" '
        f'title="{phase.replace("_", " ")}: {format_span(seconds)}"></i>'
        for phase, seconds in known
    ]
    if rest:
        parts.append(f'<i style="width:{rest * scale:.2f}%" title="{describe_rest(one)}: {format_span(rest)}"></i>')
    return f'<div class="bar">{"".join(parts)}</div>'


def _evictions(receipt: JobReceipt) -> str:
    if not receipt.evictions:
        return ""
    rows = [
        f"<tr><td>{escape(eviction.node)}</td>"
        f'<td class="n">{format_span(max(0.0, eviction.at - receipt.began_at))}</td>'
        f"<td>{escape(eviction.decision.replace('_', ' '))}</td><td><code>{escape(eviction.rule or '–')}</code></td>"
        f'<td class="sentence">{escape(eviction.evidence or eviction.sentence)}'
        f'<br><span class="why">{escape(eviction.sentence if eviction.evidence else "")}</span></td></tr>'
        for eviction in receipt.evictions
    ]
    return f"<h2>Evictions</h2>{_table('node|>after|decision|rule|evidence', rows)}"


def _audit_notes(receipt: JobReceipt) -> str:
    if not receipt.audit_notes:
        return ""
    rows = [f'<tr><td class="sentence">{escape(note)}</td></tr>' for note in receipt.audit_notes]
    return f"<h2>Audits</h2>{_table('note', rows)}"


def _sizes(receipt: JobReceipt) -> str:
    if len(receipt.sizes) < 2:
        return ""
    rows = [
        f'<tr><td class="n">{size.generation}</td>'
        f'<td class="n">{format_span(max(0.0, size.at - receipt.began_at))}</td><td class="n">{size.ranks:,}</td></tr>'
        for size in receipt.sizes
    ]
    return f"<h2>World sizes</h2>{_table('>generation|>after|>ranks', rows, 'narrow')}"


def _versions(receipt: JobReceipt) -> str:
    if not receipt.versions:
        return ""
    rows = [
        f'<tr><td class="n">{version.version}</td><td>{escape(version.storage_tier)}</td>'
        f"<td>{'yes' if version.restorable else 'no'}</td>"
        f'<td class="sentence">{escape(version.url or version.sentence)}</td></tr>'
        for version in receipt.versions
    ]
    return f"<h2>Versions kept</h2>{_table('>version|where|restorable|place', rows, 'narrow')}"
