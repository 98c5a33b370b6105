// The tasks of each worker over time. The server sends pieces of at least a pixel, however many tasks there are.
import { ask } from "../api.js";
import { colorOf, count, duration, empty, h, percent, plain, show, swatch } from "../dom.js";
import { nodesInput } from "./tasks.js";

const GUTTER = 170;
const ROW = 15;
const AXIS = 22;
const ROWS = 32;
const LEAST = 1e-5; // seconds
const WINDOWS = [["All", 0], ["Last 10 s", 10], ["Last minute", 60], ["Last 10 min", 600]];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function ticks(start, end, most) {
  const rough = (end - start) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const found = [];
  for (let at = Math.ceil(start / step) * step; at < end; at += step) found.push(at);
  return found;
}

export function timeline(shown) {
  const canvas = h("canvas", { tabIndex: 0, role: "img", ariaLabel: "Tasks over time. Arrow keys move, plus and minus zoom." });
  const tip = h("div", { className: "tip", hidden: true });
  const stage = h("div", { className: "stage" }, canvas, tip);
  const said = h("p", { className: "note", role: "status" });
  const legend = h("div", { className: "legend" });
  const note = h("p", { className: "note" });
  const view = { start: 0, end: 0, last: 0, offset: 0, nodes: shown.params.nodes || "" };
  let found = null;
  let rows = [];
  let timer = 0;

  const buttons = WINDOWS.map(([title, last]) => h("button", {
    type: "button", onclick: () => go({ start: 0, end: 0, last }),
  }, title));
  const earlier = h("button", { type: "button", onclick: () => go({ offset: Math.max(0, view.offset - ROWS) }) }, "Earlier workers");
  const later = h("button", { type: "button", onclick: () => go({ offset: view.offset + ROWS }) }, "Later workers");
  const place = h("span", { className: "dim" });
  shown.element.append(h("h1", {}, "Timeline"), h("div", { className: "bar" }, buttons,
    h("button", { type: "button", ariaLabel: "Zoom in", onclick: () => zoom(0.5, 0.5) }, "+"),
    h("button", { type: "button", ariaLabel: "Zoom out", onclick: () => zoom(2, 0.5) }, "−"),
    nodesInput(shown, (nodes) => go({ nodes, offset: 0 })), earlier, later, place), stage, said, legend, note);

  function go(change) {
    Object.assign(view, change);
    again();
  }

  const width = () => Math.max(200, stage.clientWidth - GUTTER);
  const span = () => (view.end ? [view.start, view.end] : [found?.start ?? 0, found?.end ?? 1]);

  function zoom(factor, at) {
    const [start, end] = span();
    const size = Math.max(LEAST, factor * (end - start));
    const middle = start + at * (end - start);
    Object.assign(view, { start: middle - at * size, end: middle + (1 - at) * size, last: 0 });
    draw();
    clearTimeout(timer);
    timer = setTimeout(again, 150);
  }

  function pan(share) {
    const [start, end] = span();
    Object.assign(view, { start: start + share * (end - start), end: end + share * (end - start), last: 0 });
    draw();
    clearTimeout(timer);
    timer = setTimeout(again, 150);
  }

  function draw() {
    if (!found) return;
    const [start, end] = span();
    const scale = width() / (end - start);
    const height = AXIS + Math.max(1, rows.length) * ROW + 6;
    const ratio = devicePixelRatio || 1;
    canvas.width = stage.clientWidth * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const draws = canvas.getContext("2d");
    draws.scale(ratio, ratio);
    draws.font = "11px system-ui";
    draws.fillStyle = css("--dim");
    draws.strokeStyle = css("--line");
    for (const at of ticks(0, end - start, width() / 110)) {
      const x = GUTTER + at * scale;
      draws.fillRect(x, AXIS - 5, 1, 5);
      draws.fillText(at ? `+${duration(at)}` : "0", x + 3, 13);
    }
    const bad = css("--bad");
    const text = css("--text");
    rows.forEach(({ title, pieces }, row) => {
      const y = AXIS + row * ROW;
      draws.fillStyle = text;
      draws.fillText(title, 6, y + 11, GUTTER - 12);
      draws.save();
      draws.beginPath();
      draws.rect(GUTTER, y, width(), ROW);
      draws.clip();
      for (const [from, to, name, amount, share, failed] of pieces) {
        const x = GUTTER + (found.start + from - start) * scale;
        const size = Math.max(1, (to - from) * scale);
        if (x > stage.clientWidth || x + size < GUTTER) continue;
        draws.globalAlpha = amount > 1 ? 0.25 + 0.75 * share : 1;
        draws.fillStyle = failed ? bad : found.colors[name];
        draws.fillRect(x, y + 1, Math.max(1, size - (size > 3 ? 1 : 0)), ROW - 3);
        if (amount === 1 && size > 40) {
          draws.fillStyle = "#1b1f24";
          draws.fillText(plain(found.names[name]).slice(0, Math.floor(size / 6)), x + 3, y + 11);
        }
      }
      draws.restore();
    });
  }

  function at(event) {
    const box = canvas.getBoundingClientRect();
    const [start, end] = span();
    const row = rows[Math.floor((event.clientY - box.top - AXIS) / ROW)];
    const time = start - (found?.start ?? 0) + ((event.clientX - box.left - GUTTER) / width()) * (end - start);
    const slack = (end - start) / width();
    const piece = row?.pieces.find(([from, to]) => time >= from - slack && time <= to + slack);
    return piece && { row, piece };
  }

  function describe({ row, piece: [from, to, name, amount, share, failed] }) {
    const what = amount > 1 ? `${count(amount)} tasks, mostly ${found.names[name]}, busy ${percent(share)} of ${duration(to - from)}`
      : `${found.names[name]}: ${duration((to - from) * share)}`;
    return `${row.title}\n${what}${failed ? `, ${failed} failed` : ""}`;
  }

  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      pan((drag - event.clientX) / width());
      drag = event.clientX;
      return;
    }
    const hit = at(event);
    tip.hidden = !hit;
    if (!hit) return;
    show(tip, describe(hit));
    tip.style.left = `${Math.min(event.offsetX + 12, stage.clientWidth - 260)}px`;
    tip.style.top = `${event.offsetY + 14}px`;
  });
  let drag = 0;
  canvas.addEventListener("pointerdown", (event) => {
    drag = event.clientX;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { drag = 0; });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("click", (event) => {
    const hit = at(event);
    if (hit) show(said, describe(hit).replace("\n", ": "));
  });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, Math.min(1, Math.max(0, (event.offsetX - GUTTER) / width())));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const does = { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.5, 0.5), "=": () => zoom(0.5, 0.5), "-": () => zoom(2, 0.5), 0: () => go({ start: 0, end: 0, last: 0 }) }[event.key];
    if (!does) return;
    does();
    event.preventDefault();
    event.stopPropagation();
  });

  const again = shown.poll(async () => {
    const now = Date.now() / 1000;
    const [start, end] = view.last ? [now - view.last, now] : [view.start, view.end];
    found = await ask("timeline", { start, end, width: width(), offset: view.offset, rows: ROWS, nodes: view.nodes });
    if (view.last) Object.assign(view, { start: 0, end: 0 });
    found.colors = found.names.map(colorOf);
    rows = found.workers.flatMap((one) => (one.lanes.length ? one.lanes : [[]]).map((pieces, lane) => ({
      title: plain(`node ${one.node}  pid ${one.pid}${one.title ? `  ${one.title}` : ""}${lane ? `  #${lane + 1}` : ""}${one.forgotten && !lane ? "  …" : ""}`), pieces,
    })));
    draw();
    show(legend, found.names.length ? found.names.slice(0, 40).map((name) => h("span", {}, swatch(name), name))
      : empty("No task has run yet.", "Each worker gets a row with its first task."));
    const shownTo = Math.min(found.total, view.offset + ROWS);
    show(place, found.total > ROWS ? `workers ${view.offset + 1} to ${shownTo} of ${found.total}` : `${found.total} workers`);
    earlier.disabled = view.offset === 0;
    later.disabled = shownTo >= found.total;
    earlier.hidden = later.hidden = found.total <= ROWS;
    show(note, [found.note, found.workers.some((one) => one.forgotten) ? "…: earlier tasks of this worker are not known" : ""].filter(Boolean).join(". "));
  }, 3000);
  const resize = new ResizeObserver(draw);
  resize.observe(stage);
  shown.closing.push(() => { resize.disconnect(); clearTimeout(timer); });
}
