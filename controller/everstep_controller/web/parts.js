// Parts that several views share: words for figures, badges, dialogs, and drawings that need no library.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";

// ---- states

// Each state has a colour and a glyph, so that states differ without colour too.
export const NODE_STATES = {
  healthy: { label: "healthy", glyph: "", rank: 9 },
  faulty: { label: "faulty", glyph: "flash", rank: 0 },
  outbreak: { label: "outbreak", glyph: "stripes", rank: 0 },
  repair: { label: "repair", glyph: "plus", rank: 1 },
  lost: { label: "lost", glyph: "cross", rank: 2 },
  quarantined: { label: "quarantined", glyph: "bang", rank: 3 },
  held: { label: "held", glyph: "bar", rank: 4 },
  probation: { label: "probation", glyph: "half", rank: 5 },
  suspect: { label: "suspect", glyph: "dot", rank: 6 },
};
export const stateOf = (name) => NODE_STATES[name] || { label: name, glyph: "dot", rank: 7 };

const GLYPHS = {
  plus: "M6 2.5v7M2.5 6h7",
  cross: "M3 3l6 6M9 3l-6 6",
  bang: "M6 2.2v5M6 9v1",
  bar: "M2.5 6h7",
  half: "M6 2v8M8 2v8M10 2v8",
  dot: "M6 5.2v1.6",
  stripes: "M1 8l7-7M4 11l7-7",
  flash: "M7 1.5L4 6.5h4L5 10.5",
};

export const StateMark = ({ state }) => html`<svg class="mark state-${state}" viewBox="0 0 12 12" aria-hidden="true">
  <rect x="0.5" y="0.5" width="11" height="11" rx="2" />
  ${GLYPHS[stateOf(state).glyph] && html`<path d=${GLYPHS[stateOf(state).glyph]} />`}
</svg>`;

export const NodeState = ({ state }) => html`<span class="state"><${StateMark} state=${state} />${stateOf(state).label}</span>`;

export const Chip = ({ kind = "", children, title }) => html`<span class="chip ${kind}" title=${title}>${children}</span>`;

const JOB_KINDS = { running: "good", forming: "note", paused: "bad", failed: "bad", finished: "", stopped: "" };
export const JobState = ({ state }) => html`<${Chip} kind=${JOB_KINDS[state] || ""}>${state}<//>`;

// ---- words

const UNITS = [
  [86400 * 2, 86400, "d"],
  [3600 * 2, 3600, "h"],
  [120, 60, "min"],
];

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size < 0.0005) return "0 s";
  if (size < 1) return `${Number((value * 1000).toPrecision(size < 0.1 ? 2 : 3))} ms`;
  for (const [from, unit, name] of UNITS) {
    if (size >= from) return `${Number((value / unit).toPrecision(3))} ${name}`;
  }
  return `${Number(value.toPrecision(3))} s`;
}

export const number = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en-GB"));

export function figure(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3)) return value.toExponential(digits - 1);
  return String(Number(value.toPrecision(digits)));
}

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
export function bytes(value) {
  let size = value;
  let unit = 0;
  while (size >= 1024 && unit < SIZES.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${Number(size.toPrecision(3))} ${SIZES[unit]}`;
}

export const version = (one) => (one ? `${one.generation}:${one.step}` : "none");

const pad = (value, width = 2) => String(value).padStart(width, "0");

export function clock(at, precise = false) {
  if (!at) return "–";
  const date = new Date(at * 1000);
  const day = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
  const today = date.toDateString() === new Date().toDateString() ? "" : `${day} `;
  const time = `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
  return `${today}${time}${precise ? `.${pad(date.getMilliseconds(), 3)}` : ""}`;
}

export const ago = (at, now = Date.now() / 1000) => (at ? `${seconds(Math.max(0, now - at))} ago` : "–");

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

// ---- links between views

export const link = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;
export const NodeLink = ({ name }) => html`<a href=${link("fleet", name)}>${name}</a>`;
export const JobLink = ({ name }) => html`<a href=${link("job", name)}>${name}</a>`;
export const TraceLink = ({ trace, children }) => html`<a href=${link("incident", trace)}>${children || trace}</a>`;

// ---- pieces of pages

export const Problem = ({ error, children }) =>
  error && html`<p class="problem" role="alert"><b>${error.status ? "Refused" : "No connection"}.</b> ${error.message}${children}</p>`;

export const Facts = ({ rows }) => html`<dl class="facts">
  ${rows.filter(Boolean).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
</dl>`;

export const Figure = ({ name, value, note, kind = "" }) => html`<div class="figure ${kind}">
  <span>${name}</span><b>${value}</b><small>${note || "\u00a0"}</small>
</div>`;

export const Section = ({ title, note, children, id }) => html`<section class="block" id=${id} aria-labelledby=${id && `${id}-h`}>
  <h2 id=${id && `${id}-h`}>${title}${note && html`<small>${note}</small>`}</h2>
  ${children}
</section>`;

// A table that scrolls sideways where it is too wide. It can be reached with the keyboard then.
export function Wide({ label, children }) {
  const box = useRef(null);
  const [scrolls, setScrolls] = useState(false);
  useLayoutEffect(() => {
    const look = () => setScrolls(box.current.scrollWidth > box.current.clientWidth);
    const observer = new ResizeObserver(look);
    observer.observe(box.current);
    observer.observe(box.current.firstElementChild);
    return () => observer.disconnect();
  }, []);
  const reachable = scrolls && { tabindex: 0, role: "region", "aria-label": label };
  return html`<div class="scroll-x" ref=${box} ...${reachable}>${children}</div>`;
}

export const Skeleton = ({ height = 120 }) => html`<div class="skeleton" style=${{ height: `${height}px` }} aria-hidden="true"></div>`;

const SEVERITIES = { critical: "bad", warning: "warn", info: "note" };
export const Finding = ({ one }) => html`<article class="finding">
  <header>
    <${Chip} kind=${SEVERITIES[one.severity] || "note"}>${one.severity}<//>
    <code>${one.kind}${one.xid === null ? "" : ` ${one.xid}`}</code>
    <span class="dim">${one.subject}</span>
  </header>
  <p>${one.message}</p>
  <p class="dim">
    ${one.value !== null && html`measured <b>${figure(one.value, 4)}</b>${one.threshold !== null && `, threshold ${figure(one.threshold, 4)}`}; `}
    ${one.rule && html`rule <code>${one.rule}</code>; `}asks for ${one.action.replace(/_/g, " ")} (${one.mode})
    ${one.since > 0 && `; since ${clock(one.since)}`}
  </p>
  ${one.source && html`<p class="dim source">Source: ${one.source}</p>`}
</article>`;

const DECISIONS = { evict: "bad", repair: "bad", defer_eviction: "warn", quarantine: "bad", restart: "warn", readmit: "good" };
export const Verdict = ({ one, open }) => html`<details class="verdict" open=${open}>
  <summary>
    <${Chip} kind=${DECISIONS[one.decision] || "note"}>${one.decision.replace(/_/g, " ")}<//>
    <time>${clock(one.at)}</time> <span>${one.sentence}</span>
  </summary>
  ${one.evidence.map((finding, index) => html`<${Finding} key=${index} one=${finding} />`)}
  <p class="dim">Verdict <code>${one.id}</code>${one.trace && html`, incident <${TraceLink} trace=${one.trace} />`}</p>
</details>`;

// ---- a dialog that asks for a reason

export function ReasonDialog({ title, text, verb, danger, onSubmit, onClose }) {
  const dialog = useRef(null);
  const [reason, setReason] = useState("");
  const [state, setState] = useState({ busy: false, error: null });
  useEffect(() => {
    dialog.current.showModal();
  }, []);
  const submit = async (event) => {
    event.preventDefault();
    if (!reason.trim() || state.busy) return;
    setState({ busy: true, error: null });
    try {
      const said = await onSubmit(reason.trim());
      onClose(said);
    } catch (error) {
      setState({ busy: false, error });
    }
  };
  return html`<dialog ref=${dialog} onClose=${() => onClose(null)} aria-labelledby="reason-title">
    <form onSubmit=${submit}>
      <h2 id="reason-title">${title}</h2>
      <p>${text}</p>
      <label>Reason, for the event log
        <input name="reason" autocomplete="off" maxlength="400" required value=${reason}
          onInput=${(event) => setReason(event.target.value)} />
      </label>
      <${Problem} error=${state.error} />
      <div class="actions">
        <button type="button" onClick=${() => dialog.current.close()}>Cancel</button>
        <button class=${danger ? "primary danger" : "primary"} disabled=${!reason.trim() || state.busy}>${verb}</button>
      </div>
    </form>
  </dialog>`;
}

// ---- event kinds

const KINDS = [
  [/^finding/, "signal"],
  [/^(rank|peer|node\.lost|launcher\.left|user_error|corruption|fleet\.correlated)/, "signal"],
  [/^(operator|credential|maintenance)/, "person"],
  [/^(remediation|probe|blame)/, "action"],
  [/^(resumed|job)/, "job"],
  [/^(verdict|generation|fleet|node)/, "decision"],
];
export const classOf = (kind) => (KINDS.find(([pattern]) => pattern.test(kind)) || [null, "other"])[1];

export function EventRows({ events, start, withIncident = true }) {
  return html`<table class="events">
    <tbody>
      ${events.map((one) => html`<tr key=${one.id} class="kind-${classOf(one.kind)}">
        <td class="n"><time>${start === undefined ? clock(one.at) : `+${seconds(one.at - start)}`}</time></td>
        <td><code>${one.kind}</code></td>
        <td>${one.sentence} ${withIncident && one.trace && html`<a class="dim" href=${link("incident", one.trace)} aria-label="incident ${one.trace}">incident</a>`}</td>
      </tr>`)}
    </tbody>
  </table>`;
}

// ---- size of an element, for drawings

export function useWidth() {
  const [element, setElement] = useState(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    if (!element) return undefined;
    setWidth(Math.floor(element.clientWidth));
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(element);
    return () => observer.disconnect();
  }, [element]);
  return [setElement, width, element];
}

// Round numbers for an axis from 0 to `most`.
export function ticks(most, count) {
  const raw = most / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw) || power;
  const found = [];
  for (let value = 0; value <= most * 1.0001; value += step) found.push(value);
  return found;
}

export function useTheme() {
  const [dark, setDark] = useState(matchMedia("(prefers-color-scheme: dark)").matches);
  useEffect(() => {
    const query = matchMedia("(prefers-color-scheme: dark)");
    const listener = () => setDark(query.matches);
    query.addEventListener("change", listener);
    return () => query.removeEventListener("change", listener);
  }, []);
  return dark;
}

export const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
