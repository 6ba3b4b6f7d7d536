// Which stored prefixes are hot.
import { bytes, known, make, moment, span, table, tokens, whole, wide } from "./format.js";

const rate = (value) => (known(value) && value > 0 && value < 10 ? value.toFixed(1) : tokens(value));
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
  return [hottest(told, status),
    wide("What these are made of", make("p.quiet", {}, `Of ${whole(told.lookups)} look-ups since the sidecar began ${whole(told.sampled)} were followed. What came half an hour ago counts half.${lost}${short}`))];
}
