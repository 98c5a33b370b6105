// The job as a whole: what it uses over time, its functions, what waits, and which nodes are not well.
import { ask } from "../api.js";
import { bytes, count, duration, empty, h, meter, number, percent, rate, show, swatch } from "../dom.js";
import { Plot } from "../plots.js";

const KEPT = 900;
const share = (part, whole) => (whole ? part / whole : 0);

const CARDS = [
  { title: "CPU", series: [{ label: "the job", of: (one) => share(one.cores, one.cpu_count) }, { label: "the hosts", of: (one) => one.cpu }], axis: percent, top: 1,
    value: (one) => percent(share(one.cores, one.cpu_count)), small: (one) => `${one.cores.toFixed(1)} of ${one.cpu_count} cores by the job; hosts ${percent(one.cpu)}` },
  { title: "Memory", series: [{ label: "used", of: (one) => share(one.memory_used, one.memory_limit) }], axis: percent, top: 1,
    value: (one) => percent(share(one.memory_used, one.memory_limit)), small: (one) => `${bytes(one.memory_used)} of ${bytes(one.memory_limit)}; ${bytes(one.rss)} by the job` },
  { title: "Tasks", series: [{ label: "per second", of: (one) => one.rate }], axis: number,
    value: (one) => `${number(one.rate)}/s`, small: (one) => `${count(one.running)} run, ${count(one.queued)} wait, ${count(one.ended)} have ended, ${count(one.failed)} failed` },
  { title: "Object store", series: [{ label: "used", of: (one) => share(one.store_used, one.store_capacity) }], axis: percent, top: 1,
    value: (one) => percent(share(one.store_used, one.store_capacity)), small: (one) => `${bytes(one.store_used)} of ${bytes(one.store_capacity)}, ${count(one.objects)} objects, ${bytes(one.on_disk)} on disk` },
  { title: "Disk", series: [{ label: "spilled", of: (one) => one.spilling }, { label: "restored", of: (one) => one.restoring }], axis: bytes,
    value: (one) => rate(one.spilling), small: (one) => `spilled; restored ${rate(one.restoring)}` },
  { title: "Network", series: [{ label: "in", of: (one) => one.receiving }, { label: "out", of: (one) => one.sending }], axis: bytes,
    value: (one) => rate(one.receiving), small: (one) => `received; sent ${rate(one.sending)}; objects ${rate(one.pulling)}` },
  { title: "GPU", only: (one) => one.gpus, series: [{ label: "busy", of: (one) => one.gpu }], axis: percent, top: 1,
    value: (one) => percent(one.gpu), small: (one) => `${one.gpus} GPUs, ${bytes(one.gpu_used)} of ${bytes(one.gpu_total)}` },
];

export function functionTable(rows) {
  const cells = (one) => [
    h("td", { className: "name", title: one.name }, swatch(one.name), h("a", { href: `#/function?name=${encodeURIComponent(one.name)}` }, one.name)),
    ...[count(one.running || ""), count(one.queued || ""), count(one.ended), h("span", { className: one.failed ? "bad" : "" }, count(one.failed || "")),
      number(one.rate), ...[one.p50, one.p99, one.seconds].map((seconds) => (seconds ? duration(seconds) : ""))]
      .map((text) => h("td", { className: "right" }, text)),
    h("td", {}, meter(one.share, percent(one.share))),
  ];
  if (!rows.length) return empty("No function has run yet.", "A row per remote function comes here with its first call.");
  const heads = ["function", "run", "wait", "ended", "failed", "per s", "p50", "p99", "total", "share"];
  return h("div", { className: "table" }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((head, place) => h("th", { scope: "col", className: place > 0 && place < 9 ? "right" : "" }, head)))),
    h("tbody", {}, rows.map((one) => h("tr", {}, cells(one))))));
}

// What the cores have done since the start; nothing where the job keeps no history.
function coreTime(account, beside) {
  const whole = Object.values(account).reduce((sum, seconds) => sum + seconds, 0);
  if (!whole) return "";
  const rows = Object.entries(account).filter(([, seconds]) => seconds >= whole / 1000).sort((a, b) => b[1] - a[1]).map(([name, seconds]) =>
    h("tr", {}, h("td", {}, name), h("td", { className: "right" }, duration(seconds)), h("td", {}, meter(share(seconds, whole), percent(share(seconds, whole))))));
  const others = Object.entries(beside).map(([name, seconds]) => `${name} ${duration(seconds)}`).join(", ");
  return [h("h2", {}, "Where the core time went"),
    h("div", { className: "table" }, h("table", {}, h("thead", {}, h("tr", {}, ["cores were", "core time", "share"].map((head, place) =>
      h("th", { scope: "col", className: place === 1 ? "right" : "" }, head)))), h("tbody", {}, rows))),
    h("p", { className: "note" }, `CPU time beside it, which is in none of these rows: ${others}.`)];
}

export function overview(shown) {
  const cards = new Map();
  const grid = h("div", { className: "cards" });
  const alerts = h("div", { className: "alerts", role: "list", ariaLabel: "What is wrong" });
  const functions = h("div");
  const nodes = h("div");
  const resources = h("div");
  const cores = h("div");
  const more = h("p", { className: "note" });
  shown.element.append(h("h1", {}, "Overview"), alerts, grid,
    h("div", { className: "columns wide" }, h("section", {}, h("h2", {}, "Functions by time"), functions, more, cores),
      h("section", {}, h("h2", {}, "Nodes, actors, resources"), nodes, resources)));
  let samples = [];

  function card(one) {
    const value = h("div", { className: "value" });
    const small = h("div", { className: "small" });
    const plot = h("div", { className: "plot" });
    const element = h("section", { className: "card", ariaLabel: one.title }, h("h2", {}, one.title), value, small, plot);
    const place = CARDS.indexOf(one);
    const after = [...cards.keys()].filter((other) => CARDS.indexOf(other) > place)[0];
    grid.insertBefore(element, after ? cards.get(after).element : null);
    const made = { element, value, small, plot: new Plot(plot, one.series, one.axis, one.top) };
    shown.closing.push(() => made.plot.close());
    return made;
  }

  shown.poll(async () => {
    const found = await ask("overview", { since: samples.at(-1)?.time ?? 0 });
    samples = [...samples, ...found.history].slice(-KEPT);
    show(alerts, found.alerts.map((one) => h("a", { className: `alert ${one.level}`, role: "listitem", href: `#/${one.page}`, title: one.text },
      h("strong", {}, one.title), h("span", {}, one.text))));
    for (const one of CARDS) {
      if (one.only && !one.only(found.now)) continue;
      if (!cards.has(one)) cards.set(one, card(one));
      const made = cards.get(one);
      show(made.value, one.value(found.now));
      show(made.small, one.small(found.now));
      made.plot.draw(samples);
    }
    show(functions, functionTable(found.functions.slice(0, 12)));
    show(more, found.functions.length > 12 ? h("a", { href: "#/tasks" }, `all ${found.functions.length} functions`) : "",
      found.partial ? " Some runs had been forgotten before the first look: numbers of runs are lower bounds." : "");
    // What can never run is among what is wrong, above.
    const waiting = shown.about.outcome ? found.waiting : found.waiting.filter((line) => !line.endsWith("can ever serve"));
    const { alive, silent, dead, problems } = found.nodes;
    const actors = Object.entries(found.actors).map(([state, amount]) => `${count(amount)} ${state}`).join(", ");
    show(nodes, h("p", {}, h("a", { href: "#/nodes" }, `${count(alive)} nodes`), shown.about.outcome ? " until the end" : " answer",
      silent ? h("span", { className: "warn" }, `, ${silent} do not`) : "", dead ? h("span", { className: "bad" }, `, ${dead} ${shown.about.outcome ? "were lost" : "are dead"}`) : "",
      `; the head ${shown.about.outcome ? "was" : "is"} node ${found.head}. Workers: `, Object.entries(found.now.workers).filter(([, amount]) => amount).map(([state, amount]) => `${count(amount)} ${state}`).join(", ") || "none",
      ". ", h("a", { href: "#/actors" }, "Actors"), `: ${actors || "none"}.`),
    problems.map((one) => h("p", { className: "bad" }, `node ${one.node} (${one.host}): ${one.problem}`)),
    waiting.length ? [h("h2", {}, shown.about.outcome ? "Why it ended" : "Waiting"), h("pre", {}, waiting.join("\n")),
      shown.about.outcome ? "" : h("p", {}, h("a", { href: "#/waits" }, "Who waits for what"))] : "");
    const rows = Object.entries(found.now.resources).map(([name, [used, total]]) => {
      const text = name.includes("memory") ? bytes : number;
      return h("tr", {}, h("td", {}, name), h("td", {}, meter(share(used, total), `${text(used)} of ${text(total)}`)));
    });
    show(cores, coreTime(found.core_time, found.cpu_time_beside));
    show(resources, h("div", { className: "table" }, h("table", {}, h("tbody", {}, rows))));
  });
}
