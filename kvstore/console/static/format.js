// Numbers and elements. Zero is 0, unknown is "-". Text of clients only ever becomes a text node.
export const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);
export const whole = (value) => (known(value) ? value.toLocaleString("en-US", { maximumFractionDigits: 0 }) : "-");
export const percent = (part, all) => (known(part) && all ? `${((100 * part) / all).toFixed(1)} %` : "-");
export const ms = (value) => (known(value) ? `${value.toFixed(2)} ms` : "-");
export function tokens(value) {
  if (!known(value)) return "-";
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= size) return `${(value / (unit === "k" ? 1e3 : size)).toFixed(1)} ${unit}`;
  }
  return whole(value);
}
export function bytes(value) {
  if (!known(value)) return "-";
  let size = value;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(size) < 1024 || unit === "TiB") return `${unit === "B" || Number.isInteger(size) ? whole(size) : size.toFixed(1)} ${unit}`;
    size /= 1024;
  }
  return "-";
}
export const clock = (at) => (known(at) ? new Date(1000 * at).toLocaleTimeString("en-GB") : "-");
export function moment(at) {
  if (!known(at)) return "-";
  const day = new Date(1000 * at);
  const today = new Date().toDateString() === day.toDateString();
  return today ? clock(at) : `${day.toLocaleDateString("en-CA")} ${clock(at)}`;
}
export function span(seconds) {
  if (!known(seconds)) return "-";
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${unit}`;
  return `${Math.round(seconds)} s`;
}
// make("p.quiet", {title: "..."}, "text", child)
export function make(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.filter((one) => one !== null && one !== undefined));
  return element;
}
// head: names; one that begins with * holds numbers.
export function table(head, rows, empty = "None.") {
  if (!rows.length) return make("p.quiet", {}, empty);
  const numeric = head.map((one) => one.startsWith("*"));
  const names = head.map((one) => one.replace(/^\*/, ""));
  const cell = (tag, text, at) => make(numeric[at] ? `${tag}.n` : tag, tag === "td" ? { "data-head": names[at] } : {}, text instanceof Node ? text : String(text));
  return make("div.scroll", { tabindex: "0" }, make(head.length > 4 ? "table.stacks" : "table", {},
    make("thead", {}, make("tr", {}, ...names.map((one, at) => cell("th", one, at)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((one, at) => cell("td", one, at)))))));
}
export const panel = (title, ...children) => make("section.panel", {}, make("h2", {}, title), ...children);
export const wide = (title, ...children) => { const one = panel(title, ...children); one.classList.add("wide"); return one; };
export function detailsOf(title, content) { return make("details", {}, make("summary", {}, title), content); }
export function eventList(events, empty) {
  if (!events.length) return make("p.quiet", {}, empty);
  return make("ul.events", {}, ...events.map((one) => make(`li.${one.level}`, {},
    make("time", { datetime: new Date(1000 * one.at).toISOString() }, moment(one.at)),
    one.page && one.page !== location.pathname ? make("a", { href: one.page + location.search }, one.text) : one.text)));
}
