// Placement groups.
import { ask } from "../api.js";
import { h } from "../dom.js";
import { Table } from "../table.js";

const COLUMNS = [
  { key: "name", title: "name" },
  { key: "state", title: "state", show: (row) => h("span", { className: { CREATED: "good", PENDING: "warn", REMOVED: "dim" }[row.state] || "" }, row.state) },
  { key: "strategy", title: "strategy" },
  { key: "count", title: "bundles", right: true },
  { key: "bundles", title: "of", rest: true },
  { key: "nodes", title: "nodes" },
  { key: "attempts", title: "attempts", right: true },
  { key: "scheduling", title: "scheduling" },
  { key: "id", title: "id" },
];

export function groups(shown) {
  const table = new Table({ empty: ["There is no placement group.", "ray.util.placement_group makes one: resources that are reserved together."], name: "placement groups", columns: COLUMNS, source: (params) => ask("groups", params) });
  shown.element.append(h("h1", {}, "Placement groups"), table.element);
  shown.poll(() => table.refresh(), 3000);
}
