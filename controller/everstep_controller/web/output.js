// What the ranks of a job printed last, if the controller's machine keeps it. Only operators may read it.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";
import * as api from "./api.js";
import { clock, number, Problem, seconds } from "./parts.js";
import { fleet, usePolled } from "./store.js";

const LINES = 3; // of each rank
const LINES_OF_ONE = 50; // of the rank that a person has chosen

const notAllowed = (name) => ({
  ranks: [],
  sentence: "Only operators may read the output here, because it may hold secrets. On a rank's node, its user reads it with",
  command: `everstep logs ${name}`,
});

// Whether an element is on the screen, as a ref; `onShown` is called when it comes there.
function useShown(onShown) {
  const [element, setElement] = useState(null);
  const shown = useRef(false);
  const call = useRef(onShown);
  call.current = onShown;
  useEffect(() => {
    if (!element) return undefined;
    const observer = new IntersectionObserver((entries) => {
      const before = shown.current;
      shown.current = entries[entries.length - 1].isIntersecting;
      if (shown.current && !before) call.current();
    });
    observer.observe(element);
    return () => observer.disconnect();
  }, [element]);
  return [setElement, shown];
}

// As usePolled, but after its first answer it asks only while `shown` is true.
function usePolledWhile(shown, ask, seconds, inputs, concerns) {
  const last = useRef(null);
  const key = JSON.stringify(inputs);
  const asked = async () => {
    if (last.current?.key === key && (!shown.current || document.hidden)) return last.current.value;
    const value = await ask();
    last.current = value && { key, value };
    return value;
  };
  return usePolled(asked, seconds, inputs, concerns);
}

// The newest lines of all ranks, and more of the chosen one.
export function useOutput(name, pace, concerns, ifThere) {
  const [chosen, choose] = useState(null);
  const [setBox, shown] = useShown(() => {
    all.refresh();
    one.refresh();
  });
  const mayRead = fleet.identity?.mayOrder;
  const all = usePolledWhile(
    shown,
    ifThere(() => (mayRead ? api.output(name, { lines: LINES }) : notAllowed(name))),
    pace,
    ["output", name, mayRead],
    concerns
  );
  const one = usePolledWhile(
    shown,
    () => (chosen === null ? null : api.output(name, { rank: chosen, lines: LINES_OF_ONE })),
    pace,
    ["output", name, chosen],
    concerns
  );
  return { all, one, chosen, choose, setBox, mayRead };
}

// The last lines of the chosen rank. They follow what is printed, unless a person has scrolled back.
function Lines({ rank, lines }) {
  const box = useRef(null);
  const follows = useRef(true);
  useLayoutEffect(() => {
    if (follows.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines]);
  const note = ({ target }) => {
    follows.current = target.scrollTop + target.clientHeight > target.scrollHeight - 20;
  };
  return html`<pre class="lines open" tabindex="0" role="region" aria-label="Last lines of rank ${rank}" ref=${box} onScroll=${note}>${lines
    ? lines.map((line) => html`<time>${clock(line.at)}</time> ${line.text}${"\n"}`)
    : "\u2026"}</pre>`;
}

const ageOf = (lines, now) =>
  lines.length ? `${seconds(Math.max(0, Math.round(now - lines[lines.length - 1].at)))} ago` : "nothing printed yet";

const Rank = ({ one, more, place, isOpen, onChoose, now }) => html`<li>
  <div><button class="small" aria-expanded=${isOpen} onClick=${onChoose}>rank ${one.rank}</button>
    <small class="dim">${place}${ageOf(one.lines, now)}</small></div>
  ${isOpen ? html`<${Lines} rank=${one.rank} lines=${more} />` : html`<pre class="lines">${one.lines.map((line) => line.text).join("\n")}</pre>`}
</li>`;

export function Output({ job, output, now }) {
  const { all, one, chosen, choose, setBox, mayRead } = output;
  const { ranks = [], sentence, command } = all.value || {};
  const more = one.value?.ranks[0];
  const rows = more && !ranks.some((each) => each.rank === chosen) ? [...ranks, more].sort((a, b) => a.rank - b.rank) : ranks;
  const pick = ({ target }) => choose(target.value === "" ? null : Math.max(0, Math.min(job.ranks - 1, Math.floor(Number(target.value) || 0))));
  const elsewhere = chosen !== null && one.value && !more ? one.value : null;
  return html`<div class="outputs" ref=${setBox}>
    <${Problem} error=${all.error || one.error} />
    <ul>${rows.map((each) => html`<${Rank} key=${each.rank} one=${each} more=${more?.lines} place=${job.nodes > 1 ? `${each.node}, ` : ""} isOpen=${each.rank === chosen} onChoose=${() => choose(each.rank === chosen ? null : each.rank)} now=${now} />`)}</ul>
    ${mayRead && job.ranks > ranks.length && html`<div class="inline-fields">
      <label>Any rank, 0 to ${number(job.ranks - 1)} <input type="number" min="0" max=${job.ranks - 1} value=${chosen ?? ""} onInput=${pick} /></label>
      ${elsewhere && html`<p>${elsewhere.sentence} <code>${elsewhere.command}</code></p>`}
    </div>`}
    ${sentence && !elsewhere && html`<p class="dim">${sentence} ${command && html`<code>${command}</code>`}</p>`}
  </div>`;
}
