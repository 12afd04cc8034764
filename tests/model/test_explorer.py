"""The explorer itself, on protocols of a few states."""

from collections.abc import Iterator, Mapping

import pytest

from tests.model.explorer import Explorer, Step


class Graph:
    """Where one can go from where; a way with an exclamation mark is forced. Capital letters are done."""

    def __init__(self, ways: Mapping[str, str]) -> None:
        self._ways = ways

    def start(self) -> str:
        return "a"

    def steps(self, state: str) -> Iterator[Step[str]]:
        for way in self._ways.get(state, "").split():
            yield Step(f"{state} to {way[0]}", way.endswith("!"), way[0])

    def normal(self, state: str) -> str:
        # Two names of one state.
        return state.replace("x", "y")

    def wrong(self, state: str) -> str:
        return "wrong" if state == "w" else ""

    def done(self, state: str) -> bool:
        return state.isupper()


def explore(**ways: str):
    return Explorer(Graph(ways)).explore()


def test_finds_nothing_where_every_way_ends():
    found = explore(a="b c", b="D", c="b D")
    assert (found.problem, found.states, found.steps) == ("", 4, 5)


def test_finds_the_shortest_way_to_what_is_wrong():
    found = explore(a="b c", b="d", d="w", c="w!")
    assert (found.problem, found.trace) == ("wrong", ["a to c", "c to w"])


def test_finds_a_dead_end():
    found = explore(a="b D", b="D!")
    assert found.problem.startswith("dead end")
    assert found.trace == ["a to b"]


def test_finds_a_loop():
    found = explore(a="b", b="c", c="d D", d="b")
    assert found.problem.startswith("loop")
    assert found.trace == ["a to b", "from here on, for ever:", "b to c", "c to d", "d to b"]


def test_a_loop_that_needs_faults_is_none():
    assert not explore(a="b", b="c D", c="b! D").problem


def test_what_is_done_may_go_on_for_ever():
    assert not explore(a="B", B="C", C="B").problem


def test_a_step_that_changes_nothing_is_none():
    found = explore(a="a b", b="D")
    assert (found.problem, found.steps) == ("", 2)


def test_states_that_differ_in_names_are_one():
    found = explore(a="x y", x="D", y="D")
    assert (found.problem, found.states) == ("", 3)


def test_labels_follow_one_name():
    found = explore(a="x", x="w", y="w")
    assert found.trace == ["a to x", "x to w"]


def test_a_model_without_an_end_is_stopped():
    with pytest.raises(OverflowError):
        Explorer(Graph({"a": "b", "b": "c"}), most_states=2).explore()
