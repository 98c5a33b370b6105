"""The live view of a job in a terminal: `hpcray top`. Textual draws it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Label, Static
from textual.worker import get_current_worker

from hpcray.cli import top_cells
from hpcray.common.terminal_text import plain
from hpcray.core.object_store.allocator import format_size
from hpcray.state.overview import FunctionUse, JobSource, JobUse
from hpcray.state.reports import format_duration

_MOST_ROWS = 1000
_WIDE = 110  # columns of a terminal
_ORDERS: dict[str, Callable[[FunctionUse], Any]] = {
    "total time": lambda one: (-one.total, -one.running, -one.queued),
    "running": lambda one: (-one.running, -one.total),
    "queued": lambda one: (-one.queued, -one.total),
    "failed": lambda one: (-one.failed, -one.total),
    "p99": lambda one: (-one.p99, -one.total),
}


class KeptTable(DataTable[Any]):
    """A table of rows that change: the cursor stays with its row."""

    def show(self, columns: Sequence[top_cells.Column], rows: Sequence[tuple[str, Sequence[Any]]]) -> None:
        """Show these rows.

        Args:
            columns: names and widths.
            rows: (key, cells).
        """
        if [str(column.label) for column in self.ordered_columns] != [name for name, _ in columns]:
            self.clear(columns=True)
            for name, width in columns:
                self.add_column(name, width=width, key=name)
        # A str would be read as markup: names of functions, hosts and errors may have square brackets.
        shown = [
            (key, [_plain(cell) if isinstance(cell, str) else cell for cell in cells])
            for key, cells in rows[:_MOST_ROWS]
        ]
        keys = [key for key, _ in shown]
        if keys == [row.key.value for row in self.ordered_rows]:
            for key, cells in shown:
                for (name, _), cell in zip(columns, cells, strict=True):
                    self.update_cell(key, name, cell)
            return
        chosen = self.chosen
        self.clear()
        for key, cells in shown:
            self.add_row(*cells, key=key)
        if chosen in keys:
            self.move_cursor(row=keys.index(chosen), animate=False)

    @property
    def chosen(self) -> str:
        """The key of the row of the cursor; "" where there is none."""
        if not self.row_count:
            return ""
        return self.ordered_rows[self.cursor_row].key.value or ""


class LiveScreen(Screen[None]):
    """A screen that asks for its rows again and again, in a thread; one question at a time."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace", "app.pop_screen", "Back"),
        Binding("q", "app.quit", "Quit"),
    ]
    period = 2.0

    def __init__(self, source: JobSource) -> None:
        super().__init__()
        self.source = source
        self._asking = False

    def on_mount(self) -> None:
        """Ask now, and from now on."""
        self.refresh_rows()
        self.set_interval(self.period, self.refresh_rows)

    def refresh_rows(self) -> None:
        """Ask, unless an answer is awaited, another screen covers this one, or the job has ended."""
        if self._says_end():
            return
        if not self._asking and self.is_current:
            self._asking = True
            self._ask()

    @work(thread=True)
    def _ask(self) -> None:
        worker = get_current_worker()
        try:
            found, problem = self.ask(), ""
        except Exception as error:  # the job has ended, or a node does not answer
            found, problem = None, str(error) or type(error).__name__
        if not worker.is_cancelled:
            self.app.call_from_thread(self._show, found, problem)

    def _show(self, found: Any, problem: str) -> None:
        self._asking = False
        if not self.is_mounted:
            return
        if not problem:
            self.show(found)
        elif not self._says_end():
            self.query_one("#head", Static).update(_plain(problem, "red"))

    def _says_end(self) -> bool:
        """Show that the job has ended, if it has; what is below stays."""
        end = self.app.end_of_job() if isinstance(self.app, TopApp) else ""
        if end:
            self.query_one("#head", Static).update(_plain(end, "bold red"))
        return bool(end)

    def ask(self) -> Any:
        """Get what `show` needs; in a thread."""
        raise NotImplementedError

    def show(self, found: Any) -> None:
        """Show it."""
        raise NotImplementedError


class JobScreen(LiveScreen):
    """Nodes, functions, and the last lines of the node of the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "look", "Details"),
        Binding("a", "actors", "Actors"),
        Binding("t", "transfers", "Transfers"),
        Binding("o", "order", "Order"),
        Binding("tab", "app.focus_next", "Switch"),
        Binding("q", "app.quit", "Quit"),
        Binding("escape,backspace", "nothing", show=False),
    ]
    use: JobUse | None = None
    order = "total time"

    def compose(self) -> ComposeResult:
        """Lay the screen out."""
        yield Static("asking the nodes …", id="head")
        yield KeptTable(id="nodes", cursor_type="row")
        yield KeptTable(id="functions", cursor_type="row")
        yield Label("", id="order")
        yield Static("", id="cores")
        yield Static("", id="log")
        yield Footer()

    def ask(self) -> Any:
        """See `LiveScreen`."""
        use = self.source.sample()
        chosen = self.query_one("#nodes", KeptTable).chosen or "0"
        return use, int(chosen), self.source.tail(int(chosen))

    def show(self, found: Any) -> None:
        """See `LiveScreen`."""
        self.use, node, lines = found
        self._draw()
        height = max(1, self.query_one("#log", Static).size.height)
        told = "\n".join(f"{pid}: {line}" for pid, line in lines[-height:])
        self.query_one("#log", Static).update(_plain(told or f"node {node}: nothing has been printed there"))

    def on_resize(self) -> None:
        """Show as many columns as there is room for."""
        self._draw()

    def _draw(self) -> None:
        if self.use is None:
            return
        use, width = self.use, self.size.width
        self.query_one("#head", Static).update(top_cells.headline(use))
        nodes = [(str(one.index), top_cells.node_cells(one, width)) for one in use.nodes]
        self.query_one("#nodes", KeptTable).show(top_cells.node_columns(width), nodes)
        whole = sum(one.total for one in use.functions)
        rows = [
            (one.name, top_cells.function_cells(one, width, whole))
            for one in sorted(use.functions, key=_ORDERS[self.order])
        ]
        self.query_one("#functions", KeptTable).show(top_cells.function_columns(width), rows)
        self.query_one("#cores", Static).update(_plain(top_cells.core_time(use)))
        more = "; numbers are lower bounds: earlier runs are forgotten" if use.partial else ""
        self.query_one("#order", Label).update(f"functions by {self.order} (enter: details){more}")

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show the node or the function of the row."""
        key = event.row_key.value or ""
        if event.data_table.id == "nodes":
            self.app.push_screen(NodeScreen(self.source, int(key)))
        elif self.use is not None:
            one = next((one for one in self.use.functions if one.name == key), None)
            if one is not None:
                self.app.push_screen(TextScreen(f"run times of {one.name}", function_lines(one)))

    def action_actors(self) -> None:
        """Show the actors."""
        self.app.push_screen(ActorScreen(self.source))

    def action_transfers(self) -> None:
        """Show what is on its way between nodes."""
        self.app.push_screen(TransferScreen(self.source))

    def action_order(self) -> None:
        """Order functions by the next column."""
        names = list(_ORDERS)
        self.order = names[(names.index(self.order) + 1) % len(names)]
        self._draw()

    def action_nothing(self) -> None:
        """This is the first screen."""


class NodeScreen(LiveScreen):
    """The processes of a node, and what has run there."""

    def __init__(self, source: JobSource, node: int) -> None:
        super().__init__(source)
        self.node = node
        self._before: dict[str, tuple[float, float]] = {}

    def compose(self) -> ComposeResult:
        """Lay the screen out."""
        yield Static(f"node {self.node}", id="head")
        yield KeptTable(id="processes", cursor_type="row")
        yield KeptTable(id="functions", cursor_type="row")
        yield Static("", id="log")
        yield Footer()

    def ask(self) -> Any:
        """See `LiveScreen`."""
        return self.source.functions_of(self.node), self.source.processes(self.node), self.source.tail(self.node)

    def show(self, found: Any) -> None:
        """See `LiveScreen`."""
        use, processes, lines = found
        width, now = self.size.width, time.monotonic()
        one = use.nodes[0]
        about = f"node {one.index} ({one.host}){': ' + one.problem if one.problem else ''}"
        gpus = ", ".join(f"GPU {gpu['index']} {gpu['busy']:.0%} {format_size(gpu['used'])}" for gpu in one.gpus)
        self.query_one("#head", Static).update(_plain(f"{about}  {gpus}"))
        columns = [("process", 9), ("kind", 18), ("CPU", 6), ("memory", 9), ("state", 8), ("runs", max(20, width - 66))]
        rows = []
        for row in processes:
            key = row["proc"].hex()
            last, self._before[key] = self._before.get(key), (now, row["cpu"])
            busy = (row["cpu"] - last[1]) / (now - last[0]) if last is not None and now > last[0] else 0.0
            calls = row["calls"]
            runs = "does not answer" if calls is None and row["kind"] == "worker" else ", ".join(
                f"{call['name']} {format_duration(call['seconds'])}" for call in calls or ()
            )  # fmt: skip
            kind = row["class"] or row["kind"]
            rows.append((key, [row["pid"], kind, f"{busy:.0%}", format_size(row["rss"]), row["state"], runs]))
        rows.sort(key=lambda row: row[1][0])
        self.query_one("#processes", KeptTable).show(columns, rows)
        whole = sum(each.total for each in use.functions)
        cells = [(each.name, top_cells.function_cells(each, width, whole)) for each in use.functions]
        self.query_one("#functions", KeptTable).show(top_cells.function_columns(width), cells)
        height = max(1, self.query_one("#log", Static).size.height)
        self.query_one("#log", Static).update(_plain("\n".join(f"{pid}: {line}" for pid, line in lines[-height:])))

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show the stacks of the process of the row."""
        if event.data_table.id == "processes":
            self.app.push_screen(StackScreen(self.source, self.node, bytes.fromhex(event.row_key.value or "")))


class ActorScreen(LiveScreen):
    """All actors; of dead ones when and why they ended."""

    period = 5.0

    def compose(self) -> ComposeResult:
        """Lay the screen out."""
        yield Static("actors", id="head")
        yield KeptTable(id="actors", cursor_type="row")
        yield Footer()

    def ask(self) -> Any:
        """See `LiveScreen`."""
        return self.source.actors()

    def show(self, found: Any) -> None:
        """See `LiveScreen`."""
        living = sum(row["state"] == "ALIVE" for row in found)
        self.query_one("#head", Static).update(f"{len(found)} actors, {living} of them alive")
        fixed = [("class", 14), ("state", 10), ("node", 4), ("died", 8)]
        fixed += [("name", 14), ("pid", 7)] if self.size.width >= _WIDE else []
        columns = [*fixed, ("reason", max(20, self.size.width - sum(width + 2 for _, width in fixed) - 4))]
        rows = []
        for row in sorted(found, key=lambda row: (row["state"] == "DEAD", -(row["ended"] or 0.0), row["class"])):
            ended = time.strftime("%H:%M:%S", time.localtime(row["ended"])) if row["ended"] else ""
            node = str(row["node"]) if row["node"] >= 0 else ""
            # What comes before says that a process has died; its end, how.
            reason = " ".join(row["reason"].split()).rpartition(" died: ")[2]
            more = [row["name"], str(row["pid"] or "")] if self.size.width >= _WIDE else []
            rows.append((row["actor"], [row["class"], row["state"], node, ended, *more, reason]))
        self._reasons = {row["actor"]: row for row in found}
        self.query_one("#actors", KeptTable).show(columns, rows)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show all that is known of the actor of the row, and what a living one does."""
        row = self._reasons[event.row_key.value or ""]
        lines = [f"{name}: {value}" for name, value in row.items() if value not in ("", None) and name != "proc"]
        title = f"actor {row['class']}"
        if row["state"] == "ALIVE" and row["proc"]:
            self.app.push_screen(StackScreen(self.source, row["node"], bytes.fromhex(row["proc"]), title, lines))
        else:
            self.app.push_screen(TextScreen(title, lines))


class TransferScreen(LiveScreen):
    """The objects that are on their way between nodes."""

    def compose(self) -> ComposeResult:
        """Lay the screen out."""
        yield Static("transfers", id="head")
        yield KeptTable(id="transfers", cursor_type="row")
        yield Footer()

    def ask(self) -> Any:
        """See `LiveScreen`."""
        return self.source.sample(), self.source.transfers()

    def show(self, found: Any) -> None:
        """See `LiveScreen`."""
        use, rows = found
        pulled = sum(one.pulling for one in use.nodes)
        left = sum(row["size"] - row["done"] for row in rows)
        text = f"{len(rows)} transfers, {format_size(left)} to come; {format_size(int(pulled))} of objects per second"
        self.query_one("#head", Static).update(text)
        columns = [("from", 4), ("to", 4), ("size", 9), ("done", 8), ("state", 8)]
        columns.append(("object", max(20, self.size.width - 47)))
        cells = [
            (
                f"{row['object']} {row['to']}",
                [*(str(row[end]) if row[end] >= 0 else "" for end in ("from", "to")), format_size(row["size"]),
                 top_cells.bar(row["done"] / row["size"] if row["size"] else 0.0), row["state"], row["object"]],
            )
            for row in rows
        ]  # fmt: skip
        self.query_one("#transfers", KeptTable).show(columns, cells)


class StackScreen(LiveScreen):
    """The stacks of a process, behind lines that are known of it."""

    def __init__(
        self, source: JobSource, node: int, proc: bytes, title: str = "process", lines: Sequence[str] = ()
    ) -> None:
        super().__init__(source)
        self._node, self._proc = node, proc
        self._title, self._lines = title, lines

    def compose(self) -> ComposeResult:
        """Lay the screen out."""
        yield Static("", id="head")
        with VerticalScroll():
            yield Static("asking the process …", id="text")
        yield Footer()

    def ask(self) -> Any:
        """See `LiveScreen`."""
        return self.source.stack(self._node, self._proc)

    def show(self, found: Any) -> None:
        """See `LiveScreen`."""
        self.query_one("#head", Static).update(_plain(f"{self._title}, stacks at {time.strftime('%H:%M:%S')}"))
        self.query_one("#text", Static).update(_plain("\n".join([*self._lines, *found])))


class TextScreen(Screen[None]):
    """Lines of text."""

    BINDINGS: ClassVar[list[BindingType]] = LiveScreen.BINDINGS

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        super().__init__()
        self._title, self._lines = title, lines

    def compose(self) -> ComposeResult:
        """Lay the screen out."""
        yield Static(_plain(self._title), id="head")
        with VerticalScroll():
            yield Static(_plain("\n".join(self._lines)), id="text")
        yield Footer()


class TopApp(App[None]):
    """The live view.

    Args:
        source: of the rows.
        period: seconds between two samples.
    """

    CSS = """
    #head { height: auto; max-height: 2; background: $panel; }
    #nodes, #processes { height: auto; max-height: 45%; }
    #functions, #actors, #transfers { height: 1fr; }
    #order { color: $text-muted; }
    #cores { color: $text-muted; height: auto; }
    #log { height: 20%; min-height: 2; border-top: solid $panel; }
    """
    TITLE = "hpcray top"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, source: JobSource, period: float = 2.0) -> None:
        super().__init__()
        self._source, self._period = source, period
        self._end = ""

    def on_mount(self) -> None:
        """Have signals that end this command leave the terminal as it was."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.exit, None, 128 + number)

    def end_of_job(self) -> str:
        """Return a line that says that the job has ended, with the time at which that was seen; "" while it runs."""
        if not self._end and (reason := self._source.ended):
            when = time.strftime("%H:%M:%S")
            self._end = f"the job has ended at {when}; below are its last figures; q quits ({reason})"
        return self._end

    def get_default_screen(self) -> Screen[None]:
        """The first screen."""
        screen = JobScreen(self._source)
        screen.period = self._period
        return screen


def function_lines(one: FunctionUse) -> list[str]:
    """All that is known of a function."""
    return [
        f"{one.running} run, {one.queued} are queued; {one.ended} have ended, {one.failed} of them in an error",
        f"{format_duration(one.total)} in all, p50 {format_duration(one.p50)}, p99 {format_duration(one.p99)}",
        "",
        *top_cells.distribution(one),
    ]


def _plain(text: str, style: str = "") -> Any:
    from rich.text import Text

    return Text(plain(text, lines=True), style)
