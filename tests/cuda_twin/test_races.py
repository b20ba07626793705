"""The check for races, on records that are written here. On the twin it looks at real steps: test_copies_on_twin.py."""

from __future__ import annotations

import pytest

from tests.cuda_twin.races import races
from tests.cuda_twin.twin import Call

COMPUTE, OUT, IN = 0, 1, 2
BLOCK, OTHER, HOST = 0x1000, 0x2000, 0x90000
EVENT = 7


def alloc(at: int = BLOCK) -> Call:
    return Call("alloc", COMPUTE, 0, at, 0, 512)


def free(at: int = BLOCK) -> Call:
    return Call("free_completed", COMPUTE, 0, at, 0, 512)


def copy(stream: int, to: int, source: int) -> Call:
    return Call("copy", stream, 0, to, source, 512)


def kernel(op: int, kind: str, at: int = BLOCK) -> list[Call]:
    return [Call(kind, COMPUTE, op, at, 1, 512), Call("kernel", COMPUTE, op, 0, 0, 0)]


def on_host(op: int, kind: str) -> Call:
    return Call(kind, COMPUTE, op, HOST, 0, 512)


def record(stream: int, event: int = EVENT) -> Call:
    return Call("record", stream, 0, event, 0, 0)


def wait(stream: int, event: int = EVENT) -> Call:
    return Call("wait", stream, 0, event, 0, 0)


HOST_WAITS = Call("event_sync", COMPUTE, 0, EVENT, 0, 0)
MADE = [alloc(), *kernel(1, "write"), record(COMPUTE, 1), wait(OUT, 1)]  # and the stream for copies waits for that
TO_HOST = [*MADE, copy(OUT, HOST, BLOCK), record(OUT)]
BACK = [alloc(), alloc(OTHER), record(COMPUTE, 1), wait(IN, 1), copy(IN, BLOCK, HOST), record(IN)]

# What is given out, the wait that orders it, and what follows.
CASES = {
    "a copy begins before its source is made": (MADE[:-1], MADE[-1], [copy(OUT, HOST, BLOCK)]),
    "a block is reused before a copy out of it has ended": ([*TO_HOST, free()], wait(COMPUTE), [alloc()]),
    "a block is written to before a copy out of it has ended": (TO_HOST, wait(COMPUTE), kernel(2, "write")),
    "a kernel reads before the copy has come": (BACK, wait(COMPUTE), kernel(2, "read")),
    "a block is reused before the copy into it has ended": ([*BACK, free()], wait(COMPUTE), [alloc()]),
    "what is on its way to the host is fetched": (TO_HOST, wait(IN), [alloc(OTHER), copy(IN, OTHER, HOST)]),
    "the host reads before the copy has come": (TO_HOST, HOST_WAITS, [on_host(2, "read")]),
    "the host's optimizer writes before the copy has read": (BACK, HOST_WAITS, [on_host(2, "write")]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_nothing_orders_is_found(name: str) -> None:
    before, ordering, after = CASES[name]
    assert len(races([*before, *after])) == 1
    assert races([*before, ordering, *after]) == []


@pytest.mark.parametrize(
    "ordering",
    [
        HOST_WAITS,
        Call("event_query", COMPUTE, 0, EVENT, 1, 0),
        Call("stream_sync", OUT, 0, 0, 0, 0),
        Call("stream_query", OUT, 0, 0, 1, 0),
        Call("device_sync", COMPUTE, 0, 0, 0, 0),
        Call("free", COMPUTE, 0, 0, 0, 0),
    ],
)
def test_what_the_host_has_waited_for_is_over_for_all_that_follows(ordering: Call) -> None:
    assert races([*TO_HOST, ordering, *kernel(2, "write"), free(), alloc()]) == []


@pytest.mark.parametrize(
    "useless",
    [
        wait(COMPUTE, EVENT + 1),
        wait(IN),
        Call("event_query", COMPUTE, 0, EVENT, 0, 0),
        Call("stream_sync", COMPUTE, 0, 0, 0, 0),
    ],
)
def test_other_waits_order_nothing(useless: Call) -> None:
    assert len(races([*TO_HOST, useless, *kernel(2, "write")])) == 1


def test_reads_do_not_disturb_one_another() -> None:
    assert races([*TO_HOST, wait(IN, 1), *kernel(2, "read"), copy(IN, OTHER, BLOCK)]) == []


def test_waits_are_passed_on() -> None:
    passed = [wait(IN), record(IN, 9), wait(COMPUTE, 9)]
    assert races([*TO_HOST, *passed, *kernel(2, "write")]) == []


def test_an_event_stands_for_what_was_before_it() -> None:
    early = [*MADE, record(OUT), copy(OUT, HOST, BLOCK), wait(COMPUTE)]
    assert len(races([*early, *kernel(2, "write")])) == 1
