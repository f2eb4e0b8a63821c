// Entry point: the token, the address bar, and the frame around the views.

import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import * as api from "./api.js";
import { Fleet } from "./fleet.js";
import { Incident, Incidents } from "./incident.js";
import { Job, Jobs } from "./job.js";
import { Policy } from "./policy.js";
import { Chip, link, Problem } from "./parts.js";
import { start, stop, useFleet } from "./store.js";

const VIEW_KEY = "everstep.view"; // the view from which a person left for a login

// A link may carry a token in its fragment, which browsers do not send. It leaves the address bar and the history, and
// the address of the link's view takes its place. Returns the token, or "".
function takeToken() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  const token = fragment.get("token");
  if (!token) return "";
  const to = fragment.get("to") || sessionStorage.getItem(VIEW_KEY) || "/fleet";
  sessionStorage.removeItem(VIEW_KEY);
  history.replaceState(null, "", `${location.pathname}#${to.startsWith("/") ? to : "/fleet"}`);
  return token;
}

function route() {
  const [view = "", ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(decode);
  return { view: view || "fleet", name: rest.join("/") };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

const TABS = [
  ["fleet", "Fleet"],
  ["job", "Jobs"],
  ["incident", "Incidents"],
  ["policy", "Policy"],
];

const VIEWS = {
  fleet: (name) => html`<${Fleet} selected=${name} />`,
  job: (name) => (name ? html`<${Job} key=${name} name=${name} />` : html`<${Jobs} />`),
  incident: (name) => (name ? html`<${Incident} key=${name} trace=${name} />` : html`<${Incidents} />`),
  policy: () => html`<${Policy} />`,
};

function Login({ error, onToken }) {
  const [text, setText] = useState("");
  const [options, setOptions] = useState(null); // null until they are known, so that nothing moves afterwards
  const input = useRef(null);
  useEffect(() => void api.loginOptions().then(setOptions, () => setOptions({ page: "" })), []);
  useEffect(() => input.current?.focus(), [options]);
  const leave = () => sessionStorage.setItem(VIEW_KEY, location.hash.slice(1) || "/fleet");
  const submit = (event) => {
    event.preventDefault();
    if (text.trim()) onToken(text);
  };
  if (options === null) return html`<main class="login"></main>`;
  return html`<main class="login">
    <form onSubmit=${submit}>
      <h1>Everstep</h1>
      ${options.page && html`<a class="button primary" href=${options.page} onClick=${leave}>Log in with ${new URL(options.issuer).host}</a>`}
      <p>${options.page ? "Or paste" : "Paste"} a viewer's or an operator's token. It stays in this tab and is forgotten when the tab closes.</p>
      <label>Token
        <input ref=${input} type="password" autocomplete="off" spellcheck="false" value=${text} onInput=${(event) => setText(event.target.value)} />
      </label>
      <${Problem} error=${error} />
      <button class="primary" disabled=${!text.trim()}>Open</button>
      <p class="dim">Make one with <code>everstep token issue</code> or <code>everstep-controller token --role viewer</code>.</p>
    </form>
  </main>`;
}

function App() {
  const fleet = useFleet();
  const [at, setAt] = useState(route());
  const [refusal, setRefusal] = useState(null); // of the token of a link that was pasted into this page
  // A token that is refused does not end the session that is open.
  const enter = async (token) => {
    if (fleet.identity && api.isToken(token)) return;
    if (fleet.identity) {
      try {
        await api.checkToken(token);
      } catch (error) {
        setRefusal(error);
        return;
      }
      stop();
    }
    api.setToken(token);
    start();
  };
  const leave = () => {
    api.setToken("");
    stop();
  };
  useEffect(() => {
    const listener = () => {
      const token = takeToken();
      setRefusal(null);
      setAt(route());
      if (token) enter(token);
    };
    addEventListener("hashchange", listener);
    if (api.hasToken()) start();
    return () => removeEventListener("hashchange", listener);
  }, []);
  useEffect(() => {
    const title = TABS.find(([view]) => view === at.view)?.[1] || "Everstep";
    document.title = `${at.name || title} · Everstep`;
  }, [at]);
  const refused = fleet.error && (fleet.error.status === 401 || fleet.error.status === 403);
  if (!api.hasToken() || (refused && !fleet.identity)) return html`<${Login} error=${api.hasToken() && fleet.error} onToken=${enter} />`;
  const view = VIEWS[at.view] ? at.view : "fleet";
  return html`<div class="frame view-${view}" key=${fleet.session}>
    <a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), document.getElementById("main").focus())}>To the content</a>
    <header class="top">
      <a class="brand" href="#/fleet"><svg viewBox="0 0 32 32" aria-hidden="true"><path d="M5 25h7v-7h7v-7h8" /></svg>Everstep</a>
      <nav aria-label="Views">${TABS.map(([name, label]) => html`<a key=${name} href=${link(name)} aria-current=${view === name ? "page" : undefined}>${label}</a>`)}</nav>
      <span class="who">
        ${fleet.identity && html`<span class="live ${fleet.live ? "on" : ""}" title=${fleet.live ? "Events arrive as they happen" : "Not connected"}>${fleet.live ? "live" : "waits"}</span>
          <span title=${`The token's name and role: ${fleet.identity.fullName}`}><b>${fleet.identity.name}</b> <${Chip} kind=${fleet.identity.mayOrder ? "note" : ""}>${fleet.identity.mayOrder ? "operator" : "read only"}<//></span>
          <button class="small" onClick=${leave}>Leave</button>`}
      </span>
    </header>
    ${refusal && html`<div class="floating"><${Problem} error=${refusal}> The page stays open with the token of ${fleet.identity?.name}.<//></div>`}
    ${fleet.error && !refusal && html`<div class="floating"><${Problem} error=${fleet.error} /></div>`}
    <main id="main" tabindex="-1">${VIEWS[view](at.name)}</main>
  </div>`;
}

const token = takeToken();
if (token) api.setToken(token);
render(html`<${App} />`, document.getElementById("app"));
