"""Writing a change of the job, and comparing it with what really happened."""

from aijobs.states import JobState
from services.jobs.events import EventType
from services.jobs.store.changes import Kind
from tests.model import rules
from tests.model.flaws import Flaw
from tests.model.rules import LATER, Row, Ruling, Written
from tests.model.world import Event, World


def row_of(world: World) -> Row:
    """Return the job's row, which is there from the create on."""
    assert world.row is not None
    return world.row


def changed(world: World, ruling: Ruling) -> World:
    """Write a change with its history entry and its event, as one transaction does."""
    if not isinstance(ruling, Written):
        return world.blame(f"a change was refused that nothing speaks against: {ruling.__name__}")
    before, after, books = row_of(world), ruling.row, world.books
    state = after.lifecycle_status
    if before.lifecycle_status.terminal:
        world = world.blame("a job changed after its end")
    if books.cancelled and state in (JobState.SUCCEEDED, JobState.FAILED):
        world = world.blame(f"a job {state} after a cancel was acknowledged")
    if ruling.kind in (Kind.LOCKED, Kind.TAKEN_OVER) and ruling.event is not None:
        world = world.blame("a lock dispatched the job again")
    events = world.events
    if ruling.event == EventType.ENQUEUE:
        if any(event.number == after.dispatch_no for event in events):
            # The unique key of the outbox aborts the transaction, and its retry, and so on (ruling 20).
            world = world.blame("two events under one dedupe key")
        events = (*events, Event(after.dispatch_no, delayed=after.due_at == LATER))
    books = books._replace(
        state=state,
        ends=books.ends + state.terminal,
        projections=books.projections + (ruling.kind == Kind.SUCCEEDED),
    )
    return world._replace(row=after, events=events, books=books)


def lapsed(world: World, flaws: frozenset[Flaw]) -> World:
    """End the present lease without an outcome (`JobLapsing._lapse`)."""
    row = row_of(world)
    if world.books.lapsed:
        world = world.blame("a lease lapsed twice")
    ruling = rules.lapse(row)
    if Flaw.LAPSE_NOT_RECORDED in flaws and isinstance(ruling, Written) and ruling.kind == Kind.LAPSED:
        kept = {column: getattr(row, column) for column in ("lease_token", "locked_by", "lock_until", "lapsed_at")}
        ruling = ruling._replace(row=ruling.row._replace(**kept), event=EventType.ENQUEUE)
    world = changed(world, ruling)
    return world._replace(books=world.books._replace(lapsed=True))
