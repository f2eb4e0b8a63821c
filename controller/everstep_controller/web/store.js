// What the page knows of the fleet, and how it stays up to date: one event stream, slow conditional requests, and
// nothing at all while the tab is hidden.

import { useEffect, useRef, useState } from "./vendor/htm-preact.js";
import * as api from "./api.js";

const EVENTS_KEPT = 2000;
const EVENTS_AT_FIRST = 40; // the latest ones of the fleet, which a page shows at once
const LARGE = 2000; // nodes of a fleet that is asked about less often
const MOST_SINGLE_NODES = 16; // more changed nodes than this are asked for as one list

export const fleet = {
  session: 0, // counts tokens that were left, so that answers to an earlier one are dropped
  identity: null,
  status: null,
  statusAt: 0, // performance.now() of the answer
  nodes: new Map(), // name -> node
  total: 0,
  loaded: false,
  events: [], // newest last
  live: false,
  error: null,
  grouping: "rack",
  changes: 0, // counts changes of nodes, for what is drawn
};

const listeners = new Set();
let pending = false;

export function notify() {
  if (pending) return;
  pending = true;
  const run = () => {
    pending = false;
    for (const listener of [...listeners]) listener();
  };
  if (document.hidden) setTimeout(run, 100);
  else requestAnimationFrame(run);
}

// Renders the component again whenever the store changes.
export function useFleet() {
  const [, render] = useState(0);
  useEffect(() => {
    const listener = () => render((count) => count + 1);
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
  return fleet;
}

const eventListeners = new Set();

// Asks for something now, again every `seconds` while the tab is visible, and soon after events that `concerns` picks.
export function usePolled(ask, seconds, inputs, concerns) {
  const [state, set] = useState({ value: null, error: null });
  const refresh = useRef(null);
  const key = JSON.stringify(inputs);
  useEffect(() => {
    let over = false;
    let timer = 0;
    let asking = false;
    let again = false;
    set((before) => (before.key === key ? before : { value: null, error: null, key }));
    const run = async () => {
      clearTimeout(timer);
      if (asking) return void (again = true);
      asking = true;
      try {
        const value = await ask();
        if (!over) set((before) => (before.value === value && !before.error ? before : { value, error: null, key }));
      } catch (error) {
        if (!over) set((before) => ({ value: before.key === key ? before.value : null, error, key }));
      }
      asking = false;
      if (over) return;
      clearTimeout(timer);
      timer = setTimeout(run, again ? 300 : document.hidden ? 1e9 : seconds * 1000);
      again = false;
    };
    const visible = () => !document.hidden && run();
    const listener = (batch) => {
      if (concerns && batch.some(concerns)) {
        clearTimeout(timer);
        timer = setTimeout(run, 250 + Math.random() * 250);
      }
    };
    document.addEventListener("visibilitychange", visible);
    eventListeners.add(listener);
    refresh.current = run;
    run();
    return () => {
      over = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", visible);
      eventListeners.delete(listener);
    };
  }, [key]);
  const { value, error } = state.key === key ? state : { value: null, error: null };
  return { value, error, refresh: () => refresh.current?.() };
}

// ---- keeping up to date

// Seconds between looks at the fleet's status, whose cost grows with the fleet. Events tell of what cannot wait.
export const statusInterval = () => Math.min(120, Math.max(3, fleet.total / 100));

let streaming = null; // AbortController of the stream that this tab reads
let statusTimer = 0;
let retryTimer = 0;
let nodesTimer = 0;
const changed = new Set(); // names of nodes to ask for again
let stale = false; // all nodes are to be asked for again
let mismatches = 0;

export async function start() {
  const { session } = fleet;
  fleet.error = null;
  notify();
  try {
    const [identity, status] = await Promise.all([api.identity(), api.status()]);
    if (session !== fleet.session) return;
    fleet.identity = identity;
    setStatus(status);
    notify();
    loadLatestEvents(status.newestEvent);
    openStream();
    await loadNodes();
  } catch (error) {
    if (session === fleet.session) fail(error);
  }
}

// The events before those that the stream brings. Nothing waits for them: the database may be unavailable.
async function loadLatestEvents(through) {
  const { session } = fleet;
  const found = await api.events({ newest: true, limit: EVENTS_AT_FIRST }).catch(() => []);
  if (session !== fleet.session) return;
  const before = Math.min(through + 1, fleet.events[0]?.id ?? Infinity);
  fleet.events = found.filter((one) => one.id < before).concat(fleet.events);
  notify();
}

export function stop() {
  closeStream();
  for (const timer of [statusTimer, nodesTimer, retryTimer]) clearTimeout(timer);
  nodesTimer = 0;
  stale = false;
  changed.clear();
  Object.assign(fleet, { identity: null, status: null, nodes: new Map(), total: 0, loaded: false, live: false });
  Object.assign(fleet, { session: fleet.session + 1, events: [], error: null });
  notify();
}

function fail(error) {
  fleet.error = error;
  if (error.status === 401 || error.status === 403) closeStream();
  else {
    clearTimeout(retryTimer);
    retryTimer = setTimeout(retry, 1000 * (error.retryAfterS || 5));
  }
  notify();
}

// Asks again for what a page needs at first. A hidden page does so when it is visible again.
function retry() {
  if (document.hidden) return;
  if (!fleet.identity) start();
  else if (!fleet.loaded) loadNodes().catch(fail);
}

function setStatus(status) {
  fleet.status = status;
  fleet.statusAt = performance.now();
  fleet.total = Object.values(status.counts).reduce((sum, count) => sum + count, 0);
  schedule(statusInterval());
}

function schedule(seconds) {
  clearTimeout(statusTimer);
  if (!document.hidden) statusTimer = setTimeout(refreshStatus, seconds * 1000);
}

async function refreshStatus() {
  const { session } = fleet;
  try {
    const status = await api.status();
    if (session !== fleet.session) return;
    setStatus(status);
    fleet.error = null;
    checkCounts();
  } catch (error) {
    if (session !== fleet.session) return;
    fail(error);
    schedule(statusInterval());
  }
  notify();
}

// Counts that differ twice in a row mean that a change was missed; then all nodes are asked for again.
function checkCounts() {
  if (!fleet.loaded) return;
  const counts = countsOf();
  const told = fleet.status.counts;
  const same = [...new Set([...Object.keys(told), ...counts.keys()])].every(
    (state) => (told[state] || 0) === (counts.get(state) || 0)
  );
  mismatches = same ? 0 : mismatches + 1;
  if (mismatches >= 2) {
    mismatches = 0;
    stale = true;
    scheduleNodes();
  }
}

export function tally(things, keyOf) {
  const counts = new Map();
  for (const thing of things) counts.set(keyOf(thing), (counts.get(keyOf(thing)) || 0) + 1);
  return counts;
}

let counted = { changes: -1, counts: new Map() };

// Nodes by state: as the page knows them, or as the status tells before it does.
export function countsOf() {
  if (!fleet.loaded) return new Map(Object.entries(fleet.status?.counts || {}));
  if (counted.changes !== fleet.changes) counted = { changes: fleet.changes, counts: tally(fleet.nodes.values(), (one) => one.state) };
  return counted.counts;
}

async function loadNodes() {
  const { session } = fleet;
  const found = new Map();
  const first = fleet.nodes.size === 0;
  await api.allNodes((nodes, total) => {
    for (const one of nodes) found.set(one.name, one);
    if (first && session === fleet.session) {
      fleet.nodes = found;
      fleet.total = total;
      fleet.changes += 1;
      notify();
    }
  });
  if (session !== fleet.session) return;
  fleet.nodes = found;
  fleet.total = found.size;
  fleet.loaded = true;
  fleet.changes += 1;
  notify();
}

function scheduleNodes() {
  if (nodesTimer) return;
  const large = fleet.total > LARGE;
  const wait = stale ? (large ? 10_000 : 500) : changed.size > MOST_SINGLE_NODES ? (large ? 5_000 : 500) : 200;
  nodesTimer = setTimeout(refreshNodes, wait * (0.75 + Math.random() / 2));
}

async function refreshNodes() {
  const { session } = fleet;
  const names = [...changed];
  const all = stale || names.length > Math.max(MOST_SINGLE_NODES, fleet.total / 100);
  changed.clear();
  stale = false;
  try {
    if (all) await loadNodes();
    else for (const name of names) await refreshNode(name);
  } catch (error) {
    if (session === fleet.session) fail(error);
  }
  if (session !== fleet.session) return;
  nodesTimer = 0;
  if (stale || changed.size) scheduleNodes();
}

async function refreshNode(name) {
  try {
    const { etag, findingList, verdicts, gpuList, host, planned, ...one } = await api.node(name);
    fleet.nodes.set(name, one);
  } catch (error) {
    if (error.status !== 404) throw error;
    fleet.nodes.delete(name);
  }
  fleet.changes += 1;
  notify();
}

// Asks for one node again now, after an order.
export function touch(name) {
  changed.add(name);
  scheduleNodes();
  schedule(0.3);
}

// What the status tells beyond the states of nodes, which a page counts itself.
const CHANGES_STATUS = /^(fleet|database|job\.|controller|verdict)/;
const STATELESS = /^(parity\.|spill|remediation|probe|peer|launcher|rank\.|resumed|user_error)/;

function onEvents(batch) {
  fleet.events = fleet.events.concat(batch).slice(-EVENTS_KEPT);
  for (const event of batch) {
    if (event.node && !STATELESS.test(event.kind)) changed.add(event.node);
    // A regroup changes which job its nodes belong to. In a large fleet that is looked up only where it is shown.
    const regroup = event.kind === "generation" || event.kind.startsWith("job.");
    if (regroup && (fleet.total < 500 || fleet.grouping === "job")) stale = true;
  }
  if (changed.size || stale) scheduleNodes();
  const urgent = batch.some((one) => CHANGES_STATUS.test(one.kind));
  if (fleet.total <= LARGE) schedule(0.5);
  else if (urgent) schedule(Math.min(statusInterval(), 5));
  for (const listener of [...eventListeners]) listener(batch);
  notify();
}

// A browser keeps six connections to a host for all its tabs, and a stream occupies one. Tabs of one identity therefore
// share a stream: the first visible one reads it and tells the others. A tab that hears of no reader becomes the reader.

const ASK_MS = 150; // for the answer of a reader
const SIGN_MS = 4000; // between a reader's signs of life
const SILENT_MS = 10_000; // without a sign, the reader is gone

const me = `${Date.now()}-${Math.random()}`; // the smaller one reads, where two began at once
let channel = null;
let readerTimer = 0;

const newestKnown = () => (fleet.events.length ? fleet.events[fleet.events.length - 1].id : fleet.status.newestEvent);

function setLive(live) {
  fleet.live = live;
  notify();
}

function openStream() {
  closeStream();
  channel = new BroadcastChannel(`everstep ${fleet.identity.role} ${fleet.identity.name}`);
  channel.onmessage = ({ data }) => hear(data);
  ask();
}

function ask() {
  channel.postMessage({ kind: "ask", me });
  clearTimeout(readerTimer);
  readerTimer = setTimeout(read, ASK_MS * (1 + Math.random()));
}

function hear(told) {
  if (told.kind === "ask" && streaming) return sign();
  if (told.kind === "bye" && !streaming) return ask();
  if (told.kind === "events" && !streaming) {
    const newest = newestKnown();
    const fresh = told.batch.filter((one) => one.id > newest);
    if (fresh.length) onEvents(fresh);
  }
  if (told.kind === "gap" && !streaming) missed();
  if (told.kind !== "sign") return undefined;
  if (streaming && told.me > me) return sign(); // the other one gives way
  stopReading();
  clearTimeout(readerTimer);
  readerTimer = setTimeout(ask, SILENT_MS * (1 + Math.random() / 2));
  setLive(told.live);
  if (told.newest > newestKnown()) catchUp();
  return undefined;
}

async function catchUp() {
  const { session } = fleet;
  try {
    const found = await api.events({ after: newestKnown(), limit: 500 });
    if (session !== fleet.session) return;
    const fresh = found.filter((one) => one.id > newestKnown());
    if (fresh.length) onEvents(fresh);
  } catch (error) {
    if (session === fleet.session) fail(error);
  }
}

function sign() {
  channel.postMessage({ kind: "sign", me, live: fleet.live, newest: newestKnown() });
  clearTimeout(readerTimer);
  readerTimer = setTimeout(sign, SIGN_MS);
}

function missed() {
  stale = true;
  scheduleNodes();
}

function read() {
  const mine = (streaming = new AbortController());
  sign();
  const tell = (told) => mine === streaming && channel.postMessage(told);
  const options = {
    signal: mine.signal,
    onEvents: (batch) => (onEvents(batch), tell({ kind: "events", batch })),
    onGap: () => (missed(), tell({ kind: "gap" })),
    onLive: (live) => mine === streaming && (setLive(live), sign()),
  };
  api.follow(newestKnown(), options).catch(fail);
}

function stopReading() {
  streaming?.abort();
  streaming = null;
}

function closeStream() {
  clearTimeout(readerTimer);
  if (streaming) channel?.postMessage({ kind: "bye" });
  stopReading();
  channel?.close();
  channel = null;
  fleet.live = false;
}

addEventListener("pagehide", closeStream);
addEventListener("pageshow", (event) => event.persisted && fleet.identity && openStream());

document.addEventListener("visibilitychange", () => {
  if (!fleet.identity) {
    if (fleet.error) retry();
    return;
  }
  if (document.hidden) {
    closeStream();
    clearTimeout(statusTimer);
  } else {
    openStream();
    refreshStatus();
    retry();
  }
});
