// The card that an incident begins with: who, why, what was done, and what to do now. What to do comes from the
// controller's list of what needs a person and from findings that stand, never from this page.

import { html } from "./vendor/htm-preact.js";
import { classOf, clock, JobLink, link, NodeLink, plural, seconds, stateOf } from "./parts.js";

const MOST = 4; // entries of each list
const MOST_DONE = 5;
const FLEETWIDE = /^(fleet|database)/;

const wordsOf = (name) => name.replace(/_/g, " ");

// ---- who

const gpuOf = (node, subject) => {
  const gpu = node?.gpuList.find((one) => [one.uuid, one.bus, String(one.index)].includes(subject));
  return gpu ? `GPU ${gpu.index}` : subject;
};

// The ranks and parts of a node that the incident is about, as far as its signals and verdicts name them.
function placesOn(name, { rows, nodes }) {
  const ranks = rows.filter((one) => one.node === name && classOf(one.kind) === "signal" && one.detail.rank);
  const judged = rows.filter((one) => one.verdict?.node === name).flatMap((one) => one.verdict.evidence);
  const parts = judged.map((one) => one.subject).filter((subject) => subject && subject !== name);
  return [...new Set([...ranks.map((one) => `rank ${one.detail.rank}`), ...parts.map((one) => gpuOf(nodes.get(name), one))])];
}

function Who({ model }) {
  const { nodeNames, jobNames, rows } = model;
  const people = [...new Set(rows.filter((one) => classOf(one.kind) === "person").map((one) => one.detail.actor).filter(Boolean))];
  const entries = nodeNames.slice(0, MOST).map((name) => {
    const places = placesOn(name, model).slice(0, MOST);
    return html`<${NodeLink} name=${name} />${places.length > 0 && ` (${places.join(", ")})`}`;
  });
  if (nodeNames.length > MOST) entries.push(plural(nodeNames.length - MOST, "more node"));
  for (const name of jobNames.slice(0, MOST)) entries.push(html`job <${JobLink} name=${name} />`);
  for (const name of people) entries.push(`ordered by ${name}`);
  if (!entries.length) return "the fleet as a whole";
  return entries.map((one, index) => html`${index ? ", " : ""}${one}`);
}

// ---- why, and what was done

function Why({ model }) {
  const evidence = model.rows.find((one) => one.verdict?.evidence.length)?.verdict.evidence[0];
  return html`${model.rows[0].sentence}${evidence?.rule && html` <span class="dim">(rule <code>${evidence.rule}</code>)</span>`}`;
}

const DOINGS = ["decision", "person", "action", "job"];
const ENDED = /(_cleared|\.cleared|_ended)$/; // signals that are over by themselves

function Done({ model }) {
  const done = model.rows.filter((one) => DOINGS.includes(classOf(one.kind)) || ENDED.test(one.kind));
  if (!done.length) return "Nothing so far: no rule and no person has acted on it.";
  const left = done.length - MOST_DONE;
  const shown = left > 0 ? [...done.slice(0, 2), null, ...done.slice(-3)] : done;
  return html`<ul>${shown.map((one) =>
    one ? html`<li key=${one.id}><time>+${seconds(one.seen - model.start)}</time> ${one.sentence}</li>` : html`<li key="rest" class="dim">and ${plural(left, "more step")}, which the trace below has</li>`
  )}</ul>`;
}

// ---- what to do

const signatureOf = (one) => (one.xid === null ? one.kind : `${one.kind}/${one.xid}`);

// Needs of the incident's nodes and jobs, and those of the whole fleet that it is part of.
export function needsOf({ needs }, { nodeNames, jobNames, rows }) {
  const signatures = rows.flatMap((one) => one.verdict?.evidence || []).map(signatureOf);
  const isFleetwide = rows.some((one) => FLEETWIDE.test(one.kind));
  return needs.filter((need) =>
    need.node || need.job
      ? nodeNames.includes(need.node) || jobNames.includes(need.job)
      : isFleetwide || signatures.includes(need.finding)
  );
}

const recommendedIn = (model, trace) =>
  [...model.nodes.values()].flatMap((node) =>
    node.findingList.filter((one) => one.trace === trace && one.mode === "recommend" && one.action !== "none").map((one) => ({ node, one }))
  );

const adviceOn = (need, { nodes }) =>
  nodes.get(need.node)?.findingList.find((one) => signatureOf(one) === need.finding && one.evidence.advice)?.evidence.advice;

const Need = ({ need, model }) => {
  const advice = adviceOn(need, model);
  return html`<li class=${need.critical ? "bad" : "warn"}><small>Since <time>${clock(need.since)}</time>: ${need.reason}</small>
    <br /><b>${need.advice}</b>${need.command && html` <code>${need.command}</code>`}
    ${advice && html`<br />The source of the finding advises: ${wordsOf(advice)}.`}</li>`;
};

// How nodes and jobs are now that are not as they should be.
function statesOf({ nodes, jobs }) {
  const out = [...nodes.values()].filter((one) => one.storedState !== "healthy");
  const stuck = jobs.filter((one) => one.stall || !["running", "finished", "stopped"].includes(one.state));
  return [
    ...out.map((one) => html`<${NodeLink} name=${one.name} /> is ${stateOf(one.storedState).label}: ${one.reason}`),
    ...stuck.map((one) => html`Job <${JobLink} name=${one.name} /> is ${one.state}: ${one.stall || one.reason}`),
  ];
}

function conclusionOf({ status, jobs }, needs, recommended) {
  if (!status) return "The controller does not report now what needs a person.";
  if (status.needCount > status.needs.length) return html`The controller lists ${status.needs.length} of ${plural(status.needCount, "matter")} that need a person: look at <a href=${link("fleet")}>the fleet</a> too.`;
  if (needs.length || jobs.some((one) => one.state === "failed")) return "";
  return recommended.length ? "Nothing is urgent: no other person is needed." : "Nothing: no person is needed.";
}

function ToDo({ model, trace }) {
  const needs = model.status ? needsOf(model.status, model) : [];
  const recommended = recommendedIn(model, trace);
  const conclusion = conclusionOf(model, needs, recommended);
  const named = new Set(needs.flatMap((one) => [one.node, one.job]));
  const left = { nodes: new Map([...model.nodes].filter(([name]) => !named.has(name))), jobs: model.jobs.filter((one) => !named.has(one.name)) };
  return html`<ul class="todo">
      ${needs.slice(0, MOST).map((need) => html`<${Need} key=${`${need.kind} ${need.subject}`} need=${need} model=${model} />`)}
      ${needs.length > MOST && html`<li><a href=${link("fleet")}>${plural(needs.length - MOST, "more matter")}</a></li>`}
      ${recommended.slice(0, MOST).map(({ node, one }, index) => html`<li key=${index} class="warn"><small>${one.message}. Rule <code>${one.rule}</code> only recommends.</small>
        <br /><b>Recommended: ${wordsOf(one.action)} <${NodeLink} name=${node.name} />.</b></li>`)}
      ${conclusion && html`<li class=${conclusion.startsWith?.("Nothing: ") ? "good" : ""}><b>${conclusion}</b></li>`}
      ${statesOf(left).slice(0, MOST).map((one, index) => html`<li key=${`state ${index}`}>${one}</li>`)}
    </ul>
    <small class="dim">As the controller reported at <time>${clock(model.askedAt)}</time>.</small>`;
}

// model: rows and start of the incident, its nodeNames and jobNames, and what the controller reports of them now: status
// (null: it did not answer), nodes by name, jobs, askedAt.
export function IncidentCard({ model, trace }) {
  const needs = model.status ? needsOf(model.status, model) : [];
  const isBad = needs.some((one) => one.critical) || model.jobs.some((one) => one.state === "failed");
  const isOpen = needs.length > 0 || recommendedIn(model, trace).length > 0 || !model.status;
  const level = isBad ? "bad" : isOpen ? "warn" : "good";
  return html`<section class="sentence card level-${level}" aria-label="In short"><dl>
    <div><dt>Who</dt><dd><${Who} model=${model} /></dd></div>
    <div><dt>Why</dt><dd><${Why} model=${model} /></dd></div>
    <div><dt>What was done</dt><dd><${Done} model=${model} /></dd></div>
    <div><dt>What to do</dt><dd><${ToDo} model=${model} trace=${trace} /></dd></div>
  </dl></section>`;
}
