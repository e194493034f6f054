// The live picture: prefill on the left, decode on the right, and a line for each pair that KV goes between.

import { el, fill, number, span, svg, time } from "./dom.js";

const ROOMY = 10;
const MOST = 60;
const MOST_LINES = 80;
const MOST_LABELS = 14;
const ROLES = ["prefill", "decode"];

/** What is wrong or special with an instance, and its class. */
function condition(instance) {
  if (instance.suspended) return ["suspended", "bad"];
  if (instance.ejected) return ["ejected", "bad"];
  if (instance.state === "ready") return ["ready", "good"];
  if (instance.drained) return ["drained", "idle"];
  return [instance.state, instance.state === "draining" ? "warn" : "idle"];
}

/** Why a router does not pick an instance; empty where it does, or where its state says it. */
const whyNot = (instance) => instance.suspended || instance.ejected;

/** The share of an engine's drafts that were accepted, since its start; empty where it does not speculate. */
function accepted(drafts) {
  if (!drafts) return "";
  return drafts.drafted ? `${Math.round(100 * drafts.accepted / drafts.drafted)} %` : "none yet";
}

const busy = (instance) => instance.in_flight + instance.load.running + instance.load.waiting + instance.served_s;

function meter(share) {
  const whole = Math.round(Math.min(1, Math.max(0, share)) * 100);
  const bar = el("i", { class: whole >= 90 ? "full" : null });
  bar.style.width = `${whole}%`;
  return el("span", { class: "meter", role: "meter", "aria-valuenow": whole, "aria-valuemin": 0, "aria-valuemax": 100,
    "aria-label": "KV cache in use" }, bar);
}

function box(instance, roomy) {
  const [word, kind] = condition(instance);
  const kv = `${Math.round(instance.load.kv_usage * 100)} %`;
  const worth = accepted(instance.load.drafts);
  const title = `${instance.instance}: ${instance.role}, ${word}${whyNot(instance) ? ` (${whyNot(instance)})` : ""}\n`
    + `KV ${kv}, ${instance.in_flight} legs of this router, engine: ${instance.load.running} running, `
    + `${instance.load.waiting} waiting\n${worth ? `drafts accepted since its start: ${worth}\n` : ""}last heartbeat ${time(instance.beat_age_s)} ago, epoch ${instance.epoch}`;
  const name = el("b", { class: "name" }, instance.instance);
  const state = el("span", { class: `word ${kind}` }, word);
  const attributes = { class: `box ${instance.role} ${kind}`, "data-instance": instance.instance, title };
  if (!roomy) return el("div", { ...attributes, class: `${attributes.class} dense` }, name, meter(instance.load.kv_usage),
    kind === "good" ? el("span", { class: "count" }, String(instance.in_flight)) : state);
  const facts = el("dl", {},
    el("div", {}, el("dt", {}, "in flight"), el("dd", {}, String(instance.in_flight))),
    el("div", {}, el("dt", {}, "running"), el("dd", {}, String(instance.load.running))),
    el("div", {}, el("dt", {}, "waiting"), el("dd", {}, String(instance.load.waiting))),
    el("div", {}, el("dt", {}, "legs/s"), el("dd", {}, number(instance.served_s))),
    worth ? el("div", {}, el("dt", {}, "accepted"), el("dd", {}, worth)) : null);
  return el("div", attributes, el("div", { class: "head" }, name, state),
    el("div", { class: "kv" }, el("span", {}, "KV"), meter(instance.load.kv_usage), el("span", {}, kv)), facts,
    whyNot(instance) ? el("p", { class: "why" }, whyNot(instance)) : null,
    instance.state !== "starting" && instance.beat_age_s > 10
      ? el("p", { class: "why" }, `silent for ${span(instance.beat_age_s)}`) : null);
}

function column(role, instances) {
  const mine = instances.filter((instance) => instance.role === role);
  const roomy = mine.length <= ROOMY;
  const shown = mine.length > MOST ? mine.toSorted((a, b) => busy(b) - busy(a)).slice(0, MOST) : mine;
  const rest = mine.length - shown.length;
  const head = el("h3", {}, `${role} `, el("span", { class: "faint" }, String(mine.length)));
  const boxes = shown.map((instance) => box(instance, roomy));
  if (!mine.length) {
    boxes.push(el("p", { class: "none" }, role === "prefill" ? "No prefill instance: decode computes prompts itself, or requests are refused"
      : "No decode instance: every request is refused"));
  }
  if (rest) boxes.push(el("p", { class: "faint more" }, `and ${rest} more, less busy`));
  return el("div", { class: "column", "data-role": role }, head, ...boxes);
}

function lines(node, pairs) {
  const layer = node.querySelector("svg.flows");
  const frame = node.getBoundingClientRect();
  layer.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
  const places = new Map([...node.querySelectorAll("[data-instance]")].map(
    (each) => [each.dataset.instance, each.getBoundingClientRect()]));
  const shown = pairs.filter((pair) => places.has(pair.prefill) && places.has(pair.decode)).slice(0, MOST_LINES);
  const most = Math.max(...shown.map((pair) => pair.per_s), 1e-9);
  const drawn = [];
  const labels = [];
  shown.forEach((pair, i) => {
    const from = places.get(pair.prefill);
    const to = places.get(pair.decode);
    // A role may have been switched: the line leaves at whichever side faces the other box.
    const right = from.left < to.left;
    const x1 = (right ? from.right : from.left) - frame.left;
    const x2 = (right ? to.left : to.right) - frame.left;
    const y1 = from.top + from.height / 2 - frame.top;
    const y2 = to.top + to.height / 2 - frame.top;
    const bend = (x2 - x1) * 0.45;
    const share = pair.per_s / most;
    const path = svg("path", { class: "flow", d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`,
      "stroke-width": (1 + 2 * share).toFixed(2), "stroke-opacity": (0.35 + 0.6 * share).toFixed(2),
      "data-pair": `${pair.prefill} ${pair.decode}` }, svg("title", {},
      `${pair.prefill} → ${pair.decode}: ${number(pair.per_s)} requests/s, handover ${time(pair.handover_s)}`));
    path.style.animationDuration = `${(3 - 2.2 * share).toFixed(2)}s`;
    drawn.push(path);
    if (i < MOST_LABELS && Math.abs(x2 - x1) > 60) {
      // Labels stand at different thirds of their lines, or those of crossing lines would lie on each other.
      const t = [0.5, 0.32, 0.68][i % 3];
      const at = (a, b, c, d) => a * (1 - t) ** 3 + 3 * b * t * (1 - t) ** 2 + 3 * c * t ** 2 * (1 - t) + d * t ** 3;
      labels.push(svg("text", { class: "rate", x: at(x1, x1 + bend, x2 - bend, x2).toFixed(1),
        y: (at(y1, y1, y2, y2) + 4).toFixed(1), "text-anchor": "middle" }, `${number(pair.per_s)}/s`));
    }
  });
  layer.replaceChildren(...drawn, ...labels);
}

function empty() {
  return el("div", { class: "empty" }, el("strong", {}, "No instance is known"),
    el("p", {}, "No engine's agent has sent a heartbeat to this router. Until one does, every request is answered with 503."),
    el("p", { class: "faint" }, "Look at the agents' logs: they name the router they try and why it refuses them."));
}

let latest = [];

/** Draw instances and the flows between them. */
export function draw(node, fleet) {
  latest = fleet.pairs;
  if (!fleet.instances.length) {
    fill(node, empty());
    return;
  }
  if (!node.querySelector("svg.flows")) {
    node.replaceChildren(el("div", { class: "both" }), svg("svg", { class: "flows", "aria-hidden": "true" }));
    new ResizeObserver(() => node.querySelector("svg.flows") && lines(node, latest)).observe(node);
  }
  fill(node.firstChild, ...ROLES.map((role) => column(role, fleet.instances)));
  lines(node, fleet.pairs);
}
