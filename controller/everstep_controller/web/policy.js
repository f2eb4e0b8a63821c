// The policy: rules and settings in force, where each value came from, and what a change would have done.

import { html, useMemo, useState } from "./vendor/htm-preact.js";
import * as api from "./api.js";
import { Chip, clock, Figure, link, number, plural, Problem, Section, seconds, Skeleton, Verdict, Wide } from "./parts.js";
import { usePolled } from "./store.js";

const SHIPPED = "Everstep's default";
const MODES = { enforce: "bad", recommend: "warn", observe: "note" };

const text = (value) => (value === null || value === undefined ? "none" : typeof value === "string" ? value : JSON.stringify(value));

// ---- budget

const concerns = (event) => event.kind.startsWith("verdict") || event.kind.startsWith("fleet");

function Budget({ value }) {
  const fleet = value.scopes.find((one) => one.kind === "fleet");
  const used = value.scopes.filter((one) => one.used > 0 && one.kind !== "fleet").slice(0, 6);
  return html`<div>
    <div class="figures">
      ${fleet && html`<${Figure} name="Evictions left" value="${fleet.remaining} of ${fleet.limit}" note="in ${seconds(value.windowS)}, fleet" />`}
      ${used.map((one) => html`<${Figure} key=${one.kind + one.name} name="${one.kind} ${one.name}" value="${one.remaining} of ${one.limit}" note="${one.used} used" />`)}
      <${Figure} name="Deferred" value=${value.deferred.length} note="evictions that wait" kind=${value.deferred.length ? "bad" : ""} />
    </div>
    ${value.deferred.length > 0 && html`<ul>${value.deferred.slice(0, 20).map((one) => html`<li key=${one.node}><a href=${link("fleet", one.node)}>${one.node}</a>: ${one.finding}, deferred by ${one.deferred_by}</li>`)}</ul>`}
  </div>`;
}

// ---- a change

const RULE_KEYS = ["mode", "n_of_m", "window_s", "min_severity", "ladder", "clear_s", "coalesce_s", "step_memory_s", "required_passes", "correlated_nodes", "correlated_share", "correlated_s"];

function parse(value) {
  try {
    return JSON.parse(value);
  } catch {
    return value;
  }
}

// The change in the form of the API. A row is a setting, or a rule and one of its keys.
export function changeOf(rows, policy) {
  const knobs = {};
  const rules = new Map();
  for (const { target, key, value } of rows) {
    if (!target || value.trim() === "") continue;
    const rule = policy.rules.find((one) => one.id === target);
    if (!rule) knobs[target] = parse(value);
    else {
      const known = rules.get(target) || { kind: rule.kind, ...(rule.name && { name: rule.name }) };
      known[key || "mode"] = parse(value);
      rules.set(target, known);
    }
  }
  return { knobs, rules: [...rules.values()] };
}

function Row({ row, policy, onChange, onRemove }) {
  const rule = policy.rules.find((one) => one.id === row.target);
  const now = rule ? text(rule[row.key]) : row.target in policy.knobs ? text(policy.knobs[row.target]) : "";
  return html`<div class="change">
    <label>Setting or rule <input list="targets" value=${row.target} onInput=${(event) => onChange({ ...row, target: event.target.value })} /></label>
    <label>Key of the rule <select disabled=${!rule} value=${row.key} onChange=${(event) => onChange({ ...row, key: event.target.value })}>${RULE_KEYS.map((key) => html`<option key=${key}>${key}</option>`)}</select></label>
    <label>New value${now && ` (now ${now.slice(0, 40)})`} <input value=${row.value} onInput=${(event) => onChange({ ...row, value: event.target.value })} /></label>
    <button type="button" aria-label="Remove this change" onClick=${onRemove}>✕</button>
  </div>`;
}

const EMPTY = { target: "", key: "mode", value: "" };

function Trial({ policy }) {
  const [rows, setRows] = useState([{ ...EMPTY }]);
  const [hours, setHours] = useState(168);
  const [state, setState] = useState({});
  const change = changeOf(rows, policy);
  const empty = !Object.keys(change.knobs).length && !change.rules.length;
  const run = (what) => async () => {
    setState({ busy: what });
    try {
      setState({ [what]: what === "check" ? await api.checkPolicy(change) : await api.tryPolicy(change, hours) });
    } catch (error) {
      setState({ error });
    }
  };
  const { check, trial } = state;
  return html`<div>
    <p class="dim">Nothing here changes the policy: it is changed in the controller's settings and policy files.</p>
    <datalist id="targets">${[...policy.rules.map((one) => one.id), ...Object.keys(policy.knobs)].map((name) => html`<option key=${name} value=${name} />`)}</datalist>
    <form class="changes" onSubmit=${(event) => (event.preventDefault(), !empty && run("check")())}>
      ${rows.map((row, index) => html`<${Row} key=${index} row=${row} policy=${policy}
        onChange=${(one) => setRows(rows.map((other, at) => (at === index ? one : other)))}
        onRemove=${() => setRows(rows.length > 1 ? rows.filter((_, at) => at !== index) : [{ ...EMPTY }])} />`)}
      <div class="inline-fields">
        <button type="button" onClick=${() => setRows([...rows, { ...EMPTY }])}>Another change</button>
        <button disabled=${empty || state.busy}>Check</button>
        <button type="button" class="primary" disabled=${empty || state.busy} onClick=${run("trial")}>${state.busy === "trial" ? "Deciding the past again …" : "Try on the recorded week"}</button>
        <label>Hours <input type="number" min="1" max="744" value=${hours} onInput=${(event) => setHours(Number(event.target.value) || 168)} /></label>
      </div>
    </form>
    <div class="answers" aria-live="polite">
      ${!check && !trial && !state.error && html`<p class="dim">${state.busy ? "…" : "The answer appears here."}</p>`}
      <${Problem} error=${state.error} />
      ${check && html`<div class="answer-box">${check.ok ? html`<${Chip} kind="good">valid<//> ${Object.keys(check.changes || {}).length ? "It changes:" : "It changes nothing."}` : html`<${Chip} kind="bad">refused<//> ${check.error}`}
        <ul>${Object.entries(check.changes || {}).map(([name, how]) => html`<li key=${name}><code>${name}</code>: ${how}</li>`)}</ul></div>`}
      ${trial && html`<div class="answer-box"><p><b>${trial.sentence}.</b></p>
        <p class="dim">${plural(trial.events, "event")} since ${clock(trial.since)}; ${plural(trial.evictions, "eviction")} under the change.
          ${trial.gaps.length ? ` ${plural(trial.gaps.length, "gap")} without a record.` : " The record has no gap."}</p>
        ${trial.added.length > 0 && html`<h3>Would have been evicted</h3>${trial.added.map((one, index) => html`<${Verdict} key=${index} one=${one} />`)}`}
        ${trial.avoided.length > 0 && html`<h3>Would not have been evicted</h3><ul>${trial.avoided.map((one) => html`<li key=${one}>${one}</li>`)}</ul>`}</div>`}
    </div>
  </div>`;
}

// ---- the view

export function Policy() {
  const { value: policy, error } = usePolled(api.policy, 120, ["policy"]);
  const { value: budget } = usePolled(api.budget, 30, ["budget"], concerns);
  const [words, setWords] = useState("");
  const [own, setOwn] = useState(false);
  const wanted = words.trim().toLowerCase();
  const shown = useMemo(() => {
    if (!policy) return null;
    const matches = (...parts) => !wanted || parts.some((part) => text(part).toLowerCase().includes(wanted));
    return {
      rules: policy.rules.filter((one) => (!own || policy.origins[one.id]) && matches(one.id, one.source, one.mode, one.ladder, one.xids)),
      knobs: Object.entries(policy.knobs).filter(([name, value]) => (!own || policy.origins[name]) && matches(name, value, policy.origins[name] || SHIPPED)),
    };
  }, [policy, wanted, own]);
  return html`<div class="page">
    <div class="page-head"><h1>Policy</h1><input type="search" placeholder="Rule, setting, source …" aria-label="Filter the policy" value=${words} onInput=${(event) => setWords(event.target.value)} />
      <label class="check"><input type="checkbox" checked=${own} onChange=${(event) => setOwn(event.target.checked)} /> only what differs from Everstep's defaults</label></div>
    <p class="lead">The rules that turn findings into verdicts, and the settings of every decision, as they are in force now.</p>
    <${Problem} error=${error} />
    ${!policy || !budget ? !error && html`<${Skeleton} height="400" />` : html`
      <${Section} id="budget" title="Budget of evictions"><${Budget} value=${budget} /><//>
      <${Section} id="try" title="Try a change" note="decided again on what this controller recorded"><${Trial} policy=${policy} /><//>
      <${Section} id="rules" title="Rules" note=${number(shown.rules.length)}><${Wide} label="Rules"><table class="plain policy-table">
        <thead><tr><th>Rule</th><th>Mode</th><th>Counts</th><th>Ladder</th><th>Where its numbers come from</th></tr></thead>
        <tbody>${shown.rules.map((one) => html`<tr key=${one.id} class=${policy.origins[one.id] ? "changed" : ""}>
          <td><code>${one.id}</code>${one.xids && html`<br /><small class="dim">XID ${one.xids.join(", ")}</small>`}</td>
          <td><${Chip} kind=${MODES[one.mode || "enforce"]}>${one.mode || "enforce"}<//></td>
          <td>${one.n_of_m ? `${one.n_of_m[0]} of ${one.n_of_m[1]}${one.window_s ? ` in ${seconds(one.window_s)}` : ""}` : "each"}</td>
          <td>${(one.ladder || ["drain", "repair"]).map((step) => step.replace(/_/g, " ")).join(" → ")}</td>
          <td>${one.source}${policy.origins[one.id] && html`<br /><b>Changed by ${policy.origins[one.id]}</b>`}</td></tr>`)}</tbody></table><//><//>
      <${Section} id="knobs" title="Settings of decisions" note=${number(shown.knobs.length)}><${Wide} label="Settings of decisions"><table class="plain policy-table">
        <thead><tr><th>Setting</th><th class="n">Value</th><th>Where it comes from</th></tr></thead>
        <tbody>${shown.knobs.map(([name, value]) => html`<tr key=${name} class=${policy.origins[name] ? "changed" : ""}><td><code>${name}</code></td><td class="n">${text(value)}</td><td>${policy.origins[name] || html`<span class="dim">${SHIPPED}</span>`}</td></tr>`)}</tbody></table><//><//>`}
  </div>`;
}
