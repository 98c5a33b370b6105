"""One page of a table: searched, sorted and cut on the server, so that a browser never gets more than it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_ROWS = 500
_ROWS = 100
_TRUE = ("1", "true")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class TableQuery:
    """Which rows of a table are wanted.

    Attributes:
        search: text that a row contains, whatever the case of its letters. only: values of columns, as text.
        sort: a column, "" for the order of the rows. descending: the largest first.
        offset, limit: which of the rows that are left.
    """

    search: str = ""
    only: tuple[tuple[str, str], ...] = ()
    sort: str = ""
    descending: bool = False
    offset: int = 0
    limit: int = _ROWS

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> TableQuery:
        """The query in the parameters of a URL: q, sort, desc, offset, limit, and is.COLUMN.

        Raises:
            ValueError: one of them is not valid.
        """
        only = tuple((name[3:], text) for name, text in given.items() if name.startswith("is."))
        offset, limit = int(given.get("offset", 0)), int(given.get("limit", _ROWS))
        if offset < 0 or not 1 <= limit <= MOST_ROWS:
            raise ValueError(f"offset={offset}, limit={limit}: at most {MOST_ROWS} rows at once")
        return cls(given.get("q", ""), only, given.get("sort", ""), given.get("desc", "") in _TRUE, offset, limit)


def table_page(rows: Sequence[Row], query: TableQuery) -> dict[str, Any]:
    """Return the "rows" that a query wants, how many "matching" there are, and the "total" of rows."""
    wanted = query.search.lower()
    found = [row for row in rows if _passes(row, query.only) and (not wanted or _contains(row, wanted))]
    if query.sort:
        known = [row for row in found if row.get(query.sort) is not None]
        known.sort(key=lambda row: _order(row[query.sort]), reverse=query.descending)
        found = known + [row for row in found if row.get(query.sort) is None]
    shown = found[query.offset : query.offset + query.limit]
    return {"rows": shown, "matching": len(found), "total": len(rows)}


def _passes(row: Row, only: Sequence[tuple[str, str]]) -> bool:
    return all(str(row.get(name)) == text for name, text in only)


def _contains(row: Row, text: str) -> bool:
    return any(text in str(value).lower() for value in row.values() if value is not None)


def _order(value: Any) -> tuple[int, Any]:
    if isinstance(value, (int, float)):
        return 0, value
    if isinstance(value, (list, tuple)):
        return 1, [str(one) for one in value]
    return 2, str(value).lower()
