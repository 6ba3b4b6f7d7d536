// Where prompts part that need not, and which stored prefixes are hot.
import { bytes, detailsOf, known, make, moment, span, table, tokens, whole, wide } from "./format.js";

const rate = (value) => (known(value) && value > 0 && value < 10 ? value.toFixed(1) : tokens(value));
const place = (one) => (one.last_place === one.place ? whole(one.place) : `${whole(one.place)} to ${whole(one.last_place)}`);
const empty = (told) => (told.prompts
  ? `None. ${whole(told.prompts)} sketches of prompts came from engines, and none of these prompts parts from an earlier one and is the same again behind.`
  : "No engine has sent a sketch of a prompt yet. vLLM sends one of 100 prompts that missed more than 1,024 tokens (its connector's setting sketch_every); what leaves it are keyed hashes, never tokens.");

function partings(told, status) {
  const rows = told.partings.map((one) => [one.kind, ...(status.tenant ? [] : [one.tenant]), one.model || one.namespace, place(one), known(one.tokens) ? `${whole(one.tokens)} for ${whole(one.earlier_tokens)}` : "-", whole(one.equal_tokens), rate(one.prompts_per_hour), rate(one.lost_tokens_per_hour), whole(one.prompts), moment(one.seen_at)]);
  return wide("Where prompts part that are the same again behind",
    told.partings.length ? make("ul.events.partings", {}, ...told.partings.map((one) => make("li.warning", { "data-kind": one.kind }, one.sentence,
      make("p.quiet", {}, `${status.tenant ? "" : `${one.tenant}, `}${one.model || one.namespace}; ${whole(one.prompts)} prompt${one.prompts === 1 ? " was" : "s were"} sampled, the last one at ${moment(one.seen_at)}.${one.is_exact ? "" : " By sketches alone: the block is known, not the token."}`)))) : make("p.quiet", {}, empty(told)),
    make("p.quiet", {}, "Of the samples that engines send, with how many prompts each stands for. A file of prompts is judged the same way by kvstore lint, before they are sent."),
    rows.length ? detailsOf("Table", table(["kind", ...(status.tenant ? [] : ["tenant"]), "model", "*at token", "*tokens there", "*equal behind", "*prompts/h", "*tokens lost/h", "*sampled", "*last seen"], rows)) : null);
}
function tiersOf(one) {
  if (!one.stored_tokens) return "not stored any more";
  const there = Object.entries(one.tiers).map(([tier, blocks]) => `${tier} ${whole(blocks)}`).join(", ");
  return one.stored_tokens < one.tokens ? `${there}; ${whole(one.tokens - one.stored_tokens)} tokens are gone` : there;
}
function hottest(told, status) {
  const rows = told.hottest.map((one) => [make("code", {}, one.id), ...(status.tenant ? [] : [one.tenant]), one.model || one.namespace, whole(one.tokens), rate(one.requests_per_hour), rate(one.saved_tokens_per_hour), known(one.saved_seconds_per_hour) ? `${one.saved_seconds_per_hour.toFixed(1)} s` : "-", bytes(one.bytes), tiersOf(one), `${span(status.at - one.used_at)} ago`, moment(one.retained_until)]);
  return wide("Hottest prefixes", table(["prefix", ...(status.tenant ? [] : ["tenant"]), "model", "*tokens", "*requests/h", "*tokens saved/h", "*GPU time saved/h", "*size", "blocks by tier", "*last use", "*retained until"], rows,
    told.lookups ? `None: no prefix that was found stands out among ${whole(told.lookups)} look-ups.` : "No look-ups yet."),
    make("p.quiet", {}, "A prefix counts for the requests that no longer one in this list explains; it is named by the first digits of its last block's key, and listed from 1 % of all tokens found on. \"-\" is unknown: engines that do not tell what hits save, or no client asked for it to be retained."));
}
export function prefixes({ status, prefixes: told }) {
  if (told.error) return [wide("Prefixes", make("p", { id: "problem" }, `The sidecar does not say: ${told.error}.`))];
  const short = told.seconds < 3600 ? ` It has run for ${span(told.seconds)}: what is said of an hour is worked out from that.` : "";
  const lost = told.dropped ? ` ${whole(told.dropped)} came too fast and are left out.` : "";
  return [partings(told, status), hottest(told, status),
    wide("What these are made of", make("p.quiet", {}, `Of ${whole(told.lookups)} look-ups since the sidecar began ${whole(told.sampled)} were followed, and ${whole(told.prompts)} sketches of prompts came. What came half an hour ago counts half.${lost}${short}${known(told.sketches) ? ` ${whole(told.sketches)} sketches are kept (${bytes(told.sketch_bytes)}).` : ""}`))];
}
