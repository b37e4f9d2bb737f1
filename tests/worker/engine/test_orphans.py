from __future__ import annotations

from worker.engine.orphans import SILENCE_S, OrphanTracker


def test_what_two_lists_in_a_row_lack_was_forgotten() -> None:
    lists = OrphanTracker()
    for request, ingress in (("a", "one"), ("b", "one"), ("c", "two")):
        lists.began(request, ingress, 0.0)
    assert lists.update("one", ["a"], 1.0) == []  # the list may be older than the request
    assert lists.update("one", ["a", "b"], 2.0) == []
    assert lists.update("one", ["a"], 3.0) == []
    assert lists.update("two", [], 3.0) == []
    assert lists.update("one", ["a"], 4.0) == ["b"]
    assert lists.update("one", ["a"], 5.0) == ["b"]  # until it has ended
    lists.ended("b")
    assert lists.update("one", ["a"], 6.0) == []


def test_a_request_that_comes_again_is_new() -> None:
    lists = OrphanTracker()
    lists.began("a", "one", 0.0)
    assert lists.update("one", [], 1.0) == []
    lists.ended("a")
    lists.began("a", "one", 2.0)
    assert lists.update("one", [], 3.0) == []
    assert lists.update("one", [], 4.0) == ["a"]


def test_the_requests_of_a_silent_ingress_are_orphans() -> None:
    lists = OrphanTracker()
    lists.began("a", "one", 0.0)
    lists.began("b", "two", 0.0)
    lists.update("two", ["b"], SILENCE_S)
    assert lists.orphans(SILENCE_S) == []
    assert lists.orphans(SILENCE_S + 0.1) == ["a"]
    assert lists.orphans(SILENCE_S + 0.2) == ["a"]
    lists.ended("a")
    assert lists.orphans(SILENCE_S + 0.3) == []
    lists.began("c", "one", SILENCE_S + 0.4)  # it was only slow
    assert lists.orphans(SILENCE_S + 0.5) == []
    assert lists.orphans(3 * SILENCE_S) == ["b", "c"]


def test_an_ingress_that_stopped_listening_itself_may_be_silent() -> None:
    """It cannot call a worker that is taken away, and still reads its streams."""
    lists = OrphanTracker()
    with lists.listening("one", 0.0):
        lists.began("a", "one", 0.0)
        lists.update("one", ["a"], 1.0)
    lists.began("b", "killed", 1.0)
    assert lists.orphans(100.0) == ["b"]
    with lists.listening("one", 100.0):  # it was suspect, and is back
        assert lists.orphans(100.0 + SILENCE_S) == ["b"]
        assert lists.orphans(100.1 + SILENCE_S) == ["a", "b"]
    lists.ended("a")
    lists.ended("b")
    lists.orphans(200.0)
    assert not lists._seen_s


def test_an_ingress_listens_until_the_last_of_its_streams_ends() -> None:
    lists = OrphanTracker()
    with lists.listening("one", 0.0):
        with lists.listening("one", 0.0):
            lists.began("a", "one", 0.0)
        assert lists.orphans(1.0 + SILENCE_S) == ["a"]


def test_nothing_is_kept_of_who_is_gone() -> None:
    lists = OrphanTracker()
    for i in range(50):
        with lists.listening(f"ingress-{i}", float(i)):
            lists.update(f"ingress-{i}", [], float(i))
        lists.began("a", f"ingress-{i}", float(i))
        lists.ended("a")
        lists.update(f"ingress-{i}", [], float(i))
    lists.orphans(100.0)
    assert not any(vars(lists).values())
