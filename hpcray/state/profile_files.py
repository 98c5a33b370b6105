"""Files of profiles: folded text, speedscope's JSON, and a flame graph as one SVG file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from hpcray.core.object_store.allocator import format_size
from hpcray.platform.stacks import part_of_hpcray
from hpcray.state.profile import Frame, JobProfile, ProfiledStack

_SPEEDSCOPE = "https://www.speedscope.app/file-format-schema.json"
_WIDTH, _ROW, _MARGIN = 1200, 18, 8
_SPAN = _WIDTH - 2 * _MARGIN
_SHORTEST = 3  # characters of a name that are worth showing
_CHARACTER = 6.6  # pixels of one in the flame graph's font
_NARROWEST = 0.3  # pixels; what is narrower is left out
_MICRO = 1_000_000


def frame_name(frame: Frame) -> str:
    """`step (train.py:12)`; in a profile of memory `train.py:12`."""
    file, line, function = frame
    where = f"{PurePath(file).name}:{line}" if file else ""
    return f"{function} ({where})" if function and where else function or where


def folded(profile: JobProfile) -> str:
    """One line per stack, `label;outer;inner weight`, as flame graph tools read it: microseconds, or bytes."""
    scale = 1 if profile.unit == "bytes" else _MICRO
    lines: dict[str, int] = {}
    for stack in profile.stacks():
        names = [name.replace(";", ":").replace("\n", " ") for name in _names(stack)]
        if (weight := round(stack.value * scale)) > 0:
            text = ";".join(names)
            lines[text] = lines.get(text, 0) + weight
    for one in profile.answered:
        for what, seconds in one.idle.items():
            lines[f"({what})"] = lines.get(f"({what})", 0) + round(seconds * scale)
    return "".join(f"{text} {weight}\n" for text, weight in lines.items())


def speedscope(profile: JobProfile) -> str:
    """A file for https://www.speedscope.app: all processes by time and by CPU time, then each process."""
    frames: dict[tuple[Any, ...], int] = {}

    def index(name: str, file: str = "", line: int = 0) -> int:
        return frames.setdefault((name, file, line), len(frames))

    def one(name: str, stacks: Iterable[ProfiledStack], weigh: Callable[[ProfiledStack], float]) -> dict[str, Any]:
        samples: list[list[int]] = []
        weights: list[float] = []
        for stack in stacks:
            if (weight := weigh(stack)) > 0:
                label = [index(stack.label)] if stack.label else []
                inner = [index(function or frame_name((file, at, "")), file, at) for file, at, function in stack.frames]
                samples.append(label + inner)
                weights.append(round(weight, 6))
        return {
            "type": "sampled", "name": name, "unit": profile.unit, "startValue": 0, "endValue": sum(weights),
            "samples": samples, "weights": weights,
        }  # fmt: skip

    def value(stack: ProfiledStack) -> float:
        return stack.value

    whole = profile.stacks()
    profiles = [one("all processes", whole, value)]
    if profile.unit == "seconds":
        profiles.append(one("all processes, CPU time", whole, lambda stack: stack.cpu))
    profiles += [one(each.title, each.stacks, value) for each in profile.answered if each.stacks]
    shared = [{"name": name} | ({"file": file, "line": line} if file else {}) for name, file, line in frames]
    return json.dumps({
        "$schema": _SPEEDSCOPE, "name": "hpcray profile", "exporter": "hpcray", "activeProfileIndex": 0,
        "shared": {"frames": shared}, "profiles": profiles,
    })  # fmt: skip


@dataclass
class FlameNode:
    """A box of a flame graph. value: seconds or bytes, those of the boxes above included. kind: "user", "library",
    "hpcray", "idle"."""

    name: str
    title: str
    kind: str
    value: float = 0.0
    children: dict[str, FlameNode] = field(default_factory=dict)

    def child(self, name: str, title: str, kind: str, value: float) -> FlameNode:
        """The box of this name upon this one, with so much added."""
        found = self.children.get(name)
        if found is None:
            found = self.children[name] = FlameNode(name, title, kind)
        found.value += value
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; the widest boxes first."""
        ordered = sorted(self.children.values(), key=lambda one: -one.value)
        return {
            "name": self.name, "title": self.title, "kind": self.kind, "value": self.value,
            "children": [one.as_dict() for one in ordered],
        }  # fmt: skip


def flame_tree(profile: JobProfile, cpu: bool = False) -> FlameNode:
    """The stacks of all processes as one tree: tasks at its root, then frames, the outermost first.

    Args:
        profile: of time or of memory.
        cpu: CPU seconds instead of seconds; what was idle is left out.
    """
    root = FlameNode("all", "all processes", "user")
    for stack in profile.stacks():
        value = stack.cpu if cpu else stack.value
        if value <= 0:
            continue
        root.value += value
        node = root.child(stack.label, stack.label, "user", value) if stack.label else root
        for frame in stack.frames:
            file, line, function = frame
            name = function or frame_name(frame)
            node = node.child(f"{name}\n{file}:{line}", f"{name}  {file}:{line}" if file else name, _kind(file), value)
    for one in profile.answered if not cpu else ():
        for what, seconds in one.idle.items():
            root.value += seconds
            root.child(f"({what})", f"({what})", "idle", seconds)
    return root


def flame_graph(profile: JobProfile, title: str, cpu: bool = False) -> str:
    """The tree of a profile as one SVG file: boxes as wide as what they took; a click enlarges one, Ctrl-F searches."""
    root = flame_tree(profile, cpu)
    boxes = list(_boxes(root, root.value or 1.0))
    depth = max(level for level, *_ in boxes) + 1
    height = (depth + 3) * _ROW + 2 * _MARGIN
    parts = [_HEAD.format(width=_WIDTH, height=height, title=escape(title), margin=_MARGIN, top=_MARGIN + 12)]
    for level, left, width, node in boxes:
        top = height - _MARGIN - (level + 1) * _ROW
        share = 100 * node.value / (root.value or 1.0)
        text = quoteattr(f"{node.title}\n{_amount(node.value, profile.unit)}, {share:.1f} %")
        name = quoteattr(node.name.partition("\n")[0])
        x, wide = _MARGIN + left * _SPAN, width * _SPAN
        room = int((wide - 6) / _CHARACTER)
        short = node.name.partition("\n")[0]
        shown = "" if room < _SHORTEST else short if len(short) <= room else f"{short[: room - 1]}…"
        parts.append(
            f'<g class="f {node.kind}" data-x="{left:.7g}" data-w="{width:.7g}" data-l="{level}" data-n={name} '
            f'data-t={text}><rect x="{x:.2f}" y="{top}" width="{max(0.2, wide - 0.4):.2f}" height="{_ROW - 1}" rx="2"/>'
            f'<text x="{x + 3:.2f}" y="{top + 13}">{escape(shown)}</text></g>\n'
        )
    return "".join([*parts, _SCRIPT, "</svg>\n"])


def _boxes(root: FlameNode, whole: float) -> Iterator[tuple[int, float, float, FlameNode]]:
    """(level, left, width, node) of the boxes that can be seen; left and width as shares of the whole."""
    waiting: list[tuple[int, float, FlameNode]] = [(0, 0.0, root)]
    while waiting:
        level, left, node = waiting.pop()
        yield level, left, node.value / whole, node
        for child in sorted(node.children.values(), key=lambda one: -one.value):
            if child.value / whole * _SPAN >= _NARROWEST:
                waiting.append((level + 1, left, child))
            left += child.value / whole


def _names(stack: ProfiledStack) -> list[str]:
    return [*([stack.label] if stack.label else []), *map(frame_name, stack.frames)]


def _kind(file: str) -> str:
    if not file or part_of_hpcray(file):
        return "hpcray"
    return "library" if "site-packages" in file or "/lib/python" in file or file.startswith("<frozen") else "user"


def _amount(value: float, unit: str) -> str:
    return format_size(int(value)) if unit == "bytes" else f"{value:.2f} s"


FORMATS: Mapping[str, Callable[[JobProfile], str]] = {
    "speedscope": speedscope,
    "svg": lambda profile: flame_graph(profile, "hpcray profile"),
    "folded": folded,
    "json": lambda profile: json.dumps(profile.as_dict(), indent=1),
}
"""The functions that write a profile, by format."""
SUFFIXES = {".json": "speedscope", ".svg": "svg", ".html": "svg", ".txt": "folded", ".folded": "folded"}
"""The formats of files, by how their names end."""

_HEAD = """<?xml version="1.0" encoding="UTF-8"?>
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">
<title>{title}</title>
<style>
text {{ font: 11px ui-monospace, Menlo, Consolas, monospace; fill: #1a1a1a; pointer-events: none }}
.f rect {{ stroke: #ffffff; stroke-width: .5 }}
.user rect {{ fill: #f2a65a }} .library rect {{ fill: #8fb9e0 }} .hpcray rect {{ fill: #b7d8a8 }}
.idle rect {{ fill: #d9d9d9 }} .found rect {{ fill: #c86bd6 }}
.f:hover rect {{ stroke: #000000; stroke-width: 1 }}
#note, #back {{ font-size: 12px }} #back {{ pointer-events: auto; cursor: pointer; display: none }}
</style>
<rect width="100%" height="100%" fill="#ffffff"/>
<text x="{margin}" y="{top}" id="note">{title}</text>
<text x="{width}" y="{top}" dx="-60" id="back">reset</text>
"""
_SCRIPT = (
    f"""<script><![CDATA[
const W = {_SPAN}, M = {_MARGIN}, C = {_CHARACTER}
"""
    """const boxes = [...document.querySelectorAll(".f")].map(g => ({g, x: +g.dataset.x, w: +g.dataset.w,
  l: +g.dataset.l, n: g.dataset.n, r: g.children[0], t: g.children[1]}))
const note = document.getElementById("note"), back = document.getElementById("back"), plain = note.textContent
for (const b of boxes) {
  const tip = document.createElementNS("http://www.w3.org/2000/svg", "title")
  tip.textContent = b.g.dataset.t
  b.g.appendChild(tip)
  b.g.addEventListener("click", () => show(b))
  b.g.addEventListener("mouseover", () => { note.textContent = b.g.dataset.t.replace("\\n", "  ") })
  b.g.addEventListener("mouseout", () => { note.textContent = plain })
}
function show(to) {
  for (const b of boxes) {
    const above = b.l > to.l, holds = b.x <= to.x + 1e-9 && b.x + b.w >= to.x + to.w - 1e-9
    let x = Math.max(0, (b.x - to.x) / to.w), end = Math.min(1, (b.x + b.w - to.x) / to.w)
    const seen = end - x > 1e-9 && (above || holds)
    b.g.style.display = seen ? "" : "none"
    if (!seen) continue
    const width = (end - x) * W
    b.r.setAttribute("x", M + x * W)
    b.r.setAttribute("width", Math.max(width - .4, .2))
    b.t.setAttribute("x", M + x * W + 3)
    const room = Math.floor((width - 6) / C)
    b.t.textContent = room < 3 ? "" : b.n.length <= room ? b.n : b.n.slice(0, room - 1) + "\\u2026"
  }
  back.style.display = to === boxes[0] ? "none" : "inline"
}
back.addEventListener("click", () => show(boxes[0]))
addEventListener("keydown", event => {
  if (!event.ctrlKey || event.key !== "f") return
  event.preventDefault()
  const wanted = prompt("functions that contain", "") || ""
  for (const b of boxes) b.g.classList.toggle("found", wanted !== "" && b.n.includes(wanted))
})
show(boxes[0])
]]></script>
"""
)
