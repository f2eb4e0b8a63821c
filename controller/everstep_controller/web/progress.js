// A job's progress: loss, step time and throughput, by time or by step, with a mark at each regroup.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import * as api from "./api.js";
import { cssColour, figure, number, seconds, ticks, useTheme, useWidth } from "./parts.js";
import { usePolled } from "./store.js";

// ---- samples

// New samples are added to the known ones, so that a long history is asked for once.
export function useProgress(name, intervalS, ifThere) {
  const kept = useRef([]);
  const ask = async () => {
    const known = kept.current;
    const { samples } = await api.progress(name, known.length ? known[known.length - 1].at : 0);
    if (samples.length || !known.length) kept.current = [...known, ...samples].slice(-3000);
    return kept.current;
  };
  return usePolled(ifThere(ask), intervalS, ["progress", name]);
}

// New steps in a second, over windows of several samples: the minimum of all ranks moves unevenly. Steps that are made
// again after a restore do not count.
function throughputOf(samples) {
  let furthest = 0;
  const steps = samples.map((one) => (furthest = Math.max(furthest, one.step)));
  const reach = Math.max(1, Math.min(8, Math.floor(samples.length / 40)));
  return samples.map((sample, index) => {
    const before = samples[Math.max(0, index - reach)];
    const span = sample.at - before.at;
    return span > 0 ? (steps[index] - steps[Math.max(0, index - reach)]) / span : null;
  });
}

// Samples of steps that were not made again: where a step was made twice, what its last time gave counts.
export function lastOfEachStep(rows) {
  let next = Infinity;
  const kept = [];
  for (const one of [...rows].reverse()) {
    if (one.step >= next) continue;
    next = one.step;
    kept.push(one);
  }
  return kept.reverse();
}

// ---- axes, as a person of this browser chose them

const AXES_KEY = "everstep.axes";
const AXES = { byStep: false, logLoss: false };

function storedAxes() {
  try {
    return { ...AXES, ...JSON.parse(localStorage.getItem(AXES_KEY)) };
  } catch {
    return AXES; // a browser may refuse to keep anything
  }
}

function keepAxes(axes) {
  try {
    localStorage.setItem(AXES_KEY, JSON.stringify(axes));
  } catch {
    // the choice lasts as long as the view then
  }
}

function AxesChoice({ axes, onChange }) {
  return html`<div class="axes">
    <div class="segments" role="group" aria-label="Horizontal axis">
      <button aria-pressed=${!axes.byStep} onClick=${() => onChange({ ...axes, byStep: false })}>by time</button>
      <button aria-pressed=${axes.byStep} onClick=${() => onChange({ ...axes, byStep: true })}>by step</button>
    </div>
    <label class="check"><input type="checkbox" checked=${axes.logLoss} onChange=${(event) => onChange({ ...axes, logLoss: event.target.checked })} /> logarithmic loss</label>
  </div>`;
}

const MOST_TICKS = 8;

// Round numbers between two positive ones: of each power of ten 1, 2 and 5, or powers alone where these are many, or
// evenly spaced ones where these are few.
export function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    found.push(...[1, 2, 5].map((factor) => Number(`${factor}e${power}`)));
  }
  const inside = found.filter((one) => one >= low && one <= high);
  if (inside.length < 3) {
    const [, unit = high] = ticks(high - low, 4);
    const from = Math.ceil(low / unit);
    return Array.from({ length: Math.floor(high / unit) - from + 1 }, (_, index) => (from + index) * unit);
  }
  if (inside.length <= MOST_TICKS) return inside;
  const powers = inside.filter((one) => one.toExponential().startsWith("1"));
  return powers.filter((_, index) => index % Math.ceil(powers.length / MOST_TICKS) === 0);
}

const LOG_SCALE = { distr: 3, range: (_plot, low, high) => (low > 0 ? [low / 1.04, high * 1.04] : [0.1, 1]) };
const ZERO_SCALE = { range: (_plot, _low, high) => [0, (high || 1) * 1.08] };

// ---- charts

let plotLibrary = null;
function loadPlot() {
  plotLibrary ??= new Promise((done, fail) => {
    const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: "/web/vendor/uplot.css" });
    const script = Object.assign(document.createElement("script"), { src: "/web/vendor/uplot.js" });
    script.onload = () => done(window.uPlot);
    script.onerror = fail;
    document.head.append(style, script);
  });
  return plotLibrary;
}

// A vertical line with the generation's number at each regroup.
const regroupMarks = (marks, colour) => ({
  hooks: {
    draw: [
      (plot) => {
        const { ctx, bbox } = plot;
        ctx.save();
        ctx.strokeStyle = colour;
        ctx.fillStyle = colour;
        ctx.lineWidth = devicePixelRatio;
        ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
        ctx.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
        let free = -Infinity;
        for (const mark of marks.current) {
          const x = plot.valToPos(mark.x, "x", true);
          if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
          const text = `g${mark.generation}`;
          const width = ctx.measureText(text).width;
          if (x >= free && x + width + 6 < bbox.left + bbox.width + 30) {
            ctx.fillText(text, x + 3 * devicePixelRatio, bbox.top + 9 * devicePixelRatio);
            free = x + width + 6 * devicePixelRatio;
          }
        }
        ctx.restore();
      },
    ],
  },
});

const timeOfDay = (at) => new Date(at * 1000).toTimeString().slice(0, 8);

// Newer samples are drawn in place; what a person has zoomed into stays.
function update(plot, x, y) {
  const [known] = plot.data;
  const { min, max } = plot.scales.x;
  const isZoomed = known.length > 1 && (min > known[0] || max < known[known.length - 1]);
  plot.setData([x, y], !isZoomed);
  if (isZoomed) plot.setScale("x", { min, max });
}

function Chart({ title, unit, x, y, marks, stroke, format, yScale = {}, byStep }) {
  const [box, width, element] = useWidth();
  const plot = useRef(null);
  const live = useRef(marks);
  live.current = marks;
  const dark = useTheme();
  const [shown, setShown] = useState(null);
  const isLog = yScale === LOG_SCALE;
  useEffect(() => {
    if (!width) return undefined;
    let over = false;
    loadPlot().then((uPlot) => {
      if (over) return;
      const axis = { stroke: cssColour("--dim"), grid: { stroke: cssColour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
      const rounds = isLog && { splits: (_plot, _axis, low, high) => logTicks(low, high), filter: (_plot, splits) => splits };
      plot.current = new uPlot(
        {
          width,
          height: 196,
          cursor: { sync: { key: "job" }, points: { size: 6 }, drag: { x: true, y: false } },
          legend: { show: false },
          scales: { x: { time: !byStep }, y: yScale },
          axes: [
            { ...axis, size: 26, space: 70, values: (_plot, values) => values.map(byStep ? number : timeOfDay), ...(byStep && { incrs: STEP_UNITS }) },
            { ...axis, ...rounds, size: 54, values: (_plot, values) => values.map((value) => (isLog ? String(Number(value.toPrecision(3))) : format(value))) },
          ],
          series: [{}, { stroke: cssColour(stroke), width: 1.6, spanGaps: false, points: { show: false } }],
          plugins: [regroupMarks(live, cssColour("--bad"))],
          hooks: { setCursor: [(one) => setShown(one.cursor.idx ?? null)] },
        },
        [x, y],
        element
      );
    });
    return () => {
      over = true;
      plot.current?.destroy();
      plot.current = null;
    };
  }, [width, dark, byStep, isLog]);
  useEffect(() => plot.current && update(plot.current, x, y), [x, y, marks.length]);
  const last = shown !== null && y[shown] !== undefined ? y[shown] : y.findLast((value) => value !== null && value !== undefined);
  return html`<figure class="chart" aria-label="${title} ${byStep ? "by step" : "over time"}${isLog ? ", logarithmic" : ""}, newest ${format(last)}">
    <h3>${title}<span>${last === undefined ? "–" : format(last)} ${unit}</span></h3>
    <div ref=${box}></div>
  </figure>`;
}

// Whole steps between lines of the grid.
const STEP_UNITS = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((factor) => factor * 10 ** power)).flat();

// The step at which a recovery began.
const stepOf = (one, samples) => one.restored?.step ?? one.afterStep ?? samples.find((sample) => sample.at >= one.decidedAt)?.step ?? Infinity;

export function Progress({ recoveries, samples }) {
  const [axes, setAxes] = useState(storedAxes);
  const { byStep, logLoss } = axes;
  const choose = (chosen) => {
    keepAxes(chosen);
    setAxes(chosen);
  };
  const data = useMemo(() => {
    const rates = throughputOf(samples);
    const all = samples.map((one, index) => ({ ...one, rate: rates[index] }));
    const rows = byStep ? lastOfEachStep(all) : all;
    return {
      x: rows.map((one) => (byStep ? one.step : one.at)),
      loss: rows.map((one) => (logLoss && !(one.loss > 0) ? null : one.loss)),
      stepS: rows.map((one) => one.stepS || null),
      rate: rows.map((one) => one.rate),
    };
  }, [samples, byStep, logLoss]);
  const left = logLoss ? samples.filter((one) => one.loss !== null && !(one.loss > 0)).length : 0;
  const marks = recoveries.map((one) => ({ x: byStep ? stepOf(one, samples) : one.decidedAt, generation: one.generation }));
  const common = { x: data.x, marks, byStep };
  return html`<${AxesChoice} axes=${axes} onChange=${choose} />
    <div class="charts" style=${{ margin: 0 }}>
      <${Chart} title="Loss" unit="" y=${data.loss} stroke="--p-2" format=${(value) => figure(value, 4)} yScale=${logLoss ? LOG_SCALE : undefined} ...${common} />
      <${Chart} title="Step time" unit="" y=${data.stepS} stroke="--p-8" format=${seconds} yScale=${ZERO_SCALE} ...${common} />
      <${Chart} title="Throughput" unit="steps/s" y=${data.rate} stroke="--p-6" format=${(value) => figure(value)} yScale=${ZERO_SCALE} ...${common} />
    </div>
    ${left > 0 && html`<p class="dim">A logarithmic axis has no place for ${number(left)} of ${number(samples.length)} losses, which are not above zero.</p>`}`;
}
