"""Compiled graphs as pictures and text."""

from __future__ import annotations

from typing import Any

from hpcray.graphs.graph_plan import DRIVER, GraphPlan

_COLUMN = 30
_LEGEND = """Legend:
+++> : Represents Accelerator-type data channels
---> : Represents Shared Memory data channels
"""


class _Picture:
    """The nodes and edges of a graph, with a `MultiOutputNode` at its end in any case."""

    def __init__(self, plan: GraphPlan) -> None:
        self.plan = plan
        self.nodes: list[Any] = list(plan.nodes)
        self.edges = plan.edges()
        if not plan.returns_list:
            self.nodes.append(None)
            self.edges.append((plan.outputs[0], len(self.nodes) - 1))

    def name(self, number: int) -> str:
        node = self.nodes[number]
        return "MultiOutputNode" if node is None else type(node).__name__

    def is_call(self, number: int) -> bool:
        return self.name(number) == "ClassMethodNode" and self.nodes[number].is_class_method_call

    def actor(self, number: int) -> str:
        """The last digits of the id of the actor; the first ones are the same for all actors."""
        return str(self.nodes[number]._get_actor_handle()._actor_id.hex())[-6:]

    def label(self, number: int) -> str:
        node, name = self.nodes[number], self.name(number)
        if self.is_call(number):
            return f"Actor: {self.actor(number)}... Method: {node.get_method_name()}"
        if name == "ClassMethodNode":
            return f"ClassMethodOutputNode[{node.output_idx}]"
        return f"{name}[{node.key}]" if name == "InputAttributeNode" else name

    def short_label(self, number: int) -> str:
        node = self.nodes[number]
        if self.is_call(number):
            return f"{number}:Actor_{self.actor(number)}:{node.get_method_name()}"
        if self.name(number) == "ClassMethodNode":
            return f"{number}:Output[{node.output_idx}]"
        return f"{number}:{self.name(number)}"

    def layers(self) -> list[list[int]]:
        """The nodes by the length of the longest way to them."""
        depth = [0] * len(self.nodes)
        for _ in self.nodes:
            for start, end in self.edges:
                depth[end] = max(depth[end], depth[start] + 1)
        return [[n for n in range(len(depth)) if depth[n] == layer] for layer in range(max(depth) + 1)]


def draw_ascii(plan: GraphPlan) -> str:
    """Return the nodes, the edges and a drawing, one line of the drawing for each step from the input."""
    picture = _Picture(plan)
    nodes = "".join(f'{n} [label="Task {n}  {picture.label(n)}"] \n' for n in range(len(picture.nodes)))
    edges = "".join(f"{start} ---> {end}\n" for start, end in picture.edges)
    drawing: list[str] = []
    columns: dict[int, int] = {}
    for layer in picture.layers():
        taken: set[int] = set()
        links = []
        for number in layer:
            sources = [columns[start] for start, end in picture.edges if end == number and start in columns]
            column = min(sources, default=0)
            while column in taken:
                column += 1
            taken.add(column)
            columns[number] = column
            links += [(source, column) for source in sources]
        if links:
            drawing.append(_link_line(links))
        line = ""
        for number in sorted(layer, key=columns.__getitem__):
            line = line.ljust(columns[number] * _COLUMN) + picture.short_label(number) + " "
        drawing.append(line.rstrip())
    text = "\n".join(drawing)
    return f"Nodes Information:\n{nodes}\nEdges Information:\n{edges}\n{_LEGEND}\nGraph Built:\n{text}"


def _link_line(links: list[tuple[int, int]]) -> str:
    width = max(max(link) for link in links) * _COLUMN + 1
    line = [" "] * width
    for start, end in links:
        low, high = sorted((start * _COLUMN, end * _COLUMN))
        for at in range(low + 1, high):
            line[at] = "-" if line[at] == " " else line[at]
        if end > start:
            line[end * _COLUMN - 1] = ">"
        elif end < start:
            line[end * _COLUMN + 1] = "<"
    for start, end in links:
        line[start * _COLUMN] = line[end * _COLUMN] = "|"
    return "".join(line)


def draw_graphviz(plan: GraphPlan, filename: str, form: str, view: bool, channel_details: bool) -> str:
    """Write a picture to a file; return it in the language of Graphviz.

    Raises:
        ImportError: the package `graphviz` is not there.
    """
    try:
        import graphviz
    except ImportError:
        raise ImportError(
            "Please install graphviz to visualize the compiled graph. You can install it by running `pip install "
            "graphviz`."
        ) from None
    picture = _Picture(plan)
    dot = graphviz.Digraph(name="compiled_graph", format=form)
    colors: dict[str, str] = {}
    for number in range(len(picture.nodes)):
        shape, color = (
            "rectangle",
            {"MultiOutputNode": "yellow", "ClassMethodNode": "orange"}.get(picture.name(number), "lightblue"),
        )
        label = picture.label(number)
        if picture.is_call(number):
            node = picture.nodes[number]
            ident, kind = picture.actor(number), node._get_actor_handle()._class_name
            shape, color = "oval", colors.setdefault(ident, f"#{(len(colors) * 2000 + 24000) % 0xFFFFFF:06X}")
            label = f"Actor: {kind}\nID: {ident}...\nMethod: {node.get_method_name()}"
        dot.node(str(number), f"Task {number}\n{label}", shape=shape, style="filled", fillcolor=color)
    for start, end in picture.edges:
        dot.edge(str(start), str(end), label=_channel(plan, start, end) if channel_details else None)
    dot.render(filename, view=view)
    return str(dot.source)


def _channel(plan: GraphPlan, start: int, end: int) -> str:
    """How a value travels to a node."""
    readers = plan.readers.get(start)
    if readers is None:
        return ""
    by_call = {task.node: actor for actor, tasks in enumerate(plan.tasks) for task in tasks}
    reader = by_call.get(end, DRIVER)
    return "in the process" if reader == plan.makers[start] else f"channel to {len(readers)} processes"
