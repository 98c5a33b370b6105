// The stacks of all processes: as text now, and as a flame graph of what was on them over some seconds.
import { ask } from "../api.js";
import { bytes, colorOf, duration, empty, frameColor, h, percent, show } from "../dom.js";
import { nodesInput } from "./tasks.js";

const HEIGHT = 19;
const LEAST = 0.0015; // of the width

// Stacks, each with its frames from the outermost on and its weight, as a tree.
function tree(stacks) {
  const root = { name: "all", value: 0, children: new Map() };
  for (const [names, value] of stacks) {
    root.value += value;
    let at = root;
    for (const name of names) {
      if (!at.children.has(name)) at.children.set(name, { name, value: 0, children: new Map(), above: at });
      at = at.children.get(name);
      at.value += value;
    }
  }
  return root;
}

function drawFlame(stage, root, said, weight) {
  const whole = root.value || 1;
  function draw(top) {
    stage.replaceChildren();
    let deepest = 0;
    const box = (one, left, width, depth) => {
      if (width < LEAST) return;
      deepest = Math.max(deepest, depth);
      const text = `${one.name}: ${weight(one.value)}, ${percent(one.value / whole)}`;
      const button = h("button", { type: "button", title: text, onclick: () => { show(said, text); draw(one); } }, one.name);
      button.style.left = `${100 * left}%`;
      button.style.width = `${100 * width}%`;
      button.style.top = `${depth * HEIGHT}px`;
      button.style.background = one === root ? "var(--line)" : one.above === root && !one.name.startsWith("(") ? colorOf(one.name) : frameColor(one.name);
      stage.append(button);
      let at = left;
      for (const child of [...one.children.values()].sort((a, b) => a.name.localeCompare(b.name))) {
        box(child, at, (width * child.value) / (one.value || 1), depth + 1);
        at += (width * child.value) / (one.value || 1);
      }
    };
    const path = [];
    for (let one = top.above; one; one = one.above) path.unshift(one);
    path.forEach((one, depth) => {
      const button = h("button", { type: "button", className: "dim", onclick: () => draw(one) }, one.name);
      Object.assign(button.style, { left: "0", width: "100%", top: `${depth * HEIGHT}px` });
      stage.append(button);
    });
    box(top, 0, 1, path.length);
    stage.style.height = `${(deepest + 1) * HEIGHT + 4}px`;
  }
  draw(root);
}

export function flame(shown) {
  const stage = h("div", { className: "flame", role: "group", ariaLabel: "Flame graph", hidden: true });
  const said = h("p", { className: "note", role: "status" });
  const limits = h("div");
  const note = h("p", { className: "note" });
  const text = h("pre", { ariaLabel: "Stacks" });
  const all = h("input", { type: "checkbox", onchange: () => again() });
  const seconds = h("select", { ariaLabel: "Seconds" }, [2, 5, 10, 20].map((one) => h("option", { value: one }, `${one} s`)));
  const what = h("select", { ariaLabel: "What" }, h("option", { value: "" }, "time"), h("option", { value: 1 }, "memory that grows"));
  let nodes = shown.params.nodes || "";

  const sample = h("button", { type: "button", onclick: async () => {
    sample.disabled = true;
    show(said, `Sampling all processes for ${seconds.value} s …`);
    const found = await shown.attempt(() => ask("profile", { nodes, seconds: seconds.value, memory: what.value }));
    sample.disabled = false;
    show(said, found ? (found.stacks.length ? "Click on a frame to see it alone." : "Nothing ran.") : "");
    if (!found) return;
    stage.hidden = !found.stacks.length;
    drawFlame(stage, tree(found.stacks), said, found.unit === "bytes" ? bytes : duration);
    show(limits, [...found.limits, ...found.problems].map((one) => h("p", { className: "note" }, one)));
  } }, "Sample");

  shown.element.append(h("h1", {}, "Stacks"), h("div", { className: "bar" }, seconds, what, sample, nodesInput(shown, (wanted) => {
    nodes = wanted;
    again();
  })), stage, said, limits, h("h2", {}, shown.about.outcome ? "At the end" : "Now"), h("div", { className: "bar" }, h("label", {}, all, " hpcray's own threads too")), text, note);
  const again = shown.poll(async () => {
    const found = await ask("stacks", { nodes, all: all.checked ? 1 : "" });
    show(text, found.lines.length ? found.lines.join("\n") : empty("Nothing runs.", "The stacks of running tasks and calls come here; idle workers have none."));
    show(note, found.note);
  }, 5000);
}
