// What workers have printed: searched over nodes, or one file.
import { ask } from "../api.js";
import { bytes, empty, h, show } from "../dom.js";
import { Table } from "../table.js";

const ANSI = /\u001b\[[0-9;?]*[A-Za-z]/g; // colours of terminals

function marked(text, pattern) {
  const parts = [];
  let from = 0;
  for (const found of pattern ? text.matchAll(pattern) : []) {
    if (!found[0]) continue;
    parts.push(text.slice(from, found.index), h("mark", {}, found[0]));
    from = found.index + found[0].length;
  }
  return [...parts, text.slice(from)];
}

export function logs(shown) {
  const input = (name, label, size) => h("input", {
    type: name === "grep" ? "search" : "text", ariaLabel: label, placeholder: label, size, value: shown.params[name] || "",
    onchange: () => again(),
  });
  const fields = { grep: input("grep", "regular expression", 30), task: input("task", "function", 14), actor: input("actor", "actor", 14), nodes: input("nodes", "nodes: 0-3,7", 10) };
  const follow = h("input", { type: "checkbox", checked: true });
  const lines = h("pre", { ariaLabel: "Lines" });
  const note = h("p", { className: "note" });
  const piece = h("pre", { hidden: true });
  const pieceBar = h("div", { className: "bar", hidden: true });
  const files = new Table({
    name: "files", id: "name", source: (params) => ask("logs/files", { ...params, nodes: fields.nodes.value }),
    columns: [{ key: "node", title: "node", right: true }, { key: "name", title: "file" }, { key: "size", title: "size", right: true, show: (row) => bytes(row.size) }],
    open: (row) => read(row, null),
  });

  async function read(row, start) {
    const found = await shown.attempt(() => ask("logs/piece", { node: row.node, name: row.name, start }));
    if (!found) return;
    piece.hidden = pieceBar.hidden = false;
    show(piece, found.text.replace(ANSI, ""));
    const step = 65536;
    show(pieceBar, h("strong", {}, row.name), `bytes ${found.start} to ${found.end} of ${found.size}`,
      h("button", { type: "button", disabled: found.start === 0, onclick: () => read(row, Math.max(0, found.start - step)) }, "Earlier"),
      h("button", { type: "button", disabled: found.end >= found.size, onclick: () => read(row, found.end) }, "Later"),
      h("button", { type: "button", onclick: () => read(row, null) }, "End"));
    pieceBar.scrollIntoView({ block: "nearest" });
  }

  shown.element.append(h("h1", {}, "Logs"), h("div", { className: "bar", role: "search" }, Object.values(fields),
    h("button", { type: "button", onclick: () => again() }, "Search"), h("label", {}, follow, " go on")), lines, note,
  h("h2", {}, "Files"), files.element, pieceBar, piece);

  const asked = () => JSON.stringify(Object.values(fields).map((field) => field.value));
  const again = shown.poll(async () => {
    if (lines.childNodes.length && !follow.checked && lines.dataset.asked === asked()) return;
    const wanted = asked();
    const found = await ask("logs/search", Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, field.value.trim()])));
    lines.dataset.asked = wanted;
    let pattern = null;
    try {
      pattern = fields.grep.value ? new RegExp(fields.grep.value, "g") : null;
    } catch { /* Python's syntax, not JavaScript's: nothing is marked */ }
    const atEnd = lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 30;
    show(lines, found.lines.length ? found.lines.map((line) => [
      h("span", { className: "who" }, `(${line.who ? `${line.who} ` : ""}pid=${line.pid}, node ${line.node}) `),
      h("span", { className: line.error ? "warn" : "" }, marked(line.text.replace(ANSI, ""), pattern)), "\n"]) : empty("No worker has printed a line like that.", "What tasks and actors print comes here within a second."));
    if (atEnd) lines.scrollTop = lines.scrollHeight;
    show(note, found.note);
  }, 3000);
  shown.poll(() => files.refresh(), 5000);
}
