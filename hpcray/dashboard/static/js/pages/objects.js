// Objects, and the memory of stores by where its objects were created.
import { ask } from "../api.js";
import { bytes, count, h, meter, show } from "../dom.js";
import { Table } from "../table.js";
import { nodesInput } from "./tasks.js";

const COLUMNS = [
  { key: "bytes", title: "memory", right: true, show: (row) => bytes(row.bytes) },
  { key: "count", title: "objects", right: true, show: (row) => count(row.count) },
  { key: "size", title: "each", right: true, show: (row) => bytes(row.size) },
  { key: "node", title: "node", right: true },
  { key: "state", title: "where", show: (row) => (row.copy ? `${row.state}, copy` : row.state) },
  { key: "owner", title: "owner", rest: true },
  { key: "refs", title: "refs", right: true, show: (row) => (row.refs === null ? "?" : `${row.refs} + ${row.borrowers} borrowed`) },
  { key: "pins", title: "pinned by", spare: true, rest: true, show: (row) => (row.pins === row.owner ? "its owner" : row.pins) },
  { key: "site", title: "created at", spare: true, rest: true },
  { key: "id", title: "id", show: (row) => (row.count > 1 ? `${row.id} and ${count(row.count - 1)} more` : row.id) },
];

export function objects(shown) {
  const sites = h("div");
  const table = new Table({
    name: "objects", columns: COLUMNS, sort: "bytes", desc: true, empty: ["No object is in the stores.", "ray.put and large results of tasks come here; small results stay in their owner's memory."], source: (params) => ask("objects", params),
    controls: [nodesInput(shown, (nodes) => table.change({ nodes, offset: 0 }))],
  });
  table.params.nodes = shown.params.nodes || "";
  shown.element.append(h("h1", {}, "Objects"), h("h2", {}, "Memory by creation site"), sites, h("h2", {}, "Objects that are alike"), table.element);
  shown.poll(async () => {
    const found = await table.refresh();
    const most = Math.max(1, ...found.sites.map((one) => one.bytes));
    show(sites, !found.sites.length ? "" : h("div", { className: "table" }, h("table", {},
      h("thead", {}, h("tr", {}, ["memory", "objects", "pinned", "on disk", "copies", "created at", "owner"].map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, found.sites.slice(0, 30).map((one) => h("tr", {}, [meter(one.bytes / most, bytes(one.bytes)), count(one.objects),
        bytes(one.pinned), bytes(one.on_disk), count(one.copies), one.site, one.owner].map((cell) => h("td", {}, cell))))))),
    shown.about.sites ? "" : h("p", { className: "note" }, "With HPCRAY_RECORD_REF_CREATION_SITES=1 at the start of the job also by line of the program."));
  }, 4000);
}
