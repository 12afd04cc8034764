"""Everything that there is in the model: one job's row and events, who works on it, and what is on its way to whom."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from aijobs.states import JobState
from services.jobs.store.changes import Kind
from services.jobs.store.outbox import EventStatus
from tests.model.rules import Row

Call = Literal["create", "cancel", "hello", "lock", "heartbeat", "report", "claim", "settle"]
#: What an executor reports about its run.
Report = Literal["", "succeeded", "failed", "cancelled", "handed back", "handed back for later"]
#: idle: has no message. wants: has one, and asks for the lock. runs: has the lease. reports: waits for the answer to a
#: report. done: has only the message left, to acknowledge it.
ExecutorStage = Literal["idle", "wants", "runs", "reports", "done"]
DispatcherStage = Literal["idle", "claims", "holds", "settles"]
Settlement = Literal["", "published", "failed", "released"]


class Late(NamedTuple):
    """A request that its caller got no answer to. It may still be carried out, once, at any later time, or never.

    That is one thing for a lost request, a slow one, and a lost answer. The caller repeats its call meanwhile, or dies.
    """

    call: Call
    token: str = ""
    attempt: int = 0
    report: Report = ""
    execution: int = 0
    #: Shows the present epoch of its executor's session.
    present: bool = True
    #: Dispatch number of an event.
    event: int = 0
    settlement: Settlement = ""


class Suspicion(NamedTuple):
    """A replica's task after a session broke: it notes that, and looks again after the grace.

    `present`: the session is the last one of its executor.
    """

    present: bool = True
    noted: bool = False


class Executor(NamedTuple):
    """An executor process, and its row in `executors`. A process that is started again is another executor."""

    alive: bool = True
    stage: ExecutorStage = "idle"
    token: str = ""
    attempt: int = 0
    execution: int = 0
    report: Report = ""
    has_message: bool = False
    #: Its session's stream is open, as far as the executor knows.
    connected: bool = True
    #: The epoch that it shows is that of its row.
    present: bool = True
    #: Its row says that its session broke and nothing was heard of it since.
    suspected: bool = False
    suspicions: tuple[Suspicion, ...] = ()
    late: tuple[Late, ...] = ()


class Dispatcher(NamedTuple):
    """A dispatcher. Killed and started again it is as new, since nothing of it is stored but its claim."""

    stage: DispatcherStage = "idle"
    token: str = ""
    event: int = 0
    settlement: Settlement = ""


class Event(NamedTuple):
    """An enqueue event. `failures`: how many failed settles it really met."""

    number: int
    status: EventStatus = EventStatus.PENDING
    token: str = ""
    attempts: int = 0
    failures: int = 0
    delayed: bool = False


class Canceller(NamedTuple):
    """Somebody who may cancel once. `remembered`: the answer that the jobs service keeps under the request id."""

    stage: Literal["may", "asks", "answered"] = "may"
    remembered: Literal["", "cancelled", "requested"] = ""
    late: bool = False


class Entry(NamedTuple):
    """A history entry from which the repeat of a call is answered."""

    attempt: int
    token: str
    kind: Kind
    execution: int


class Books(NamedTuple):
    """What really happened, noted beside the row to compare it with."""

    #: State in the newest history entry.
    state: JobState | None = None
    ends: int = 0
    projections: int = 0
    #: The newest lease has lapsed.
    lapsed: bool = False
    #: A cancel was answered with "cancelled" or "requested".
    cancelled: bool = False


class World(NamedTuple):
    """A state of the model."""

    executors: tuple[Executor, ...]
    dispatchers: tuple[Dispatcher, ...]
    cancellers: tuple[Canceller, ...]
    #: Faults and wishes that may still come.
    faults: int
    wishes: int
    row: Row | None = None
    events: tuple[Event, ...] = ()
    history: tuple[Entry, ...] = ()
    #: Messages in the broker; those that executors hold are not among them.
    messages: int = 0
    #: The client knows that the job is created.
    created: bool = False
    #: Late requests of client and dispatchers.
    late: tuple[Late, ...] = ()
    #: The reaper has read the job as one whose lease has ended.
    to_lapse: bool = False
    #: Dispatch number under which the sweep has read the job as one whose message is lost.
    to_dispatch: int = 0
    paused: bool = False
    books: Books = Books()
    #: What a step did wrong.
    wrong: str = ""

    @property
    def ended(self) -> bool:
        """True once the job has ended."""
        return self.row is not None and self.row.lifecycle_status.terminal

    def executor(self, index: int, **changes: object) -> "World":
        """Change one executor."""
        changed = self.executors[index]._replace(**changes)  # type: ignore[arg-type]
        return self._replace(executors=put(self.executors, index, changed))

    def blame(self, wrong: str) -> "World":
        """Note what a step did wrong; the first thing stands."""
        return self if self.wrong else self._replace(wrong=wrong)


def put(items: tuple, index: int, item: object) -> tuple:
    """Replace one item of a tuple."""
    return (*items[:index], item, *items[index + 1 :])


def name(index: int) -> str:
    """Name an executor."""
    return f"executor {index + 1}"


def fresh(used: Iterable[str]) -> str:
    """Make a token that nobody has."""
    taken = set(used)
    return next(token for token in "abcdefghijklmnopqrstuvwxyz" if token not in taken)


def lease_tokens(world: World) -> Iterable[str]:
    """Find every lease token that is known somewhere, in an order that does not depend on tokens."""
    if world.row is not None and world.row.lease_token is not None:
        yield world.row.lease_token
    for executor in world.executors:
        yield executor.token
        for late in executor.late:
            yield late.token
    for entry in world.history:
        yield entry.token


def claim_tokens(world: World) -> Iterable[str]:
    """Find every claim token that is known somewhere, in an order that does not depend on tokens."""
    for event in world.events:
        yield event.token
    for dispatcher in world.dispatchers:
        yield dispatcher.token
    for late in world.late:
        yield late.token
