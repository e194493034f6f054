// Lists: failures with their reasons, pairs, changes of the roster.

import { clock, el, fill, number, time } from "./dom.js";

const OUTCOMES = {
  failed: "no engine could answer",
  broken: "broke off in mid-stream",
  timeout: "took too long",
  unavailable: "refused, nobody to serve it",
};

function table(heads, rows) {
  return el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, ...rows));
}

const calm = (words) => el("p", { class: "calm" }, words);

export function failures(node, count, fleet) {
  const latest = fleet.failures.toReversed();
  count.textContent = latest.length ? `the latest ${latest.length}, ${fleet.requests_failed} since the start` : "";
  if (!latest.length) {
    fill(node, calm(fleet.requests_total ? `None of ${number(fleet.requests_total)} requests failed.` : "No request yet."));
    return;
  }
  fill(node, el("ul", { class: "failures" }, ...latest.map((each) => el("li", { title: `transfer ${each.transfer || "none"}` },
    el("div", {}, el("time", {}, clock(each.at)), el("span", { class: "tag", title: OUTCOMES[each.outcome] ?? "" },
      `${each.outcome}${each.status ? ` ${each.status}` : ""}`),
    each.prefill || each.decode ? el("span", { class: "faint" }, `${each.prefill || "–"} → ${each.decode || "–"}`) : null,
    each.attempt > 1 ? el("span", { class: "faint" }, `attempt ${each.attempt}`) : null),
    el("p", { class: "reason" }, each.detail || OUTCOMES[each.outcome] || "no reason was given"),
    el("code", { class: "faint" }, each.request)))));
}

export function pairs(node, count, fleet) {
  count.textContent = fleet.pairs.length ? `the last ${fleet.window_s} s` : "";
  if (!fleet.pairs.length) {
    fill(node, calm("No KV went from prefill to decode within the last minute."));
    return;
  }
  fill(node, table(["prefill", "decode", "per s", "handover"], fleet.pairs.slice(0, 12).map((pair) => el("tr", {},
    el("td", { class: "p" }, pair.prefill), el("td", { class: "d" }, pair.decode),
    el("td", { class: "n" }, number(pair.per_s)), el("td", { class: "n" }, time(pair.handover_s))))));
}

export function changes(node, fleet) {
  const latest = fleet.changes.toReversed().slice(0, 24);
  if (!latest.length) {
    fill(node, calm("Nothing changed since this router started."));
    return;
  }
  fill(node, el("ul", { class: "changes" }, ...latest.map((each) => el("li", {}, el("time", {}, clock(each.at)),
    el("b", {}, each.instance), " ", el("span", {}, each.what)))));
}
