"""The normal form of a world: worlds that differ in names, or in what can no longer matter, are one.

This is what makes the number of states finite although attempts, dispatch numbers, sequences and tokens have no bound:
rules compare them for equality with those of the row, or count them up, and nothing else.
"""

from collections.abc import Iterable, Mapping

from aijobs.states import JobState
from services.jobs.store.outbox import EventStatus
from tests.model.world import Dispatcher, Event, Executor, World, claim_tokens, lease_tokens, name


def normal(world: World) -> World:
    """Return the world that stands for all that are like it."""
    if world.wrong or world.row is None:
        return world
    world = _after_the_end(world) if world.ended else world
    return _renamed(_in_order(_without_what_is_over(world)))


def _after_the_end(world: World) -> World:
    """Forget what only leads to locks: they are all refused from here on. Late reports and repeats are kept."""
    executors = (
        executor._replace(has_message=False, connected=True, present=True, suspected=False, suspicions=())
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
    assert world.row is not None
    row = world.row
    settling = {dispatcher.event for dispatcher in world.dispatchers} | {late.event for late in world.late}
    events = (
        event
        for event in world.events
        if event.status != EventStatus.PUBLISHED or event.number == row.dispatch_no or event.number in settling
    )
    holder = row.locked_by
    executors = [
        (executor, name(index) == holder)
        for index, executor in enumerate(world.executors)
        if name(index) == holder or executor.alive or executor.connected or executor.suspicions or executor.late
    ]
    if (row.locked_by is not None) and not any(holds for _, holds in executors):
        row = row._replace(locked_by="nobody")
    asked = {(late.attempt, late.token) for executor, _ in executors for late in executor.late}
    asked |= {(executor.attempt, executor.token) for executor, _ in executors if executor.stage == "reports"}
    locks = {late.token for executor, _ in executors for late in executor.late if late.call == "lock"}
    history = (entry for entry in world.history if (entry.attempt, entry.token) in asked or entry.token in locks)
    executors.sort(key=lambda pair: _rank(pair[0], pair[1], world))
    for index, (_, holds) in enumerate(executors):
        if holds:
            row = row._replace(locked_by=name(index))
    return world._replace(
        row=row, executors=tuple(executor for executor, _ in executors), events=tuple(events), history=tuple(history)
    )


def _rank(executor: Executor, holds: bool, world: World) -> tuple[object, ...]:
    """Put executors in an order that does not depend on their tokens."""
    assert world.row is not None
    token = executor.token == world.row.lease_token
    return (holds, token, executor.attempt == world.row.attempt, len(executor.late), executor._replace(token=""))


def _in_order(world: World) -> World:
    return world._replace(
        events=tuple(sorted(world.events, key=lambda event: (event.number, event.status))),
        dispatchers=tuple(sorted(world.dispatchers, key=lambda dispatcher: (dispatcher.stage, dispatcher))),
        cancellers=tuple(sorted(world.cancellers)),
    )


def _renamed(world: World) -> World:
    assert world.row is not None
    leases, claims = _numbered(lease_tokens(world)), _numbered(claim_tokens(world))
    attempts = {executor.attempt for executor in world.executors} | {entry.attempt for entry in world.history}
    attempts |= {late.attempt for executor in world.executors for late in executor.late} | {0, world.row.attempt}
    attempt = {old: new for new, old in enumerate(sorted(attempts))}
    numbers = {event.number for event in world.events} | {late.event for late in world.late}
    numbers |= {dispatcher.event for dispatcher in world.dispatchers} | {0, world.to_dispatch, world.row.dispatch_no}
    number = {old: new for new, old in enumerate(sorted(numbers))}
    token = world.row.lease_token
    return world._replace(
        row=world.row._replace(
            attempt=attempt[world.row.attempt],
            lease_token=None if token is None else leases[token],
            dispatch_no=number[world.row.dispatch_no],
            sequence=1,
        ),
        executors=tuple(_executor(executor, leases, attempt) for executor in world.executors),
        history=tuple(
            sorted(entry._replace(attempt=attempt[entry.attempt], token=leases[entry.token]) for entry in world.history)
        ),
        events=tuple(
            event._replace(number=number[event.number], token=claims[event.token]) for event in world.events
        ),
        dispatchers=tuple(
            dispatcher._replace(event=number[dispatcher.event], token=claims[dispatcher.token])
            for dispatcher in world.dispatchers
        ),
        late=tuple(sorted(late._replace(event=number[late.event], token=claims[late.token]) for late in world.late)),
        to_dispatch=number[world.to_dispatch],
    )


def _executor(executor: Executor, leases: Mapping[str, str], attempt: Mapping[int, int]) -> Executor:
    late = (late._replace(token=leases[late.token], attempt=attempt[late.attempt]) for late in executor.late)
    return executor._replace(
        token=leases[executor.token], attempt=attempt[executor.attempt], late=tuple(sorted(late))
    )


def _numbered(tokens: Iterable[str]) -> Mapping[str, str]:
    """Name tokens anew, in the order in which they are met. No token stays none."""
    names = {"": ""}
    for token in tokens:
        if token not in names:
            names[token] = "abcdefghijklmnopqrstuvwxyz"[len(names) - 1]
    return names
