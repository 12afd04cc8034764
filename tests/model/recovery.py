"""What the jobs service does by itself about executors that are gone and messages that are lost.

Each function is one transaction and names the code that it mirrors. The reaper and the sweep read first and write in
another transaction, in which they look again; so do the suspicions of a session.
"""

from aijobs.states import JobState
from services.jobs.store.outbox import EventStatus
from tests.model import rules
from tests.model.books import changed, lapsed, row_of
from tests.model.flaws import Flaw
from tests.model.rules import EARLIER, LATER
from tests.model.world import Request, Suspicion, World, name, without


def next_hello(world: World, index: int) -> Request:
    """Return what an executor says next; its number is above those of all before (`ExecutorSession._hello`)."""
    return Request("hello", hello=1 + max((request.hello for request in world.executors[index].late), default=0))


def open_session(world: World, index: int, hello: Request, flaws: frozenset[Flaw]) -> World | None:
    """Begin a session; None if a later hello was heard before (`ExecutorSessions._open`, `executors.say_hello`)."""
    if not hello.hello and Flaw.HELLO_NUMBER_UNSEEN not in flaws:
        return None
    world = _begin_epoch(world, index).executor(index, disconnected=False)
    late = tuple(request._replace(hello=max(0, request.hello - hello.hello)) for request in world.executors[index].late)
    return world.executor(index, late=late)


def _begin_epoch(world: World, index: int) -> World:
    """Count an executor's epoch up: by a hello, or because it is lost (`executors.say_hello`, `executors.lose`)."""
    executor = world.executors[index]
    return world.executor(
        index,
        present=False,
        suspected=False,
        suspicions=tuple(suspicion._replace(present=False) for suspicion in executor.suspicions),
        late=tuple(request._replace(present=False) for request in executor.late),
    )


def suspect(world: World, index: int, *, present: bool) -> World:
    """Notice that the stream of a session broke (`ExecutorSessions.close`, `_close_opened`)."""
    suspicions = tuple(sorted((*world.executors[index].suspicions, Suspicion(present=present))))
    return world.executor(index, suspicions=suspicions)


def note_break(world: World, index: int, suspicion: Suspicion) -> World:
    """Note that a session broke, unless it is over already (`ExecutorSessions._disconnect`, `executors.disconnect`)."""
    suspicions = without(world.executors[index].suspicions, suspicion)
    if not suspicion.present:
        return world.executor(index, suspicions=suspicions)
    suspicions = tuple(sorted((*suspicions, suspicion._replace(noted=True))))
    return world.executor(index, suspicions=suspicions, disconnected=True, suspected=True)


def judge(world: World, index: int, suspicion: Suspicion, flaws: frozenset[Flaw]) -> World:
    """End the leases of a suspect that did not come back (`ExecutorSessions._judge`)."""
    executor = world.executors[index]
    world = world.executor(index, suspicions=without(executor.suspicions, suspicion))
    if not suspicion.present and Flaw.EPOCH_UNSEEN_BY_SUSPICION not in flaws:
        return world
    if not executor.suspected:
        return world
    if row_of(world).locked_by == name(index):
        if executor.alive and not suspicion.present:
            world = world.blame("an executor lost its lease by the suspicion of a session that was over")
        if executor.alive and executor.connected:
            world = world.blame("an executor lost its lease although its session was open")
        world = lapsed(world, flaws)
    return _begin_epoch(world, index)


def expired(world: World) -> bool:
    """Tell whether the present lease has ended, grace and all (`job_store.expired_leases`, `lapsing._expired`)."""
    row = row_of(world)
    return _leased(world) and row.lock_until == EARLIER


def holder_lives(world: World) -> bool:
    """Tell whether the process that holds the lease is there, whether it knows of it or not."""
    holder = row_of(world).locked_by
    return any(executor.alive and name(index) == holder for index, executor in enumerate(world.executors))


def lapse_found(world: World, flaws: frozenset[Flaw]) -> World:
    """Judge again, on the locked row, what the reaper has read, and end it (`JobLapsing._lapse_if_expired`)."""
    world = world._replace(to_lapse=False)
    if not _leased(world) or (not expired(world) and Flaw.REAPER_LOOKS_ONCE not in flaws):
        return world
    if not expired(world):
        world = world.blame("the reaper ended a lease that had been renewed")
    return lapsed(world, flaws)


def seems_lost(world: World) -> bool:
    """Tell whether the sweep takes the job's message for lost (`Reconciliation._idle_queues`, `_is_lost`).

    It does so when an executor has been idle for longer than a message takes: one in the broker would have come by now,
    one that another executor has just received would have been looked at.
    """
    row = row_of(world)
    idle = any(executor.alive and executor.connected and executor.stage == "idle" for executor in world.executors)
    asked = any(executor.alive and executor.stage == "wants" for executor in world.executors)
    sent = any(event.number == row.dispatch_no and event.status == EventStatus.PUBLISHED for event in world.events)
    due = row.due_at != LATER and not world.paused
    return rules.job(row).waits and due and sent and idle and not asked and not world.messages


def dispatch_found(world: World) -> World:
    """Dispatch a job again that the sweep has read, if it still waits (`Reconciliation._dispatch_lost`)."""
    row, number = row_of(world), world.to_dispatch
    world = world._replace(to_dispatch=0)
    if not rules.job(row).waits or row.dispatch_no != number:
        return world
    return changed(world, rules.dispatch_again(row))


def _leased(world: World) -> bool:
    row = row_of(world)
    return row.lifecycle_status == JobState.RUNNING and row.lapsed_at is None
