"""docs/glossary.md: each term occurs in the code, is defined once, and names of classes are made of known words."""

from __future__ import annotations

import re

from helpers.jobs import ROOT
from helpers.source_laws import parse, tree, unknown_words

TERM = re.compile(r"^\| \*([^*]+)\* \| (.+) \|$", re.MULTILINE)

WORDS = ROOT / "tests" / "helpers" / "class_words.txt"
"""Words of class names besides the glossary's terms: Ray's, a textbook's, Linux's or plain English."""


def terms() -> list[str]:
    text = (ROOT / "docs" / "glossary.md").read_text()
    return [term for found in TERM.finditer(text) for term in found[1].split(", ")]


def letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", text).lower()


def test_every_term_of_the_glossary_occurs_in_the_code() -> None:
    code = letters("".join(path.read_text() for path in (ROOT / "hpcray").rglob("*.py")))
    assert not [term for term in terms() if letters(term) not in code]


def test_every_term_of_the_glossary_is_defined_once() -> None:
    found = terms()
    assert len(found) > 60
    assert not [term for term in found if found.count(term) > 1]


def known_words() -> set[str]:
    return set(WORDS.read_text().split()) | {word.lower() for term in terms() for word in re.findall(r"\w+", term)}


def test_names_of_classes_are_made_of_terms_of_the_glossary_and_known_words() -> None:
    sources = [source for source in tree() if source.path.startswith(("core/", "protocol/", "runtime/"))]
    assert sources and not unknown_words(sources, known_words())


def test_a_private_word_in_the_name_of_a_class_is_seen() -> None:
    source = parse("core/x.py", "class NearCrowdTable: pass\nclass LeasedTables: pass")
    assert unknown_words([source], {"lease", "table"}) == {"near": ["NearCrowdTable"], "crowd": ["NearCrowdTable"]}


def test_the_list_of_known_words_is_short_and_sorted() -> None:
    words = WORDS.read_text().split()
    assert len(words) <= 300 and words == sorted(set(words))
