// One shell for all pages: which page, which time, what was asked, what listens, and what is said when nothing answers.
import { endCharts } from "./charts.js";
import { clock, make, moment, span } from "./format.js";
import { operate } from "./operate.js";
import { answersPanel, overview } from "./overview.js";
import * as pages from "./pages.js";
import { prefixes } from "./prefixes.js";

const filled = new URLSearchParams([...new URLSearchParams(location.search)].filter(([name, value]) => name !== "window" && value));
const PAGES = [
  ["/", "Overview", overview, { whatif: "/api/whatif" }], ["/misses", "Why misses", pages.misses, { misses: "/api/misses?window=" }],
  ["/prefixes", "Prefixes", prefixes, { prefixes: "/api/prefixes" }],
  ["/tenants", "Tenants", pages.tenants, { tenants: "/api/tenants", namespaces: "/api/namespaces" }],
  ["/moves", "Moves and disk", pages.moves, { engines: "/api/engines", elsewhere: "/api/elsewhere" }], ["/engines", "Engines", pages.engines, { engines: "/api/engines" }],
  ["/request", "Request", pages.request, { answer: filled.has("id") ? `/api/request?${new URLSearchParams({ id: filled.get("id") })}` : "/api/request" }],
  ["/plan", "Plan", pages.plan, { models: "/api/models", planned: `/api/plan?${filled}` }],
  ["/operate", "Operate", operate, (status) => (status.acts ? { namespaces: "/api/namespaces", tenants: "/api/tenants" } : {})],
  ["/events", "Events", pages.events, (status) => ({ events: "/api/events", ...(status.acts ? { audit: "/api/audit" } : {}) })],
  ["/help", "Help", null, {}],  // the console wrote it already
];
const WINDOWS = { run: "since start", "15m": "15 min", "1h": "1 h", "6h": "6 h", "24h": "24 h", "7d": "7 d" };
const WORDS = { run: "since the sidecar began", "15m": "in the last 15 minutes", "1h": "in the last hour", "6h": "in the last 6 hours", "24h": "in the last 24 hours", "7d": "in the last 7 days" };
const SILENT_SECONDS = 12, REDRAW_SECONDS = 10;

const [path, title, render, wanted] = PAGES.find(([one]) => one === location.pathname) ?? PAGES[0];
const asked = new URLSearchParams(location.search).get("window");
const window_ = asked in WINDOWS ? asked : "run";
const main = document.getElementById("main"), stale = document.getElementById("stale");
let status = null, heardAt = Date.now(), drawnAt = 0, isDrawing = false, run = null, source = null;

document.title = `${title} - kvstore console`;
document.getElementById("nav").append(...PAGES.map(([one, name]) => make("a", { href: one + location.search, ...(one === path ? { "aria-current": "page" } : {}) }, name)));
document.querySelector("#nav [aria-current]").scrollIntoView({ block: "nearest", inline: "center" });
document.getElementById("theme").addEventListener("click", () => switchTheme());

async function get(url) {
  const answer = await fetch(url, { headers: { accept: "application/json" } });
  if (answer.status === 401) { location.href = "/login"; throw new Error("log in first"); }
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error ?? `status ${answer.status}`);
  return body;
}
function chosenRing() {
  if (window_ !== "run") return window_;
  const up = status.up_seconds ?? 0;
  return up <= 900 ? "15m" : up <= 3600 ? "1h" : up <= 21600 ? "6h" : up <= 86400 ? "24h" : "7d";
}
async function draw() {
  if (!render) { ready(); return; }
  if (isDrawing || !status) return;
  isDrawing = true;
  try {
    const ring = chosenRing();
    if (status.run === null) { alone(answersPanel(status)); ready(); return; }
    const asked = typeof wanted === "function" ? wanted(status) : wanted, keys = Object.keys(asked);
    const found = await Promise.all([get(`/api/series?window=${ring}`), ...keys.map((key) => {
      const answer = get(asked[key].endsWith("=") ? asked[key] + ring : asked[key]);
      return ["planned", "answer", "prefixes"].includes(key) ? answer.catch((error) => ({ error: error.message })) : answer;  // what was written in a form is wrong, or the sidecar is asked in vain
    })]);
    const series = found[0];
    series.words = WORDS[ring];
    series.note = series.seen_since === null ? "The console has watched for less than one look." : series.seen_since > series.times[0] ? `The console has watched since ${moment(series.seen_since)}; before that nothing is known.` : "";
    if (status.tenant) series.note = "A tenant's numbers are those since the sidecar began; what happened when is told of all tenants together alone.";
    const windows = status.tenant ? make("span") : make("div.windows", {}, ...Object.entries(WINDOWS).map(([name, text]) => make("a", { href: `${path}?window=${name}`, ...(name === window_ ? { "aria-current": "true" } : {}) }, text)));
    const open = [...main.querySelectorAll("details")].map((one) => one.open), scrolled = scrollY;
    endCharts();
    main.replaceChildren(...render({ status, series, window: window_, windows, words: WORDS[window_], ...Object.fromEntries(keys.map((key, at) => [key, found[at + 1]])) }));
    main.querySelectorAll("details").forEach((one, at) => { one.open = open[at] ?? false; });
    scrollTo(0, scrolled);
    if (!drawnAt && location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
    drawnAt = Date.now();
    ready();
  } catch (error) {
    if (!main.querySelector("section:not(.wait)")) say(`The console does not answer: ${error.message}.`);
    ready();
  } finally { isDrawing = false; }
}
function alone(section) { if (!render) return; endCharts(); section.classList.add("alone"); main.replaceChildren(section); }
function say(text) { alone(make("section.panel.wide", { id: "answers" }, make("p.answer.error", { id: "health" }, text))); }
function ready() { document.body.dataset.ready = "1"; }
function tell() {
  const silent = (Date.now() - heardAt) / 1000;
  const from = status?.contact.numbers_from;
  let text = "";
  if (silent > SILENT_SECONDS) text = `No answer from the console for ${span(silent)}; numbers are from ${from ? clock(from) : "-"}.`;
  else if (status && !status.contact.connected && from) text = `The sidecar has not answered since ${clock(status.contact.since)}; numbers are from ${clock(from)}.`;
  stale.hidden = !text;
  if (stale.textContent !== text) stale.textContent = text;
  document.body.classList.toggle("stale", Boolean(text));
  if (status) document.getElementById("foot").textContent = `kvstore ${status.version}; numbers from ${status.contact.numbers_from ? moment(status.contact.numbers_from) : "-"}.`;
}
function take(next) {
  status = next; heardAt = Date.now();
  if (next.tenant) document.querySelectorAll("#nav a").forEach((one) => { one.hidden = !["/misses", "/prefixes", "/tenants", "/request", "/plan", "/help"].includes(new URL(one.href).pathname); });
  document.querySelector('#nav a[href^="/operate"]').hidden = !next.acts;
  if (next.tenant && path === "/") { location.replace("/tenants"); return; }
  const isNew = run !== null && next.run !== run;
  run = next.run;
  const wasEmpty = !main.querySelector("section:not(.wait):not(.alone)");
  tell();
  const isForm = Boolean(main.querySelector("form"));  // what is written there must stay
  if (wasEmpty || (!isForm && (isNew || Date.now() - drawnAt > 1000 * REDRAW_SECONDS))) draw();
}
function listen() {
  if (source || document.hidden || status?.tenant) return;  // a tenant asks again and again: what is streamed is of all
  source = new EventSource("/api/stream");
  source.addEventListener("message", (event) => take(JSON.parse(event.data)));
}
document.addEventListener("visibilitychange", () => {
  if (document.hidden) { source?.close(); source = null; } else { heardAt = Date.now(); listen(); drawnAt = 0; }
});
addEventListener("pagehide", () => { source?.close(); source = null; });
setInterval(tell, 1000);
setInterval(async () => { if (status?.tenant && !document.hidden) try { take(await get("/api/status")); } catch { /* tell() says how long ago the last answer was */ } }, 5000);
try { take(await get("/api/status")); } catch (error) { say(`The console does not answer: ${error.message}.`); ready(); }
listen();
