// Who waits for what, as a graph: whoever waits is on the left, what holds it up on the right.
import { ask } from "../api.js";
import { empty, h, show, svg } from "../dom.js";
import { nodesInput } from "./tasks.js";

const WIDTH = { most: 300, least: 190 };
const GAP = { x: 44, y: 12 };

function draw(stage, { nodes, edges }) {
  const columns = [];
  const depth = 1 + Math.max(...nodes.map((one) => one.depth));
  const width = Math.max(WIDTH.least, Math.min(WIDTH.most, (stage.clientWidth - 24 - (depth - 1) * GAP.x) / depth));
  const ends = new Set(nodes.keys());
  for (const [from] of edges) ends.delete(from);
  const boxes = nodes.map((one, place) => {
    const box = h("div", { className: `box${one.never ? " never" : ends.has(place) ? " end" : ""}`, tabIndex: 0 }, one.text);
    box.style.left = `${12 + one.depth * (width + GAP.x)}px`;
    box.style.width = `${width}px`;
    (columns[one.depth] ??= []).push(box);
    return box;
  });
  const lines = svg("svg", { width: 1, height: 1 });
  show(stage, lines, boxes);
  let height = 0;
  for (const column of columns) {
    let top = 12;
    for (const box of column || []) {
      box.style.top = `${top}px`;
      top += box.offsetHeight + GAP.y;
    }
    height = Math.max(height, top);
  }
  lines.setAttribute("width", columns.length * (width + GAP.x) - GAP.x + 24);
  lines.setAttribute("height", height);
  stage.style.height = `${height + 14}px`;
  for (const [from, to] of edges) {
    const [a, b] = [boxes[from], boxes[to]];
    const [x1, y1] = [a.offsetLeft + a.offsetWidth, a.offsetTop + a.offsetHeight / 2];
    const [x2, y2] = [b.offsetLeft, b.offsetTop + b.offsetHeight / 2];
    const bend = Math.max(30, Math.abs(x2 - x1) / 2);
    lines.append(svg("path", { d: `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}` }));
  }
}

export function waits(shown) {
  const stage = h("div", { className: "graph", role: "group", ariaLabel: "Waits" });
  const note = h("p", { className: "note" });
  let nodes = shown.params.nodes || "";
  let last = "";
  const again = shown.poll(async () => {
    const found = await ask("waits", { nodes });
    const text = JSON.stringify([found.nodes, found.edges]);
    if (text !== last && found.nodes.length) draw(stage, found);
    if (!found.nodes.length) {
      stage.style.height = "";
      show(stage, empty("Nothing waits.", "Here stands who waits for what: tasks for resources or for results, `get` for objects, actors for nodes."));
    }
    last = text;
    show(note, found.note, found.more ? ` ${found.more} lines more are not shown.` : "");
  }, 4000);
  shown.element.append(h("h1", {}, shown.about.outcome ? "Why it ended" : "Who waits for what"), h("div", { className: "bar" }, nodesInput(shown, (text) => {
    nodes = text;
    again();
  })), stage, note);
}
