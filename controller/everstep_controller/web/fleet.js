// The fleet: what needs a person, every node in a grid, and one node with its findings, verdicts and orders.

import { html, useCallback, useEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import * as api from "./api.js";
import { Grid } from "./grid.js";
import {
  ago, bytes, Chip, clock, EventRows, Facts, Finding, JobLink, JobState, link, NODE_STATES, NodeState,
  number, plural, Problem, ReasonDialog, seconds, Skeleton, StateMark, stateOf, Verdict, version, Wide,
} from "./parts.js";
import { countsOf, touch, useFleet, usePolled } from "./store.js";

// ---- the sentence about the fleet

const OUT = ["faulty", "repair", "lost", "quarantined", "held", "probation", "outbreak"];
const SHOWN = 4; // needs that are shown before a person asks for all

const targetOf = (need) => (need.node ? link("fleet", need.node) : need.job ? link("job", need.job) : "");

// One matter that no automatic action will settle: why, what to do, and the command to begin with.
function Need({ need, onBreaker, mayOrder }) {
  const target = targetOf(need);
  return html`<li class=${need.critical ? "bad" : "warn"}>
    <span class="why">${target ? html`<a href=${target}>${need.reason}</a>` : need.reason}</span>
    <span class="do"><small><time>${ago(need.since)}</time></small> ${need.advice}
      ${need.command && html` <code>${need.command}</code>`}
      ${need.kind === "breaker" && mayOrder && html` <button class="small" onClick=${onBreaker}>Reset the breaker</button>`}</span>
  </li>`;
}

function Sentence({ fleet, onBreaker }) {
  const { status } = fleet;
  const [all, setAll] = useState(false);
  const { needs, needCount } = status;
  const counts = countsOf();
  const serving = ["healthy", "suspect", "faulty", "outbreak"].reduce((sum, state) => sum + (counts.get(state) || 0), 0);
  const running = status.jobs.filter((job) => job.state === "running").length;
  const level = needs.some((one) => one.critical) ? "bad" : needCount ? "warn" : "good";
  const out = OUT.filter((state) => counts.get(state)).map((state) => `${number(counts.get(state))} ${stateOf(state).label}`);
  const shown = all ? needs : needs.slice(0, SHOWN);
  return html`<section class="sentence level-${level}" aria-label="State of the fleet" aria-live="polite">
    <p class="main">
      <span class="lamp" aria-hidden="true">${{ good: "✓", warn: "!", bad: "✕" }[level]}</span>
      ${needCount ? html`<b>${plural(needCount, "thing needs", "things need")} a person.</b> ` : html`<b>Nothing needs a person.</b> `}
      ${number(serving)} of ${plural(fleet.total, "node")} serve${out.length ? ` (${out.join(", ")})` : ""};
      ${" "}${running ? `${plural(running, "job runs", "jobs run")}` : "no job runs"}.
      ${" "}<span class="dim">Leader since ${clock(status.startedAt)} (epoch ${status.epoch}); database
      ${status.outage ? " unavailable" : " available"}; ${status.breaker ? "evictions paused" : `${plural(status.budgetLeft, "eviction")} left`}.</span>
    </p>
    <ul class="concerns">${shown.map((need) => html`<${Need} key=${`${need.kind} ${need.subject} ${need.since}`} need=${need}
      onBreaker=${onBreaker} mayOrder=${fleet.identity.mayOrder} />`)}</ul>
    ${needCount > SHOWN && html`<button class="small more" aria-expanded=${all} onClick=${() => setAll(!all)}>
      ${all ? "Show fewer" : `Show ${needCount > needs.length ? `the first ${number(needs.length)}` : `all ${number(needCount)}`}`}</button>`}
  </section>`;
}

// ---- one node

const ORDERS = {
  drain: { verb: "Drain", text: "The node leaves its job at a boundary and stays out until it is released or readmitted.", danger: true },
  hold: { verb: "Hold", text: "The node takes no new work, whatever its state, until it is released.", danger: true },
  release: { verb: "Release", text: "The hold ends. The node serves again if its state allows it." },
  readmit: { verb: "Readmit", text: "The node goes through probation and serves again." },
};

function ordersFor(node) {
  const out = ["quarantined", "repair", "lost"].includes(node.storedState);
  const found = [];
  if (!out && !node.holdReason) found.push("drain");
  found.push(node.holdReason ? "release" : "hold");
  if ((out || node.storedState === "held") && node.storedState !== "lost" && !node.cordonedBy) found.push("readmit");
  return found;
}

function Orders({ node, onDone }) {
  const fleet = useFleet();
  const [asked, setAsked] = useState(null);
  const [said, setSaid] = useState("");
  if (!fleet.identity?.mayOrder) {
    return html`<p class="dim orders">Orders need a token with the operator role; this one is ${fleet.identity?.role}.</p>`;
  }
  const close = (answer) => {
    setAsked(null);
    if (answer) {
      setSaid(answer.sentence || "Done.");
      touch(node.name);
      onDone();
    }
  };
  const submit = async (reason) => {
    try {
      return await api.order(node.name, asked, reason, node.etag);
    } catch (error) {
      if (error.code === "outdated") onDone(); // the panel behind the dialog shows what has changed
      throw error;
    }
  };
  return html`<div class="orders" role="group" aria-label="Orders">
    ${ordersFor(node).map((kind) => html`<button key=${kind} class=${ORDERS[kind].danger ? "danger" : ""} onClick=${() => setAsked(kind)}>${ORDERS[kind].verb}</button>`)}
    <span class="said" role="status">${said}</span>
    ${asked && html`<${ReasonDialog} title="${ORDERS[asked].verb} ${node.name}" text=${ORDERS[asked].text} verb=${ORDERS[asked].verb}
      danger=${ORDERS[asked].danger} onSubmit=${submit} onClose=${close} />`}
  </div>`;
}

// The ladder of the rule that keeps the node out, with the step that its newest verdict took.
function Ladder({ node, policy }) {
  const verdict = node.verdicts.find((one) => one.evidence.length && one.action !== "none");
  const finding = verdict?.evidence[0];
  if (!finding || !policy) return html`<p class="dim">No remediation has been due.</p>`;
  const rules = policy.rules.filter((rule) => rule.kind === finding.kind);
  const rule = rules.find((one) => one.xids?.includes(finding.xid)) || rules.find((one) => !one.name) || rules[0];
  const steps = rule?.ladder || ["drain", "repair"];
  const taken = steps.indexOf(verdict.action);
  return html`<div>
    <ol class="ladder">${steps.map((step, index) => html`<li key=${step} class=${index === taken ? "now" : index < taken ? "past" : ""}
      aria-current=${index === taken ? "step" : undefined}>${step.replace(/_/g, " ")}</li>`)}</ol>
    <p class="dim">Rule <code>${rule?.id || finding.kind}</code>. A repeat within the rule's memory takes the next step.</p>
  </div>`;
}

const OLD_S = 120; // agents send gauges at least once a minute

const measured = (value, unit) => (value === null ? "–" : `${Math.round(value)}${unit}`);

// A power cap is usual under load; what the hardware or the heat slows down is not.
const USUAL_REASON = "power_cap";

const Reasons = ({ names }) =>
  names.length
    ? names.map((name) => html`<span key=${name} class=${name === USUAL_REASON ? "" : "unusual"}>${name.replace(/_/g, " ")}</span>`)
    : "–";

function Gauges({ gauges, suspects }) {
  const { receivedAt, gpus } = gauges;
  if (receivedAt === null || !gpus.length) return null;
  const isOld = Date.now() / 1000 - receivedAt > OLD_S;
  return html`<${Wide} label="Gauges of the GPUs"><table class="plain gauges ${isOld ? "old" : ""}">
    <thead><tr><th>#</th><th class="n">Temp.</th><th class="n">Power</th><th class="n">Use</th><th class="n">Memory</th><th class="n">MHz</th><th class="n">ECC</th><th>Throttled by</th></tr></thead>
    <tbody>${gpus.map((gpu) => html`<tr key=${gpu.uuid} class=${gpu.lost || suspects.has(gpu.uuid) ? "suspect" : ""}>
      <td>${gpu.index}${gpu.lost ? " lost" : ""}</td>
      <td class="n" title="Memory: ${measured(gpu.memoryTemperature, " °C")}">${measured(gpu.temperature, " °C")}</td>
      <td class="n" title="Limit: ${measured(gpu.powerLimit, " W")}">${measured(gpu.power, " W")}</td>
      <td class="n">${gpu.use === null ? "–" : measured(100 * gpu.use, " %")}</td>
      <td class="n" title="In use, of ${bytes(gpu.memoryBytes)}">${gpu.memoryUsed === null ? "–" : bytes(gpu.memoryUsed)}</td>
      <td class="n" title="Memory: ${measured(gpu.memoryClock, " MHz")}">${measured(gpu.clock, "")}</td>
      <td class="n" title="${number(gpu.corrected)} corrected, ${number(gpu.uncorrected)} uncorrected errors since the driver was loaded">${number(gpu.uncorrected)}${gpu.corrected ? html` <small>+ ${number(gpu.corrected)}</small>` : ""}</td>
      <td class="reasons"><${Reasons} names=${gpu.throttledBy} /></td></tr>`)}</tbody></table><//>
    <p class="dim">Measured <time>${clock(receivedAt)}</time>${isOld ? ": the agent has sent nothing newer." : "."}</p>`;
}

function NodePanel({ name, onClose }) {
  const ask = async () => {
    const [node, gauges, events, findings, remediations, policy] = await Promise.all([
      api.node(name),
      api.gauges(name),
      api.events({ node: name, newest: true, limit: 40 }),
      api.findings(name),
      api.remediations(name),
      api.policy(),
    ]);
    return { node, gauges, events: [...events].reverse(), past: findings.filter((one) => one.clearedAt), remediations, policy };
  };
  const { value, error, refresh } = usePolled(ask, 20, [name], (event) => event.node === name);
  const heading = useRef(null);
  useEffect(() => heading.current?.focus(), [name]);
  const node = value?.node;
  const suspects = new Set((node?.findingList || []).map((one) => one.subject));
  return html`<aside class="panel" aria-label="Node ${name}">
    <header class="panel-head">
      <h2 tabindex="-1" ref=${heading}>${name}</h2>
      ${node && html`<${NodeState} state=${node.state} />`}
      <button class="close" aria-label="Close" onClick=${onClose}>✕</button>
    </header>
    <${Problem} error=${error} />
    ${!node ? !error && html`<${Skeleton} height="300" />` : html`
      <p class="reason">${node.reason || "No reason is recorded."}</p>
      ${node.holdReason && html`<p class="reason warn">Held: ${node.holdReason}</p>`}
      ${node.deferredBy && html`<p class="reason warn">Its eviction is deferred: ${node.deferredBy}</p>`}
      ${node.cordonedBy && html`<p class="reason warn">Kept out by ${node.cordonedBy}.</p>`}
      ${node.planned.map((one) => html`<p key=${one.startsAt} class="reason">Maintenance from ${clock(one.startsAt)} to ${clock(one.until)}: ${one.sentence}</p>`)}
      ${node.drifts.map((one) => html`<p key=${one} class="reason">Information: ${one}</p>`)}
      <${Orders} node=${node} onDone=${refresh} />
      <${Facts} rows=${[
        ["In this state for", seconds(Math.max(0, Date.now() / 1000 - node.since))],
        ["Last seen", node.connected ? "connected" : node.lastSeenAt ? ago(node.lastSeenAt) : "never"],
        ["Job", node.job ? html`<${JobLink} name=${node.job} />` : "none"],
        ["Rack, switch", [node.domain.rack, node.domain.switch].filter(Boolean).join(", ") || "not told"],
        ["Agent, driver", [node.agentVersion, node.driver].filter(Boolean).join(", ") || "–"],
        ["Evictions, score", `${node.evictions}, ${node.offenceScore.toFixed(2)}`],
        node.host.product && ["Machine", [node.host.vendor, node.host.product, node.host.serial].filter(Boolean).join(" ")],
        Object.keys(node.labels).length > 0 && ["Labels", Object.entries(node.labels).map(([key, label]) => `${key}=${label}`).join(", ")],
      ]} />
      <h3>Findings <small>${node.findingList.length || "none"}</small></h3>
      ${node.findingList.map((one, index) => html`<${Finding} key=${index} one=${one} />`)}
      <h3>GPUs <small>${node.gpuList.length || "none"}</small></h3>
      ${node.gpuList.length > 0 && html`<${Wide} label="GPUs"><table class="plain"><thead><tr><th>#</th><th>Model</th><th class="n">Memory</th><th>Bus</th><th>Serial</th></tr></thead>
        <tbody>${node.gpuList.map((gpu) => html`<tr key=${gpu.uuid} class=${suspects.has(gpu.uuid) ? "suspect" : ""} title=${gpu.uuid}>
          <td>${gpu.index}${suspects.has(gpu.uuid) ? " !" : ""}</td><td>${gpu.name}</td><td class="n">${bytes(gpu.memoryBytes)}</td><td><code>${gpu.bus}</code></td><td>${gpu.serial || "–"}</td></tr>`)}</tbody></table><//>`}
      <${Gauges} gauges=${value.gauges} suspects=${suspects} />
      <h3>Verdicts <small>${node.verdicts.length || "none"}</small></h3>
      ${node.verdicts.map((one, index) => html`<${Verdict} key=${one.id} one=${one} open=${index === 0} />`)}
      <h3>Remediation</h3>
      <${Ladder} node=${node} policy=${value.policy} />
      ${value.remediations.length > 0 && html`<table class="plain"><tbody>${value.remediations.map((one, index) => html`<tr key=${index}>
        <td><time>${clock(one.requestedAt)}</time></td><td>${one.kind.replace(/_/g, " ")}</td><td><${Chip} kind=${one.state === "failed" ? "bad" : one.state === "confirmed" ? "good" : "note"}>${one.state}<//></td><td>${one.sentence}</td></tr>`)}</tbody></table>`}
      ${value.past.length > 0 && html`<h3>Past findings</h3><table class="plain"><tbody>${value.past.slice(0, 10).map((one, index) => html`<tr key=${index}>
        <td><time>${clock(one.raisedAt)}</time></td><td class="n">${seconds(one.clearedAt - one.raisedAt)}</td><td>${one.message}</td></tr>`)}</tbody></table>`}
      <h3>History</h3>
      <${EventRows} events=${value.events} />
    `}
  </aside>`;
}

// ---- the view

const GROUPINGS = {
  rack: (one) => one.domain.rack,
  switch: (one) => one.domain.switch,
  job: (one) => one.job,
};

const describe = (one) =>
  `${stateOf(one.state).label}${one.connected ? "" : ", not connected"}${one.domain.rack ? `, rack ${one.domain.rack}` : ""}` +
  `${one.job ? `, job ${one.job}` : ""}${one.findings ? `, ${plural(one.findings, "finding")}` : ""}`;

export function Fleet({ selected }) {
  const fleet = useFleet();
  const [grouping, setGrouping] = useState(fleet.grouping);
  const [text, setText] = useState("");
  const [only, setOnly] = useState("");
  const [resetting, setResetting] = useState(false);
  fleet.grouping = grouping;
  const open = useCallback((name) => (location.hash = link("fleet", name)), []);
  const close = useCallback(() => (location.hash = link("fleet")), []);
  useEffect(() => {
    const escape = (event) => event.key === "Escape" && selected && !document.querySelector("dialog[open]") && close();
    addEventListener("keydown", escape);
    return () => removeEventListener("keydown", escape);
  }, [selected]);
  const wanted = text.trim().toLowerCase();
  const nodes = useMemo(() => {
    const matches = (one) =>
      (!only || one.state === only) &&
      (!wanted || [one.name, one.domain.rack, one.domain.switch, one.job, one.gpuModel, one.driver, ...Object.values(one.labels)].some((word) => word.toLowerCase().includes(wanted)));
    return [...fleet.nodes.values()].filter(matches);
  }, [fleet.changes, wanted, only]);
  const counts = countsOf();
  const troubled = useMemo(
    () => nodes.filter((one) => one.state !== "healthy").sort((a, b) => stateOf(a.state).rank - stateOf(b.state).rank || b.since - a.since),
    [nodes]
  );
  if (!fleet.status) return html`<div class="fleet"><h1 class="spoken">Fleet</h1><${Skeleton} height="84" /><${Skeleton} height="480" /></div>`;
  const jobs = fleet.status.jobs;
  return html`<div class="fleet ${selected ? "with-panel" : ""}">
    <div class="fleet-main">
      <h1 class="spoken">Fleet</h1>
      <${Sentence} fleet=${fleet} onBreaker=${() => setResetting(true)} />
      <div class="toolbar">
        <div class="segments" role="group" aria-label="Group nodes by">
          ${Object.keys(GROUPINGS).map((name) => html`<button key=${name} aria-pressed=${grouping === name} onClick=${() => setGrouping(name)}>${name}</button>`)}
        </div>
        <input type="search" placeholder="Node, rack, job, label …" aria-label="Filter nodes" value=${text} onInput=${(event) => setText(event.target.value)} />
        <div class="legend" role="group" aria-label="Show one state only">
          ${Object.keys(NODE_STATES).filter((state) => counts.get(state) || state === only).map((state) => html`<button key=${state} aria-pressed=${only === state} onClick=${() => setOnly(only === state ? "" : state)}>
            <${StateMark} state=${state} />${stateOf(state).label} <b>${number(counts.get(state) || 0)}</b></button>`)}
        </div>
      </div>
      <div class="fleet-body">
        <${Grid} nodes=${nodes} changes=${fleet.changes} groupOf=${GROUPINGS[grouping]} selected=${selected} onOpen=${open} describe=${describe} />
        <div class="side">${fleet.loaded && html`
          <h2>Out of the ordinary <small>${number(troubled.length)}</small></h2>
          <ul class="troubled">${troubled.slice(0, 60).map((one) => html`<li key=${one.name}><a href=${link("fleet", one.name)}>
            <${StateMark} state=${one.state} /><span><b>${one.name}</b> <small>${ago(one.since)}</small><br />${one.reason}</span></a></li>`)}
            ${!troubled.length && html`<li class="dim">Every node shown is healthy.</li>`}
          </ul>
          <h2>Jobs <small>${number(jobs.length)}</small></h2>
          <ul class="joblist">${jobs.map((job) => html`<li key=${job.name}><a href=${link("job", job.name)}><b>${job.name}</b> <${JobState} state=${job.state} />
            <span class="dim">step ${number(job.step)}, ${plural(job.ranks, "rank")}, committed ${version(job.committed)}</span></a></li>`)}
            ${!jobs.length && html`<li class="dim">No job runs.</li>`}
          </ul>
          <h2>Latest events</h2>
          <div class="latest"><${EventRows} events=${fleet.events.slice(-12).reverse()} /></div>`}
        </div>
      </div>
    </div>
    ${selected && html`<${NodePanel} key=${selected} name=${selected} onClose=${close} />`}
    ${resetting && html`<${ReasonDialog} title="Reset the breaker" text="Automatic evictions are allowed again." verb="Reset" danger=${true}
      onSubmit=${api.resetBreaker} onClose=${() => setResetting(false)} />`}
  </div>`;
}
