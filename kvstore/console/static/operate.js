// What an operator does: each action is confirmed by its name, typed, and asked for with a ticket that is good once.
import { make, table, wide, moment, whole, bytes } from "./format.js";

async function answerOf(url, options) {
  const answer = await fetch(url, options), body = await answer.json();
  if (!answer.ok) throw new Error(body.error ?? `status ${answer.status}`);
  return body;
}
async function act(what, order) {
  const { ticket } = await answerOf("/api/operator", {});
  return answerOf(`/api/operator/${what}`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ ...order, ticket }) });
}
const IRREVOCABLE = { drop: "This deletes.", purge: "This deletes for good." };
// choices: [what is sent, what is to be typed, words]; rest: further fields, and what they add to what is sent.
function form(what, title, words, label, choices, rest = [], more = () => ({})) {
  if (!choices.length) return wide(title, make("p.quiet", {}, "There is none."));
  const choice = make("select", { id: `${what}-choice` }, ...choices.map(([, , text], at) => make("option", { value: at }, text)));
  const typed = make("input", { id: `${what}-confirm`, autocomplete: "off", spellcheck: "false" });
  const button = make("button", { type: "submit", disabled: "" }, title), said = make("p", { id: `${what}-result`, role: "status" });
  const asked = make("code", {}), chosen = () => choices[Number(choice.value)];
  const look = () => { asked.textContent = chosen()[1]; button.disabled = typed.value !== chosen()[1]; };
  const one = make("form.plan.act", {}, make("label", {}, label, choice), ...rest, make("label", {}, "type ", asked, " to confirm", typed), button);
  choice.addEventListener("change", () => { typed.value = ""; look(); });
  typed.addEventListener("input", look);
  one.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    said.textContent = "Under way; it may take half a minute.";
    try {
      const done = await act(what, { ...chosen()[0], ...more(), confirm: typed.value });
      said.textContent = `Done: ${done.text}.`;
    } catch (error) { said.textContent = `Not done: ${error.message}.`; }
    typed.value = "";
    look();
  });
  look();
  const framed = wide(title, make(IRREVOCABLE[what] ? "p" : "p.quiet", {}, IRREVOCABLE[what] ? make("b.state.error", {}, `${IRREVOCABLE[what]} `) : "", words), one, said);
  if (IRREVOCABLE[what]) { framed.classList.add("deletes"); button.classList.add("danger"); }
  return framed;
}
export function operate({ status, namespaces, tenants }) {
  if (!status.acts) return [wide("This console changes nothing", make("p", {}, "Start it with console.operator = true, or kvstore console --operator, to drop, purge and warm here. The commands do the same: kvstore drop, kvstore purge, kvstore warm."))];
  const spaces = namespaces.namespaces.map((one) => [{ tenant: one.tenant, namespace: one.id }, one.id, `${one.id}, ${one.tenant}: ${one.name || one.model}, ${one.layout}, ${one.codec} (${whole(one.blocks)} blocks, ${bytes(one.dram_bytes)} dram)`]);
  const names = tenants.map((one) => [{ tenant: one.tenant }, one.tenant, `${one.tenant}: ${whole(one.namespaces)} namespaces`]);
  const prompts = make("textarea", { id: "prompts", rows: "4", placeholder: "[1, 2, 3]", spellcheck: "false" });
  return [
    form("warm", "Warm prefixes", "Brings the stored prefixes of prompts up to DRAM, before engines ask for them. JSON lines of token ids, as kvstore warm reads them.", "namespace", spaces, [make("label", {}, "prompts, a line each", prompts)], () => ({ prompts: prompts.value })),
    form("drop", "Drop a namespace", "Evicts all of it from every tier. Engines store it again as they compute it.", "namespace", spaces),
    form("purge", "Purge a tenant", "Voids all of its blocks durably, retires its key and ends its connections. There is no way back.", "tenant", names),
    namespaces.next ? make("p.quiet.wide", {}, "Not all namespaces are listed: kvstore drop takes the others.") : null,
    make("p.wide", {}, make("a", { href: "/events" }, "What was done here so far")),
  ].filter(Boolean);
}
export function auditPanel(entries) {
  const rows = entries.map((one) => [moment(one.at), one.what, one.tenant, one.namespace ? make("code", {}, one.namespace) : "-", one.result === "begun" ? "begun; its end is not known" : one.result, one.text || "-", one.who]);
  return wide("What operators did here, the newest first", table(["when", "what", "tenant", "namespace", "result", "what came of it", "who"], rows, "Nothing yet."));
}
