// One job: its progress with every regroup, its ranks, what recoveries and restarts cost, and what could be restored.

import { html, useLayoutEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import * as api from "./api.js";
import {
  bytes, Chip, clock, cssColour, EventRows, Figure, figure, JobLink, JobState, link, NodeLink, number, plural,
  Problem, Section, seconds, Skeleton, ticks, TraceLink, useTheme, useWidth, version, Wide,
} from "./parts.js";
import { Output, useOutput } from "./output.js";
import { Progress, useProgress } from "./progress.js";
import { useFleet, usePolled } from "./store.js";

export const PHASES = ["start", "abort", "teardown", "wait", "rendezvous", "build", "restore", "plan", "compile", "first_step"];
const PHASE_WORDS = { first_step: "first step", start: "start of a process" };
export const phaseColour = (name) => `var(--p-${Math.max(0, PHASES.indexOf(name))})`;

// ---- list of jobs

export function Jobs() {
  const { value, error } = usePolled(api.jobs, 15, ["jobs"], (event) => event.job !== "" && event.kind !== "resumed");
  return html`<div class="page">
    <div class="page-head"><h1>Jobs</h1></div>
    <${Problem} error=${error} />
    ${!value ? !error && html`<${Skeleton} height="200" />` : !value.length ? html`<p class="lead">No launcher has joined a job yet.</p>` : html`<${Wide} label="Jobs"><table class="plain">
      <thead><tr><th>Job</th><th>State</th><th class="n">Generation</th><th class="n">Ranks</th><th class="n">Spares</th><th class="n">Step</th><th class="n">Step time</th><th class="n">Loss</th><th>Committed</th><th>Reason</th></tr></thead>
      <tbody>${value.map((job) => html`<tr key=${job.name}><td><${JobLink} name=${job.name} /></td><td><${JobState} state=${job.state} /></td>
        <td class="n">${job.generation}</td><td class="n">${number(job.ranks)}</td><td class="n">${job.spares}</td><td class="n">${number(job.step)}</td>
        <td class="n">${seconds(job.stepS)}</td><td class="n">${figure(job.loss, 4)}</td><td>${version(job.committed)}</td><td>${job.reason}</td></tr>`)}</tbody>
    </table><//>`}
  </div>`;
}

// ---- ranks

const STRIP_ROWS = 256; // more ranks than this share rows: each row shows its latest rank

// Busy share of each rank's step, against the median of the job. A rank far above the median keeps the others waiting.
function ranksNow(job) {
  const busy = job.rankList.filter((one) => one.busyS !== null && one.stepS > 0).map((one) => one.busyS).sort((a, b) => a - b);
  const median = busy.length ? busy[busy.length >> 1] : null;
  const newest = Math.max(0, ...job.rankList.map((one) => one.step));
  const known = new Map(job.rankList.map((one) => [one.rank, one]));
  return {
    median,
    newest,
    ranks: Array.from({ length: job.ranks }, (_, rank) => {
      const one = known.get(rank);
      if (!one) return { rank, kind: "silent", share: 0 };
      const share = one.busyS === null || !one.stepS ? null : Math.min(1, one.busyS / one.stepS);
      const late = median !== null && one.busyS > 1.3 * median && one.busyS - median > 0.005;
      return { rank, node: one.node, step: one.step, stepS: one.stepS, busyS: one.busyS, share, kind: late ? "late" : share === null ? "unmeasured" : "busy" };
    }),
  };
}

const columnOf = ({ ranks }) => {
  const rows = Math.min(STRIP_ROWS, ranks.length);
  const column = new Array(rows).fill(null);
  const gravity = { late: 3, silent: 2, busy: 1, unmeasured: 0 };
  for (const one of ranks) {
    const row = Math.floor((one.rank * rows) / ranks.length);
    if (!column[row] || gravity[one.kind] > gravity[column[row].kind]) column[row] = one;
  }
  return column;
};

const HISTORY = 120;

function RankHeat({ job }) {
  const [box, width] = useWidth();
  const canvas = useRef(null);
  const columns = useRef([]);
  const dark = useTheme();
  const now = useMemo(() => ranksNow(job), [job]);
  const [chosen, setChosen] = useState(null);
  const rows = Math.min(STRIP_ROWS, Math.max(1, job.ranks));
  const cell = Math.max(3, Math.min(22, Math.floor(220 / rows)));
  const height = rows * cell;
  useMemo(() => {
    const last = columns.current[columns.current.length - 1];
    const column = columnOf(now);
    if (last && last.length !== column.length) columns.current = [];
    columns.current = [...columns.current, column].slice(-HISTORY);
  }, [now]);
  useLayoutEffect(() => {
    if (!width) return;
    const inner = width;
    const ratio = Math.min(2, devicePixelRatio || 1);
    const element = canvas.current;
    element.width = inner * ratio;
    element.height = height * ratio;
    const context = element.getContext("2d");
    context.scale(ratio, ratio);
    const low = cssColour("--heat-0");
    const high = cssColour("--heat-1");
    const shown = Math.max(40, columns.current.length);
    const w = inner / shown;
    const shift = shown - columns.current.length;
    columns.current.forEach((column, index) => {
      const x = (shift + index) * w;
      column.forEach((one, row) => {
        const y = row * cell;
        context.globalAlpha = 1;
        context.fillStyle = one.kind === "silent" ? cssColour("--silent") : one.kind === "late" ? cssColour("--late") : low;
        context.fillRect(x, y, Math.ceil(w), cell - (cell > 6 ? 1 : 0));
        if (one.kind === "busy") {
          context.globalAlpha = one.share;
          context.fillStyle = high;
          context.fillRect(x, y, Math.ceil(w), cell - (cell > 6 ? 1 : 0));
        }
      });
    });
  }, [now, width, dark, height]);
  const late = now.ranks.filter((one) => one.kind === "late").sort((a, b) => b.busyS - a.busyS);
  const silent = now.ranks.filter((one) => one.kind === "silent");
  const point = (event) => {
    const bounds = canvas.current.getBoundingClientRect();
    const row = Math.floor(((event.clientY - bounds.top) / bounds.height) * rows);
    setChosen(columns.current[columns.current.length - 1]?.[Math.max(0, Math.min(rows - 1, row))]?.rank ?? null);
  };
  const one = chosen === null ? null : now.ranks[chosen];
  const said = one
    ? html`rank ${one.rank}${one.node && html` on <${NodeLink} name=${one.node} />, step ${number(one.step)}: ${one.busyS === null ? "busy time is not measured" : html`busy ${seconds(one.busyS)}, waiting ${seconds(Math.max(0, one.stepS - one.busyS))} of ${seconds(one.stepS)}`}`}`
    : late.length
      ? html`${plural(late.length, "rank is", "ranks are")} late: ${late.slice(0, 4).map((rank, index) => html`${index ? ", " : ""}${rank.rank} on <${NodeLink} name=${rank.node} /> (busy ${seconds(rank.busyS)}, median ${seconds(now.median)})`)}`
      : now.median === null ? "Busy time is not measured yet." : `No rank keeps the others waiting; the median rank is busy for ${seconds(now.median)} of a step.`;
  return html`<div class="heat">
    <div ref=${box} style=${{ height: `${height}px` }}><canvas ref=${canvas} role="img" aria-label="Ranks by time: busy, waiting, late" style=${{ height: `${height}px` }} onMouseMove=${point} onMouseLeave=${() => setChosen(null)}></canvas></div>
    <p class="keys"><span><i style=${{ background: "var(--heat-1)" }}></i>busy</span><span><i style=${{ background: "var(--heat-0)" }}></i>waiting for others</span>
      <span><i style=${{ background: "var(--late)" }}></i>late: busy over 1.3 × the median</span>${silent.length > 0 && html`<span><i style=${{ background: "var(--silent)" }}></i>no progress reported</span>`}
      <span>rank 0 above, newest at the right</span></p>
    <p>${said}</p>
  </div>`;
}

// ---- recoveries; there is room for four from the start, so that the first ones move nothing below

const ROW = 24;

const REST_COLOURS = { directives: "var(--line)", boundary: "var(--good-bg)" };
const restWords = (phase, one) =>
  ({ directives: "directives and reports on their way", boundary: `all ranks train on until step ${one.afterStep}` })[phase];

export function Gantt({ recoveries, width }) {
  const rows = recoveries.slice(-24).reverse();
  const lengthOf = (one) => Math.max(one.durationS || 0, sum(Object.values(one.phases)));
  const most = Math.max(0.05, ...rows.map(lengthOf));
  const left = width < 560 ? 92 : 190;
  const scale = (width - left - 70) / most;
  const marks = ticks(most, width < 560 ? 3 : 8);
  const height = rows.length * ROW + 40;
  return html`<svg width=${width} height=${height} viewBox="0 0 ${width} ${height}" role="group" aria-label="Phases of the last ${rows.length} recoveries">
    ${marks.map((at) => html`<g key=${at}><line class="axis" x1=${left + at * scale} x2=${left + at * scale} y1="4" y2=${height - 34} /><text x=${left + at * scale} y=${height - 20} text-anchor="middle">${seconds(at)}</text></g>`)}
    <text x=${left + (width - left - 70) / 2} y=${height - 4} text-anchor="middle">time since the decision</text>
    ${rows.map((one, index) => {
      let x = left;
      const y = 6 + index * ROW;
      const known = sum(Object.values(one.phases));
      const rest = Math.max(0, (one.durationS || 0) - known);
      const phases = PHASES.filter((phase) => one.phases[phase]).map((phase) => [phase, one.phases[phase]]);
      // Up to a boundary the ranks train on; else the rest is the time that directives and reports take.
      const parts = one.afterStep === null ? [...phases, ["directives", rest]] : [["boundary", rest], ...phases];
      return html`<g key=${one.generation}>
        <a href=${link("incident", one.trace)}><text class="ink" x="0" y=${y + 13}>g${one.generation} ${width < 560 ? "" : one.reason.replace(/_/g, " ")}</text></a>
        ${parts.map(([phase, length]) => {
          const from = x;
          x += length * scale;
          return length * scale > 0.3 && html`<rect key=${phase} x=${from} y=${y} width=${length * scale} height="16" rx="1.5" style=${{ fill: REST_COLOURS[phase] || phaseColour(phase) }}>
            <title>${restWords(phase, one) || PHASE_WORDS[phase] || phase}: ${seconds(length)}</title></rect>`;
        })}
        <text class="ink" x=${left + lengthOf(one) * scale + 6} y=${y + 13}>${one.durationS === null ? `… ${one.resumed}/${one.ranks}` : seconds(one.durationS)}</text>
      </g>`;
    })}
  </svg>`;
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

export const PhaseKeys = ({ recoveries }) => html`<p class="keys">${PHASES.filter((phase) => recoveries.some((one) => one.phases[phase])).map((phase) => html`<span key=${phase}><i style=${{ background: phaseColour(phase) }}></i>${PHASE_WORDS[phase] || phase}</span>`)}
  ${recoveries.some((one) => one.afterStep !== null) && html`<span><i style=${{ background: REST_COLOURS.boundary }}></i>training on until the boundary</span>`}
  <span><i style=${{ background: REST_COLOURS.directives }}></i>directives and reports</span></p>`;

function Recoveries({ recoveries }) {
  const [box, width] = useWidth();
  return html`<div class="drawing"><div ref=${box} style=${{ minHeight: `${4 * ROW + 40}px` }}>${width > 0 && html`<${Gantt} recoveries=${recoveries} width=${width} />`}</div><${PhaseKeys} recoveries=${recoveries} /></div>`;
}

// ---- what recoveries cost, and what restarts would have cost: the controller adds it up, in read_models/receipts.py

const NO_COSTS = { ranks: 0, count: 0, wall: 0, lost: 0, lostGpuS: 0, restart: 0, restartGpuS: 0, share: null };

function Costs({ job, pace, concerns }) {
  const [every, setEvery] = useState(30);
  const [restart, setRestart] = useState(60);
  const ask = () => api.receipt(job.name, Math.max(1, every) * 60, Math.max(0, restart));
  const { value, error } = usePolled(ask, pace, ["receipt", job.name, every, restart], concerns);
  const shown = useRef(NO_COSTS);
  shown.current = value || shown.current; // while other restarts are asked for, the last figures stay
  const told = shown.current;
  const hours = (gpuS) => (gpuS < 7200 ? seconds(gpuS) : `${figure(gpuS / 3600)} h`);
  return html`<div>
    <${Problem} error=${error} />
    <div class="figures">
      <${Figure} name="Effective time" value=${told.share === null ? "–" : `${(100 * told.share).toFixed(told.share > 0.999 ? 3 : 2)} %`} note="of ${seconds(told.wall)} since the first step" kind=${told.share > 0.99 ? "good" : ""} />
      <${Figure} name="Recoveries" value=${told.count} note=${told.count ? `${seconds(told.lost / told.count)} each` : ""} />
      <${Figure} name="Time lost" value=${seconds(told.lost)} note="with repeated steps" />
      <${Figure} name="GPU time lost" value=${hours(told.lostGpuS)} note=${plural(told.ranks, "GPU")} />
      <${Figure} name="GPU time saved" value=${hours(Math.max(0, told.restartGpuS - told.lostGpuS))} note="against restarts" kind="good" />
    </div>
    <div class="inline-fields" style=${{ marginTop: "10px" }}>
      <label>A restart's checkpoint, every min <input type="number" min="1" max="1440" value=${every} onInput=${(event) => setEvery(Number(event.target.value) || 30)} /></label>
      <label>Seconds of a restart <input type="number" min="0" max="7200" value=${restart} onInput=${(event) => setRestart(Number(event.target.value) || 0)} /></label>
      <p class="dim">The same failures would have cost ${seconds(told.restart)}: each restart, and the work since the last checkpoint.</p>
    </div>
  </div>`;
}

// ---- checkpoints

const DIES = { node: "node", pair: "pair of nodes", rack: "rack", switch: "switch", power: "power unit" };

function Exposure({ restorability }) {
  const { exposures } = restorability;
  const [picked, setPicked] = useState(0);
  const one = exposures[Math.min(picked, exposures.length - 1)];
  const bad = exposures.filter((each) => !each.restorable).length;
  return html`<div class="exposure">
    <p>${restorability.sentence}</p>
    ${restorability.missingRanks.length > 0 && html`<p class="reason warn">No reachable node holds the shares of ranks ${restorability.missingRanks.slice(0, 12).join(", ")}.</p>`}
    ${one && html`<div class="picks"><label>What would be lost if this dies now?
      <select value=${picked} onChange=${(event) => setPicked(Number(event.target.value))}>
        ${exposures.map((each, index) => html`<option key=${index} value=${index}>${each.restorable ? "" : "! "}${DIES[each.kind]} ${each.name}</option>`)}
      </select></label></div>
    <div class="answer ${one.restorable ? "" : "bad"}"><b>${one.restorable ? (one.fallback ? `Goes back to ${version(one.fallback)}.` : "No committed step would be lost.") : "The committed version would be lost."}</b> ${one.sentence}</div>
    <p class="dim">${bad ? `${bad} of ${plural(exposures.length, "possible loss", "possible losses")} cannot be borne.` : `${plural(exposures.length, "possible loss is", "possible losses are")} looked at; each can be borne.`}</p>`}
  </div>`;
}

const TIERS = { memory: "memory", parity: "parity", storage: "storage" };

function Versions({ checkpoints }) {
  return html`<div>
    <p>${checkpoints.sentence}</p>
    ${checkpoints.lastError && html`<p class="reason warn">${checkpoints.lastError}</p>`}
    <${Wide} label="Versions"><table class="plain"><thead><tr><th>Version</th><th>Where</th><th>Since</th><th class="n">Size</th><th>State</th></tr></thead>
    <tbody>${checkpoints.versions.slice(0, 12).map((one, index) => html`<tr key=${index} title=${one.sentence}><td>${version(one.version)}</td><td>${TIERS[one.tier]}</td><td><time>${clock(one.since)}</time></td>
      <td class="n">${one.bytes ? bytes(one.bytes) : "–"}</td><td>${!one.complete ? html`<${Chip}>in progress<//>` : one.restorable ? html`<${Chip} kind="good">restorable<//>` : html`<${Chip} kind="bad">not restorable<//>`} ${one.verified && html`<${Chip} kind="note">verified<//>`}</td></tr>`)}</tbody></table><//>
  </div>`;
}

// ---- hangs

function Hangs({ events }) {
  const stalled = events.filter((one) => one.detail.stacks);
  if (!stalled.length) return html`<p class="dim">No rank has stood still.</p>`;
  return stalled.slice(0, 24).map((one, index) => html`<details class="stack" key=${one.id} open=${index === 0}>
    <summary><time>${clock(one.at)}</time> ${one.sentence} ${one.trace && html`<${TraceLink} trace=${one.trace}>incident<//>`}</summary>
    <pre class="stacks" tabindex="0">${one.detail.stacks}</pre>
  </details>`);
}

// ---- the view

export function Job({ name }) {
  const fleet = useFleet();
  const size = fleet.status?.jobs.find((one) => one.name === name)?.ranks || 0;
  const pace = Math.min(30, Math.max(2, size / 300));
  const concerns = (event) => event.job === name && event.kind !== "launcher.joined";
  // A launcher's link may be opened before its job exists; asking for the job then would only be refused.
  const exists = useRef(null); // null: not known yet
  const ifThere = (ask) => async () => {
    if (!exists.current) exists.current = (await api.jobs()).some((one) => one.name === name);
    return exists.current ? ask() : null;
  };
  const job = usePolled(ifThere(() => api.job(name)), pace, ["job", name], concerns);
  const progress = useProgress(name, pace, ifThere);
  const slow = usePolled(
    ifThere(async () => {
      const [restorability, checkpoints, events, hangs] = await Promise.all([
        api.restorability(name),
        api.checkpoints(name),
        api.events({ job: name, newest: true, limit: 60 }),
        api.events({ job: name, kind: "rank.stalled", newest: true, limit: 24 }),
      ]);
      return { restorability, checkpoints, events: [...events].reverse(), hangs: [...hangs].reverse() };
    }),
    Math.max(5, pace),
    ["slow", name],
    concerns
  );
  const output = useOutput(name, pace, concerns, ifThere);
  const one = job.value;
  if (!one || !progress.value || !slow.value || !(output.all.value || output.all.error)) {
    return html`<div class="page"><div class="page-head"><h1>${name}</h1></div>
      <p class="lead">${exists.current === false ? "Waiting for its first launcher." : "\u00a0"}</p>
      <${Problem} error=${job.error || progress.error || slow.error} />
      ${!job.error && html`<${Skeleton} height="64" /><${Skeleton} height="232" /><${Skeleton} height="600" />`}</div>`;
  }
  const now = fleet.status ? fleet.status.now + (performance.now() - fleet.statusAt) / 1000 : Date.now() / 1000;
  const real = one.recoveries.filter((each) => each.reason !== "formed");
  const { restorability, checkpoints, events, hangs } = slow.value;
  return html`<div class="page">
    <div class="page-head"><h1>${one.name}</h1><${JobState} state=${one.state} /><span class="dim">generation ${one.generation}, ${one.state} for ${seconds(Math.max(0, now - one.since))}</span></div>
    <p class="lead">${one.reason}</p>
    ${one.stall && html`<p class="reason warn">For ${seconds(Math.max(0, now - one.stallSince))}: ${one.stall}.</p>`}
    <${Problem} error=${job.error} />
    <div class="figures">
      <${Figure} name="Step" value=${number(one.step)} note="finished by all ranks" />
      <${Figure} name="Loss" value=${figure(one.loss, 5)} />
      <${Figure} name="Step time" value=${seconds(one.stepS)} note="slowest rank" />
      <${Figure} name="Ranks" value=${number(one.ranks)} note="on ${plural(one.nodes, "node")}, ${one.minNodes} to ${one.maxNodes}" />
      <${Figure} name="Spares" value=${one.spares} note=${one.spareNodes.slice(0, 3).join(", ")} />
      <${Figure} name="Committed" value=${version(one.committed)} note="generation:step" />
      <${Figure} name="Verified" value=${version(one.verified)} note="digests agree" />
    </div>
    <details class="stack"><summary>${Object.keys(one.ineligible).length ? `${plural(Object.keys(one.ineligible).length, "node")} may not take a seat` : "Every node that joined may take a seat"}</summary>
      <ul>${Object.entries(one.ineligible).slice(0, 50).map(([node, why]) => html`<li key=${node}><${NodeLink} name=${node} />: ${why}</li>`)}</ul></details>
    <${Section} id="progress" title="Progress" note="dashed lines are regroups; drag to zoom, double-click to return"><${Progress} recoveries=${real} samples=${progress.value} /><//>
    <${Section} id="ranks" title="Ranks" note="share of each step in which the rank computes"><${RankHeat} job=${one} /><//>
    <${Section} id="output" title="Output" note="what each rank printed last"><${Output} job=${one} output=${output} now=${now} /><//>
    <${Section} id="costs" title="What failures cost"><${Costs} job=${one} pace=${pace} concerns=${concerns} /><//>
    <${Section} id="recoveries" title="Recoveries" note=${real.length ? "phases of the slowest rank; a row opens its incident" : ""}>${real.length ? html`<${Recoveries} recoveries=${real} />` : html`<p class="dim">No rank or node has been lost.</p>`}<//>
    <${Section} id="checkpoints" title="Checkpoints"><div class="two"><${Exposure} restorability=${restorability} /><${Versions} checkpoints=${checkpoints} /></div><//>
    <${Section} id="hangs" title="Stacks of hangs"><${Hangs} events=${hangs} /><//>
    <${Section} id="events" title="Events"><${EventRows} events=${events} /><//>
  </div>`;
}
