"""Files of profiles: folded text, and speedscope's JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any

from hpcray.state.profile import Frame, JobProfile, ProfiledStack

_SPEEDSCOPE = "https://www.speedscope.app/file-format-schema.json"
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


def _names(stack: ProfiledStack) -> list[str]:
    return [*([stack.label] if stack.label else []), *map(frame_name, stack.frames)]


FORMATS: Mapping[str, Callable[[JobProfile], str]] = {
    "speedscope": speedscope,
    "folded": folded,
    "json": lambda profile: json.dumps(profile.as_dict(), indent=1),
}
"""The functions that write a profile, by format."""
SUFFIXES = {".json": "speedscope", ".txt": "folded", ".folded": "folded"}
"""The formats of files, by how their names end."""
