// Tiles: a figure of now and its last ten minutes.

import { clock, el, number, svg, time } from "./dom.js";

const BINS = 120;
const SPANS = [120, 300, 600]; // seconds that a chart may show: a young router's would be empty over ten minutes
const W = 240;
const H = 48;
const few = (value) => (value === 0 ? "0" : value < 0.1 ? "<0.1" : value < 10 ? value.toFixed(1) : number(value));
const percent = (value) => `${number(value * 100)} %`;

/** What is shown: `lines` are columns of the history, each bin drawn as the mean (or sum) of its seconds. */
const TILES = [
  { name: "Requests", unit: "/s", of: (f) => number(f.rates.requests), lines: ["done"], format: (v) => `${number(v)}/s`,
    note: (f) => `${number(f.rates.tokens)} tokens/s` },
  { name: "In flight", of: (f) => number(f.in_flight), lines: ["in_flight"], format: number,
    note: (f) => `${f.requests_total} since the start` },
  { name: "Queue", of: (f) => number(f.queued), lines: ["queued"], format: number,
    note: (f) => `wait p95 ${f.latencies.queue.count ? time(f.latencies.queue.p95) : "–"}` },
  { name: "TTFT", of: (f) => quantile(f, "ttft", "p50"), lines: ["ttft_p50", "ttft_p95"], format: time,
    note: (f) => `p95 ${quantile(f, "ttft", "p95")}, p99 ${quantile(f, "ttft", "p99")}` },
  { name: "TPOT", of: (f) => quantile(f, "tpot", "p50"), lines: ["tpot_p50", "tpot_p95"], format: time,
    note: (f) => `p95 ${quantile(f, "tpot", "p95")}, p99 ${quantile(f, "tpot", "p99")}` },
  { name: "Handover", of: (f) => quantile(f, "handover", "p50"), lines: ["handover_p50", "handover_p95"], format: time,
    note: (f) => `p95 ${quantile(f, "handover", "p95")}, p99 ${quantile(f, "handover", "p99")}` },
  { name: "Failed", of: (f) => percent(f.rates.requests ? f.rates.failed / f.rates.requests : 0), lines: ["failed"],
    format: (v) => `${number(v)}/s`, bad: (f) => f.rates.failed > 0, bars: true,
    note: (f) => `${few(f.rates.retries)} retried, ${few(f.rates.continued)} moved /s` },
];

function quantile(fleet, measure, which) {
  const found = fleet.latencies[measure];
  return found.count ? time(found[which]) : "–";
}

/** Seconds into bins that stay where they are while the picture moves. null: nothing was measured in it. */
function binned(rows, column, now, wide) {
  const last = Math.floor(now / wide);
  const sums = new Array(BINS).fill(0);
  const counts = new Array(BINS).fill(0);
  for (const row of rows) {
    const bin = Math.floor(row.at / wide) - last + BINS - 1;
    if (bin >= 0 && bin < BINS && row[column] !== null) {
      sums[bin] += row[column];
      counts[bin] += 1;
    }
  }
  return sums.map((sum, i) => (counts[i] ? sum / counts[i] : null));
}

function line(values, top) {
  let path = "";
  let gap = true;
  values.forEach((value, i) => {
    if (value === null) return; // a bin without requests: the line goes on to the next that has some
    path += `${gap ? "M" : "L"}${((i + 0.5) * W / BINS).toFixed(1)} ${(H - 2 - (value / top) * (H - 6)).toFixed(1)}`;
    gap = false;
  });
  return path;
}

function chart(tile, rows, now, wide) {
  const all = tile.lines.map((column) => binned(rows, column, now, wide));
  const top = Math.max(1e-9, ...all.flat().filter((value) => value !== null)) * 1.05;
  const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  if (tile.bars) {
    all[0].forEach((value, i) => {
      if (value) {
        const high = Math.max(3, (value / top) * (H - 6));
        picture.append(svg("rect", { class: "bar", x: i * W / BINS, y: H - 2 - high, width: W / BINS, height: high }));
      }
    });
  } else {
    const path = line(all[0], top);
    const ends = [...path.matchAll(/[ML]([\d.]+)/g)];
    if (ends.length > 1) {
      picture.append(svg("path", { class: "area", d: `${path}L${ends.at(-1)[1]} ${H}L${ends[0][1]} ${H}Z` }));
    }
    all.toReversed().forEach((values, i) => picture.append(
      svg("path", { class: i === all.length - 1 ? "curve" : "curve second", d: line(values, top) })));
  }
  return { picture, values: all };
}

/** Fills `node` with tiles; `update(fleet, rows, now)` draws them anew. */
export function tiles(node) {
  const made = TILES.map((tile) => {
    const value = el("strong", {}, "–");
    const note = el("span", { class: "note" });
    const box = el("div", { class: "spark" });
    const card = el("article", { class: "tile", "data-name": tile.name }, el("h3", {}, tile.name), value, box, note);
    const state = { tile, value, note, box, card, pointed: null, values: [], said: "" };
    box.addEventListener("pointermove", (event) => {
      const at = box.getBoundingClientRect();
      state.pointed = Math.min(BINS - 1, Math.max(0, Math.floor((event.clientX - at.left) / at.width * BINS)));
      point(state);
    });
    box.addEventListener("pointerleave", () => {
      state.pointed = null;
      point(state);
    });
    return state;
  });
  node.replaceChildren(...made.map((state) => state.card));
  return (fleet, rows, now) => {
    const shown = SPANS.find((span) => span >= rows.length) ?? SPANS.at(-1);
    node.dataset.shown = shown;
    for (const state of made) {
      const { tile } = state;
      state.value.replaceChildren(tile.of(fleet), el("small", {}, tile.unit ?? ""));
      state.card.classList.toggle("bad", Boolean(tile.bad?.(fleet)));
      const { picture, values } = chart(tile, rows, now, shown / BINS);
      state.box.replaceChildren(picture);
      state.values = values;
      state.now = now;
      state.wide = shown / BINS;
      state.said = tile.note(fleet);
      point(state);
    }
  };
}

function point(state) {
  if (state.pointed === null) {
    state.note.textContent = state.said;
    return;
  }
  const at = (Math.floor(state.now / state.wide) - BINS + 1 + state.pointed) * state.wide;
  const words = state.values.map((values, i) => {
    const value = values[state.pointed];
    const prefix = state.values.length > 1 ? ["p50 ", "p95 "][i] : "";
    return `${prefix}${value === null ? "–" : state.tile.format(value)}`;
  });
  state.note.textContent = `${clock(at)}  ${words.join(", ")}`;
}
