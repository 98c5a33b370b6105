// The frame of the page: navigation, keys, polling, and what is said when the job does not answer or has ended.
import { ask, enter } from "./api.js";
import { duration, h, show } from "./dom.js";
import { PAGES } from "./pages.js";

const INTERVAL = 2000; // ms
const $ = (id) => document.getElementById(id);
let page = null;
let paused = false;
let ended = false;
let about = {};

function banner(text, calm = false) {
  const element = $("banner");
  element.hidden = !text;
  element.className = calm ? "calm" : "";
  show(element, text);
}

function failed(error) {
  if (error.ended) {
    ended = true;
    banner(`The job has ended: ${error.message}`, true);
  } else if (error.status === 401) {
    ended = true;
    login(error.message);
  } else banner(error.message || String(error));
}

function login(text) {
  const token = h("input", { type: "text", ariaLabel: "Link or token", placeholder: "http://localhost:8265/#token=…", size: 44 });
  const go = () => {
    location.hash = `token=${token.value.trim().split("token=").pop()}`;
    location.reload();
  };
  show($("main"), h("section", { className: "card login" }, h("h1", {}, "hpcray dashboard"),
    h("p", {}, text || "Open the link that hpcray dashboard prints: it is good for one browser."),
    h("div", { className: "bar" }, token, h("button", { type: "button", onclick: go }, "Enter"))));
  token.addEventListener("keydown", (event) => event.key === "Enter" && go());
}

// One page that is shown: what it polls ends with it.
class Shown {
  constructor(place, params) {
    this.params = params;
    this.about = about;
    this.element = h("div");
    this.closing = [];
    this.open = true;
    show($("main"), this.element);
    place.render(this);
  }

  // Call now and every few seconds, unless nobody looks.
  poll(call, interval = INTERVAL) {
    let busy = false;
    const run = async (first) => {
      if (busy || ended || !this.open || (!first && (paused || document.hidden || about.outcome))) return;
      busy = true;
      try {
        await call();
        if (!ended) banner(about.outcome || "", true);
      } catch (error) {
        if (this.open) failed(error);
      } finally {
        busy = false;
      }
    };
    const timer = setInterval(run, interval);
    this.closing.push(() => clearInterval(timer));
    run(true);
    return () => run(true);
  }

  // Do something once, and say where it fails.
  async attempt(call) {
    try {
      return await call();
    } catch (error) {
      failed(error);
      return null;
    }
  }

  close() {
    this.open = false;
    for (const one of this.closing) one();
  }
}

function route() {
  const [name, query] = location.hash.replace(/^#\/?/, "").split("?");
  const place = PAGES.find((one) => one.name === name) || PAGES[0];
  page?.close();
  for (const link of $("nav").children) {
    if (link.dataset.page === (place.under || place.name)) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${place.title} · hpcray`;
  document.activeElement?.blur();
  page = new Shown(place, Object.fromEntries(new URLSearchParams(query)));
}

function help() {
  const keys = [...PAGES.filter((one) => one.key).map((one) => [one.key, one.title]),
    ["/", "Search"], ["↑ ↓ Enter", "Rows of a table"], ["p", "Pause"], ["d", "Dark or light"], ["Esc", "Back, or close"]];
  show($("dialog"), h("h1", {}, "Keys"), h("dl", { className: "facts" },
    keys.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])),
  h("p", {}, h("button", { type: "button", onclick: () => $("dialog").close() }, "Close")));
  $("dialog").showModal();
}

function pause() {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  show($("pause"), paused ? "Continue" : "Pause");
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("hpcray-theme", root.dataset.theme);
  } catch { /* for this page only */ }
  route();
}

function keydown(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("dialog").open) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName);
  if (typing) {
    if (event.key === "Escape") document.activeElement.blur();
    return;
  }
  const place = PAGES.find((one) => one.key === event.key);
  if (place) location.hash = `/${place.name}`;
  else if (event.key === "/") document.querySelector("input[type=search]")?.focus();
  else if (event.key === "p") pause();
  else if (event.key === "d") theme();
  else if (event.key === "?") help();
  else if (event.key === "Escape") history.back();
  else return;
  event.preventDefault();
}

async function start() {
  show($("nav"), PAGES.filter((one) => one.key).map((one) => {
    const link = h("a", { href: `#/${one.name}` }, h("kbd", {}, one.key), one.title);
    link.dataset.page = one.name;
    return link;
  }));
  $("pause").addEventListener("click", pause);
  $("theme").addEventListener("click", theme);
  $("help").addEventListener("click", help);
  document.addEventListener("keydown", keydown);
  try {
    await enter();
    about = await ask("about");
  } catch (error) {
    failed(error);
    if (!error.status) setTimeout(() => location.reload(), 5000);
    return;
  }
  show($("program"), about.program.replace(/(^|\s)\/\S*\/([^/\s]+)/g, "$1$2") || "hpcray"); // without directories
  $("program").title = about.program;
  show($("job"), `job ${about.job}`, about.actions ? ", actions allowed" : "");
  const clock = () => {
    if (about.end) show($("clock"), `${duration(Math.max(0, about.end - Date.now() / 1000))} left`);
  };
  clock();
  setInterval(clock, 1000);
  if (about.outcome) $("pause").hidden = true; // nothing changes any more
  addEventListener("hashchange", route);
  route();
}

start();
