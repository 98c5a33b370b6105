// Elements and texts. All that comes from the job goes through text nodes: nothing of it is ever markup.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

// Control characters and those that reorder text, made visible.
export function plain(text) {
  return String(text).replace(UNSEEN, (one) => {
    const code = one.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return code === 0x7f ? "\u2421" : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  put(element, ...children);
  return element;
}

export function put(element, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    element.append(child instanceof Node ? child : document.createTextNode(plain(child)));
  }
  return element;
}

export function show(element, ...children) {
  element.replaceChildren();
  return put(element, ...children);
}

export function svg(tag, props = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) element.setAttribute(name, value);
  return element;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(amount) {
  if (amount === null || amount === undefined) return "";
  let place = 0;
  let value = amount;
  while (Math.abs(value) >= 1024 && place < UNITS.length - 1) {
    value /= 1024;
    place += 1;
  }
  return `${place && value < 100 ? value.toFixed(1) : Math.round(value)} ${UNITS[place]}`;
}

export const rate = (amount) => (amount ? `${bytes(amount)}/s` : "0");
export const percent = (share) => (share === null || share === undefined ? "" : `${Math.round(100 * share)}%`);
export const count = (value) => (value === null || value === undefined ? "" : value.toLocaleString("en"));
export const number = (value) => (value >= 100 ? count(Math.round(value)) : String(Number(value.toPrecision(3))));

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  for (const [limit, factor, unit] of [[1e-3, 1e6, "µs"], [1, 1e3, "ms"], [60, 1, "s"]]) {
    if (seconds < limit) return `${Number((seconds * factor).toPrecision(3))} ${unit}`;
  }
  const two = (value) => String(value).padStart(2, "0");
  const whole = Math.round(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  const clock = days || hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
  return days ? `${days}-${clock}` : clock;
}

export const moment = (time) => (time ? new Date(1000 * time).toLocaleString("sv") : "");

// limit: a full one is wrong, as of memory; a busy CPU or a full store is not.
export function meter(share, text, limit = false) {
  const fill = h("i", { className: share > 0.9 && limit ? "high" : "" });
  fill.style.width = `${Math.min(100, Math.max(0, 100 * (share || 0)))}%`;
  return [h("span", { className: "meter", ariaHidden: "true" }, fill), text];
}

// Light enough for dark text, and apart for those who do not see some colours (Paul Tol's "light", without the pink that
// looks like a failure); the next ones are darker.
const PALETTE = ["#77aadd", "#eedd88", "#44bb99", "#99ddff", "#bbcc33", "#ee8866", "#aaaa00"];
const DARKER = 0.74;
const OTHER = "#c9ced6";
const colors = new Map();

function paletteColor(place) {
  const base = PALETTE[place % PALETTE.length];
  const factor = DARKER ** Math.floor(place / PALETTE.length);
  return `rgb(${[1, 3, 5].map((at) => Math.round(factor * parseInt(base.slice(at, at + 2), 16))).join(" ")})`;
}

// Functions get colours in the order in which they are first shown, and keep them on all pages.
export function colorOf(name) {
  if (!colors.has(name)) {
    const place = colors.size;
    colors.set(name, place < 2 * PALETTE.length ? paletteColor(place) : OTHER);
    try {
      sessionStorage.setItem("hpcray-functions", JSON.stringify([...colors.keys()].slice(0, 2 * PALETTE.length)));
    } catch { /* for this page only */ }
  }
  return colors.get(name);
}

try {
  for (const name of JSON.parse(sessionStorage.getItem("hpcray-functions") || "[]")) colorOf(name);
} catch { /* none are kept */ }

// The colour of a frame that may be that of a function, with which it is drawn then.
export const frameColor = (name) => colors.get(name) || OTHER;

export function swatch(name) {
  const mark = svg("svg", { width: 10, height: 10, class: "swatch", "aria-hidden": "true" });
  mark.append(svg("rect", { width: 10, height: 10, rx: 2, fill: colorOf(name) }));
  return mark;
}

// What would be here, and how one gets it.
export const empty = (what, how = "") => h("p", { className: "empty" }, h("strong", {}, what), how ? ` ${how}` : "");

export function facts(pairs) {
  return h("dl", { className: "facts" }, pairs.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}
