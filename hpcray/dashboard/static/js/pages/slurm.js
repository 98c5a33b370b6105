// The job as Slurm sees it: limits, drain, requeue.
import { ask } from "../api.js";
import { duration, facts, h, moment, show } from "../dom.js";

export function slurm(shown) {
  const state = h("div");
  const job = h("div");
  const nodes = h("div");
  const more = h("div");
  shown.element.append(h("h1", {}, "Slurm"), h("div", { className: "columns" },
    h("section", { className: "card" }, h("h2", {}, "Limits"), state), h("section", { className: "card" }, h("h2", {}, "Job"), job)), nodes, more);
  shown.poll(async () => {
    const found = await ask("slurm");
    const now = Date.now() / 1000;
    const draining = Object.entries(found.draining).map(([node, at]) => `node ${node}${at ? ` at ${moment(at / 1000)}` : ""}`).join(", ");
    show(state, facts([
      ["job", found.job || "not of Slurm"], ["ends", found.end ? `${moment(found.end)}, in ${duration(Math.max(0, found.end - now))}` : "not known"],
      ["drains", found.drain_at ? `${moment(found.drain_at)}, in ${duration(Math.max(0, found.drain_at - now))}` : "not by itself"],
      ["nodes that leave", draining || "none known"], ["requeued", `${found.restarts} times`], ["checkpoints", found.checkpoints || "no directory"],
    ]));
    show(job, found.problem ? h("p", { className: "note" }, found.problem) : facts(found.fields));
    show(nodes, found.nodes.length ? [h("h2", {}, "Nodes by Slurm"), h("div", { className: "table" }, h("table", {}, h("tbody", {}, found.nodes.map((one) =>
      h("tr", {}, h("td", {}, one.name), h("td", { className: /DRAIN|DOWN|FAIL/.test(one.state) ? "bad" : "" }, one.state), h("td", {}, one.reason))))))] : "");
    show(more, found.dead_nodes.length ? [h("h2", {}, "Nodes that are gone"), found.dead_nodes.map((one) => h("p", {}, `node ${one.index}: ${one.reason}`))] : "",
      found.autoscaler ? [h("h2", {}, "Autoscaler"), h("pre", {}, JSON.stringify(found.autoscaler, null, 1))] : "");
  }, 15000);
}
