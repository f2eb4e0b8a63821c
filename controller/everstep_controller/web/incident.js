// An incident: everything that has one trace, from the first signal to the first step after it.

import { html, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import * as api from "./api.js";
import { IncidentCard } from "./incident_card.js";
import { Gantt, PhaseKeys, phaseColour, PHASES } from "./job.js";
import {
  Chip, classOf, clock, Facts, Finding, link, plural, Problem, Section, seconds, Skeleton, useWidth,
} from "./parts.js";
import { usePolled } from "./store.js";

const NEWEST = 1000;

// ---- list

// Events that make a trace an incident; a node that registers or a job that begins is none.
const SERIOUS = /^(finding$|verdict|rank\.|node\.(lost|eviction)|operator|fleet|corruption|user_error|remediation|job\.(paused|failed)|generation\.overdue|peer\.lost|maintenance)/;

export function incidentsOf(events) {
  const found = new Map();
  for (const one of events) {
    if (!one.trace) continue;
    const known = found.get(one.trace) || { trace: one.trace, events: [], nodes: new Set(), jobs: new Set(), serious: false };
    known.events.push(one);
    known.serious ||= SERIOUS.test(one.kind);
    if (one.node) known.nodes.add(one.node);
    if (one.job) known.jobs.add(one.job);
    found.set(one.trace, known);
  }
  return [...found.values()].filter((one) => one.serious).sort((a, b) => b.events[0].at - a.events[0].at);
}

const outcomeOf = (events) => {
  const resumed = events.findLast((one) => one.kind === "resumed");
  if (resumed) return html`<${Chip} kind="good">stepping after ${seconds(Number(resumed.detail.took_s))}<//>`;
  const verdict = events.findLast((one) => one.kind.startsWith("verdict."));
  if (verdict) return html`<${Chip} kind=${/evict|repair|quarantine/.test(verdict.kind) ? "bad" : "note"}>${verdict.kind.slice(8).replace(/_/g, " ")}<//>`;
  return events.some((one) => one.kind.startsWith("operator")) ? html`<${Chip} kind="note">order<//>` : null;
};

export function Incidents() {
  const [text, setText] = useState("");
  const { value, error } = usePolled(() => api.events({ newest: true, limit: NEWEST }), 30, ["incidents"], (event) => SERIOUS.test(event.kind) || event.kind === "resumed");
  const found = useMemo(() => incidentsOf(value || []), [value]);
  const wanted = text.trim().toLowerCase();
  const shown = found.filter((one) => !wanted || [one.trace, ...one.nodes, ...one.jobs, one.events[0].sentence].some((word) => word.toLowerCase().includes(wanted)));
  return html`<div class="page">
    <div class="page-head"><h1>Incidents</h1><input type="search" placeholder="Node, job, word …" aria-label="Filter incidents" value=${text} onInput=${(event) => setText(event.target.value)} /></div>
    <p class="lead">From the newest ${NEWEST} events. Each incident is one trace: a signal, what was decided because of it, and what followed.</p>
    <${Problem} error=${error} />
    ${!value ? !error && html`<${Skeleton} height="320" />` : html`<div class="list">${shown.slice(0, 200).map((one) => html`<a class="row" key=${one.trace} href=${link("incident", one.trace)}>
      <time>${clock(one.events[0].at)}</time>
      <p>${one.events[0].sentence}</p>
      <span class="chips">${outcomeOf(one.events)} ${[...one.jobs].slice(0, 1).map((job) => html`<${Chip}>${job}<//>`)} ${[...one.nodes].slice(0, 2).map((node) => html`<${Chip}>${node}<//>`)} ${one.nodes.size > 2 && html`<${Chip}>+${one.nodes.size - 2}<//>`}</span>
    </a>`)}${!shown.length && html`<p class="dim">Nothing has happened.</p>`}</div>`}
  </div>`;
}

// ---- one incident

// When the sensor saw it, where the event says so; otherwise when the controller wrote it down.
const seenAt = (one) => {
  const seen = Number(one.detail.seen_at);
  return seen > 0 && seen <= one.at && one.at - seen < 3600 ? seen : one.at;
};

const LANES = [
  ["signal", "Signals", "var(--warn)"],
  ["decision", "Decisions", "var(--bad)"],
  ["person", "People", "var(--note)"],
  ["action", "Actions", "var(--p-4)"],
  ["job", "Job", "var(--good)"],
];

const laneOf = (kind) => {
  const lane = classOf(kind);
  return LANES.some(([name]) => name === lane) ? lane : "decision";
};

// Milliseconds and hours on one axis: linear at first, then logarithmic.
const KNEE_S = 0.05;
const warp = (value) => Math.log10(1 + Math.max(0, value) / KNEE_S);
const MARKS = [0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10800, 43200, 86400, 259200, 604800];

export function modelOf({ events, verdicts, recoveries, ...now }) {
  const start = Math.min(...events.map(seenAt));
  const rows = events
    .map((one) => ({ ...one, seen: seenAt(one), verdict: verdicts.get(one.detail.verdict) || null }))
    .sort((a, b) => a.seen - b.seen || a.id - b.id);
  const ends = rows.map((one) => one.at).concat(recoveries.map((one) => one.decidedAt + (one.durationS || 0)));
  return { start, end: Math.max(...ends), rows, recoveries, nodeNames: namesIn(events, "node"), jobNames: namesIn(events, "job"), ...now };
}

function Timeline({ model, width }) {
  const narrow = width < 560;
  const left = narrow ? 62 : 84;
  const span = Math.max(0.2, model.end - model.start);
  const scale = (width - left - 36) / warp(span);
  const x = (at) => left + warp(at - model.start) * scale;
  const used = LANES.filter(([lane]) => model.rows.some((one) => laneOf(one.kind) === lane));
  const heightOf = 38;
  const top = 8;
  const bars = model.recoveries.filter((one) => one.durationS !== null);
  const height = top + used.length * heightOf + (bars.length ? 34 : 0) + 44;
  let lastMark = -Infinity;
  const marks = MARKS.filter((mark) => {
    if (mark > span || x(model.start + mark) - lastMark < (narrow ? 46 : 62)) return false;
    lastMark = x(model.start + mark);
    return true;
  });
  return html`<svg width=${width} height=${height} viewBox="0 0 ${width} ${height}" role="img" aria-label="Timeline of ${plural(model.rows.length, "event")} over ${seconds(span)}">
    ${marks.map((mark) => html`<g key=${mark}><line class="axis" x1=${x(model.start + mark)} x2=${x(model.start + mark)} y1=${top} y2=${height - 36} /><text x=${x(model.start + mark)} y=${height - 21} text-anchor="middle">${mark ? seconds(mark) : "0"}</text></g>`)}
    <text x=${left + (width - left) / 2} y=${height - 4} text-anchor="middle">time since the first signal (logarithmic)</text>
    ${used.map(([lane, label, colour], index) => {
      const y = top + index * heightOf + heightOf / 2;
      let free = -Infinity;
      let level = 0;
      return html`<g key=${lane}>
        <line class="axis" x1=${left} x2=${width - 10} y1=${y} y2=${y} /><text class="ink" x="0" y=${y + 4}>${label}</text>
        ${model.rows.filter((one) => laneOf(one.kind) === lane).map((one) => {
          const at = x(one.seen);
          level = at - free < 11 ? (level + 1) % 3 : 0; // events at the same time are stacked, not hidden
          free = at;
          const cy = y + [0, -10, 10][level];
          return html`<g key=${one.id} style=${{ fill: colour }}>${mark(lane, at, cy)}<title>+${seconds(one.seen - model.start)} ${one.kind}: ${one.sentence}</title></g>`;
        })}
      </g>`;
    })}
    ${bars.length > 0 && html`<g>
      <text class="ink" x="0" y=${top + used.length * heightOf + 21}>Regroup</text>
      ${bars.map((one) => {
        const y = top + used.length * heightOf + 8;
        let at = one.decidedAt;
        return html`<g key=${one.generation}><rect x=${x(one.decidedAt)} y=${y} width=${Math.max(1, x(one.decidedAt + one.durationS) - x(one.decidedAt))} height="18" rx="2" style=${{ fill: "var(--line)" }}><title>generation ${one.generation}: ${seconds(one.durationS)}</title></rect>
          ${PHASES.filter((phase) => one.phases[phase]).map((phase) => {
            const from = at;
            at = Math.min(one.decidedAt + one.durationS, at + one.phases[phase]);
            return html`<rect key=${phase} x=${x(from)} y=${y} width=${Math.max(0, x(at) - x(from))} height="18" style=${{ fill: phaseColour(phase) }}><title>${phase.replace("_", " ")}: ${seconds(one.phases[phase])}</title></rect>`;
          })}</g>`;
      })}
    </g>`}
  </svg>`;
}

const mark = (lane, x, y) =>
  lane === "signal" ? html`<path d="M${x} ${y - 6}L${x + 6} ${y}L${x} ${y + 6}L${x - 6} ${y}Z" />`
    : lane === "decision" ? html`<rect x=${x - 5} y=${y - 5} width="10" height="10" rx="1.5" />`
      : lane === "job" ? html`<path d="M${x - 5} ${y - 6}L${x + 6} ${y}L${x - 5} ${y + 6}Z" />`
        : html`<circle cx=${x} cy=${y} r="5.5" />`;

// Who an event comes from: a person, a rule of the policy, an agent, or the job's ranks.
function actorOf(one) {
  if (one.detail.actor) return one.detail.actor;
  if (one.kind === "resumed") return one.detail.slowest_rank === undefined ? "ranks" : `ranks; rank ${one.detail.slowest_rank} was the last`;
  if (one.kind.startsWith("verdict") || one.kind === "generation" || one.kind.startsWith("fleet") || one.kind.startsWith("job")) {
    const rule = one.verdict?.evidence[0]?.rule;
    return rule ? `controller, rule ${rule}` : "controller";
  }
  if (one.kind.startsWith("remediation")) return "remediation";
  return one.node ? `agent of ${one.node}` : "controller";
}

const HIDDEN = new Set(["actor", "verdict", "seen_at", "reason", "stacks"]);

function Step({ one, start }) {
  const facts = Object.entries(one.detail).filter(([name, value]) => !HIDDEN.has(name) && !name.endsWith("_s") && value !== "");
  return html`<li class="kind-${laneOf(one.kind)}">
    <header><b>+${seconds(one.seen - start)}</b><code>${one.kind}</code><span class="dim">${actorOf(one)}</span><time>${clock(one.at, true)}</time></header>
    <p>${one.sentence}</p>
    ${one.verdict && html`<p class="dim">On this evidence:</p>${one.verdict.evidence.map((finding, index) => html`<${Finding} key=${index} one=${finding} />`)}`}
    ${facts.length > 0 && html`<p class="dim">${facts.map(([name, value]) => `${name.replace(/_/g, " ")}: ${value}`).join("; ").slice(0, 600)}</p>`}
    ${one.detail.stacks && html`<details class="stack"><summary>Stacks</summary><pre class="stacks" tabindex="0">${one.detail.stacks}</pre></details>`}
  </li>`;
}

const namesIn = (events, kind) => [...new Set(events.map((one) => one[kind]).filter(Boolean))];

const MOST_ASKED = 4; // nodes and jobs whose present state is asked for

async function ask(trace) {
  const events = await api.events({ trace, limit: 500 });
  const ids = [...new Set(events.map((one) => one.detail.verdict).filter(Boolean))].slice(0, 40);
  const none = (error) => {
    if (error.status !== 404) throw error;
    return null;
  };
  const all = async (names, get) => (await Promise.all(names.map((name) => get(name).catch(none)))).filter(Boolean);
  const [verdicts, jobs, nodes, status] = await Promise.all([
    all(ids, api.verdict),
    all(namesIn(events, "job").slice(0, MOST_ASKED), api.job),
    all(namesIn(events, "node").slice(0, MOST_ASKED), api.node),
    api.status().catch(() => null),
  ]);
  return {
    events,
    verdicts: new Map(verdicts.map((one) => [one.id, one])),
    recoveries: jobs.flatMap((job) => job.recoveries).filter((one) => one.trace === trace),
    jobs,
    nodes: new Map(nodes.map((one) => [one.name, one])),
    status,
    askedAt: Date.now() / 1000,
  };
}

// A page of its own: this article with the stylesheet, without scripts, readable without a controller.
async function download(article, name) {
  const style = await (await fetch("/web/style.css")).text();
  const copy = article.cloneNode(true);
  for (const one of copy.querySelectorAll(".actions")) one.remove();
  for (const one of copy.querySelectorAll("a")) one.replaceWith(...one.childNodes);
  for (const one of copy.querySelectorAll("details")) one.setAttribute("open", "");
  const title = document.createElement("title");
  title.textContent = `Everstep incident ${name}`;
  const page = `<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
${title.outerHTML}<style>${style}</style></head>
<body><div class="page">${copy.outerHTML}</div></body></html>
`;
  const blob = new Blob([page], { type: "text/html" });
  const url = URL.createObjectURL(blob);
  Object.assign(document.createElement("a"), { href: url, download: `everstep-incident-${name}.html` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export function Incident({ trace }) {
  const about = useRef({ nodeNames: [], jobNames: [] });
  const concerns = (event) => event.trace === trace || about.current.nodeNames.includes(event.node) || about.current.jobNames.includes(event.job);
  const { value, error } = usePolled(() => ask(trace), 60, ["incident", trace], concerns);
  const [box, width] = useWidth();
  const article = useRef(null);
  const model = useMemo(() => (value && value.events.length ? modelOf(value) : null), [value]);
  about.current = model || about.current;
  const resumed = model?.rows.findLast((one) => one.kind === "resumed");
  const decided = model?.rows.find((one) => /^(verdict|generation$|operator|rank\.hung)/.test(one.kind));
  return html`<div class="page"><article ref=${article}>
    <div class="page-head"><h1>Incident <code>${trace}</code></h1>${model && html`<span class="actions"><button onClick=${() => download(article.current, trace)}>Download as HTML</button></span>`}</div>
    <${Problem} error=${error} />
    ${value && !model && html`<p class="lead">No event has this trace.</p>`}
    ${!model && !value && !error && html`<${Skeleton} height="300" />`}
    ${model && html`<${IncidentCard} model=${model} trace=${trace} />`}
    ${model && html`<${Facts} rows=${[
      ["First signal", clock(model.start, true)],
      decided && ["Decided after", seconds(Math.max(0, decided.at - model.start))],
      resumed && ["All ranks step after", seconds(resumed.at - model.start)],
      ["Events", model.rows.length],
    ]} />`}
    ${model && html`<${Section} id="timeline" title="Timeline"><div class="drawing"><div ref=${box}>${width > 0 && html`<${Timeline} model=${model} width=${width} />`}</div></div><//>`}
    ${model && model.recoveries.length > 0 && html`<${Section} id="phases" title="Phases of the recovery"><div class="drawing"><${Gantt} recoveries=${model.recoveries} width=${Math.max(280, width)} /><${PhaseKeys} recoveries=${model.recoveries} /></div><//>`}
    ${model && html`<${Section} id="trail" title="Who decided what, on which evidence"><ol class="trail" style=${{ listStyle: "none" }}>${model.rows.map((one) => html`<${Step} key=${one.id} one=${one} start=${model.start} />`)}</ol><//>`}
  </article></div>`;
}
