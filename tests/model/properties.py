"""What must hold in every state, besides what `service.py` checks at every write."""

from aijobs.states import JobState
from services.jobs.store.outbox import EventStatus
from services.jobs.store.quotas import LIVE
from tests.model.world import World


def problem(world: World) -> str:
    """Say what is wrong with a world; empty if nothing is."""
    row, books = world.row, world.books
    if world.wrong or row is None:
        return world.wrong
    state = row.lifecycle_status
    running, leased, lapsed = state == JobState.RUNNING, row.lease_token is not None, row.lapsed_at is not None
    holds = {
        "exactly one end, and only of an ended job": books.ends == state.terminal,
        "the newest history entry says the row's state": books.state == state,
        "a projection for a success, once": books.projections == (state == JobState.SUCCEEDED),
        "an acknowledged cancel can only end cancelled": not (
            books.cancelled and state in (JobState.SUCCEEDED, JobState.FAILED)
        ),
        "a quota counts the job as long as it has not ended": (state in LIVE) != state.terminal,
        "an event's attempts are those that failed": all(event.attempts <= event.failures for event in world.events),
        # What the CHECK constraints of the table say.
        "an ended job has a finish time": state.terminal == (row.finished_at is not None),
        "a running job is leased or lapsed": running == (leased or lapsed),
        "a lapsed job has no lease and no cancel": not lapsed
        or (not leased and row.locked_by is None and row.cancel_requested_at is None),
        "a lease has an end": leased == (row.lock_until is not None) == (row.locked_by is not None),
        "a queued job is cancelled at once": state != JobState.QUEUED or row.cancel_requested_at is None,
        # A job that waits can be found by its event.
        "a waiting job has an event": not (state == JobState.QUEUED or lapsed)
        or any(event.number == row.dispatch_no for event in world.events),
    }
    return next((f"violated: {what}" for what, is_so in holds.items() if not is_so), "")


def settled(world: World) -> bool:
    """Tell whether the job has ended, or an operator has to look at it because its event is dead (LC-13)."""
    return world.ended or any(
        event.status == EventStatus.DEAD and world.row is not None and event.number == world.row.dispatch_no
        for event in world.events
    )
