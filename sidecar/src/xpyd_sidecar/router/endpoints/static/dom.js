// Making elements and words. Text always goes in as text: names and reasons come from elsewhere and may hold anything.

export const $ = (id) => document.getElementById(id);

/** An element; `kids` are nodes or texts. Attributes of the value null or false are left out. */
export function el(name, attributes = {}, ...kids) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== false && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...kids.filter((kid) => kid !== null && kid !== undefined));
  return node;
}

/** The same for SVG. */
export function svg(name, attributes = {}, ...kids) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...kids);
  return node;
}

/** Seconds as a person reads them. */
export function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.0095) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(2)} s`;
  if (seconds < 99.5) return `${seconds.toFixed(1)} s`;
  return span(seconds);
}

/** A long time. */
export function span(seconds) {
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${String(Math.floor(whole / 60) % 60).padStart(2, "0")} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor(whole / 3600) % 24} h`;
}

/** A rate or a count, short. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (size >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** The time of day of seconds since 1970. */
export const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });

/** Replace what an element holds only when it would differ, so that selections and focus stay. */
export function fill(node, ...kids) {
  const made = document.createElement("div");
  made.append(...kids);
  if (made.innerHTML !== node.innerHTML) node.replaceChildren(...made.childNodes);
}
