// The 100 % bar, and uPlot with this house's colours. Misses are hatched, hits are not; the order never changes.
import { bytes, detailsOf, known, make, moment, percent, table, tokens, whole } from "./format.js";

const ORDER = ["engine", "hbm", "dram", "nvme", "peer", "remote"];
const HUES = { engine: "engine", hbm: "dram", dram: "dram", nvme: "nvme", peer: "remote", remote: "remote", found: "found" };
const NAMES = { engine: "engine's own cache", hbm: "hbm", dram: "dram", nvme: "nvme", peer: "other nodes", remote: "remote", found: "found, not loaded" };
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
// Each miss reason's hue, and its hatch below: calm, nothing is to be done; miss2, see whether it can be less; miss, see to it.
export const LOOKS = {
  partial_block: ["calm", 1], last_token: ["calm", 2], grid: ["calm", 3], audit: ["calm", 4], in_flight: ["calm", 5], cheaper_to_compute: ["calm", 6], disabled: ["calm", 7], incomplete: ["calm", 8],
  absent: ["miss2", 1], evicted: ["miss2", 2], diverged: ["miss2", 3], other_namespace: ["miss2", 4], warming: ["miss2", 5], pinned_full: ["miss2", 6],
  deadline: ["miss2", 7], stale_hint: ["miss2", 8], quota: ["miss2", 9], not_admitted: ["miss2", 10], busy: ["miss2", 11], others: ["miss2", 12], no_state: ["miss2", 13],
  corrupt: ["miss", 1], tier_down: ["miss", 2], unreachable: ["miss", 3], key_mismatch: ["miss", 4], nonfinite: ["miss", 5], out_of_range: ["miss", 6], unsupported: ["miss", 7],
};
const HATCHES = [null, [45, 8], [-45, 8], [90, 8], [0, 8], [45, 5], [-45, 5], [90, 5], [0, 5], [45, 13], [-45, 13], [90, 13], [0, 13], [45, 21]];  // degrees, pixels from stripe to stripe
export function lookOf(name) { const [hue, hatch] = LOOKS[name] ?? ["miss2", 1]; return { hue, hatch }; }  // a later sidecar's reason
function painted(element, one) {
  element.classList.add(`hue-${one.hue}`);
  if (!one.hatch) return element;
  const [slope, pitch] = HATCHES[one.hatch];
  element.classList.add("hatched");
  element.style.setProperty("--slope", `${slope}deg`); element.style.setProperty("--pitch", `${pitch}px`);
  return element;
}
const rest = (count) => `${count} other reason${count === 1 ? "" : "s"}`;

// hits, misses: tokens by name. Pieces in their order; misses largest first, those below 1 % joined, but for what is to be seen to.
export function piecesOf(hits, misses, found, asked) {
  const pieces = ORDER.filter((name) => hits[name] > 0).map((name) => ({ name, label: NAMES[name], hue: HUES[name], hatch: 0, tokens: hits[name] }));
  if (found > 0) pieces.push({ name: "found", label: NAMES.found, hue: "found", hatch: 0, tokens: found });
  const sorted = Object.entries(misses).filter(([, count]) => count > 0).sort((a, b) => b[1] - a[1]);
  const isLarge = ([name, count]) => count >= asked / 100 || lookOf(name).hue === "miss", large = sorted.filter(isLarge), small = sorted.filter((one) => !isLarge(one));
  if (small.length === 1) large.push(small.pop());
  large.forEach(([name, count]) => pieces.push({ name, label: `miss: ${name.replaceAll("_", " ")}`, ...lookOf(name), tokens: count, miss: true }));
  if (small.length) pieces.push({ name: "others", label: rest(small.length), ...lookOf("others"), tokens: small.reduce((sum, [, count]) => sum + count, 0), miss: true });
  return pieces;
}
const swatch = (one) => painted(make("i.swatch"), one);

export function bar(pieces, asked, empty) {
  if (!asked) return make("div", {}, make("div.bar.empty"), make("p.quiet", {}, empty));
  const row = make("div.bar", { role: "img", "aria-label": pieces.map((one) => `${one.label} ${percent(one.tokens, asked)}`).join(", ") });
  for (const one of pieces) {
    const part = painted(make("span", { title: `${one.label}: ${whole(one.tokens)} tokens` }), one);
    part.style.flexGrow = String(one.tokens);
    part.style.flexBasis = "0";
    if (one.tokens / asked >= 0.14) part.append(make("b", {}, one.label.replace("miss: ", "")));
    row.append(part);
  }
  const legend = make("ul.legend", {}, ...pieces.map((one) => make("li", { "data-piece": one.name, "data-tokens": one.tokens }, swatch(one), `${one.label} ${percent(one.tokens, asked)} (${whole(one.tokens)})`)));
  return make("div", {}, row, legend);
}

function hatched(one) {
  const base = colour(one.hue === "found" ? "line" : one.hue);
  if (!one.hatch) return base;
  const [slope, pitch] = HATCHES[one.hatch], isUpright = slope % 90 === 0, size = Math.round(isUpright ? pitch : pitch * Math.SQRT2);
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const pen = tile.getContext("2d");
  pen.fillStyle = base; pen.fillRect(0, 0, size, size);
  pen.strokeStyle = colour("stripe"); pen.lineWidth = 0.4 * pitch;
  pen.beginPath();
  for (const shift of isUpright ? [size / 2] : [-size, 0, size]) {  // CSS's angle is across its stripes
    if (slope === 90) { pen.moveTo(shift, 0); pen.lineTo(shift, size); } else if (slope === 0) { pen.moveTo(0, shift); pen.lineTo(size, shift); } else if (slope < 0) { pen.moveTo(shift - size, 2 * size); pen.lineTo(shift + 2 * size, -size); } else { pen.moveTo(shift - size, -size); pen.lineTo(shift + 2 * size, 2 * size); }
  }
  pen.stroke();
  return pen.createPattern(tile, "repeat");
}
// The same for the legend below a chart, whose swatches are no elements of ours.
function marker(one) {
  const base = colour(one.hue === "found" ? "line" : one.hue);
  if (!one.hatch) return base;
  const [slope, pitch] = HATCHES[one.hatch], gap = Math.round(0.6 * pitch);
  return `repeating-linear-gradient(${slope}deg, transparent 0 ${gap}px, ${colour("stripe")} ${gap}px ${pitch}px), ${base}`;
}
// While no pointer is over a chart, its legend shows the last values. rows: of the series, as they are told.
const lastShown = (rows) => {
  const last = Math.max(-1, ...rows.map((values) => values.findLastIndex(known)));
  const show = (plot) => { if (last >= 0 && !known(plot.cursor.idx)) plot.setLegend({ idx: last }, false); };
  return { ready: [show], setLegend: [show] };
};
const drawn = new Set();
addEventListener("themechange", () => drawn.forEach((one) => one.redraw()));
export function endCharts() { drawn.forEach((one) => { one.watcher.disconnect(); one.destroy(); }); drawn.clear(); }

const FONT = "system-ui, 'DejaVu Sans', sans-serif";
const axis = { stroke: () => colour("quiet"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { stroke: () => colour("line"), width: 1 }, font: `12px ${FONT}` };
// As wide as its box, until the page is drawn again.
function keep(plot, box, height) {
  plot.watcher = new ResizeObserver(() => { const width = Math.floor(box.clientWidth); if (width > 0 && width !== plot.width) plot.setSize({ width, height }); });
  plot.watcher.observe(box);
  drawn.add(plot);
}
// points: [[bytes, share]], sizes rising. ceiling: drawn across. marks: [{at, text}], sizes that are named.
export function curve(title, points, ceiling, marks) {
  const box = make("div.chart", { "aria-label": title });
  const least = Math.min(...points.map(([size]) => size), ...marks.map(({ at }) => at)) / 2, most = 2 * Math.max(...points.map(([size]) => size), ...marks.map(({ at }) => at));
  const rising = [[least, 0], ...points.filter(([size]) => size > least), [most, ceiling]];
  const share = (value) => (known(value) ? percent(value, 1) : "-");
  const options = {
    width: 300, height: 220, cursor: { y: false }, legend: { live: true, markers: { fill: () => colour("dram") } }, padding: [16, 26, 0, 0],
    scales: { x: { time: false, distr: 3, log: 2 }, y: { range: () => [0, Math.max(0.05, Math.min(1, ceiling * 1.15))] } },
    axes: [{ ...axis, space: 80, values: (_, found) => found.map((one) => (one === null ? null : bytes(one))) }, { ...axis, size: 64, values: (_, found) => found.map((one) => `${Math.round(100 * one)} %`) }],
    series: [{ label: "size", value: (_, at) => bytes(at) }, { label: "tokens found", width: 2, points: { show: false }, stroke: () => colour("dram"), value: (_, at) => share(at) }],
    hooks: { ...lastShown([rising.map(([, found]) => found)]), draw: [(plot) => {
      const pen = plot.ctx, ratio = devicePixelRatio || 1;
      pen.save(); pen.setLineDash([4 * ratio, 4 * ratio]); pen.lineWidth = ratio; pen.strokeStyle = pen.fillStyle = colour("quiet");
      pen.font = `${12 * ratio}px ${FONT}`;
      const line = (fromX, fromY, toX, toY) => { pen.beginPath(); pen.moveTo(fromX, fromY); pen.lineTo(toX, toY); pen.stroke(); };
      const { left, top, width, height } = plot.bbox, level = plot.valToPos(ceiling, "y", true);
      line(left, level, left + width, level);
      pen.textAlign = "left"; pen.fillText(`ceiling, ${share(ceiling)}`, left + 6 * ratio, level - 4 * ratio);
      marks.forEach(({ at, text }, place) => {
        const x = plot.valToPos(at, "x", true), isLate = x > left + width / 2;
        line(x, top, x, top + height);
        pen.textAlign = isLate ? "right" : "left";
        pen.fillText(text, x + (isLate ? -4 : 4) * ratio, top + height - (8 + 15 * place) * ratio);
      });
      pen.restore();
    }] },
  };
  const plot = new uPlot(options, [rising.map(([size]) => size), rising.map(([, found]) => found)], box);
  keep(plot, box, 220);
  return make("div", {}, box, detailsOf("Table of the curve", table(["size", "*tokens found"], points.map(([size, found]) => [bytes(size), share(found)]))));
}

// series: [{label, hue, hatch, values}], values may hold null. stacked: painted from the sum of all down to the first.
export function chart(title, times, series, { stacked = false, unit = "", format = tokens, restarts = [], step = 10, note = "" } = {}) {
  const box = make("div.chart", { "aria-label": title });
  const isCut = times.map((at) => restarts.some((one) => one >= at && one < at + step));
  const shown = series.map((one) => one.values.map((value, at) => (isCut[at] ? null : value)));
  const sums = stacked ? shown.map((_, place) => times.map((_, at) => {
    let sum = 0, any = false;
    for (let below = 0; below <= place; below++) if (known(shown[below][at])) { sum += Math.max(0, shown[below][at]); any = true; }
    return any ? sum : null;
  })) : shown;
  const order = stacked ? [...series.keys()].reverse() : [...series.keys()];
  const options = {
    width: 300, height: 200, cursor: { sync: { key: "kvstore" }, y: false }, legend: { live: true, isolate: true, markers: { fill: (_, at) => (at ? marker(series[order[at - 1]]) : "") } },
    padding: [10, 26, 0, 0], scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), high > 0 ? high * 1.05 : 1] } },
    axes: [{ ...axis, values: "{HH}:{mm}", space: 70 }, { ...axis, size: 64, values: (_, found) => found.map((one) => format(one)) }],
    series: [{ value: (_, at) => (known(at) ? moment(at) : "-") }, ...order.map((at) => ({
      label: series[at].label, width: stacked ? 0 : 2, points: { show: stacked ? false : undefined, size: 4 }, spanGaps: false,
      stroke: () => colour(series[at].hue === "found" ? "quiet" : series[at].hue), fill: stacked ? () => hatched(series[at]) : undefined,
      paths: uPlot.paths.stepped({ align: 1 }), value: (_, __, ___, place) => (known(place) && known(shown[at][place]) ? `${format(shown[at][place])}${unit}` : "-"),
    }))],
    hooks: { ...lastShown(shown), draw: [(plot) => {
      plot.ctx.save(); plot.ctx.strokeStyle = colour("error"); plot.ctx.setLineDash([4, 4]);
      for (const at of restarts) { const x = plot.valToPos(at, "x", true); plot.ctx.beginPath(); plot.ctx.moveTo(x, plot.bbox.top); plot.ctx.lineTo(x, plot.bbox.top + plot.bbox.height); plot.ctx.stroke(); }
      plot.ctx.restore();
    }] },
  };
  // A slot is as wide as its step: the last one needs an end.
  const ended = [...times, times[times.length - 1] + step];
  const plot = new uPlot(options, [ended, ...order.map((at) => [...sums[at], sums[at][times.length - 1]])], box);
  keep(plot, box, 200);
  const rows = times.map((at, place) => [moment(at), ...shown.map((values) => (known(values[place]) ? format(values[place]) : "-"))]).reverse().slice(0, 60);
  const head = ["from", ...series.map((one) => `*${one.label}`)];
  return make("div", {}, box, restarts.length ? make("p.quiet", {}, `Dashed: the sidecar began again at ${restarts.map(moment).join(", ")}; nothing is drawn across it.`) : null,
    note ? make("p.quiet", {}, note) : null, detailsOf(`Table (the newest ${rows.length} of ${times.length}${unit ? `,${unit}` : ""})`, table(head, rows)));
}
