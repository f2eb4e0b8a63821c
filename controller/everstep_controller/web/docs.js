// The interactive API page: every route of /openapi.json, with a form to try it and the same request for curl.

import { html, render, useEffect, useMemo, useState } from "./vendor/htm-preact.js";
import * as api from "./api.js";
import { Chip, Problem, Wide } from "./parts.js";

const SHOWN_CHARACTERS = 200_000; // of an answer: a browser lays out more only slowly

// ---- schemas

const refOf = (schema) => schema?.$ref?.split("/").pop();

function typeOf(schema = {}) {
  const name = refOf(schema);
  if (name) return name;
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  const choices = schema.anyOf || schema.oneOf;
  if (choices) return choices.map(typeOf).join(" | ");
  if (schema.type === "array") return `${typeOf(schema.items)}[]`;
  if (schema.type === "object" && schema.additionalProperties?.constructor === Object) {
    return `{name: ${typeOf(schema.additionalProperties)}}`;
  }
  return schema.type || "any";
}

// A body with the fields that a schema requires, as a start for the person who edits it.
function sampleOf(schema, schemas, depth = 0) {
  const name = refOf(schema);
  if (name) return depth > 4 ? {} : sampleOf(schemas[name], schemas, depth + 1);
  const choices = schema.anyOf || schema.oneOf;
  if (choices) return sampleOf(choices[0], schemas, depth + 1);
  if (schema.enum) return schema.enum[0];
  if (schema.type === "object") {
    const properties = Object.entries(schema.properties || {});
    const needed = properties.filter(([field]) => schema.required?.includes(field));
    return Object.fromEntries(needed.map(([field, one]) => [field, sampleOf(one, schemas, depth + 1)]));
  }
  if (schema.type === "array") return schema.minItems ? [sampleOf(schema.items, schemas, depth + 1)] : [];
  return { string: "", integer: schema.minimum ?? 0, number: 0, boolean: false }[schema.type] ?? null;
}

const docOf = (text = "") => text.replaceAll("``", "").split("\n\n")[0];

function Schema({ name, schemas }) {
  const schema = schemas[name];
  const fields = Object.entries(schema?.properties || {});
  return html`<details class="schema">
    <summary><code>${name}</code> <span class="dim">${docOf(schema?.description)}</span></summary>
    <${Wide} label="Fields of ${name}"><table class="plain">${fields.map(
      ([field, one]) => html`<tr key=${field}>
        <td><code>${field}</code>${schema.required?.includes(field) ? " *" : ""}</td>
        <td>${typeOf(one)}</td>
        <td>${one.default !== undefined && html`<span class="dim">default</span> ${JSON.stringify(one.default)}`}</td>
      </tr>`
    )}</table><//>
  </details>`;
}

// The messages that a schema is made of, itself first, each once.
function namesIn(schema, schemas, found = new Set()) {
  if (Array.isArray(schema)) schema.forEach((one) => namesIn(one, schemas, found));
  else if (schema && typeof schema === "object") {
    const name = refOf(schema);
    if (name && !found.has(name)) {
      found.add(name);
      namesIn(schemas[name], schemas, found);
    } else if (!name) Object.values(schema).forEach((one) => namesIn(one, schemas, found));
  }
  return found;
}

// ---- one route

const quoteForShell = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

function requestOf(operation, values, body) {
  let path = operation.path;
  const query = new URLSearchParams();
  const headers = {};
  for (const one of operation.parameters) {
    const value = (values[one.name] || "").trim();
    if (one.in === "path") path = path.replace(`{${one.name}}`, encodeURIComponent(value));
    else if (value && one.in === "query") query.set(one.name, value);
    else if (value) headers[one.name] = value;
  }
  const search = query.toString();
  return { method: operation.method, path: path + (search ? `?${search}` : ""), headers, body };
}

function curlOf({ method, path, headers, body }) {
  const words = ["curl", "-H", '"Authorization: Bearer $(cat TOKEN_FILE)"'];
  for (const [name, value] of Object.entries(headers)) words.push("-H", quoteForShell(`${name}: ${value}`));
  if (method === "POST") words.push("--json", quoteForShell(body));
  return [...words, quoteForShell(location.origin + path)].join(" ");
}

function Operation({ operation, schemas }) {
  const [open, setOpen] = useState(location.hash === `#${operation.operationId}`);
  return html`<details class="operation" id=${operation.operationId} open=${open} onToggle=${(event) => setOpen(event.target.open)}>
    <summary>
      <${Chip} kind=${operation.method === "GET" ? "note" : "warn"}>${operation.method}<//>
      <code>${operation.path}</code> <span class="dim">${operation.summary}</span>
    </summary>
    ${open && html`<${Form} operation=${operation} schemas=${schemas} />`}
  </details>`;
}

function Form({ operation, schemas }) {
  const wanted = operation.requestBody?.content["application/json"].schema;
  const answered = operation.responses[200].content;
  const [media, answer] = Object.entries(answered)[0];
  const [values, setValues] = useState({});
  const [body, setBody] = useState(() => (wanted ? JSON.stringify(sampleOf(wanted, schemas), null, 2) : ""));
  const [said, setSaid] = useState(null);
  const request = requestOf(operation, values, body);
  const send = async (event) => {
    event.preventDefault();
    setSaid({ waiting: true });
    try {
      setSaid(await api.raw(request));
    } catch (error) {
      setSaid({ error });
    }
  };
  return html`<form onSubmit=${send}>
    <p>${operation.description}</p>
    ${operation.parameters.length > 0 && html`<div class="inline-fields">${operation.parameters.map(
      (one) => html`<label key=${one.name}>${one.name}${one.required ? " *" : ""}
        <input
          required=${one.required}
          title=${`${one.in}: ${typeOf(one.schema)} ${one.schema.pattern || ""}`}
          value=${values[one.name] || ""}
          onInput=${(event) => setValues({ ...values, [one.name]: event.target.value })}
        /></label>`
    )}</div>`}
    ${wanted && html`<label>Body: ${typeOf(wanted)}
      <textarea spellcheck="false" rows=${Math.min(body.split("\n").length + 1, 16)} value=${body} onInput=${(event) => setBody(event.target.value)}></textarea></label>`}
    ${[...namesIn([wanted, answer.schema], schemas)].map((name) => html`<${Schema} key=${name} name=${name} schemas=${schemas} />`)}
    <p class="dim">Answer: ${refOf(answer.schema) || media}. Refusals: ${Object.keys(operation.responses).filter((status) => status >= 400).join(", ") || "none"}.</p>
    <pre class="stacks" tabindex="0">${curlOf(request)}</pre>
    ${media === "text/event-stream"
      ? html`<p class="dim">A stream does not end: read it with curl.</p>`
      : html`<div class="actions"><button class="primary" disabled=${said?.waiting}>Send</button></div>`}
    <${Problem} error=${said?.error} />
    ${said?.status && html`<p class="answer-status"><${Chip} kind=${said.status < 400 ? "good" : "bad"}>${said.status}<//> <span class="dim">${said.media}</span></p>
      <pre class="stacks" tabindex="0">${said.text.slice(0, SHOWN_CHARACTERS)}${said.text.length > SHOWN_CHARACTERS ? "\n..." : ""}</pre>`}
  </form>`;
}

// ---- page

const METHODS = ["get", "post"];

function Page() {
  const [document, setDocument] = useState(null);
  const [error, setError] = useState(null);
  const [filter, setFilter] = useState("");
  const [token, setToken] = useState("");
  const [known, setKnown] = useState(api.hasToken());
  useEffect(() => {
    api.description().then(setDocument, setError);
  }, []);
  const operations = useMemo(() => {
    const paths = Object.entries(document?.paths || {});
    return paths.flatMap(([path, methods]) =>
      METHODS.filter((method) => methods[method]).map((method) => ({ ...methods[method], path, method: method.toUpperCase() }))
    );
  }, [document]);
  const words = filter.toLowerCase().split(/\s+/);
  const shown = operations.filter((one) => {
    const text = `${one.method} ${one.path} ${one.summary} ${one.operationId}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const enter = (event) => {
    event.preventDefault();
    api.setToken(token);
    setToken("");
    setKnown(api.hasToken());
  };
  return html`<main class="page api">
    <div class="page-head"><h1>${document?.info.title || "API"}</h1> <span class="dim">${document?.info.version}</span>
      <span class="actions"><a href="/">Fleet</a> <a href="/openapi.json">openapi.json</a></span></div>
    <p class="lead">Every route of the controller, with a form that sends real requests under your token. Orders take effect at once.</p>
    <form class="inline-fields" onSubmit=${enter}>
      <label>Token <input type="password" autocomplete="off" value=${token} placeholder=${known ? "kept in this tab" : "none"} onInput=${(event) => setToken(event.target.value)} /></label>
      <button disabled=${!token.trim() && !known}>${token.trim() || !known ? "Use" : "Forget"}</button>
      <label>Filter <input type="search" value=${filter} onInput=${(event) => setFilter(event.target.value)} /></label>
    </form>
    <${Problem} error=${error} />
    ${document && html`<div class="block">${shown.map((one) => html`<${Operation} key=${one.operationId} operation=${one} schemas=${document.components.schemas} />`)}</div>`}
    ${document && shown.length === 0 && html`<p class="dim">No route matches.</p>`}
  </main>`;
}

render(html`<${Page} />`, globalThis.document.getElementById("app"));
