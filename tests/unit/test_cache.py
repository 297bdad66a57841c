"""The cache of executables: made once, bounded in number, counted."""

import threading

import pytest

from compiled_adv.cache import Cache


def never() -> object:
    raise AssertionError("made again")


def test_an_executable_is_made_once():
    cache, made = Cache(4), object()
    assert cache.get("a", lambda: made) is made
    assert cache.get("a", never) is made


def test_hits_misses_and_compiles_are_counted():
    cache = Cache(4)
    for key in "aabab":
        cache.get(key, object)
    info = cache.info()
    assert (info.hits, info.misses, info.compiles, info.executables, info.evictions) == (3, 2, 2, 2, 0)


def test_the_least_recently_used_goes_first():
    cache = Cache(2)
    first = cache.get("a", object)
    cache.get("b", object)
    cache.get("a", never)
    cache.get("c", object)  # b goes
    assert cache.get("a", never) is first
    made = object()
    assert cache.get("b", lambda: made) is made
    assert cache.info().evictions == 2 and cache.info().executables == 2


def test_a_limit_of_one_keeps_the_newest():
    cache = Cache(1)
    cache.get("a", object)
    newest = cache.get("b", object)
    assert cache.get("b", never) is newest


def test_what_could_not_be_made_is_asked_for_again():
    cache = Cache(4)

    def fails() -> object:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError):
            cache.get("a", fails)
    assert cache.info().compiles == 0 and cache.info().misses == 2
    made = object()
    assert cache.get("a", lambda: made) is made


def test_no_executable_takes_no_place_and_counts_as_no_compile():
    cache = Cache(1)
    kept = cache.get("a", object)
    for key in ("b", "c"):
        assert cache.get(key, lambda: None) is None
    assert cache.get("a", never) is kept
    info = cache.info()
    assert (info.compiles, info.executables, info.evictions) == (1, 1, 0)


def test_seconds_of_compiling_add_up(monkeypatch):
    clock = iter([0.0, 2.0, 10.0, 13.0])
    monkeypatch.setattr("compiled_adv.cache.time.perf_counter", lambda: next(clock))
    cache = Cache(4)
    cache.get("a", object)
    cache.get("b", object)
    cache.get("b", never)
    assert cache.info().compile_seconds == 5.0


def test_padding_is_the_share_of_computed_slots_that_held_nothing():
    cache = Cache(4)
    assert cache.info().padding == 0.0
    cache.served(50, 100)
    cache.served(100, 100)
    assert cache.info().padding == 0.25


def test_calls_that_ran_eager_instead_are_counted():
    cache = Cache(4)
    cache.fell_back()
    cache.fell_back()
    assert cache.info().fallbacks == 2


def test_a_thread_that_asks_for_one_in_the_making_waits_for_it():
    cache, started, go = Cache(4), threading.Event(), threading.Event()
    made, got = object(), []

    def slow() -> object:
        started.set()
        assert go.wait(10)
        return made

    threads = [threading.Thread(target=lambda: got.append(cache.get("a", slow)))]
    threads[0].start()
    assert started.wait(10)
    threads.append(threading.Thread(target=lambda: got.append(cache.get("a", never))))
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join(10)
    assert got == [made, made]


def test_making_one_may_ask_for_another():
    cache = Cache(4)
    inner = object()
    assert cache.get("a", lambda: cache.get("b", lambda: inner)) is inner
    assert cache.info().compiles == 2
