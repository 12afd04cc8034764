"""What the jobs service does with the rules: each method is one transaction, and names the code that it mirrors.

The methods change the world and return what the caller is told. At every write they compare what the rules did with
what really happened (`Books`): most of what must hold is checked here, the rest in `properties.py`.
"""

from typing import Literal

from aijobs.errors import CancelRequested
from aijobs.states import JobState
from services.jobs.events import EventType
from services.jobs.store.changes import Kind
from tests.model import rules
from tests.model.flaws import Flaw
from tests.model.rules import EARLIER, LATER, Row, Ruling, Written
from tests.model.world import Entry, Event, Report, Suspicion, World, name, put

Answer = Literal[
    "leased", "not ours", "session lost", "renewed", "lease lost", "cancel requested", "ended", "go on", "cancelled",
    "requested", "refused",
]  # fmt: skip

REPORT_KINDS: dict[Report, frozenset[Kind]] = {
    "succeeded": frozenset({Kind.SUCCEEDED}),
    "failed": frozenset({Kind.EXECUTION_FAILED, Kind.FAILED}),
    "cancelled": frozenset({Kind.CANCELLED}),
    "handed back": frozenset({Kind.HANDED_BACK, Kind.CANCELLED}),
    "handed back for later": frozenset({Kind.HANDED_BACK, Kind.CANCELLED}),
}


class Service:
    """The jobs service.

    Args:
        flaws: what it does wrong.
        remembers_tokens: a lock with a token that has had a lease of the job before is refused.

    """

    def __init__(self, flaws: frozenset[Flaw] = frozenset(), *, remembers_tokens: bool = False) -> None:
        self.flaws = flaws
        self._remembers_tokens = remembers_tokens

    def create(self, world: World) -> World:
        """Create the job; a repeat finds it by its request id (`JobCreation._create`)."""
        if world.row is not None:
            return world
        books = world.books._replace(state=JobState.QUEUED)
        return world._replace(row=Row(), events=(Event(1),), books=books)

    def cancel(self, world: World, index: int) -> tuple[World, Answer]:
        """Cancel, or say why not; a repeat gets the first answer (`JobCancellation._cancel`, `_change`)."""
        remembered = world.cancellers[index].remembered
        if remembered and Flaw.CANCELS_FORGOTTEN not in self.flaws:
            return world, remembered
        row, answer = _row(world), "refused"
        if not row.lifecycle_status.terminal:
            answer = "cancelled" if rules.job(row).waits else "requested"
            if answer == "cancelled":
                world = self._changed(world, rules.cancel_waiting(row))
            elif row.cancel_requested_at is None:
                world = self._changed(world, rules.note_cancel_requested(row))
        if remembered and answer != remembered:
            world = world.blame("a repeated cancel got another answer")
        if answer == "refused":
            return world, "refused"
        canceller = world.cancellers[index]._replace(remembered=answer)
        books = world.books._replace(cancelled=True)
        return world._replace(cancellers=put(world.cancellers, index, canceller), books=books), answer

    def lock(
        self, world: World, index: int, token: str, *, present: bool, knows_type: bool = True
    ) -> tuple[World, Answer]:
        """Hand out a lease, or dispatch a job again that cannot start now (`JobLeasing._lock`, `_not_ready`, `_grant`).

        Args:
            world: the world.
            index: of the executor.
            token: the lease token that it made.
            present: the session that it shows is the present one.
            knows_type: it has this job's type.

        """
        world = _heard(world, index)
        if not present and Flaw.EPOCH_UNSEEN_BY_LOCK not in self.flaws:
            return world, "session lost"
        row = _row(world)
        if rules.job(row).waits and (world.paused or row.due_at == LATER or not knows_type):
            delayed = not world.paused and row.due_at != LATER
            ruling = rules.dispatch_again(row, delayed=delayed)
            if isinstance(ruling, Written) and Flaw.SAME_DISPATCH_AFTER_REFUSAL in self.flaws:
                ruling = ruling._replace(row=ruling.row._replace(dispatch_no=row.dispatch_no))
            return self._changed(world, ruling), "not ours"
        if row.lifecycle_status == JobState.RUNNING and row.lease_token == token:
            return world, "leased"
        if self._remembers_tokens and any(entry.token == token for entry in world.history):
            return world, "not ours"
        ruling = rules.lock(row, token, name(index))
        if not isinstance(ruling, Written):
            return world, "not ours"
        if row.lifecycle_status == JobState.RUNNING and not world.books.lapsed:
            world = world.blame("a lease was taken over that had not lapsed")
        if not present:
            world = world.blame("a session that is over was given a lease")
        world = self._changed(world, ruling)
        world = world._replace(books=world.books._replace(lapsed=False))
        if self._remembers_tokens:
            world = _remember(world, Entry(ruling.row.attempt, token, ruling.kind, 0))
        return world, "leased"

    def heartbeat(self, world: World, index: int, attempt: int, token: str) -> tuple[World, Answer]:
        """Renew a lease, however late, as long as it has not lapsed (`JobLeasing._extend`)."""
        world = _heard(world, index)
        row = _row(world)
        if not rules.holds(row, attempt, token):
            return world, "lease lost"
        if world.books.lapsed:
            world = world.blame("a lease was renewed that had lapsed")
        world = world._replace(row=row._replace(lock_until=LATER))
        return world, "renewed" if row.cancel_requested_at is None else "cancel requested"

    def report(
        self, world: World, index: int, attempt: int, token: str, report: Report, execution: int
    ) -> tuple[World, Answer]:
        """Take in what became of a run (`JobExecution._submit`, `_change`, `_repeat`)."""
        world = _heard(world, index)
        row = _row(world)
        execution = execution if report == "failed" else 0
        earlier = next(
            (
                entry
                for entry in world.history
                if (entry.attempt, entry.token, entry.execution) == (attempt, token, execution)
                and entry.kind in REPORT_KINDS[report]
            ),
            None,
        )
        if earlier is not None and Flaw.REPORTS_FORGOTTEN not in self.flaws:
            if earlier.kind != Kind.EXECUTION_FAILED:
                return world, "ended"
            return world, "go on" if rules.holds(row, attempt, token) else "lease lost"
        holds = (row.attempt, row.lease_token) == (attempt, token) and not world.books.lapsed
        if Flaw.NO_FENCE_AT_REPORT in self.flaws and row.lease_token is not None:
            ruling = self._report(row, row.attempt, row.lease_token, report, execution)
        else:
            ruling = self._report(row, attempt, token, report, execution)
        if not isinstance(ruling, Written):
            if earlier is not None:
                world = world.blame("a repeated report got another answer")
            return world, "cancel requested" if ruling is CancelRequested else "lease lost"
        if earlier is not None:
            world = world.blame("a repeated report was counted twice")
        if not holds:
            world = world.blame("a report without the present lease changed the job")
        if report.startswith("handed back"):
            world = self._check_hand_back(world, ruling)
        world = _remember(self._changed(world, ruling), Entry(attempt, token, ruling.kind, execution))
        return world, "go on" if ruling.kind == Kind.EXECUTION_FAILED else "ended"

    def note_break(self, world: World, index: int, suspicion: Suspicion) -> World:
        """Note that a session broke, unless it is over already (`ExecutorSessions._disconnect`)."""
        world = _without(world, index, suspicion)
        if not suspicion.present:
            return world
        suspicions = tuple(sorted((*world.executors[index].suspicions, suspicion._replace(noted=True))))
        return world.executor(index, suspicions=suspicions, suspected=True)

    def judge(self, world: World, index: int, suspicion: Suspicion) -> World:
        """End the leases of a suspect that did not come back (`ExecutorSessions._judge`)."""
        world = _without(world, index, suspicion)
        executor, row = world.executors[index], _row(world)
        if not (suspicion.present or Flaw.EPOCH_UNSEEN_BY_SUSPICION in self.flaws) or not executor.suspected:
            return world
        if row.locked_by == name(index):
            if executor.alive and not suspicion.present:
                world = world.blame("an executor lost its lease by the suspicion of a session that was over")
            if executor.alive and executor.connected:
                world = world.blame("an executor lost its lease although its session was open")
            world = self._lapsed(world)
        return begin_epoch(world, index)

    def find_expired(self, world: World) -> World:
        """Read the leases that have ended (`JobLapsing._lapse_expired`)."""
        return world._replace(to_lapse=True) if _expired(world) else world

    def lapse_found(self, world: World) -> World:
        """End what was read, if it still is to be ended (`JobLapsing._lapse_if_expired`)."""
        world = world._replace(to_lapse=False)
        row = _row(world)
        recheck = Flaw.REAPER_LOOKS_ONCE not in self.flaws
        if row.lifecycle_status != JobState.RUNNING or row.lapsed_at is not None or (recheck and not _expired(world)):
            return world
        if not _expired(world):
            world = world.blame("the reaper ended a lease that had been renewed")
        return self._lapsed(world)

    def dispatch_found(self, world: World) -> World:
        """Dispatch a job again whose message is lost, if that is still so (`Reconciliation._dispatch_lost`)."""
        row, number = _row(world), world.to_dispatch
        world = world._replace(to_dispatch=0)
        if not rules.job(row).waits or row.dispatch_no != number:
            return world
        return self._changed(world, rules.dispatch_again(row))

    def _report(self, row: Row, attempt: int, token: str, report: Report, execution: int) -> Ruling:
        """Ask the rule for a report; with a flaw, of a row that does not show what the rule should see."""
        shown = row
        if report == "succeeded" and Flaw.CANCEL_UNSEEN_BY_SUCCESS in self.flaws:
            shown = row._replace(cancel_requested_at=None)
        if report == "failed" and Flaw.CANCEL_UNSEEN_BY_FAILURE in self.flaws:
            shown = row._replace(cancel_requested_at=None)
        match report:
            case "succeeded":
                ruling = rules.succeed(shown, attempt, token)
            case "failed":
                ruling = rules.fail_execution(shown, attempt, token, execution)
            case "cancelled":
                ruling = rules.cancel_running(row, attempt, token)
            case _ if Flaw.HAND_BACK_AS_LAPSE in self.flaws and rules.holds(row, attempt, token):
                ruling = rules.lapse(row)
            case _:
                ruling = rules.hand_back(row, attempt, token, delayed=report == "handed back for later")
        if not isinstance(ruling, Written):
            return ruling
        return ruling._replace(row=ruling.row._replace(cancel_requested_at=row.cancel_requested_at))

    def _check_hand_back(self, world: World, ruling: Written) -> World:
        before, after = _row(world), ruling.row
        if (before.takeover_count, before.retry_count) != (after.takeover_count, after.retry_count):
            return world.blame("a hand-back was counted")
        if after.lifecycle_status == JobState.FAILED:
            return world.blame("a hand-back failed the job")
        return world._replace(books=world.books._replace(lapsed=True))

    def _lapsed(self, world: World) -> World:
        """End the present lease (`JobLapsing._lapse`)."""
        row = _row(world)
        if world.books.lapsed:
            world = world.blame("a lease lapsed twice")
        ruling = rules.lapse(row)
        if isinstance(ruling, Written) and Flaw.LAPSE_NOT_RECORDED in self.flaws and ruling.kind == Kind.LAPSED:
            kept = {column: getattr(row, column) for column in ("lease_token", "locked_by", "lock_until", "lapsed_at")}
            ruling = ruling._replace(row=ruling.row._replace(**kept), event=EventType.ENQUEUE)
        world = self._changed(world, ruling)
        return world._replace(books=world.books._replace(lapsed=True))

    def _changed(self, world: World, ruling: Ruling) -> World:
        """Write a change with its history entry and its event, and keep the books."""
        if not isinstance(ruling, Written):
            return world.blame(f"a change was refused that nothing speaks against: {ruling.__name__}")
        before, after, books = _row(world), ruling.row, world.books
        state = after.lifecycle_status
        if before.lifecycle_status.terminal:
            world = world.blame("a job changed after its end")
        if books.cancelled and state in (JobState.SUCCEEDED, JobState.FAILED):
            world = world.blame(f"a job {state} after a cancel was acknowledged")
        if after.dispatch_no != before.dispatch_no and ruling.event != EventType.ENQUEUE:
            world = world.blame("a dispatch without its event")
        books = books._replace(
            state=state,
            ends=books.ends + state.terminal,
            projections=books.projections + (ruling.kind == Kind.SUCCEEDED),
        )
        events = world.events
        if ruling.event == EventType.ENQUEUE:
            if any(event.number == after.dispatch_no for event in events):
                world = world.blame("two events under one dedupe key: the transaction is aborted")
            events = (*events, Event(after.dispatch_no, delayed=after.due_at == LATER))
        return world._replace(row=after, events=events, books=books)


def begin_epoch(world: World, index: int) -> World:
    """Count an executor's epoch up, by a hello or because it is lost (`executors.say_hello`, `executors.lose`)."""
    executor = world.executors[index]
    return world.executor(
        index,
        present=False,
        suspected=False,
        suspicions=tuple(suspicion._replace(present=False) for suspicion in executor.suspicions),
        late=tuple(late._replace(present=False) for late in executor.late),
    )


def _row(world: World) -> Row:
    assert world.row is not None
    return world.row


def _heard(world: World, index: int) -> World:
    """Note a sign of life of an executor (`leasing.sign_of_life`)."""
    return world.executor(index, suspected=False) if world.executors[index].suspected else world


def _expired(world: World) -> bool:
    row = _row(world)
    return row.lifecycle_status == JobState.RUNNING and row.lapsed_at is None and row.lock_until == EARLIER


def _remember(world: World, entry: Entry) -> World:
    return world._replace(history=(*world.history, entry))


def _without(world: World, index: int, suspicion: Suspicion) -> World:
    suspicions = list(world.executors[index].suspicions)
    suspicions.remove(suspicion)
    return world.executor(index, suspicions=tuple(suspicions))
