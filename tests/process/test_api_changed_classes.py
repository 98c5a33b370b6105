"""What a program has changed in an importable class before it made an actor class of it. As on Ray: methods travel."""

from __future__ import annotations

import operator
import threading
from email.message import EmailMessage, Message
from statistics import NormalDist
from string import Formatter

import pytest
from engine import ray

from hpcray.api.export import changed_methods

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 1}


def _call(cls, method, *args):
    actor = ray.remote(cls).remote(*args)
    return ray.get(getattr(actor, method).remote(), timeout=60)


def test_a_new_method(monkeypatch):
    monkeypatch.setattr(NormalDist, "doubled", lambda self: self.mean * 2, raising=False)
    assert _call(NormalDist, "doubled", 3, 1) == 6


def test_a_method_replaced_by_a_function_that_can_be_imported(monkeypatch):
    monkeypatch.setattr(NormalDist, "pdf", _imported)
    assert _call(NormalDist, "pdf", 3, 1) == ("imported", 3)


def _imported(self):
    return "imported", self.mean


def test_a_method_of_a_base_class(monkeypatch):
    monkeypatch.setattr(Message, "get_charset", lambda self: "changed")
    assert _call(EmailMessage, "get_charset") == "changed"


def test_the_constructor(monkeypatch):
    def init(self):
        self._mu, self._sigma = 7, 1

    monkeypatch.setattr(NormalDist, "__init__", init)
    monkeypatch.setattr(NormalDist, "place", lambda self: self.mean, raising=False)
    assert _call(NormalDist, "place") == 7


def test_as_it_was_when_the_actor_class_was_made(monkeypatch):
    monkeypatch.setattr(NormalDist, "word", lambda self: "early", raising=False)
    actor_class = ray.remote(NormalDist)
    monkeypatch.setattr(NormalDist, "word", lambda self: "late")
    actor = actor_class.options(num_cpus=0).remote(0, 1)
    assert ray.get(actor.word.remote(), timeout=60) == "early"


def test_attributes_class_methods_and_properties_stay_those_of_the_worker(monkeypatch):
    monkeypatch.setattr(NormalDist, "unit", 5, raising=False)
    monkeypatch.setattr(NormalDist, "from_samples", classmethod(lambda cls: "changed"))
    monkeypatch.setattr(NormalDist, "variance", property(lambda self: "changed"))
    monkeypatch.setattr(
        NormalDist,
        "look",
        lambda self: (hasattr(self, "unit"), self.variance, self.from_samples([1, 3]).mean),
        raising=False,
    )
    assert _call(NormalDist, "look", 0, 2) == (False, 4, 2)


def test_what_does_not_pickle_stays_in_the_driver(monkeypatch):
    lock = threading.Lock()

    def locked(self):
        with lock:
            return 1

    monkeypatch.setattr(NormalDist, "pdf", locked)
    actor = ray.remote(NormalDist).remote(0, 1)
    assert ray.get(actor.cdf.remote(0.0), timeout=60) == 0.5


def test_a_class_that_has_a_function_of_another_module_is_as_it_was():
    assert "walk" in changed_methods(EmailMessage)
    assert _call(EmailMessage, "get_content_type") == "text/plain"


def test_classes_that_nobody_has_changed_travel_by_name():
    class Own:
        def method(self):
            pass

    assert not changed_methods(Formatter) and not changed_methods(Own) and not changed_methods(operator.itemgetter)
