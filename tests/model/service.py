"""What the jobs service does with the rules when somebody calls it.

Each function is one transaction and names the code that it mirrors. It changes the world and returns what the caller is
told. At every write, what the rules did is compared with what really happened: most of what must hold is checked here
and in `books.py`, the rest in `properties.py`.
"""

from typing import Literal

from aijobs.errors import CancelRequested
from aijobs.states import JobState
from services.jobs.store.changes import Kind
from tests.model import rules
from tests.model.books import changed, row_of
from tests.model.flaws import Flaw
from tests.model.rules import LATER, Row, Ruling, Written
from tests.model.world import CancelAnswer, Entry, Event, Report, Request, World, name, put

#: What an executor is told.
Answer = Literal[
    "leased", "not ours", "session open", "session lost", "renewed", "lease lost", "cancel requested", "ended", "go on"
]  # fmt: skip

#: The history entries that say that a report was taken (`execution.REPORT_KINDS`).
REPORT_KINDS: dict[Report, frozenset[Kind]] = {
    "succeeded": frozenset({Kind.SUCCEEDED}),
    "failed": frozenset({Kind.EXECUTION_FAILED, Kind.FAILED}),
    "cancelled": frozenset({Kind.CANCELLED}),
    "handed back": frozenset({Kind.HANDED_BACK, Kind.CANCELLED}),
    "handed back for later": frozenset({Kind.HANDED_BACK, Kind.CANCELLED}),
}


class Service:
    """The jobs service, with the given flaws."""

    def __init__(self, flaws: frozenset[Flaw] = frozenset()) -> None:
        self._flaws = flaws

    def create(self, world: World) -> World:
        """Create the job; a repeat finds it by its request id (`JobCreation._create`)."""
        if world.row is not None:
            return world
        books = world.books._replace(state=JobState.QUEUED)
        return world._replace(row=Row(), events=(Event(1),), books=books)

    def cancel(self, world: World, index: int) -> tuple[World, CancelAnswer]:
        """Cancel, or say why not; a repeat gets the first answer (`JobCancellation._cancel`, `_change`).

        A refusal has no answer and is not remembered.
        """
        remembered = world.cancellers[index].remembered
        if remembered and Flaw.CANCELS_FORGOTTEN not in self._flaws:
            return world, remembered
        row, answer = row_of(world), _cancel_answer(row_of(world))
        if answer == "cancelled":
            world = changed(world, rules.cancel_waiting(row))
        elif answer == "requested" and row.cancel_requested_at is None:
            world = changed(world, rules.note_cancel_requested(row))
        if remembered and answer != remembered:
            world = world.blame("a repeated cancel got another answer")
        if not answer:
            return world, answer
        canceller = world.cancellers[index]._replace(remembered=answer)
        books = world.books._replace(cancelled=True)
        return world._replace(cancellers=put(world.cancellers, index, canceller), books=books), answer

    def lock(self, world: World, index: int, request: Request, *, knows_type: bool = True) -> tuple[World, Answer]:
        """Hand out a lease, or dispatch a job again that cannot start now (`JobLeasing._lock`, `_not_ready`).

        It is no sign of life. A session that is not open gets nothing, and a token that had a lease gets no other one.

        Args:
            world: the world.
            index: of the executor that asks.
            request: what it asks with.
            knows_type: it has this job's type.

        """
        if Flaw.LOCK_AS_SIGN_OF_LIFE in self._flaws:
            world = _heard(world, index)
        over = not request.present and Flaw.EPOCH_UNSEEN_BY_LOCK not in self._flaws
        broken = world.executors[index].disconnected and Flaw.BREAK_UNSEEN_BY_LOCK not in self._flaws
        if over or broken:
            return world, "session lost"
        row = row_of(world)
        if rules.job(row).waits and (world.paused or row.due_at == LATER or not knows_type):
            delayed = not world.paused and row.due_at != LATER
            ruling = rules.dispatch_again(row, delayed=delayed)
            if Flaw.SAME_DISPATCH_AFTER_REFUSAL in self._flaws and isinstance(ruling, Written):
                ruling = ruling._replace(row=ruling.row._replace(dispatch_no=row.dispatch_no))
            return changed(world, ruling), "not ours"
        used = request.token in _lease_tokens(world) and request.token != row.lease_token
        if used and Flaw.USED_TOKEN_UNSEEN not in self._flaws:
            return world, "not ours"
        return self._grant(world, index, request)

    def _grant(self, world: World, index: int, request: Request) -> tuple[World, Answer]:
        """Give a lease, unless the request has it already, by a repeat (`JobLeasing._grant`, `_already_locked`)."""
        row = row_of(world)
        if row.lifecycle_status == JobState.RUNNING and row.lease_token == request.token:
            if Flaw.LOCKS_FORGOTTEN not in self._flaws:
                return world, "leased"
            world = world.blame("a repeated lock was not recognised")
        ruling = rules.lock(row, request.token, name(index))
        if not isinstance(ruling, Written):
            return world, "not ours"
        if row.lifecycle_status == JobState.RUNNING and not world.books.lapsed:
            world = world.blame("a lease was taken over that had not lapsed")
        if not request.present:
            world = world.blame("a session that is over was given a lease")
        world = changed(world, ruling)
        # The normal form keeps the entry only as long as somebody may ask for a lock with this token.
        history = (*world.history, Entry(0, request.token, Kind.LOCKED))
        return world._replace(books=world.books._replace(lapsed=False), history=history), "leased"

    def heartbeat(self, world: World, index: int, request: Request) -> tuple[World, Answer]:
        """Renew a lease, however late, as long as it has not lapsed (`JobLeasing._extend`)."""
        world = _heard(world, index)
        row = row_of(world)
        if not rules.holds(row, request.attempt, request.token):
            return world, "lease lost"
        if world.books.lapsed:
            world = world.blame("a lease was renewed that had lapsed")
        world = world._replace(row=row._replace(lock_until=LATER))
        return world, "renewed" if row.cancel_requested_at is None else "cancel requested"

    def report(self, world: World, index: int, request: Request) -> tuple[World, Answer]:
        """Take in what became of a run (`JobExecution._submit`, `_repeat`)."""
        world = _heard(world, index)
        row, attempt, token = row_of(world), request.attempt, request.token
        earlier = _reported_before(world, request)
        if earlier is not None and Flaw.REPORTS_FORGOTTEN not in self._flaws:
            if earlier.kind != Kind.EXECUTION_FAILED:
                return world, "ended"
            return world, "go on" if rules.holds(row, attempt, token) else "lease lost"
        held = (row.attempt, row.lease_token) == (attempt, token) and not world.books.lapsed
        if Flaw.NO_FENCE_AT_REPORT in self._flaws and row.lease_token is not None:
            ruling = self._ruling(row, request._replace(attempt=row.attempt, token=row.lease_token))
        else:
            ruling = self._ruling(row, request)
        if earlier is not None:
            world = world.blame("a repeated report was not recognised")
        if not isinstance(ruling, Written):
            return world, "cancel requested" if ruling is CancelRequested else "lease lost"
        if not held:
            world = world.blame("a report without the present lease changed the job")
        if request.report.startswith("handed back"):
            world = _check_hand_back(world, ruling.row)
        world = changed(world, ruling)
        world = world._replace(history=(*world.history, Entry(attempt, token, ruling.kind, request.execution)))
        return world, "go on" if ruling.kind == Kind.EXECUTION_FAILED else "ended"

    def _ruling(self, row: Row, request: Request) -> Ruling:
        """Ask the rule for a report (`JobExecution._change`); some flaws hide the cancel from it."""
        attempt, token, report = request.attempt, request.token, request.report
        hidden = (report == "succeeded" and Flaw.CANCEL_UNSEEN_BY_SUCCESS in self._flaws) or (
            report == "failed" and Flaw.CANCEL_UNSEEN_BY_FAILURE in self._flaws
        )
        shown = row._replace(cancel_requested_at=None) if hidden else row
        match report:
            case "succeeded":
                ruling = rules.succeed(shown, attempt, token)
            case "failed":
                ruling = rules.fail_execution(shown, attempt, token, request.execution)
            case "cancelled":
                ruling = rules.cancel_running(row, attempt, token)
            case _ if Flaw.HAND_BACK_AS_LAPSE in self._flaws and rules.holds(row, attempt, token):
                ruling = rules.lapse(row)
            case _:
                ruling = rules.hand_back(row, attempt, token, delayed=report == "handed back for later")
        if hidden and isinstance(ruling, Written):
            return ruling._replace(row=ruling.row._replace(cancel_requested_at=row.cancel_requested_at))
        return ruling


def _cancel_answer(row: Row) -> CancelAnswer:
    if row.lifecycle_status.terminal:
        return ""
    return "cancelled" if rules.job(row).waits else "requested"


def _heard(world: World, index: int) -> World:
    """Note a sign of life of an executor (`store/executors.sign`)."""
    return world.executor(index, suspected=False) if world.executors[index].suspected else world


def _lease_tokens(world: World) -> frozenset[str]:
    """Find the tokens of all leases that the job ever had (`store.history.lease_tokens`)."""
    return frozenset(entry.token for entry in world.history if entry.kind == Kind.LOCKED)


def _reported_before(world: World, request: Request) -> Entry | None:
    """Find the history entry of a report that was taken before (`execution._reported_before`)."""
    for entry in world.history:
        same = (entry.attempt, entry.token, entry.execution) == (request.attempt, request.token, request.execution)
        if same and entry.kind in REPORT_KINDS[request.report]:
            return entry
    return None


def _check_hand_back(world: World, after: Row) -> World:
    before = row_of(world)
    if (before.takeover_count, before.retry_count) != (after.takeover_count, after.retry_count):
        world = world.blame("a hand-back was counted")
    return world._replace(books=world.books._replace(lapsed=True))
