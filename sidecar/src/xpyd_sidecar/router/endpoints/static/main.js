// Asks the router every second, and says so when it does not answer.
//
//   no token or 401 ──▶ login ──▶ asking ──answer──▶ board ──no answer──▶ board with a notice, asking on

import { tiles } from "./charts.js";
import { $, span } from "./dom.js";
import { draw } from "./fleet.js";
import { changes, failures, pairs } from "./lists.js";

const EVERY_MS = 1000;
const AWAY_MS = 10000;
const SLOWEST_MS = 8000;
const TIMEOUT_MS = 5000;
const KEEP = 600;
const TOKEN = "xpyd.token";
const THEME = "xpyd.theme";

let token = sessionStorage.getItem(TOKEN) ?? "";
let rows = [];
let uptime = 0;
let heard = 0;
let fails = 0;
let timer = 0;
let asking = null;
const drawTiles = tiles($("tiles"));

function show(which) {
  $("login").hidden = which !== "login";
  $("board").hidden = which !== "board";
}

function notice(words, kind) {
  $("notice").hidden = !words;
  $("notice").className = `notice ${kind ?? ""}`;
  $("notice").textContent = words;
}

function login(need, wrong) {
  token = "";
  sessionStorage.removeItem(TOKEN);
  rows = [];
  notice("");
  $("need").textContent = need;
  $("wrong").textContent = wrong;
  show("login");
  $("token").value = "";
  $("token").focus();
}

async function ask() {
  clearTimeout(timer);
  asking?.abort();
  const mine = new AbortController();
  asking = mine;
  const late = setTimeout(() => mine.abort(), TIMEOUT_MS);
  const given = token;
  const since = rows.length ? rows.at(-1).at : 0;
  try {
    const headers = { "xpyd-since": String(since) };
    if (given) headers.authorization = `Bearer ${given}`;
    const answer = await fetch("dashboard/data", { headers, signal: mine.signal, cache: "no-store", credentials: "omit" });
    if (asking !== mine) return;
    if (answer.status === 401 || answer.status === 403) {
      const body = await answer.json();
      const known = answer.status === 403; // the right token, on a way that others can read
      login(body.error.message, given && !known ? "The router does not know this token." : "");
      return;
    }
    if (!answer.ok) throw new Error(`it answered ${answer.status}`);
    take(await answer.json());
    fails = 0;
  } catch (error) {
    if (asking !== mine) return;
    fails += 1;
    lost(error);
  } finally {
    clearTimeout(late);
  }
  if (asking === mine) timer = setTimeout(ask, fails ? Math.min(SLOWEST_MS, EVERY_MS * 2 ** (fails - 1)) : pace());
}

const pace = () => (document.hidden ? AWAY_MS : EVERY_MS);

function lost(error) {
  if (!heard) {
    notice(`The router cannot be reached. Trying again.`, "bad");
    return;
  }
  const words = error.name === "AbortError" ? "it does not answer" : error instanceof TypeError ? "no connection" : error.message;
  notice(`The router cannot be reached (${words}). This is how it looked ${span((Date.now() - heard) / 1000)} ago.`, "bad");
  document.body.classList.add("stale");
}

function take({ now, columns, seconds, fleet }) {
  if (fleet.uptime_s < uptime) rows = []; // another router, or the same one started anew
  uptime = fleet.uptime_s;
  heard = Date.now();
  document.body.classList.remove("stale");
  const last = rows.length ? rows.at(-1).at : 0;
  for (const second of seconds) {
    const row = Object.fromEntries(columns.map((name, i) => [name, second[i]]));
    if (row.at > last) rows.push(row);
  }
  rows = rows.slice(-KEEP);
  show("board");
  header(fleet);
  drawTiles(fleet, rows, now);
  draw($("fleet"), fleet);
  failures($("failures"), $("failures-count"), fleet);
  pairs($("pairs"), $("pairs-count"), fleet);
  changes($("changes"), fleet);
}

function header(fleet) {
  const picked = (each) => each.state === "ready" && !each.suspended && !each.ejected;
  const can = (role) => fleet.instances.filter((each) => each.role === role && picked(each)).length;
  const [p, d] = [can("prefill"), can("decode")];
  const models = [...new Set(fleet.instances.map((each) => each.model).filter(Boolean))];
  $("service").textContent = fleet.service;
  $("shape").textContent = `${p}P${d}D`;
  const [word, kind] = fleet.draining ? ["draining", "warn"] : !fleet.settled ? ["waiting for agents", "warn"]
    : !d ? ["nobody decodes", "bad"] : !p ? ["without prefill", "warn"] : ["serving", "good"];
  $("state").textContent = word;
  $("state").className = `pill ${kind}`;
  received(fleet.disaggregation);
  $("about").textContent = [models.slice(0, 3).join(", "), `router ${fleet.router}`, `up ${span(fleet.uptime_s)}`].filter(Boolean).join(" · ");
  document.title = `${p}P${d}D ${fleet.service} · xpyd`;
  notice(fleet.draining ? "This router is stopping: it finishes what it has begun." : "", "warn");
}

/** Whether decode receives prompts instead of computing them: the share, the busiest link and its GB/s. */
function received({ holds, share, links, message }) {
  const known = holds !== "Unknown";
  const link = links.length ? ` · ${links[0].link} ${links[0].gb_s} GB/s` : "";
  $("received").hidden = !known;
  $("received").className = `pill ${holds === "True" ? "good" : "warn"}`;
  $("received").textContent = holds === "True" ? `${Math.round(share * 100)} % received${link}` : "not disaggregating";
  $("received").title = message;
}

function theme(next) {
  const order = ["auto", "dark", "light"];
  let now = localStorage.getItem(THEME) ?? "auto";
  if (next) now = order[(order.indexOf(now) + 1) % order.length];
  localStorage.setItem(THEME, now);
  document.documentElement.dataset.theme = now;
  $("theme").textContent = now[0].toUpperCase() + now.slice(1);
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  if (!token || /[^\x21-\x7e]/.test(token)) {
    $("wrong").textContent = "A token has letters, digits and signs, no spaces.";
    return;
  }
  sessionStorage.setItem(TOKEN, token);
  ask();
});
$("leave").addEventListener("click", () => {
  asking?.abort();
  asking = null;
  clearTimeout(timer);
  token = "";
  rows = [];
  ask();
});
$("theme").addEventListener("click", () => theme(true));
document.addEventListener("visibilitychange", () => document.hidden || ask());
theme(false);
ask();
