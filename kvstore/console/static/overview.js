// The first page: how it is, where tokens came from, what the tiers hold, whether anything was damaged.
import { bar, chart, curve, lookOf, piecesOf } from "./charts.js";
import { bytes, eventList, known, make, moment, panel, percent, span, table, tokens, whole, wide } from "./format.js";

export const empty = (status) => {
  if (!status || !known(status.sessions)) return "No numbers yet.";
  if (!status.sessions) return "No engine is attached: start an engine with url: unix:... of this sidecar's socket.";
  return `No look-ups in this time. ${whole(status.sessions)} engine${status.sessions === 1 ? " is" : "s are"} attached.`;
};
const linked = ({ text, page }) => {
  const [path, hash] = page.split("#"), query = path.includes("?") ? "" : location.search;
  return page === "/" ? text : make("a", { href: `${path}${query}${hash ? `#${hash}` : ""}` }, text);
};
// What people ask first, a sentence each.
export function answersPanel(status) {
  const { saved, missed, next } = status.answers;
  return make("section.panel.wide", { id: "answers", "aria-label": "Summary" }, ...[["health", "health", status.health], ["saved", "saved", saved], ["missed", "misses", missed], ["next", "to do", next]].map(([id, label, one]) =>
    make(`p.answer.${one.level}`, { id }, make("b", {}, label), make("span", {}, linked(one)))));
}
export function account(status, series, window) {
  if (window === "run") {
    const looked = status.looked;
    return { asked: looked.asked_tokens, hits: looked.hit_tokens, misses: looked.miss_tokens, found: looked.found_tokens };
  }
  const of = (prefix) => Object.fromEntries(Object.entries(series.sums).filter(([name]) => name.startsWith(prefix)).map(([name, count]) => [name.slice(prefix.length), count]));
  return { asked: series.sums.asked ?? 0, hits: of("hit."), misses: of("miss."), found: series.sums.found ?? 0 };
}
export function sentence(one, words) {
  if (!one.asked) return null;
  const own = one.hits.engine ?? 0, all = Object.values(one.hits).reduce((sum, count) => sum + count, 0);
  const more = own ? `: ${whole(own)} were in the engine's own cache, ${whole(all - own)} came from this store` : "";
  return make("p.sentence", { id: "sentence" }, `Of ${whole(one.asked)} prompt tokens that engines asked for ${words}, ${whole(all)} did not have to be computed (${percent(all, one.asked)})${more}.`);
}
export function rates(series, pieces) {
  return pieces.map((one) => ({ label: one.label, hue: one.hue, hatch: one.hatch, values: one.values.map((value) => (known(value) ? value / series.step : null)) }));
}
export function stackOf(series) {
  const pieces = piecesOf(
    Object.fromEntries(Object.entries(series.sums).filter(([name]) => name.startsWith("hit.")).map(([name, count]) => [name.slice(4), count])),
    Object.fromEntries(Object.entries(series.sums).filter(([name]) => name.startsWith("miss.")).map(([name, count]) => [name.slice(5), count])),
    0, series.sums.asked ?? 0);
  const missing = pieces.filter((one) => one.miss).map((one) => one.name);
  const large = new Set(missing.filter((one) => one !== "others").slice(0, 4));
  const lines = pieces.filter((one) => !one.miss).map((one) => ({ ...one, values: series.counters[`hit.${one.name}`] }));
  for (const one of pieces) if (large.has(one.name)) lines.push({ ...one, values: series.counters[`miss.${one.name}`] });
  const others = Object.keys(series.counters).filter((name) => name.startsWith("miss.") && !large.has(name.slice(5)) && series.sums[name] > 0);
  if (others.length) lines.push({ name: "others", label: `${others.length} other reason${others.length === 1 ? "" : "s"}`, ...lookOf("others"), values: series.times.map((_, at) => others.reduce((sum, name) => { const value = series.counters[name][at]; return known(value) ? (sum ?? 0) + value : sum; }, null)) });
  return lines;
}
function tierPanel(status) {
  const rows = [], meters = [];
  for (const one of status.tiers) {
    const pinned = one.name === "dram" ? status.pinned_bytes : null;
    const retained = status.retained_bytes[one.name] ?? null;
    rows.push([one.name, bytes(one.budget_bytes), bytes(one.taken_bytes), bytes(pinned), bytes(retained), whole(one.slots.used), whole(one.slots.free)]);
    const meter = make("div.meter", { role: "img", "aria-label": `${one.name}: ${percent(one.taken_bytes, one.budget_bytes)} taken` });
    for (const [kind, size] of [[`hue-${one.name}`, one.taken_bytes], ["pinned", pinned], ["retained", retained]]) {
      if (!size) continue;
      const part = make(`i.${kind}`);
      part.style.width = `${Math.min(100, (100 * size) / one.budget_bytes)}%`;
      meter.append(part);
    }
    meters.push(make("p", {}, `${one.name}: ${bytes(one.taken_bytes)} of ${bytes(one.budget_bytes)} taken (${percent(one.taken_bytes, one.budget_bytes)})`), meter);
  }
  const legend = make("p.quiet", {}, "The narrow stripes: below, pinned by leases; above, retained by a ttl or a priority.");
  return panel("Tiers", ...meters, legend, table(["tier", "*budget", "*taken", "*pinned", "*retained", "*slots used", "*free"], rows));
}
function integrityPanel(status) {
  const one = status.integrity;
  const facts = [
    ["failed a reader's check", `${whole(one.reported)} blocks`], ["quarantined", `${whole(one.quarantined_slots)} slots`],
    ["verified on disk", known(one.verified_bytes) ? `${bytes(one.verified_bytes)} in ${whole(one.verified_frames)} frames` : "-"],
    ["damaged on disk", whole(one.damaged)], ["unreadable", whole(one.unreadable)], ["mended", whole(one.mended)],
    ["scrub", known(one.in_pass) ? `${one.in_pass ? "in a pass" : "waiting"}, ${whole(one.passes)} done` : "- (no disk tier)"],
    ["last pass ended", moment(one.last_pass_ended)],
  ];
  return panel("Integrity", make("dl", {}, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])),
    make("p.quiet", {}, "Every block is verified again when it is loaded; what fails is a miss, and is never served. Counts begin with the sidecar."));
}
function whatIfPanel({ estimate, dram_bytes, own_hit_rate, sizes }, status) {
  const title = "What more memory would bring";
  if (!estimate) return wide(title, make("p.quiet", {}, "This sidecar estimates nothing."));
  if (!sizes.length) return wide(title, make("p.quiet", {}, `Nothing was looked up in the last hour, so nothing can be estimated. ${status.sessions ? "" : "No engine is attached."}`));
  const all = sizes[sizes.length - 1], signed = (count) => (count > 0 ? `+${tokens(count)}` : tokens(count));
  const marks = [{ at: estimate.budget_bytes, text: `today, ${bytes(estimate.budget_bytes)}` }];
  if (dram_bytes && dram_bytes < estimate.budget_bytes) marks.push({ at: dram_bytes, text: `dram, ${bytes(dram_bytes)}` });
  return wide(title,
    make("p", { id: "whatif" }, `No size finds more than ${percent(all.token_hit_rate, 1)} of requested tokens: the others were requested for the first time.`),
    curve("Share of tokens found by size", estimate.curve.map((one) => [one.size_bytes, one.token_hit_rate]), all.token_hit_rate, marks),
    table(["all tiers", "*size", "*found", "*more tokens a day"], sizes.map((one) => [one.words, one.size_bytes === null ? "-" : bytes(one.size_bytes), percent(one.token_hit_rate, 1), signed(one.more_tokens_per_day)])),
    make("p.quiet", {}, `From ${span(Math.min(3600, estimate.seconds))} of look-ups; ${estimate.words}. It counts what would be found if everything was kept and the least recently used went first.${known(own_hit_rate) ? ` The store itself found ${percent(own_hit_rate, 1)} in the last hour: declined writes, deadlines and pins lower that, a policy that learns may raise it.` : ""}`));
}
function savingsPanel(savings) {
  if (!savings) return null;  // the answer says so
  const hours = (seconds) => (seconds >= 7200 ? `${(seconds / 3600).toFixed(1)} GPU hours` : `${seconds >= 100 ? whole(seconds) : seconds.toFixed(2)} GPU seconds`);
  return panel("Saved", make("dl", {}, ...[["not computed", `${hours(savings.saved_seconds)}, estimated by the speeds that engines learned`], ["loads that took longer", `${hours(savings.regret_seconds)}, estimated`],
    ["time to first token", known(savings.ttft_saved_ms) ? `${savings.ttft_saved_ms.toFixed(0)} ms sooner with a hit (standard error ${savings.ttft_saved_error_ms.toFixed(0)} ms), measured` : "- (too few hits were computed all the same to compare)"]].flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])),
    make("p.quiet", {}, "Since the sidecar began."));
}
export function overview({ status, series, window, windows, words, whatif }) {
  const one = account(status, series, window), pieces = piecesOf(one.hits, one.misses, one.found, one.asked);
  const lines = stackOf(series);
  return [
    answersPanel(status),
    wide("Where prompt tokens came from", windows, bar(pieces, one.asked, empty(status)), sentence(one, words),
      status.loading ? make("p.quiet", {}, `The sidecar takes in its disk: ${whole(status.loading.slots)} of ${whole(status.loading.all_slots)} slots.`) : null),
    wide(`Tokens a second, ${series.words}`, lines.length ? chart("Tokens a second by where they came from", series.times, rates(series, lines), { stacked: true, unit: " tokens/s", restarts: series.restarts, step: series.step, note: series.note })
      : make("p.quiet", {}, `${empty(status)} ${series.note}`)),
    whatIfPanel(whatif, status),
    tierPanel(status), integrityPanel(status), savingsPanel(status.savings),
    panel("Now", make("dl", {}, ...[["state", `${status.state}, up ${span(status.up_seconds)}`], ["blocks", whole(status.blocks)], ["engines", whole(status.sessions)], ["namespaces", whole(status.namespaces)],
      ["leases", `${whole(status.leases)}, pinning ${bytes(status.pinned_bytes)}`], ["policy", status.policy ?? "-"], ["run", `${status.run.slice(0, 8)}, pid ${status.pid}`]].flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]))),
    (status.savings ? wide : panel)("What happened last", eventList(status.events, "Nothing yet."), make("p", {}, make("a", { href: `/events${location.search}` }, "All events"))),
  ].filter(Boolean);
}
