// The other pages.
import { bar, chart, lookOf, piecesOf } from "./charts.js";
import { bytes, eventList, known, make, moment, ms, panel, percent, span, table, tokens, whole, wide } from "./format.js";
import { auditPanel } from "./operate.js";
import { account, answersPanel, empty, rates, stackOf } from "./overview.js";

const sum = (counts) => Object.values(counts).reduce((all, one) => all + one, 0);

export function misses({ status, series, window, windows, words, misses: reasons }) {
  const one = account(status, series, window);
  const of = (reason) => (window === "run" ? reason.tokens : reason.window_tokens);
  const listed = reasons.filter((reason) => of(reason) > 0).sort((a, b) => of(b) - of(a));
  const lines = stackOf(series).filter((line) => line.miss || line.name === "others");
  const all = sum(one.misses);
  return [
    wide("Why tokens were computed", windows, bar(piecesOf({}, one.misses, 0, all), all, one.asked ? "Nothing was missed." : empty(status)),
      all ? make("p.sentence", {}, `${whole(all)} of ${whole(one.asked)} prompt tokens ${words} had to be computed (${percent(all, one.asked)}).`) : null),
    wide(`Misses, ${series.words}`, lines.length ? chart("Missed tokens a second by reason", series.times, rates(series, lines), { stacked: true, unit: " tokens/s", restarts: series.restarts, step: series.step, note: series.note }) : make("p.quiet", {}, `No misses in this time. ${series.note}`)),
    ...listed.map((reason) => {
      const card = panel(`${reason.reason.replaceAll("_", " ")}: ${percent(of(reason), one.asked)} of all tokens asked for (${whole(of(reason))})`,
        make("dl", {}, make("dt", {}, "what it means"), make("dd", {}, reason.meaning), make("dt", {}, "usual cause"), make("dd", {}, reason.cause), make("dt", {}, "what to do"), make("dd", {}, reason.remedy), make("dt", {}, "more"), make("dd", {}, make("a", { href: `/help#${reason.reason}` }, `Help: ${reason.reason}`))));
      card.classList.add("reason", `hue-${lookOf(reason.reason).hue}`);
      card.id = reason.reason;
      card.dataset.tokens = of(reason);
      return card;
    }),
  ];
}
export function tenants({ status, tenants: told, namespaces }) {
  const rows = told.map((one) => [one.tenant, whole(one.namespaces), whole(one.asked_tokens), whole(one.granted_tokens), percent(one.granted_tokens, one.asked_tokens), whole(one.hit_tokens.engine ?? 0), whole(sum(one.miss_tokens)),
    bytes(one.dram_bytes), known(one.share) ? bytes(one.dram_guaranteed_bytes) : "-", bytes(one.nvme_bytes), known(one.share) ? bytes(one.nvme_guaranteed_bytes) : "-", known(one.share) ? `${one.share} / ${one.weight}` : "-"]);
  const spaces = namespaces.namespaces.map((one) => [make("code", {}, one.id), one.tenant, one.name || one.model, one.layout, one.codec, whole(one.blocks), bytes(one.dram_bytes), bytes(one.nvme_bytes), whole(one.looked.asked_tokens), known(one.looked.hit_rate) ? percent(one.looked.hit_rate, 1) : "-", known(one.used_at) ? `${span(status.at - one.used_at)} ago` : "-"]);
  return [
    ...(status.tenant ? [answersPanel(status)] : []),
    wide("Tenants, since the sidecar began", table(["tenant", "*namespaces", "*tokens asked", "*from this store", "*hit rate", "*engine's own", "*missed", "*dram", "*guaranteed", "*nvme", "*guaranteed", "*share / weight"], rows, "No tenant has a key yet."),
      make("p.quiet", {}, "Hit rate: tokens that leases granted from this store / tokens asked for. Guaranteed and share are \"-\" where no share is set.")),
    wide(`Namespaces (${whole(namespaces.namespaces.length)} of ${whole(namespaces.all)})`, table(["id", "tenant", "model", "layout", "codec", "*blocks", "*dram", "*nvme", "*tokens asked", "*hit rate", "*used"], spaces, "No engine has opened a namespace yet."),
      make("p.quiet", {}, "Engines share blocks within one namespace only: a model that is listed twice differs in layout, codec or weights.")),
  ];
}
export function moves({ status, series, engines, elsewhere }) {
  const kinds = [...new Set(engines.moves.map((one) => one.kind))];
  const hues = ["dram", "miss", "engine", "remote", "nvme", "miss2"];
  const lines = kinds.filter((kind) => series.counters[`moves.${kind}`]).map((kind, at) => ({ label: kind, hue: hues[at % hues.length], hatch: 0, values: series.counters[`moves.${kind}`] }));
  const rows = engines.moves.map((one) => [one.kind, one.priority, whole(one.waiting), whole(one.running), whole(one.done), whole(one.failed)]);
  const failed = engines.moves.filter((one) => one.failed);
  const scrub = status.integrity, nvme = status.tiers.find((one) => one.name === "nvme");
  return [
    wide(`Moves a second, ${series.words}`, lines.length ? chart("Moves a second by kind", series.times, rates(series, lines), { unit: " moves/s", restarts: series.restarts, step: series.step, note: series.note, format: (value) => (value < 10 && value % 1 ? value.toFixed(1) : whole(value)) })
      : make("p.quiet", {}, nvme ? `No moves in this time. ${series.note}` : "There is no disk tier: blocks lie in dram alone, and nothing moves.")),
    wide("Moves since the sidecar began", table(["kind", "priority", "*waiting", "*running", "*done", "*failed"], rows, "None: there is no disk tier."),
      make("p.quiet", {}, "Waiting moves that stay mean that the disk is slower than what is asked of it: look-ups that need them end as deadline. Failed ones were refused or given up.")),
    panel("Disk", make("dl", {}, ...[["taken", nvme ? `${bytes(nvme.taken_bytes)} of ${bytes(nvme.budget_bytes)}` : "- (no disk tier)"], ["what is written", nvme ? String(status.nvme_writes ?? "-") : "-"],
      ["verified by the scrub", known(scrub.verified_bytes) ? bytes(scrub.verified_bytes) : "-"], ["damaged", whole(scrub.damaged)], ["unreadable", whole(scrub.unreadable)], ["mended", whole(scrub.mended)], ["last pass ended", moment(scrub.last_pass_ended)]].flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]))),
    panel("What does not work", make("p", {}, status.health.level !== "ok" ? status.health.text : failed.length ? "Everything works now." : "Everything works."),
      failed.length ? make("p", {}, `Moves that failed since the sidecar began: ${failed.map((one) => `${one.kind} ${whole(one.failed)}`).join(", ")}. Their blocks stayed where they were, or will be computed again; if the numbers grow, the disk refuses or is too slow.`) : null),
    elsewherePanel(elsewhere.elsewhere),
  ];
}
export function engines({ status, series, engines: told }) {
  const { sessions, hidden, departed, door } = told.engines;
  const rows = sessions.map((one) => [one.engine || "-", one.tenant || "-", whole(one.connections), whole(one.leases), whole(one.leased_blocks), whole(one.reservations), `${span(status.at - one.since)} ago`, ms(one.wait_ms_p50), ms(one.wait_ms_p99)]);
  const waits = [["wait_ms_p50", "p50", "dram"], ["wait_ms_p99", "p99", "miss"]].filter(([name]) => series.gauges[name]).map(([name, label, hue]) => ({ label, hue, hatch: 0, values: series.gauges[name] }));
  return [
    wide(`Engines (${whole(sessions.length + hidden)})`, table(["engine", "tenant", "*connections", "*leases", "*leased blocks", "*reservations", "*came", "*waited p50", "*waited p99"], rows, empty(status)),
      hidden ? make("p.quiet", {}, `And ${whole(hidden)} more.`) : null, departed ? make("p", {}, `${whole(departed)} connections are gone whose processes may still map memory.`) : null),
    wide(`How long requests waited to be begun, ${series.words}`, waits.length ? chart("Waits of the last 4,096 requests", series.times, waits, { unit: "", format: (value) => `${value && value < 10 ? value.toFixed(2) : whole(value)} ms`, restarts: series.restarts, step: series.step, note: series.note }) : make("p.quiet", {}, "No request has come yet.")),
    panel("API sockets", make("dl", {}, ...[["tenants' connections", whole(door.connections)], ["operators and observers", whole(door.admin_connections)], ["turned away", whole(door.refused)], ["unreadable messages", whole(door.malformed)], ["waited p50", ms(door.wait_ms_p50)], ["waited p99", ms(door.wait_ms_p99)]].flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]))),
    panel("Requests since the sidecar began", table(["verb", "*served"], Object.entries(door.served).sort((a, b) => b[1] - a[1]).map(([name, count]) => [name, whole(count)]), "None yet.")),
  ];
}
const STATES = { __proto__: null, up: ["ok", "up"], banned: ["warning", "banned"], open: ["warning", "breaker open"], down: ["error", "down"] };
function elsewherePanel(told) {
  const title = "Other nodes and the remote tier";
  if (!told) return wide(title, make("p.quiet", {}, "None is configured: this sidecar serves what engines of this host stored."));
  const rows = told.sources.map((one) => {
    const [level, word] = STATES[one.state] ?? ["unknown", one.state];
    return [one.kind, one.name, make("span", {}, make(`b.state.${level}`, {}, word), one.detail ? `: ${one.detail}` : ""), whole(one.blocks_in), whole(one.blocks_out), bytes(one.bytes_in), bytes(one.bytes_out), whole(one.lookups), whole(one.found), whole(one.late || 0), whole(one.failures), whole(one.unwritten || 0), counted(one.refused),
      one.gbps ? one.gbps.toFixed(2) : "-", one.p99_ms ? one.p99_ms.toFixed(1) : "-", whole(one.hints)];
  });
  const why = told.couriers ? told.reasons : ["no courier is there: what other nodes and remote engines have is not fetched (kvstore network)", ...told.reasons];
  return wide(title, why.length ? make("ul.events", {}, ...why.map((one) => make("li.warning", {}, `degraded: ${one}`))) : null,
    table(["kind", "name", "state", "*blocks in", "*blocks out", "*bytes in", "*bytes out", "*look-ups", "*found", "*late", "*failures", "*unwritten", "refused", "*GB/s", "*p99 ms", "*hints"], rows, "No courier has told of one."),
    make("p", {}, `Blocks adopted: ${counted(told.adopted)}. Refused here: ${counted(told.refused)}. Being fetched: ${whole(told.fetching)}. Kept for who waits: ${bytes(told.kept_bytes)}; ${whole(told.gave_way)} blocks gave way to others. Hints not announced: ${whole(told.dropped_hints)}.`),
    make("p.quiet", {}, "Counts are since each courier began; GB/s and p99 are of the last transfers of a megabyte and more, and \"-\" before the first."));
}
const counted = (counts) => Object.entries(counts).filter(([, count]) => count > 0).map(([name, count]) => `${name.replaceAll("_", " ")} ${whole(count)}`).join(", ") || "none";
function gone({ at, gone: went }) {
  if (!went) return "When and why the first of them went is not known any more.";
  const why = { room: `from ${went.tier}, for room`, declined: "from dram, for room; nvme was not to have it (store.nvme_writes)", ttl: `from ${went.tier}, for room: its ttl was over, or more was to be kept than may be`, drop: "as its namespace was dropped" };
  return `The first of them went ${span(Math.max(0, at - went.at))} before, at ${moment(went.at)}, ${why[went.cause] ?? went.cause}.`;
}
function timeline(one) {
  const rows = [...one.looked, ...one.leases].sort((a, b) => a.at - b.at).map((note) => [moment(note.at), `${known(note.first_block) ? "leased" : "looked up: found"} ${whole(note.blocks)} of ${whole(note.wanted)} blocks${known(note.first_block) ? ` from block ${whole(note.first_block)} on` : ""} (${counted(note.tiers)}) in ${ms(1000 * note.seconds)}${note.reason ? `; the others: ${note.reason.replaceAll("_", " ")}${note.detail ? ` (${note.detail})` : ""}` : ""}${note.reason === "evicted" ? `. ${gone(note)}` : ""}`]);
  if (known(one.purged_at)) rows.unshift([moment(one.purged_at), "its tenant was purged: what was stored before is gone"]);
  if (one.reported) rows.push(["-", `${whole(one.reported)} blocks failed their check when they were read, and were not used`]);
  const told = one.told;
  if (told) rows.push([moment(one.told_at), `its engine: ${whole(told.asked)} tokens; hits: ${counted(told.hits)}; misses: ${counted(told.misses)}${told.load_ms ? `; it waited ${ms(told.load_ms)} for its load` : ""}; ${whole(told.saved_blocks)} blocks saved${Object.keys(told.put_reasons).length ? `, not all: ${counted(told.put_reasons)}` : ""}${told.detail ? `. ${told.detail}` : ""}`]);
  return wide(`${one.request}, ${one.engine || "an engine"} of ${one.tenant}${one.model ? `, ${one.model}` : ""}`,
    told ? bar(piecesOf(told.hits, told.misses, 0, told.asked), told.asked, "Nothing was asked for.") : null, table(["when", "what happened"], rows, "Nothing but its name."),
    told ? null : make("p.quiet", {}, "Its engine has not told what became of it: it is still running, or speaks an earlier version."));
}
const largest = (misses) => (Object.entries(misses ?? {}).sort((a, b) => b[1] - a[1])[0]?.[0] ?? "-").replaceAll("_", " ");
function latest(found, kept) {
  const all = (counts) => (counts ? whole(sum(counts)) : "-");
  return wide(`The last requests (${whole(found.length)} of ${whole(kept)})`, table(["request", "engine", "tenant", "model", "*tokens", "*hits", "*misses", "largest miss"], found.map((one) => [make("a", { href: `/request?${new URLSearchParams({ id: one.request })}` }, one.request),
    one.engine || "-", one.tenant, one.model || "-", whole(one.told?.asked), all(one.told?.hits), all(one.told?.misses), largest(one.told?.misses)]), "No engine has named a request yet."), make("p.quiet", {}, "\"-\": its engine has not told yet."));
}
export function request({ answer }) {
  const asked = new URLSearchParams(location.search).get("id") ?? "";
  const form = make("form.plan", { method: "get", action: "/request" }, make("label", {}, "name of the request, or its beginning", make("input", { name: "id", value: asked, placeholder: "cmpl-...", autocomplete: "off", required: "" })), make("button", { type: "submit" }, "Show"));
  const found = answer?.found ?? [];
  return [
    wide("Why was this request a hit, or a miss?", form, answer?.error ? make("p", { id: "problem" }, answer.error) : asked && !found.length ? make("p", { id: "problem" }, `Nothing is known of a request that begins so. The sidecar remembers the last 1,024 requests of each tenant, now ${whole(answer.kept)}, by the names that engines have for them.`) : make("p.quiet", {}, "Names are those of the engine: vLLM tells them in its answers as id. The command is kvstore why.")),
    ...(asked ? found.map(timeline) : [latest(found, answer?.kept)]),
  ];
}
const inUnit = (value, unit) => {
  if (!known(value)) return "-";
  if (unit === "bytes/second") return `${(value / 1e9).toFixed(2)} GB/s`;
  if (unit === "seconds" && value < 1) return `${(1000 * value).toFixed(1)} ms`;
  if (unit.startsWith("bytes")) return `${value < 1 << 20 ? `${whole(value)} B` : bytes(value)}${unit.slice(5).replace("/", " per ")}`;
  if (unit === "share") return percent(value, 1);
  return `${Number.isInteger(value) || value >= 1000 ? whole(value) : value.toFixed(2)} ${(value === 1 ? unit.replace(/s$/, "") : unit).replace("/", " per ")}`;
};
const FIELDS = [
  ["context_tokens", "tokens of a prompt", "8192"], ["users", "users at a time", "1"], ["tensor_parallel", "GPUs (tensor parallel)", "1"],
  ["gpu_memory", "memory of a GPU", ""], ["weights", "the model's weights", ""], ["prefill_rate", "prefill, tokens a second", "10000"],
  ["dram", "DRAM of the store", ""], ["nvme", "NVMe of the store", ""], ["new_tokens_per_second", "new tokens a second", ""], ["window_seconds", "to be reused within, seconds", "900"],
];
export function plan({ models, planned }) {
  const asked = new URLSearchParams(location.search);
  const chosen = planned.model ?? asked.get("model");
  const choice = make("select", { name: "model", id: "model" }, ...models.map((one) => make("option", { value: one.model, ...(one.model === chosen ? { selected: "" } : {}) }, one.model)));
  const own = planned.error ? {} : { dram: bytes(planned.dram_bytes), nvme: bytes(planned.nvme_bytes), new_tokens_per_second: `${whole(planned.new_tokens_per_second)}${planned.is_measured ? ", measured here" : ""}` };
  const form = make("form.plan", { method: "get", action: "/plan" }, make("label", {}, "model", choice),
    ...FIELDS.map(([name, words, usual]) => make("label", {}, words, make("input", { name, value: asked.get(name) ?? usual, placeholder: own[name] ?? (name === "weights" ? "16GB" : "80GB"), autocomplete: "off" }))), make("button", { type: "submit" }, "Plan"));
  return [
    wide("What is planned for", form, make("p.quiet", {}, "Left empty, DRAM and NVMe are this sidecar's; new tokens are what it sees, if it serves this model alone. The command is kvstore plan; it also sizes from a recording (--trace).")),
    ...(planned.error ? [wide("That cannot be planned", make("p", { id: "problem" }, planned.error))] : figuresOf(planned)),
  ];
}
function figuresOf(planned) {
  return [
    planned.refusals.length ? wide("Engines that do not serve all of it", ...planned.refusals.map((one) => make("p", {}, one))) : null,
    ...planned.sections.map((one) => wide(one.heading, table(["", "*", "formula"], one.figures.map((figure) => [figure.words, inUnit(figure.value, figure.unit), figure.formula])))),
    wide("What to know beside it", make("p", {}, `${planned.model}: ${planned.source}; codec ${planned.codec}.`), ...planned.notes.map((one) => make("p.quiet", {}, `${one}.`))),
  ].filter(Boolean);
}
export function events({ events: told, audit }) {
  return [audit ? auditPanel(audit) : null, wide("Events, the newest first", eventList(told, "Nothing has happened since the console began."), make("p.quiet", {}, "The last 500 that the console saw since it began; the sidecar's log has more."))].filter(Boolean);
}
