// Actors, living and dead, and one of them.
import { act, ask } from "../api.js";
import { facts, h, moment, show } from "../dom.js";
import { Table } from "../table.js";

const STATES = { ALIVE: "good", DEAD: "dim", RESTARTING: "warn", PENDING: "warn" };
// Red is what nobody has asked for; an actor that was killed or is not needed any more is not wrong.
const stateOf = (row) => h("span", { className: row.fault ? "bad" : STATES[row.state] || "" }, row.state);
const COLUMNS = [
  { key: "class", title: "class" },
  { key: "name", title: "name" },
  { key: "state", title: "state", show: stateOf },
  { key: "node", title: "node", right: true },
  { key: "pid", title: "pid", right: true },
  { key: "restarts", title: "restarts", right: true },
  { key: "ended", title: "ended", show: (row) => moment(row.ended) },
  { key: "reason", title: "reason", rest: true },
  { key: "id", title: "id" },
];

export function actors(shown) {
  const table = new Table({
    name: "actors", columns: COLUMNS, states: true, source: (params) => ask("actors", params),
    open: (row) => { location.hash = `/actor?id=${row.id}`; },
    empty: ["There is no actor.", "Each instance of a class with @ray.remote gets a row here."],
  });
  if (shown.params.state) table.params["is.state"] = shown.params.state;
  shown.element.append(h("h1", {}, "Actors"), table.element);
  shown.poll(() => table.refresh(), 3000);
}

export function actor(shown) {
  const { id } = shown.params;
  const state = h("div");
  const said = h("p", { className: "note" });
  const lines = h("pre");
  const kill = async () => {
    if (!confirm("Kill this actor? It is not restarted.")) return;
    const done = await shown.attempt(() => act("kill-actor", { actor: id }));
    if (done) show(said, done.said);
  };
  shown.element.append(h("h1", {}, "Actor"), h("section", { className: "card" }, state,
    shown.about.actions ? h("p", {}, h("button", { type: "button", onclick: kill }, "Kill this actor")) : "", said),
  h("h2", {}, "Its last output"), lines);
  shown.poll(async () => {
    const { rows: [found] } = await ask("actors", { "is.id": id });
    if (!found) {
      show(state, "The head does not remember this actor.");
      return;
    }
    show(state, facts([
      ["class", found.class], ["name", found.name], ["namespace", found.namespace], ["id", found.id], ["state", stateOf(found)],
      ["reason", found.reason], ["ended", moment(found.ended)], ["restarts", found.restarts],
      ["node", found.node === null ? "" : h("a", { href: `#/node?node=${found.node}` }, `node ${found.node}`)], ["pid", found.pid ?? ""],
      ["resources", JSON.stringify(found.resources)], ["detached", found.detached ? "yes" : "no"],
      ["tasks", h("a", { href: `#/tasks?q=${found.id}` }, "its calls")],
    ]));
  });
  shown.poll(async () => {
    const found = await ask("logs/search", { actor: id });
    show(lines, found.lines.slice(-100).map((line) => `${line.text}\n`));
  }, 5000);
}
