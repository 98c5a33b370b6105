"""Draw docs/compared-with-ray.svg from the table of results in docs/performance.md.

python benchmarks/draw_comparison.py

`tests/unit/test_docs.py` fails when the picture does not match the table.
"""

from __future__ import annotations

import math
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "compared-with-ray.svg"
ROWS = {
    "single client tasks sync": "task, one at a time",
    "single client tasks async": "tasks, all at once",
    "multi client tasks async": "tasks of several clients",
    "1:1 actor calls sync": "actor call, one at a time",
    "1:1 actor calls async": "actor calls, all at once",
    "n:n actor calls async": "actor calls, n to n",
    "1:1 async-actor calls async": "calls of an asyncio actor",
    "actors created": "actors created",
    "single client put calls": "put of a small value",
    "single client put of 0.8 GB": "put of 0.8 GB",
    "single client get calls": "get of a small value",
    "single client get 100 MB": "get of 100 MB",
    "init": "init",
}
WIDTH, LEFT, RIGHT, TOP, STEP, BAR = 860, 210, 190, 64, 26, 16
HIGHEST = 1000.0


def results(text: str) -> dict[str, tuple[str, str, float]]:
    """The rows under "## Results": name to (hpcray's figure beside Ray, Ray's figure, ratio of the speeds)."""
    section = text.split("## Results", 1)[1].split("###", 1)[0]
    found = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[5].replace(".", "", 1).isdigit():
            found[cells[0]] = (cells[3], cells[4], float(cells[5]))
    return found


def draw(rows: dict[str, tuple[str, str, float]]) -> str:
    """The picture as SVG: a bar for each row of `ROWS`, on a logarithmic scale from 1 to 1,000."""
    height = TOP + STEP * len(ROWS) + 34
    scale = (WIDTH - LEFT - RIGHT) / math.log10(HIGHEST)
    bottom = TOP + STEP * len(ROWS)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        '<text x="16" y="26" font-size="16" font-weight="bold">Times as fast as Ray 2.60</text>',
        '<text x="16" y="46" fill="#666">one machine with 2 cores; logarithmic scale; right: hpcray, Ray</text>',
    ]
    for exponent in range(4):
        x = LEFT + exponent * scale
        out.append(f'<line x1="{x:.0f}" y1="{TOP - 6}" x2="{x:.0f}" y2="{bottom}" stroke="#ddd"/>')
        out.append(f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle" fill="#666">{10**exponent:,}</text>')
    for index, (name, label) in enumerate(ROWS.items()):
        ours, rays, ratio = rows[name]
        y, length = TOP + index * STEP, max(2.0, math.log10(ratio) * scale)
        base = y + BAR - 4
        out.append(f'<text x="{LEFT - 10}" y="{base}" text-anchor="end">{escape(label)}</text>')
        out.append(f'<rect x="{LEFT}" y="{y}" width="{length:.0f}" height="{BAR}" fill="#2f6fab"/>')
        out.append(f'<text x="{LEFT + length + 6:.0f}" y="{base}" font-weight="bold">{ratio:g}</text>')
        figures = escape(f"{ours}, {rays}")
        out.append(f'<text x="{WIDTH - 12}" y="{base}" text-anchor="end" fill="#666">{figures}</text>')
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(results(TABLE.read_text())))
