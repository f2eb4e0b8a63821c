// The grid of nodes on a canvas. The canvas covers the visible part and a margin; scrolling inside the margin costs
// nothing, and beyond it one drawing of the cells in sight.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { cssColour, NODE_STATES, stateOf, useTheme } from "./parts.js";

const LABEL = 17;
const GAP = 14;
const EDGE = 2; // for the outline of a selected cell
const MARGIN = 400; // pixels drawn above and below what is visible
const BIN = 128;

// Sizes of a cell by the number of nodes: tiles with names, then squares.
function sizeFor(count, width) {
  if (count <= 96) return { w: Math.min(148, Math.max(96, (width - 30) / 2)), h: 28, gap: 4, named: true };
  if (count <= 1200) return { w: 20, h: 20, gap: 3, named: false };
  return { w: 12, h: 12, gap: 2, named: false };
}

const ordered = new Intl.Collator("en", { numeric: true }).compare;

// About twice as many columns as rows, and few empty places in the last row.
function evenColumns(count) {
  const ideal = Math.ceil(Math.sqrt(count * 2.2));
  let best = ideal;
  let fewest = Infinity;
  for (let columns = Math.ceil(ideal * 0.75); columns <= ideal * 1.4; columns++) {
    const empty = Math.ceil(count / columns) * columns - count;
    if (empty < fewest || (empty === fewest && Math.abs(columns - ideal) < Math.abs(best - ideal))) {
      best = columns;
      fewest = empty;
    }
  }
  return best;
}

export function layout(nodes, groupOf, width) {
  const size = sizeFor(nodes.length, width);
  const pitchX = size.w + size.gap;
  const pitchY = size.h + size.gap;
  const groups = new Map();
  for (const one of nodes) {
    const name = groupOf(one);
    if (groups.has(name)) groups.get(name).push(one);
    else groups.set(name, [one]);
  }
  const names = [...groups.keys()].sort((a, b) => (a === "") - (b === "") || ordered(a, b));
  const most = Math.max(1, Math.floor((width - EDGE) / pitchX));
  const cells = [];
  const labels = [];
  let x = EDGE;
  let y = 0;
  let tallest = 0;
  for (const name of names) {
    const members = groups.get(name).sort((a, b) => (a.sortKey < b.sortKey ? -1 : 1));
    const labelWidth = Math.ceil((name.length + String(members.length).length + 4) * 6.4);
    const wish = size.named ? Math.min(members.length, most) : evenColumns(members.length);
    const columns = Math.min(most, Math.max(wish, members.length > 400 ? most : 1, Math.ceil(labelWidth / pitchX)));
    const rows = Math.ceil(members.length / columns);
    const blockWidth = columns * pitchX;
    if (x > EDGE && x + blockWidth > width) {
      x = EDGE;
      y += tallest + GAP;
      tallest = 0;
    }
    labels.push({ x, y, text: name, count: members.length, w: blockWidth });
    members.forEach((one, index) => {
      cells.push({ node: one, x: x + (index % columns) * pitchX, y: y + LABEL + Math.floor(index / columns) * pitchY });
    });
    tallest = Math.max(tallest, LABEL + rows * pitchY);
    x += blockWidth + GAP;
  }
  const height = y + tallest + 8;
  const bins = Array.from({ length: Math.ceil((height + 1) / BIN) }, () => []);
  cells.forEach((cell, index) => bins[Math.floor(cell.y / BIN)].push(index));
  const labelBins = bins.map(() => []);
  labels.forEach((label) => labelBins[Math.floor(label.y / BIN)].push(label));
  const place = new Map(cells.map((cell, index) => [cell.node.name, index]));
  return { size, cells, labels, bins, labelBins, place, height, pitchX, pitchY };
}

function glyph(context, kind, x, y, w, h) {
  const left = x + w * 0.25;
  const right = x + w * 0.75;
  const top = y + h * 0.25;
  const bottom = y + h * 0.75;
  const middleX = x + w / 2;
  const middleY = y + h / 2;
  if (kind === "half") {
    context.fillRect(middleX, y + 1, w / 2 - 1, h - 2);
    return;
  }
  context.beginPath();
  if (kind === "plus") {
    context.moveTo(middleX, top);
    context.lineTo(middleX, bottom);
    context.moveTo(left, middleY);
    context.lineTo(right, middleY);
  } else if (kind === "cross") {
    context.moveTo(left, top);
    context.lineTo(right, bottom);
    context.moveTo(right, top);
    context.lineTo(left, bottom);
  } else if (kind === "bang") {
    context.moveTo(middleX, y + h * 0.18);
    context.lineTo(middleX, y + h * 0.6);
    context.moveTo(middleX, y + h * 0.72);
    context.lineTo(middleX, y + h * 0.86);
  } else if (kind === "bar") {
    context.moveTo(left, middleY);
    context.lineTo(right, middleY);
  } else if (kind === "dot") {
    context.moveTo(middleX, middleY - h * 0.1);
    context.lineTo(middleX, middleY + h * 0.1);
  } else if (kind === "flash") {
    context.moveTo(x + w * 0.6, y + h * 0.12);
    context.lineTo(x + w * 0.3, y + h * 0.55);
    context.lineTo(x + w * 0.7, y + h * 0.55);
    context.lineTo(x + w * 0.4, y + h * 0.9);
  } else if (kind === "stripes") {
    context.moveTo(x + 1, y + h * 0.7);
    context.lineTo(x + w * 0.7, y + 1);
    context.moveTo(x + w * 0.3, y + h - 1);
    context.lineTo(x + w - 1, y + h * 0.3);
  }
  context.stroke();
}

function colours() {
  const states = {};
  for (const name of Object.keys(NODE_STATES)) {
    states[name] = [cssColour(`--state-${name}`), cssColour(`--on-${name}`)];
  }
  return { states, other: cssColour("--dim"), ink: cssColour("--ink"), dim: cssColour("--dim"), focus: cssColour("--focus") };
}

function draw(canvas, plan, top, height, width, paint, selected, cursor) {
  const ratio = Math.min(2, devicePixelRatio || 1);
  const w = Math.round(width * ratio);
  const h = Math.round(height * ratio);
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, -top * ratio);
  context.clearRect(0, top, width, height);
  const { size, cells, bins, labelBins } = plan;
  const first = Math.max(0, Math.floor(top / BIN) - 1);
  const last = Math.min(bins.length - 1, Math.floor((top + height) / BIN));
  context.textBaseline = "alphabetic";
  context.font = "11px system-ui, sans-serif";
  for (let bin = first; bin <= last; bin++) {
    for (const label of labelBins[bin]) {
      context.fillStyle = paint.ink;
      const text = label.text || "none";
      context.fillText(text, label.x, label.y + 12);
      context.fillStyle = paint.dim;
      context.fillText(String(label.count), label.x + context.measureText(text).width + 6, label.y + 12);
    }
  }
  const byState = new Map();
  for (let bin = first; bin <= last; bin++) {
    for (const index of bins[bin]) {
      const cell = cells[index];
      const known = byState.get(cell.node.state);
      if (known) known.push(cell);
      else byState.set(cell.node.state, [cell]);
    }
  }
  for (const [state, found] of byState) {
    const [fill, on] = paint.states[state] || [paint.other, paint.ink];
    context.fillStyle = fill;
    for (const cell of found) context.fillRect(cell.x, cell.y, size.w, size.h);
    const kind = stateOf(state).glyph;
    if (kind) {
      context.strokeStyle = on;
      context.fillStyle = on;
      context.lineWidth = size.w > 14 ? 2 : 1.5;
      for (const cell of found) {
        if (size.named) glyph(context, kind, cell.x + 5, cell.y + 8, 12, 12);
        else glyph(context, kind, cell.x, cell.y, size.w, size.h);
      }
    }
    if (size.named) {
      context.fillStyle = on;
      const inset = kind ? 22 : 8;
      for (const cell of found) context.fillText(shortened(context, cell.node.name, size.w - inset - 6), cell.x + inset, cell.y + 18);
    }
    context.fillStyle = on;
    for (const cell of found) {
      if (!cell.node.connected && state !== "lost") context.fillRect(cell.x, cell.y + size.h - 2, size.w, 2);
    }
  }
  for (const [name, colour, width] of [
    [cursor, paint.focus, 2],
    [selected, paint.ink, 2],
  ]) {
    const index = plan.place.get(name);
    if (index === undefined) continue;
    const cell = cells[index];
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.strokeRect(cell.x - 1, cell.y - 1, size.w + 2, size.h + 2);
  }
}

function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let end = text.length - 1;
  while (end > 3 && context.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}

export function Grid({ nodes, changes, groupOf, selected, onOpen, describe }) {
  const scroll = useRef(null);
  const canvas = useRef(null);
  const [width, setWidth] = useState(0);
  const [cursor, setCursor] = useState("");
  const [hover, setHover] = useState(null);
  const dark = useTheme();
  const paint = useMemo(colours, [dark]);
  const plan = useMemo(() => (width ? layout(nodes, groupOf, width) : null), [nodes, changes, groupOf, width]);
  const band = useRef({ top: -1, height: 0 });

  const show = (force) => {
    const pane = scroll.current;
    if (!plan || !pane) return;
    const top = pane.scrollTop;
    const bottom = top + pane.clientHeight;
    const known = band.current;
    if (!force && top >= known.top && bottom <= known.top + known.height) return;
    const from = Math.max(0, top - MARGIN);
    const height = Math.max(1, Math.min(plan.height, bottom + MARGIN) - from);
    band.current = { top: from, height };
    canvas.current.style.transform = `translateY(${from}px)`;
    canvas.current.style.width = `${width}px`;
    canvas.current.style.height = `${height}px`;
    draw(canvas.current, plan, from, height, width, paint, selected, cursor);
  };
  useLayoutEffect(() => show(true), [plan, paint, selected, cursor]);

  useEffect(() => {
    const pane = scroll.current;
    const observer = new ResizeObserver(() => setWidth(pane.clientWidth));
    observer.observe(pane);
    return () => observer.disconnect();
  }, []);

  const at = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top + band.current.top;
    for (let bin = Math.max(0, Math.floor(y / BIN) - 1); bin <= Math.floor(y / BIN); bin++) {
      for (const index of plan?.bins[bin] || []) {
        const cell = plan.cells[index];
        if (x >= cell.x && x < cell.x + plan.pitchX && y >= cell.y && y < cell.y + plan.pitchY) return cell;
      }
    }
    return null;
  };
  const move = (event) => {
    const cell = at(event);
    setHover(cell && { name: cell.node.name, x: cell.x, y: cell.y });
  };
  const key = (event) => {
    if (!plan || !plan.cells.length) return;
    const index = plan.place.get(cursor || selected) ?? 0;
    const here = plan.cells[index];
    const beside = (sign) =>
      plan.cells.reduce((best, cell, other) => {
        const dy = (cell.y - here.y) * sign;
        if (dy < 1) return best;
        const cost = dy * 4 + Math.abs(cell.x - here.x);
        return best && best.cost <= cost ? best : { cost, other };
      }, null)?.other ?? index;
    const moves = {
      ArrowRight: () => Math.min(plan.cells.length - 1, index + (cursor ? 1 : 0)),
      ArrowLeft: () => Math.max(0, index - 1),
      ArrowDown: () => beside(1),
      ArrowUp: () => beside(-1),
      Home: () => 0,
      End: () => plan.cells.length - 1,
    };
    if (event.key === "Enter" && cursor) return onOpen(cursor);
    if (!moves[event.key]) return;
    event.preventDefault();
    const cell = plan.cells[moves[event.key]()];
    setCursor(cell.node.name);
    const pane = scroll.current;
    if (cell.y < pane.scrollTop + 20) pane.scrollTop = cell.y - 40;
    else if (cell.y + 40 > pane.scrollTop + pane.clientHeight) pane.scrollTop = cell.y - pane.clientHeight + 60;
  };
  const shown = hover && plan?.cells[plan.place.get(hover.name)]?.node;
  const spoken = plan?.cells[plan.place.get(cursor)]?.node;
  return html`<div class="grid" ref=${scroll} onScroll=${() => show(false)} tabindex="0" role="application"
      aria-label="Nodes. Arrow keys move, Enter opens." onKeyDown=${key} onBlur=${() => setCursor("")}>
    <div style=${{ height: `${plan?.height || 0}px`, position: "relative" }}>
      <canvas ref=${canvas} aria-hidden="true" onMouseMove=${move} onMouseLeave=${() => setHover(null)}
        onClick=${(event) => at(event) && onOpen(at(event).node.name)}></canvas>
      ${shown && html`<div class="tip" style=${{ transform: `translate(${Math.max(0, Math.min(hover.x, width - 264))}px, ${hover.y + plan.size.h + 6}px)` }}>
        <b>${shown.name}</b> ${describe(shown)}
      </div>`}
    </div>
    <p class="spoken" aria-live="polite">${spoken && `${spoken.name}: ${describe(spoken)}`}</p>
  </div>`;
}
