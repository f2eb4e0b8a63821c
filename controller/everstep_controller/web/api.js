// Access to the controller's REST API. This is the only module that knows its paths and field names: the others use
// the shapes that are made here, so a renamed field is one change.

const TOKEN_KEY = "everstep.token";
let token = sessionStorage.getItem(TOKEN_KEY) || "";
const tags = new Map(); // path -> {etag, value}: answers for conditional requests
const MOST_TAGS = 64;

class ApiError extends Error {
  constructor(status, code, message, retryAfterS) {
    super(message);
    Object.assign(this, { status, code, retryAfterS });
  }
}

export const hasToken = () => token !== "";
export const isToken = (text) => text.trim() === token;

export function setToken(text) {
  token = text.trim();
  if (token) sessionStorage.setItem(TOKEN_KEY, token);
  else sessionStorage.removeItem(TOKEN_KEY);
  tags.clear();
}

// Raises the controller's refusal of a token that is not in use yet.
export async function checkToken(text) {
  const response = await send("/v1/identity", { headers: authorization(text.trim()) });
  if (!response.ok) throw await errorOf(response);
}

// How people log in with accounts of the site's provider: the address at which that begins, or "".
export const loginOptions = () =>
  get("/v1/login/options", {}, (body) => ({
    page: body.page || "",
    issuer: body.issuer || "",
  }));

const headersOf = (more) => ({ ...(token && authorization(token)), ...more });

function authorization(text) {
  if (/[^\x21-\x7e]/.test(text)) {
    throw new ApiError(401, "unauthenticated", "The token has characters that no token has: copy it again.", 0);
  }
  return { Authorization: `Bearer ${text}` };
}

// Text comes from nodes, also from one that was taken over: characters that control a terminal into which it is copied,
// or that change the order in which it is read, are shown as U+FFFD.
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;
const ESCAPED_CONTROL = /\\u00[01]/;

function parse(text) {
  if (text.search(CONTROLS) < 0 && !ESCAPED_CONTROL.test(text)) return JSON.parse(text);
  return JSON.parse(text, (_name, value) => (typeof value === "string" ? value.replace(CONTROLS, "\ufffd") : value));
}

async function errorOf(response) {
  const retry = Number(response.headers.get("retry-after")) || 0;
  try {
    const body = parse(await response.text());
    return new ApiError(response.status, body.code, body.detail, retry);
  } catch {
    return new ApiError(response.status, "http", `The controller answered ${response.status}.`, retry);
  }
}

async function send(path, options) {
  try {
    return await fetch(path, { cache: "no-store", credentials: "omit", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "The controller does not answer.", 5);
  }
}

function query(parameters) {
  const given = Object.entries(parameters || {}).filter(([, value]) => value !== undefined && value !== "");
  return given.length ? `?${new URLSearchParams(given)}` : "";
}

async function get(path, parameters, shape = (body) => body) {
  const url = path + query(parameters);
  const known = tags.get(url);
  const response = await send(url, { headers: headersOf(known && { "If-None-Match": known.etag }) });
  if (response.status === 304 && known) return known.value;
  if (!response.ok) throw await errorOf(response);
  const etag = response.headers.get("etag") || "";
  const value = shape(parse(await response.text()), etag);
  if (etag) {
    tags.delete(url);
    tags.set(url, { etag, value });
    if (tags.size > MOST_TAGS) tags.delete(tags.keys().next().value);
  }
  return value;
}

async function post(path, body, etag) {
  const headers = headersOf({ "Content-Type": "application/json", ...(etag && { "If-Match": etag }) });
  const response = await send(path, { method: "POST", headers, body: JSON.stringify(body) });
  if (!response.ok) throw await errorOf(response);
  return parse(await response.text());
}

// ---- any route, as the interactive API page sends it

export const description = () => get("/openapi.json");

export async function raw({ method, path, headers, body }) {
  const json = method === "POST" && { "Content-Type": "application/json" };
  const response = await send(path, { method, headers: headersOf({ ...headers, ...json }), ...(json && { body }) });
  const media = response.headers.get("content-type") || "";
  const text = await response.text();
  return { status: response.status, media, text: media.includes("json") && text ? pretty(text) : text };
}

function pretty(text) {
  try {
    return JSON.stringify(parse(text), null, 2);
  } catch {
    return text;
  }
}

const encode = encodeURIComponent;

// ---- shapes

const versionOf = (pair) => (pair ? { generation: pair[0], step: pair[1] } : null);

const domainOf = (domain = {}) => ({
  rack: domain.rack || "",
  switch: domain.switch || "",
});

function nodeOf(one) {
  const outbreaks = one.outbreaks || [];
  return {
    name: one.node,
    sortKey: one.node.replace(/\d+/g, (digits) => digits.padStart(9, "0")), // node-2 comes before node-10
    state: outbreaks.length && SERVING.has(one.state) ? "outbreak" : one.is_faulty ? "faulty" : one.state,
    storedState: one.state,
    since: one.since,
    reason: one.reason || "",
    connected: one.connected || false,
    lastSeenAt: one.last_seen_at ?? null,
    job: one.job || "",
    gpuModel: one.gpu_model || "",
    findings: one.findings || 0,
    domain: domainOf(one.domain),
    labels: one.labels || {},
    holdReason: one.hold_reason || "",
    driver: one.driver_version || "",
    outbreaks,
  };
}
const SERVING = new Set(["healthy", "suspect"]);

const findingOf = (one) => ({
  kind: one.kind,
  subject: one.subject,
  severity: one.severity,
  message: one.message,
  action: one.action || "none",
  mode: one.mode || "enforce",
  rule: one.rule || "",
  source: one.source || "",
  value: one.value ?? null,
  threshold: one.threshold ?? null,
  xid: one.xid ?? null,
  since: one.since || 0,
  trace: one.trace || "",
  evidence: one.evidence || {},
});

const verdictOf = (one) => ({
  id: one.id,
  node: one.node,
  decision: one.decision,
  sentence: one.sentence,
  action: one.action,
  evidence: (one.evidence || []).map(findingOf),
  at: one.at,
  trace: one.trace || "",
});

const eventOf = (one) => ({
  id: one.id,
  at: one.at,
  kind: one.kind,
  sentence: one.sentence,
  node: one.node || "",
  job: one.job || "",
  generation: one.generation ?? null,
  trace: one.trace || "",
  detail: one.detail || {},
});

const jobOf = (one) => ({
  name: one.job,
  state: one.is_stopped ? "stopped" : one.state,
  generation: one.generation || 0,
  ranks: one.world_size || 0,
  nodes: one.nodes || 0,
  spares: one.spares || 0,
  step: one.step || 0,
  stepS: one.step_s || 0,
  loss: one.loss ?? null,
  committed: versionOf(one.committed),
  verified: versionOf(one.verified),
  reason: one.reason || "",
  stall: one.stall || "",
  stallSince: one.stall_since || 0,
});

const recoveryOf = (one) => ({
  generation: one.generation,
  reason: one.reason,
  sentence: one.sentence,
  trace: one.trace || "",
  decidedAt: one.decided_at,
  durationS: one.duration_s ?? null,
  restored: versionOf(one.restored),
  resumed: one.resumed_ranks || 0,
  ranks: one.world_size || 0,
  phases: one.phases_s || {},
  afterStep: one.after_step ?? null,
});

// ---- queries

// The name of a person who logged in ends with subject and issuer, which identify but are long.
export const identity = () =>
  get("/v1/identity", {}, (body) => ({
    role: body.role,
    name: body.subject.split(/ (?:\(|at )/)[0],
    fullName: body.subject,
    mayOrder: body.role === "operator",
  }));

export const status = () =>
  get("/v1/status", {}, (body) => ({
    version: body.version,
    epoch: body.epoch,
    now: body.now,
    startedAt: body.started_at,
    counts: body.nodes || {},
    jobs: (body.jobs || []).map(jobOf),
    connected: body.connected_nodes || 0,
    budgetLeft: body.budget_left || 0,
    breaker: body.breaker || "",
    newestEvent: body.newest_event || 0,
    outage: body.database_outage || "",
    needs: (body.needs || []).map((one) => ({
      kind: one.kind,
      critical: one.severity === "critical",
      subject: one.subject,
      since: one.since,
      reason: one.reason,
      advice: one.advice,
      command: one.command || "",
      node: one.node || "",
      job: one.job || "",
      finding: one.finding || "",
    })),
    needCount: body.need_count || 0,
  }));

// All nodes, page by page, so that the first ones are shown while the rest is on its way.
export async function allNodes(onPage) {
  let cursor = "";
  do {
    const page = await get("/v1/nodes", { limit: 1000, cursor }, (body) => ({
      nodes: body.nodes.map(nodeOf),
      total: body.total || 0,
      next: body.next || "",
    }));
    onPage(page.nodes, page.total);
    cursor = page.next;
  } while (cursor);
}

export const node = (name) =>
  get(`/v1/nodes/${encode(name)}`, {}, (body, etag) => ({
    ...nodeOf(body.summary),
    etag,
    agentVersion: body.agent_version || "",
    driver: body.driver_version || "",
    gpuList: (body.gpus || []).map((gpu) => ({
      index: gpu.index,
      uuid: gpu.uuid,
      name: gpu.name,
      bus: gpu.pci_bus_id,
      memoryBytes: gpu.memory_bytes,
      serial: gpu.serial || "",
    })),
    host: body.host || {},
    findingList: (body.findings || []).map(findingOf),
    verdicts: (body.verdicts || []).map(verdictOf),
    evictions: body.evictions || 0,
    offenceScore: body.offence_score || 0,
    cordonedBy: body.external_cordon_by || "",
    planned: (body.planned_maintenance || []).map((one) => ({
      startsAt: one.starts_at,
      until: one.until,
      sentence: one.sentence,
    })),
    deferredBy: body.eviction_deferred_by || "",
    drifts: (body.drifts || []).map((one) => one.sentence),
  }));

// What the node's GPUs measured last. receivedAt is null before anything came.
export const gauges = (name) =>
  get(`/v1/nodes/${encode(name)}/gpus`, {}, (body) => ({
    receivedAt: body.received_at ?? null,
    gpus: (body.gpus || []).map((gpu) => ({
      index: gpu.index,
      uuid: gpu.uuid,
      memoryBytes: gpu.memory_bytes,
      lost: gpu.is_lost || false,
      temperature: gpu.temperature_c ?? null,
      memoryTemperature: gpu.memory_temperature_c ?? null,
      power: gpu.power_w ?? null,
      powerLimit: gpu.power_limit_w ?? null,
      use: gpu.utilization ?? null,
      memoryUsed: gpu.memory_used_bytes ?? null,
      clock: gpu.sm_clock_mhz ?? null,
      memoryClock: gpu.memory_clock_mhz ?? null,
      throttledBy: gpu.throttled_by || [],
      corrected: gpu.ecc_corrected ?? null,
      uncorrected: gpu.ecc_uncorrected ?? null,
    })),
  }));

export const order = (name, kind, reason, etag) => post(`/v1/nodes/${encode(name)}/${kind}`, { reason }, etag);

export const resetBreaker = (reason) => post("/v1/breaker/reset", { reason });

export const jobs = () => get("/v1/jobs", { limit: 1000 }, (body) => body.jobs.map(jobOf));

export const job = (name) =>
  get(`/v1/jobs/${encode(name)}`, {}, (body) => ({
    ...jobOf(body.summary),
    minNodes: body.spec.min_nodes || 1,
    maxNodes: body.spec.max_nodes || 1,
    createdAt: body.created_at || 0,
    since: body.since || 0,
    rankList: (body.ranks || []).map((one) => ({
      rank: one.rank,
      node: one.node,
      step: one.step,
      stepS: one.step_s || 0,
      busyS: one.busy_s ?? null,
      loss: one.loss ?? null,
    })),
    spareNodes: body.spares || [],
    recoveries: (body.recoveries || []).map(recoveryOf),
    ineligible: body.ineligible_nodes || {},
  }));

export const progress = (name, since) =>
  get(`/v1/jobs/${encode(name)}/progress`, { since: since || undefined }, (body) => ({
    intervalS: body.interval_s,
    samples: (body.samples || []).map((one) => ({
      at: one.at,
      generation: one.generation,
      step: one.step,
      ranks: one.world_size,
      stepS: one.step_s || 0,
      loss: one.loss ?? null,
    })),
  }));

// parameters: rank, lines
export const output = (name, parameters) =>
  get(`/v1/jobs/${encode(name)}/output`, parameters, (body) => ({
    sentence: body.sentence || "",
    command: body.command || "",
    ranks: (body.ranks || []).map((one) => ({
      rank: one.rank,
      node: one.node,
      lines: one.lines || [],
    })),
  }));

// `everyS` and `restartS`: the restarts that the run is compared with.
export const receipt = (name, everyS, restartS) =>
  get(`/v1/jobs/${encode(name)}/receipt`, { checkpoint_interval_s: everyS, restart_s: restartS }, (body) => ({
    ranks: body.ranks || 0,
    count: body.recovery_count || 0,
    wall: body.costs.stepping_s || 0,
    lost: body.costs.lost_s || 0,
    lostGpuS: body.costs.lost_rank_s || 0,
    restart: body.costs.restart_lost_s || 0,
    restartGpuS: body.costs.restart_lost_rank_s || 0,
    share: body.costs.effective_share ?? null,
  }));

export const restorability = (name) =>
  get(`/v1/jobs/${encode(name)}/restorability`, {}, (body) => ({
    sentence: body.sentence,
    version: versionOf(body.version),
    verified: body.verified || false,
    missingRanks: body.missing_ranks || [],
    exposures: (body.loss_forecasts || []).map((one) => ({
      kind: one.kind,
      name: one.name,
      nodes: one.nodes,
      restorable: one.restorable,
      sentence: one.sentence,
      ranks: one.ranks || [],
      fallback: versionOf(one.fallback_version),
    })),
  }));

export const checkpoints = (name) =>
  get(`/v1/jobs/${encode(name)}/checkpoints`, {}, (body) => ({
    sentence: body.sentence,
    lastError: body.last_error || "",
    lost: body.spills_failed || 0,
    versions: (body.versions || []).map((one) => ({
      version: versionOf(one.version),
      tier: one.storage_tier,
      complete: one.state === "complete",
      restorable: one.restorable,
      sentence: one.sentence,
      since: one.since,
      verified: one.verified || false,
      bytes: one.bytes || 0,
      url: one.url || "",
    })),
  }));

// parameters: trace, node, job, kind (how kinds begin), since, until, newest, limit
export const events = (parameters) => get("/v1/events", parameters, (body) => body.events.map(eventOf));

export const verdict = (id) => get(`/v1/verdicts/${encode(id)}`, {}, verdictOf);

export const findings = (name) =>
  get("/v1/findings", { node: name, limit: 50 }, (body) =>
    body.findings.map((one) => ({
      ...findingOf(one.finding),
      raisedAt: one.raised_at,
      clearedAt: one.cleared_at ?? null,
    }))
  );

export const remediations = (name) =>
  get("/v1/remediations", { node: name, limit: 20 }, (body) =>
    body.remediations.map((one) => ({
      kind: one.kind,
      state: one.state,
      sentence: one.sentence,
      requestedAt: one.requested_at,
      detail: one.detail || "",
    }))
  );

const ruleOf = (one) => ({ ...one, id: one.name ? `${one.kind}.${one.name}` : one.kind });

export const policy = () =>
  get("/v1/policy", {}, (body) => ({
    knobs: body.knobs,
    rules: body.rules.map(ruleOf),
    origins: body.origins || {},
  }));

export const budget = () =>
  get("/v1/budget", {}, (body) => ({
    windowS: body.window_s,
    scopes: body.scopes || [],
    deferred: body.deferred || [],
  }));

export const checkPolicy = (change) => post("/v1/policy/check", change);

export async function tryPolicy(change, hours) {
  const body = await post("/v1/policy/try", { change, hours });
  return {
    since: body.since,
    events: body.events || 0,
    evictions: body.evictions || 0,
    added: (body.added_evictions || []).map(verdictOf),
    avoided: body.avoided_evictions || [],
    gaps: body.gaps || [],
    sentence: body.sentence || "",
  };
}

// ---- events as they come

const sleep = (ms, signal) =>
  new Promise((done) => {
    const timer = setTimeout(done, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), done()), { once: true });
  });

const POLL_MS = 10_000;

// Calls onEvents with each batch of new events until the signal aborts, and onLive with whether the stream is open.
// Reconnects by itself. Asks for events now and then while the controller serves no more streams.
export async function follow(after, { onEvents, onGap, onLive, signal }) {
  let last = after;
  let failures = 0;
  while (!signal.aborted) {
    try {
      const response = await send("/v1/events/stream" + query({ after: last }), { headers: headersOf(), signal });
      if (!response.ok) throw await errorOf(response);
      onLive(true);
      failures = 0;
      last = await readFrames(response.body.getReader(), last, onEvents, onGap);
    } catch (error) {
      if (signal.aborted || error.name === "AbortError") break;
      if (error.status === 401 || error.status === 403) throw error;
      if (error.status === 429) {
        last = await poll(last, onEvents, onLive, signal);
        continue;
      }
      failures += 1;
    }
    onLive(false);
    await sleep(Math.min(500 * 2 ** failures, 15_000) * (0.5 + Math.random()), signal);
  }
}

async function readFrames(reader, after, onEvents, onGap) {
  const decoder = new TextDecoder();
  let text = "";
  let last = after;
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) return last;
    text += decoder.decode(value, { stream: true });
    const frames = text.split("\n\n");
    text = frames.pop();
    const batch = [];
    for (const frame of frames) {
      const fields = {};
      for (const line of frame.split("\n")) {
        const at = line.indexOf(": ");
        if (at > 0) fields[line.slice(0, at)] = line.slice(at + 2);
      }
      if (fields.id) last = Number(fields.id);
      if (fields.event === "entry") batch.push(eventOf(parse(fields.data)));
      if (fields.event === "gap") onGap();
    }
    if (batch.length) onEvents(batch);
  }
}

async function poll(after, onEvents, onLive, signal) {
  let last = after;
  onLive(true);
  for (let round = 0; round < 30 && !signal.aborted; round++) {
    await sleep(POLL_MS, signal);
    if (signal.aborted) break;
    const found = await events({ after: last, limit: 500 }).catch((error) => {
      if (error.status === 401 || error.status === 403) throw error;
      return null; // the caller tries the stream again, with its own pauses
    });
    if (!found) break;
    if (found.length) {
      last = found[found.length - 1].id;
      onEvents(found);
    }
  }
  return last;
}
