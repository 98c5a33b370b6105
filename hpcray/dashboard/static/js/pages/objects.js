// Objects, and the memory of stores by where its objects were created.
import { ask } from "../api.js";
import { bytes, count, h, meter, show } from "../dom.js";
import { Table } from "../table.js";
import { nodesInput } from "./tasks.js";

const COLUMNS = [
  { key: "size", title: "size", right: true, show: (row) => bytes(row.size) },
  { key: "node", title: "node", right: true },
  { key: "state", title: "where", show: (row) => (row.copy ? `${row.state}, copy` : row.state) },
  { key: "owner", title: "owner" },
  { key: "refs", title: "refs", right: true, show: (row) => (row.refs === null ? "?" : `${row.refs} + ${row.borrowers} borrowed`) },
  { key: "pins", title: "pinned by" },
  { key: "site", title: "created at" },
  { key: "id", title: "id" },
];

export function objects(shown) {
  const sites = h("div");
  const table = new Table({
    name: "objects", columns: COLUMNS, sort: "size", desc: true, source: (params) => ask("objects", params),
    controls: [nodesInput(shown, (nodes) => table.change({ nodes, offset: 0 }))],
  });
  table.params.nodes = shown.params.nodes || "";
  shown.element.append(h("h1", {}, "Objects"), h("h2", {}, "Memory by creation site"), sites, h("h2", {}, "One by one"), table.element);
  shown.poll(async () => {
    const found = await table.refresh();
    const most = Math.max(1, ...found.sites.map((one) => one.bytes));
    show(sites, h("div", { className: "table" }, h("table", {},
      h("thead", {}, h("tr", {}, ["memory", "objects", "pinned", "on disk", "copies", "created at", "owner"].map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, found.sites.slice(0, 30).map((one) => h("tr", {}, [meter(one.bytes / most, bytes(one.bytes), true), count(one.objects),
        bytes(one.pinned), bytes(one.on_disk), count(one.copies), one.site, one.owner].map((cell) => h("td", {}, cell))))))),
    shown.about.sites ? "" : h("p", { className: "note" }, "With HPCRAY_RECORD_REF_CREATION_SITES=1 at the start of the job also by line of the program."));
  }, 4000);
}
