// Nodes and GPUs, and one node with its processes.
import { act, ask } from "../api.js";
import { bytes, count, duration, facts, h, meter, number, percent, rate, show } from "../dom.js";
import { Table } from "../table.js";
import { functionTable } from "./overview.js";

const COLUMNS = [
  { key: "node", title: "node", right: true },
  { key: "host", title: "host" },
  { key: "state", title: "state", show: (row) => h("span", { className: ["alive", "ended"].includes(row.state) ? "good" : "bad" }, row.state) },
  { key: "cores", title: "CPU", show: (row) => meter(row.cores / (row.cpu_count || 1), `${row.cores.toFixed(1)} of ${row.cpu_count}`) },
  { key: "cpu", title: "host", right: true, show: (row) => percent(row.cpu) },
  { key: "memory", title: "memory", show: (row) => meter(row.memory, bytes(row.memory_used), true) },
  { key: "gpus", title: "GPU", spare: true, show: (row) => (row.gpus ? meter(row.gpu, `${percent(row.gpu)} of ${row.gpus}`) : "") },
  { key: "store_used", title: "store", show: (row) => meter(row.store_used / (row.store_capacity || 1), bytes(row.store_used)) },
  { key: "on_disk", title: "on disk", spare: true, right: true, show: (row) => bytes(row.on_disk) },
  { key: "pulling", title: "objects in", spare: true, right: true, show: (row) => rate(row.pulling) },
  { key: "receiving", title: "in / out per s", right: true, show: (row) => `${bytes(row.receiving)} / ${bytes(row.sending)}` },
  { key: "workers", title: "workers", right: true },
  { key: "actors", title: "actors", spare: true, right: true },
  { key: "waiting", title: "waiting", spare: true, right: true },
  { key: "slowness", title: "run times", spare: true, right: true, show: (row) => (row.slowness ? h("span", { className: row.slowness >= 1.5 ? "bad" : "" }, `× ${number(row.slowness)}`) : "") },
  { key: "latency", title: "round trip", spare: true, right: true, show: (row) => duration(row.latency) },
];

export function nodes(shown) {
  const table = new Table({
    name: "nodes", columns: COLUMNS, id: "node", source: (params) => ask("nodes", params),
    group: (row) => row.place,
    open: (row) => { location.hash = `/node?node=${row.node}`; },
  });
  shown.element.append(h("h1", {}, "Nodes"), table.element);
  shown.poll(() => table.refresh());
}

const PROCESSES = ["process", "pid", "kind", "state", "memory", "CPU time", "runs"];

export function node(shown) {
  const index = Number(shown.params.node);
  const title = h("h1", {}, `Node ${index}`);
  const state = h("div");
  const gpus = h("div");
  const processes = h("div");
  const functions = h("div");
  const tail = h("pre");
  const links = h("p", {}, ["timeline", "tasks", "flame", "logs", "objects"].map((page, place) => [
    place ? " · " : "", h("a", { href: `#/${page}?nodes=${index}` }, page === "flame" ? "stacks" : page)]));
  const remove = async () => {
    if (!confirm(`Have node ${index} leave the job? Its tasks end, its objects are copied.`)) return;
    const done = await shown.attempt(() => act("remove-node", { node: index }));
    if (done) show(state, done.said);
  };
  shown.element.append(title, links, h("div", { className: "columns" },
    h("section", { className: "card" }, h("h2", {}, "State"), state, gpus,
      shown.about.actions ? h("p", {}, h("button", { type: "button", onclick: remove }, "Remove this node")) : ""),
    h("section", {}, h("h2", {}, "Functions by time"), functions)),
  h("h2", {}, "Processes"), processes, h("h2", {}, "Last output"), tail);
  shown.poll(async () => {
    const found = await ask("node", { node: index });
    show(title, `Node ${index}, ${found.host}`);
    show(state, facts([
      ["state", found.state], ["id", found.id], ...(found.place ? [["place", found.place]] : []), ["CPU", `${percent(found.cpu)} of ${found.cpu_count}; ${number(found.cores)} by the job`],
      ["memory", `${bytes(found.memory_used)} of ${bytes(found.memory_limit)}; ${bytes(found.rss)} by the job`],
      ["store", `${bytes(found.store_used)} of ${bytes(found.store_capacity)}; ${bytes(found.on_disk)} on disk`],
      ["network", `in ${rate(found.receiving)}, out ${rate(found.sending)}`], ["waiting leases", count(found.waiting)],
      ...Object.entries(found.resources).map(([name, [used, total]]) => [name, name.includes("memory") ? `${bytes(used)} of ${bytes(total)}` : `${number(used)} of ${number(total)}`]),
    ]));
    show(gpus, found.gpu_rows.length ? h("h2", {}, "GPUs") : "", found.gpu_rows.map((one) => h("p", {},
      `${one.index} ${one.name} `, meter(one.busy, percent(one.busy)), " ", meter(one.used / (one.total || 1), `${bytes(one.used)} of ${bytes(one.total)}`))));
    show(functions, functionTable(found.functions.slice(0, 20)));
    show(processes, h("div", { className: "table" }, h("table", {},
      h("thead", {}, h("tr", {}, PROCESSES.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, found.processes.map((one) => h("tr", {}, [
        one.process, one.pid, one.class ? `actor ${one.class}` : one.kind, one.answers ? one.state : h("span", { className: "bad" }, "no answer"),
        bytes(one.rss), duration(one.cpu), one.runs].map((cell) => h("td", {}, cell))))))));
    show(tail, found.tail.map((one) => [h("span", { className: "who" }, `${one.pid}: `), `${one.text}\n`]));
  });
}
