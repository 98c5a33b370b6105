"""Tasks: arguments, return values, options, functions of every kind."""

from __future__ import annotations

import functools
import os
import time

import numpy as np
import pytest
from engine import Marks, eventually, exceptions, hpcray_only, ray

pytestmark = pytest.mark.usefixtures("session")


@ray.remote
def echo(*args, **kwargs):
    return args, kwargs


@ray.remote
def add(x, y=10, *rest, scale=1):
    """Adds."""
    return (x + y + sum(rest)) * scale


class TestArguments:
    def test_positional_default_variadic_and_keyword(self):
        calls = [add.remote(1), add.remote(1, 2), add.remote(1, 2, 3, 4), add.remote(1, y=5, scale=2), add.remote(x=0)]
        assert ray.get(calls) == [11, 3, 10, 12, 10]

    @pytest.mark.parametrize(
        "value",
        [
            None,
            True,
            -(2**80),
            1.5,
            1j,
            "text",
            b"bytes",
            (),
            [],
            {},
            {1, 2},
            [1, (2, {"k": [3]})],
            range(4),
            "é" * 999,
        ],
    )
    def test_values_arrive_unchanged(self, value):
        (got,), keywords = ray.get(echo.remote(value))
        assert got == value
        assert type(got) is type(value)
        assert keywords == {}

    def test_refs_at_top_level_are_replaced_by_their_values(self):
        one, two = ray.put(1), add.remote(1, 1)
        assert ray.get(echo.remote(one, two, key=one)) == ((1, 2), {"key": 1})

    def test_refs_inside_containers_stay_refs(self):
        ref = ray.put("inside")
        (got, mapping), keywords = ray.get(echo.remote([ref], {"k": ref}, key=(ref,)))
        assert isinstance(got[0], ray.ObjectRef)
        assert [got[0], mapping["k"], keywords["key"][0]] == [ref, ref, ref]
        assert ray.get(got[0]) == "inside"

    def test_the_same_ref_twice(self):
        ref = ray.put([1])
        assert ray.get(echo.remote(ref, ref, k=ref)) == (([1], [1]), {"k": [1]})

    def test_hundreds_of_refs(self):
        refs = [ray.put(i) for i in range(300)]
        assert ray.get(echo.remote(*refs))[0] == tuple(range(300))

    def test_arguments_are_copies(self):
        given = [1, 2]

        @ray.remote
        def append(items):
            items.append(3)
            return items

        assert ray.get(append.remote(given)) == [1, 2, 3]
        assert given == [1, 2]

    def test_arguments_are_taken_at_the_call(self):
        @ray.remote
        def later(first, items):
            return items

        @ray.remote
        def slow():
            time.sleep(0.2)

        items = [1]
        ref = later.remote(slow.remote(), items)
        items.append(2)
        assert ray.get(ref) == [1]

    @pytest.mark.parametrize(
        ("args", "kwargs"), [((), {}), ((), {"y": 1}), ((1,), {"unknown": 2}), ((1,), {"x": 2})], ids=str
    )
    def test_arguments_that_do_not_fit_are_refused_at_the_call(self, args, kwargs):
        with pytest.raises(TypeError):
            add.remote(*args, **kwargs)

    def test_too_many_arguments_are_refused_at_the_call(self):
        with pytest.raises(TypeError):
            ray.remote(lambda x: x).remote(1, 2)

    def test_a_long_chain_of_dependencies(self):
        ref = ray.put(0)
        for _ in range(200):
            ref = add.remote(ref, 1)
        assert ray.get(ref) == 200


class TestReturnValues:
    @pytest.mark.parametrize("num_returns", [1, 2, 3, 50])
    def test_as_many_refs_as_asked_for(self, num_returns):
        @ray.remote(num_returns=num_returns)
        def numbers():
            return 7 if num_returns == 1 else list(range(num_returns))

        refs = numbers.remote()
        if num_returns == 1:
            assert ray.get(refs) == 7
        else:
            assert isinstance(refs, list)
            assert len(set(refs)) == num_returns
            assert ray.get(refs) == list(range(num_returns))

    def test_no_ref_at_all(self, marks: Marks):
        @ray.remote(num_returns=0)
        def effect(value):
            marks.add()
            return value

        assert effect.remote(5) is None
        assert effect.remote(None) is None
        eventually(lambda: len(marks.lines()) == 2)

    def test_by_options(self):
        refs = echo.options(num_returns=2).remote(1, k=2)
        assert ray.get(refs) == [(1,), {"k": 2}]
        assert ray.get(echo.remote(1)) == ((1,), {})

    def test_from_a_tuple_or_a_generator(self):
        @ray.remote(num_returns=3)
        def generate():
            yield from "abc"

        assert ray.get(ray.remote(lambda: (1, 2)).options(num_returns=2).remote()) == [1, 2]
        assert ray.get(generate.remote()) == ["a", "b", "c"]

    @pytest.mark.parametrize("count", [0, 2, 4])
    def test_wrong_number_is_an_error_of_every_ref(self, count):
        refs = ray.remote(num_returns=3)(lambda: list(range(count))).remote()
        assert len(refs) == 3
        for ref in refs:
            with pytest.raises(ValueError, match=f"{count} objects.*num_returns=3") as caught:
                ray.get(ref)
            assert isinstance(caught.value, exceptions.RayTaskError)

    def test_one_value_for_several_refs_is_an_error(self):
        refs = ray.remote(num_returns=2)(lambda: 5).remote()
        with pytest.raises(exceptions.RayTaskError):
            ray.get(refs[1])

    def test_an_exception_is_the_value_of_every_ref(self):
        refs = ray.remote(num_returns=2)(lambda: 1 / 0).remote()
        for ref in refs:
            with pytest.raises(ZeroDivisionError):
                ray.get(ref)

    def test_small_and_large_together(self):
        @ray.remote(num_returns=3)
        def mixed():
            return "small", np.arange(500_000), None

        small, large, nothing = ray.get(mixed.remote())
        assert (small, nothing) == ("small", None)
        assert int(large.sum()) == 500_000 * 499_999 // 2

    def test_two_gets_are_equal(self):
        ref = echo.remote([1, 2])
        assert ray.get(ref) == ray.get(ref)


class TestFunctions:
    def test_lambda_and_call_without_decorator(self):
        assert ray.get(ray.remote(lambda x: x * 2).remote(4)) == 8

    def test_decorator_with_options(self):
        @ray.remote(num_cpus=0.5, max_retries=1)
        def half():
            return "half"

        assert ray.get(half.remote()) == "half"

    @hpcray_only
    def test_keeps_name_and_docstring(self):
        assert add.__name__ == "add"
        assert add.__doc__ == "Adds."
        assert add.__module__ == __name__

    def test_closure_over_values_and_large_data(self):
        data = np.arange(100_000)
        offset = 3

        @ray.remote
        def total():
            return int(data.sum()) + offset

        assert ray.get(total.remote()) == 4_999_950_000 + 3

    def test_nested_closures_and_helpers(self):
        def helper(x):
            return x + 1

        def make(n):
            @ray.remote
            def inner(x):
                return helper(x) * n

            return inner

        assert ray.get([make(2).remote(1), make(3).remote(1)]) == [4, 6]

    def test_many_different_functions(self):
        functions = [ray.remote(functools.partial(lambda i, x: (i, x), i).func) for i in range(100)]
        assert ray.get([f.remote(i, -i) for i, f in enumerate(functions)]) == [(i, -i) for i in range(100)]

    def test_recursion(self):
        @ray.remote
        def factorial(n):
            return 1 if n == 0 else n * ray.get(factorial.remote(n - 1))

        assert ray.get(factorial.remote(6)) == 720

    def test_mutual_recursion_of_local_functions(self):
        @ray.remote
        def even(n):
            return n == 0 or ray.get(odd.remote(n - 1))

        @ray.remote
        def odd(n):
            return n != 0 and ray.get(even.remote(n - 1))

        assert ray.get([even.remote(4), odd.remote(4)]) == [True, False]

    def test_remote_functions_travel_as_arguments_and_results(self):
        @ray.remote
        def apply(function, *args):
            return ray.get(function.remote(*args))

        @ray.remote
        def maker(n):
            return ray.remote(lambda x: x * n)

        assert ray.get(apply.remote(add, 1, 2)) == 3
        assert ray.get(apply.remote(add.options(num_cpus=0), 1, 2)) == 3
        assert ray.get(apply.remote(ray.get(maker.remote(5)), 4)) == 20

    def test_functions_of_the_same_name_are_different(self):
        def make(value):
            def same():
                return value

            return ray.remote(same)

        assert ray.get([make(1).remote(), make(2).remote()]) == [1, 2]

    def test_the_environment_is_per_options(self):
        @ray.remote
        def read():
            return os.environ.get("HPCRAY_TEST_COLOUR")

        red = read.options(runtime_env={"env_vars": {"HPCRAY_TEST_COLOUR": "red"}})
        assert ray.get([red.remote(), read.remote()]) == ["red", None]

    def test_cannot_be_called_directly(self):
        with pytest.raises(TypeError, match=r"cannot be called directly.*\.remote\(\)"):
            add(1, 2)

    def test_async_def_is_refused(self):
        async def coroutine():
            pass

        with pytest.raises(ValueError, match="async def"):
            ray.remote(coroutine)


class TestOptions:
    @pytest.mark.parametrize(
        "options",
        [
            {"bogus": 1}, {"num_cpus": -1}, {"num_returns": -1}, {"max_retries": -2}, {"max_restarts": 1},
            {"resources": {"CPU": 1}},
        ],
        ids=str,
    )  # fmt: skip
    def test_bad_ones_are_refused(self, options):
        with pytest.raises(ValueError):
            ray.remote(**options)(lambda: 1)
        with pytest.raises(ValueError):
            add.options(**options)

    def test_an_unknown_strategy_is_refused_by_the_call_at_the_latest(self):
        with pytest.raises(ValueError, match="BOGUS"):
            add.options(scheduling_strategy="BOGUS").remote(1)

    @pytest.mark.parametrize("options", [{"num_cpus": "1"}, {"name": 3}, {"max_retries": 1.5}], ids=str)
    def test_wrong_types_are_refused(self, options):
        with pytest.raises(TypeError):
            add.options(**options)

    @pytest.mark.parametrize("target", [1, "f", None])
    def test_only_functions_and_classes_are_decorated(self, target):
        with pytest.raises((TypeError, AssertionError)):
            ray.remote(target)

    def test_empty_call_of_the_decorator_is_refused(self):
        with pytest.raises((TypeError, AssertionError), match="decorator must be applied"):
            ray.remote()

    def test_leave_the_original_alone(self):
        other = echo.options(num_returns=2, num_cpus=0, name="x", max_retries=0)
        assert ray.get(other.remote(1)) == [(1,), {}]
        assert ray.get(echo.remote(1)) == ((1,), {})


def test_ten_thousand_tasks():
    assert ray.get([add.remote(i, 1) for i in range(10_000)]) == list(range(1, 10_001))


def test_several_workers_work_at_once():
    @ray.remote
    def pid():
        time.sleep(0.3)
        return os.getpid()

    found = ray.get([pid.remote() for _ in range(4)])
    assert len(set(found)) == 4
    assert os.getpid() not in found


def test_a_worker_is_used_again():
    @ray.remote
    def pid():
        return os.getpid()

    assert len({ray.get(pid.remote()) for _ in range(50)}) <= 4
