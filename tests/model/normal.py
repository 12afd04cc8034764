"""The normal form of a world: worlds that differ in names, or in what can no longer matter, are one.

This is what makes the number of states finite although attempts, dispatch numbers, sequences and tokens have no bound:
rules compare them for equality with those of the row, or count them up, and nothing else.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from operator import itemgetter

from services.jobs.store.outbox import EventStatus
from tests.model.rules import Row
from tests.model.world import (
    LETTERS,
    Dispatcher,
    Executor,
    Request,
    World,
    attempts,
    claim_tokens,
    dispatch_numbers,
    lease_tokens,
    name,
)


def normal(world: World) -> World:
    """Return the world that stands for all that are like it."""
    if world.row is None:
        return world
    return _renamed(_without_what_is_over(_after_the_end(world) if world.ended else world))


def _after_the_end(world: World) -> World:
    """Forget what only leads to locks: they are all refused from here on. Late reports and repeats are kept."""
    executors = (
        executor._replace(
            has_message=False, connected=True, present=True, disconnected=False, suspected=False, suspicions=()
        )
        for executor in world.executors
        if executor.late or executor.stage in ("runs", "reports")
    )
    return world._replace(
        executors=tuple(executors),
        dispatchers=(Dispatcher(),) * len(world.dispatchers),
        events=(),
        messages=0,
        late=(),
        created=True,
        to_lapse=False,
        to_dispatch=0,
        paused=False,
        faults=0,
        wishes=0,
    )


def _without_what_is_over(world: World) -> World:
    """Forget executors, events and history that nothing can come of any more, and put the rest in an order."""
    row = world.row
    assert row is not None
    executors = [
        (_rank(executor, row, holds=name(index) == row.locked_by), executor)
        for index, executor in enumerate(world.executors)
        if executor.alive or executor.late or name(index) == row.locked_by
    ]
    executors.sort(key=itemgetter(0))
    if row.locked_by is not None:
        # Its holder has come to the end of the line.
        row = row._replace(locked_by=name(len(executors) - 1))
    events, history = world.events, world.history
    if len(events) > 1:
        settling = {dispatcher.event for dispatcher in world.dispatchers} | {late.event for late in world.late}
        events = tuple(
            event
            for event in events
            if event.status != EventStatus.PUBLISHED or event.number == row.dispatch_no or event.number in settling
        )
    if history:
        late = [request for _, executor in executors for request in executor.late]
        asked = {(request.attempt, request.token) for request in late}
        asked |= {(executor.attempt, executor.token) for _, executor in executors if executor.stage == "reports"}
        asked |= {(0, executor.token) for _, executor in executors if executor.stage == "wants"}
        history = tuple(entry for entry in history if (entry.attempt, entry.token) in asked)
    return world._replace(
        row=row,
        executors=tuple(executor for _, executor in executors),
        dispatchers=tuple(sorted(world.dispatchers)),
        cancellers=tuple(sorted(world.cancellers)),
        events=events,
        history=history,
    )


def _rank(executor: Executor, row: Row, *, holds: bool) -> tuple[object, ...]:
    """Put executors in an order that does not depend on their tokens."""
    alive, stage, token, attempt, *others, late = executor
    return (holds, token == row.lease_token, attempt == row.attempt, alive, stage, others, len(late))


def _renamed(world: World) -> World:
    assert world.row is not None
    lease, claim = _names(lease_tokens(world)), _names(claim_tokens(world))
    attempt, number = _ranks(attempts(world)), _ranks(dispatch_numbers(world))
    executors, dispatchers, events, late = world.executors, world.dispatchers, world.events, world.late
    # Most steps leave most names as they are.
    if lease or attempt or any(len(executor.late) > 1 for executor in executors):
        executors = tuple(
            executor._replace(
                token=lease.get(executor.token, executor.token),
                attempt=attempt.get(executor.attempt, executor.attempt),
                late=_late(executor.late, lease, attempt, number),
            )
            for executor in executors
        )
    if claim or number:
        events = tuple(
            event._replace(number=number.get(event.number, event.number), token=claim.get(event.token, event.token))
            for event in events
        )
        dispatchers = tuple(
            dispatcher._replace(
                event=number.get(dispatcher.event, dispatcher.event),
                token=claim.get(dispatcher.token, dispatcher.token),
            )
            for dispatcher in dispatchers
        )
    history = (
        entry._replace(attempt=attempt.get(entry.attempt, entry.attempt), token=lease.get(entry.token, entry.token))
        for entry in world.history
    )
    return world._replace(
        row=_row(world.row, lease, attempt, number),
        executors=executors,
        events=events,
        dispatchers=dispatchers,
        late=_late(late, claim, attempt, number) if late else late,
        history=tuple(sorted(history)) if world.history else (),
        to_dispatch=number.get(world.to_dispatch, world.to_dispatch),
    )


def _row(row: Row, lease: Mapping[str, str], attempt: Mapping[int, int], number: Mapping[int, int]) -> Row:
    return _interned(
        row._replace(
            attempt=attempt.get(row.attempt, row.attempt),
            lease_token=row.lease_token and lease.get(row.lease_token, row.lease_token),
            dispatch_no=number.get(row.dispatch_no, row.dispatch_no),
            sequence=1,
        )
    )


@cache
def _interned(row: Row) -> Row:
    """Keep one of all rows that are equal: millions of worlds share a few hundred rows."""
    return row


def _late(
    requests: tuple[Request, ...], token: Mapping[str, str], attempt: Mapping[int, int], number: Mapping[int, int]
) -> tuple[Request, ...]:
    renamed = (
        request._replace(
            token=token.get(request.token, request.token),
            attempt=attempt.get(request.attempt, request.attempt),
            event=number.get(request.event, request.event),
        )
        for request in requests
    )
    return tuple(sorted(renamed))


def _names(tokens: Iterable[str]) -> Mapping[str, str]:
    """Name tokens anew, in the order in which they are met; nothing if all keep their names."""
    met = dict.fromkeys(tokens)
    met.pop("", None)
    named = dict(zip(met, LETTERS, strict=False))
    return {} if all(old == new for old, new in named.items()) else named


def _ranks(numbers: Iterable[int]) -> Mapping[int, int]:
    """Number anew, in the same order, from 0 for 0; nothing if all keep their numbers."""
    ranked = {old: new for new, old in enumerate(sorted({0, *numbers}))}
    return {} if all(old == new for old, new in ranked.items()) else ranked
