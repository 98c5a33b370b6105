// Tasks by function and by state.
import { ask } from "../api.js";
import { count, duration, facts, h, moment, number, percent, show } from "../dom.js";
import { Table } from "../table.js";
import { functionTable } from "./overview.js";

const stateOf = (row) => h("span", { className: { FAILED: "bad", RUNNING: "good" }[row.state] || "" }, row.state);
const COLUMNS = [
  { key: "name", title: "function" },
  { key: "state", title: "state", show: stateOf },
  { key: "seconds", title: "time", right: true, show: (row) => duration(row.seconds) },
  { key: "start", title: "started", show: (row) => moment(row.start) },
  { key: "node", title: "node", right: true },
  { key: "pid", title: "pid", right: true },
  { key: "attempt", title: "attempt", right: true },
  { key: "error", title: "error", rest: true },
  { key: "id", title: "id" },
];

export function nodesInput(shown, change) {
  const input = h("input", {
    type: "text", size: 10, placeholder: "nodes: 0-3,7", ariaLabel: "Nodes", value: shown.params.nodes || "",
    onchange: () => change(input.value.trim()),
  });
  return input;
}

function details(row) {
  return h("section", { className: "card" }, h("h2", {}, "Task"), facts([
    ["function", row.name], ["id", row.id], ["type", row.type], ["state", row.state], ["attempt", row.attempt],
    ["started", moment(row.start)], ["time", duration(row.seconds)], ["node", row.node ?? ""], ["pid", row.pid ?? ""],
    ["actor", row.actor ? h("a", { href: `#/actor?id=${row.actor}` }, row.actor) : ""],
    ["resources", row.resources ? JSON.stringify(row.resources) : ""], ["error", row.error || ""],
  ]), row.message ? h("pre", {}, row.message) : "");
}

export function tasks(shown) {
  const functions = h("div");
  const opened = h("div");
  const table = new Table({
    name: "tasks", columns: COLUMNS, id: "id", states: true, controls: [nodesInput(shown, (nodes) => table.change({ nodes, offset: 0 }))],
    source: (params) => ask("tasks", params), open: (row) => { show(opened, details(row)); opened.scrollIntoView({ block: "nearest" }); },
    empty: ["There is no such task.", "Workers remember the tasks that they ran last; those that wait are here too."],
  });
  if (shown.params.state) table.params["is.state"] = shown.params.state;
  table.params.nodes = shown.params.nodes || "";
  if (shown.params.q) table.params.q = table.search.value = shown.params.q;
  shown.element.append(h("h1", {}, "Tasks"), h("h2", {}, "By function"), functions, h("h2", {}, "One by one"), table.element, opened);
  shown.poll(async () => show(functions, functionTable((await ask("functions", { limit: 200 })).rows)));
  shown.poll(() => table.refresh(), 4000);
}

export function functionPage(shown) {
  const { name } = shown.params;
  const state = h("div");
  const times = h("div");
  shown.element.append(h("h1", {}, name || ""), h("div", { className: "columns" },
    h("section", { className: "card" }, state, h("p", {}, h("a", { href: `#/tasks?q=${encodeURIComponent(name)}` }, "its tasks"))),
    h("section", {}, h("h2", {}, "Run times"), times)));
  shown.poll(async () => {
    const found = await ask("function", { name });
    show(state, facts([["run", count(found.running)], ["wait", count(found.queued)], ["ended", count(found.ended)], ["failed", count(found.failed)],
      ["per second", number(found.rate)], ["p50", duration(found.p50)], ["p99", duration(found.p99)], ["in all", duration(found.seconds)],
      ["share of all", percent(found.share)]]));
    const most = Math.max(1, ...found.times.map((one) => one.runs));
    show(times, h("div", { className: "table" }, h("table", {}, h("tbody", {}, found.times.map((one) => {
      const bar = h("span", { className: "meter" }, h("i"));
      bar.style.width = "240px";
      bar.firstChild.style.width = `${(100 * one.runs) / most}%`;
      return h("tr", {}, h("td", { className: "right" }, `${duration(one.from)} to ${duration(one.to)}`), h("td", {}, bar, count(one.runs)));
    })))));
  });
}
