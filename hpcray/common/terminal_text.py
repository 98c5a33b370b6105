"""Text of a job as it may reach a terminal: names of actors, functions, groups, nodes and labels, errors.

Any process of the job, and who wrote its programs, chooses such text. Escape sequences in it would change the title of
the terminal, hide lines or colour them, and some terminals do more; line breaks would make one name look like two rows;
marks of the direction of text show words in another order than they have. All of that is shown as an escape of Python,
`\\x1b`. Everything that writes to a terminal passes text of the job through `plain`.
"""

from __future__ import annotations

import re

_UNSEEN = "".join(
    (
        "\x00-\x1f\x7f-\x9f",  # C0 controls, DEL, C1 controls
        "\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f",  # marks, embeddings, overrides and isolates of direction
        "\u200b-\u200d\u2060-\u2065\ufeff\ufff9-\ufffb",  # characters without a width
        "\u2028\u2029",  # separators of lines and paragraphs
        "\ud800-\udfff",  # surrogates, which no encoding has
        "\U000e0000-\U000e007f",  # tags
    )
)
_ONE_LINE = re.compile(f"[{_UNSEEN}]")
_LINES = re.compile(f"(?![\n\t])[{_UNSEEN}]")


def plain(text: object, lines: bool = False) -> str:
    """Text in which nothing commands a terminal.

    Args:
        text: any value; its `str`.
        lines: whether it is a text of several lines: line feeds and tabs stay.
    """
    return (_LINES if lines else _ONE_LINE).sub(_escape, str(text))


def plain_line(text: object) -> str:
    """A line of a report. Where an error in it has several lines, the further ones are indented: none looks like the
    report's own. A text that was one already stays as it is."""
    return re.sub("\n(?! {8})", "\n        ", plain(text, lines=True))


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode("ascii")
