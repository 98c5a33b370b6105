// A table whose rows the server searches, sorts and cuts. Arrow keys move between rows, enter opens one.
import { count, empty, h, put, show } from "./dom.js";

const ROWS = 100;

export class Table {
  // columns: {key, title, show(row), right, long, rest: takes the room that is left, and is cut with
  // an ellipsis}; source(params) gives {rows, matching, note}; open(row): enter, click.
  // states: with a control that shows only the rows of one state; then source gives {state: rows} as `states`, too.
  // group(row): heading of the rows that follow, in the order of the source; "" where that is not known.
  // empty: what would be there where there is no row, and how one gets it. A column with `spare` is left out where none of
  // the rows has anything in it.
  constructor({ name, columns, source, open, id = "id", sort = "", desc = false, states = false, controls = [], group, empty }) {
    Object.assign(this, { name, all: columns, columns, source, open, id, group, empty });
    this.params = { q: "", sort, desc: desc ? 1 : "", offset: 0, limit: ROWS };
    this.search = h("input", {
      type: "search", className: "search", placeholder: "Search", ariaLabel: `Search ${name}`,
      oninput: () => this.change({ q: this.search.value, offset: 0 }),
    });
    if (states) {
      this.states = h("select", { ariaLabel: "State", onchange: () => this.change({ "is.state": this.states.value, offset: 0 }) });
    }
    this.count = h("span", { className: "dim" });
    this.earlier = h("button", { type: "button", onclick: () => this.turn(-ROWS) }, "Earlier");
    this.later = h("button", { type: "button", onclick: () => this.turn(ROWS) }, "Later");
    this.note = h("p", { className: "note" });
    this.head = h("tr");
    this.body = h("tbody", { onkeydown: (event) => this.move(event) });
    const table = h("table", {}, h("caption", { hidden: true }, name), h("thead", {}, this.head), this.body);
    this.element = h("section", { ariaLabel: name },
      h("div", { className: "bar" }, this.search, this.states || "", controls, this.count, this.earlier, this.later),
      h("div", { className: "table" }, table), this.note);
  }

  // The states that the server has counted, to choose the rows of one.
  offerStates(states) {
    const chosen = this.states.value;
    show(this.states, h("option", { value: "" }, "all states"), Object.entries(states).sort().map(([state, amount]) =>
      h("option", { value: state }, `${state} (${count(amount)})`)));
    const wanted = chosen || this.params["is.state"] || "";
    this.states.value = wanted in states ? wanted : "";
  }

  change(params) {
    Object.assign(this.params, params);
    return this.refresh();
  }

  turn(by) {
    this.change({ offset: Math.max(0, this.params.offset + by) });
  }

  async refresh() {
    const asked = (this.asked = { ...this.params });
    const found = await this.source(asked);
    if (asked !== this.asked) return found; // a later question is under way
    this.render(found);
    if (this.states) this.offerStates(found.states);
    return found;
  }

  render({ rows, matching, total, note }) {
    const { offset, sort, desc } = this.params;
    this.columns = this.all.filter((column) => !column.spare || column.key === sort || rows.some((row) => row[column.key]));
    show(this.head, this.columns.map((column) => h("th", {
      scope: "col", className: column.right ? "right" : column.rest ? "rest" : "",
      "aria-sort": sort === column.key ? (desc ? "descending" : "ascending") : null,
    }, h("button", { type: "button", onclick: () => this.sort(column) }, column.title,
      sort === column.key ? (desc ? " ▾" : " ▴") : ""))));
    const focused = document.activeElement?.closest?.("tr")?.dataset.row;
    const groups = this.group && !sort ? rows.map((row) => this.group(row)) : [];
    const heads = groups.some(Boolean);
    show(this.body, rows.map((row, place) => [
      heads && groups[place] !== groups[place - 1] ? h("tr", { className: "group" },
        h("th", { scope: "rowgroup", colSpan: this.columns.length }, groups[place] || "place unknown")) : "",
      this.row(row)]));
    if (focused !== undefined) [...this.body.rows].find((one) => one.dataset.row === focused)?.focus();
    if (!rows.length) {
      const [what, how] = total ? ["No row matches.", "Clear the search, or choose other nodes or states."] : this.empty || ["Nothing is here yet."];
      show(this.body, h("tr", {}, h("td", { colSpan: this.columns.length }, empty(what, how))));
    }
    const last = offset + rows.length;
    show(this.count, matching > rows.length ? `${count(offset + 1)} to ${count(last)} of ${count(matching)}` : `${count(matching)}`,
      total > matching ? ` (${count(total)} in all)` : "");
    this.earlier.disabled = offset === 0;
    this.later.disabled = last >= matching;
    this.earlier.hidden = this.later.hidden = matching <= rows.length && offset === 0;
    show(this.note, note || "");
  }

  row(row) {
    const opens = this.open && (() => this.open(row));
    const line = h("tr", {
      className: opens ? "open" : "", tabIndex: opens ? 0 : -1, onclick: opens,
      onkeydown: opens && ((event) => event.key === "Enter" && opens()),
    }, this.columns.map((column) => {
      const cell = h("td", { className: `${column.right ? "right " : ""}${column.long ? "long " : ""}${column.rest ? "rest" : ""}` });
      put(cell, column.show ? column.show(row) : (row[column.key] ?? ""));
      if (!column.long && cell.textContent.length > 40) cell.title = cell.textContent;
      return cell;
    }));
    line.dataset.row = String(row[this.id]);
    return line;
  }

  sort(column) {
    const same = this.params.sort === column.key;
    this.change({ sort: column.key, desc: (same ? !this.params.desc : column.right) ? 1 : "", offset: 0 });
  }

  move(event) {
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    let line = step && document.activeElement?.closest?.("tr")?.[step];
    if (line?.className === "group") line = line[step];
    if (line) {
      line.focus();
      event.preventDefault();
    }
  }
}
