"""Everything that there is in the model: one job's row and events, who works on it, and what is on its way to whom.

A request that gets no answer becomes *late*: it may still be carried out, once, at any later time, or never. That is
one thing for a lost request, a slow one, and a lost answer. Its caller repeats the call meanwhile, or dies.
"""

from collections.abc import Iterable, Iterator
from string import ascii_lowercase
from typing import Literal, NamedTuple, TypeVar

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
CancelAnswer = Literal["", "cancelled", "requested"]
LETTERS = ascii_lowercase
ItemT = TypeVar("ItemT")


class Request(NamedTuple):
    """A call, with what it carries."""

    call: Call
    token: str = ""
    attempt: int = 0
    report: Report = ""
    execution: int = 0
    #: Shows the present epoch of its executor's session.
    present: bool = True
    #: Of a hello: by how much its number is above that of the last one that was heard; 0: it is not.
    hello: int = 0
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
    #: Its row says that its session broke.
    disconnected: bool = False
    #: ... and nothing was heard of it since.
    suspected: bool = False
    suspicions: tuple[Suspicion, ...] = ()
    #: Requests that it got no answer to.
    late: tuple[Request, ...] = ()


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
    remembered: CancelAnswer = ""
    late: bool = False


class Entry(NamedTuple):
    """A history entry from which a repeat or a late copy of a call is answered.

    Of an entry that says that a lease was given, only the token is looked for.
    """

    attempt: int
    token: str
    kind: Kind
    execution: int = 0


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
    #: Requests of client and dispatchers that got no answer.
    late: tuple[Request, ...] = ()
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


def put(items: tuple[ItemT, ...], index: int, item: ItemT) -> tuple[ItemT, ...]:
    """Replace one item of a tuple."""
    return (*items[:index], item, *items[index + 1 :])


def without(items: tuple[ItemT, ...], item: ItemT) -> tuple[ItemT, ...]:
    """Take one item away, once."""
    index = items.index(item)
    return items[:index] + items[index + 1 :]


def name(index: int) -> str:
    """Name an executor."""
    return f"executor {index + 1}"


def fresh(used: Iterable[str]) -> str:
    """Make a token that nobody has."""
    taken = set(used)
    return next(token for token in LETTERS if token not in taken)


# Where names and numbers are, each in an order that does not depend on them.


def lease_tokens(world: World) -> Iterator[str]:
    """Find the lease tokens that anybody knows."""
    assert world.row is not None
    yield world.row.lease_token or ""
    for executor in world.executors:
        yield executor.token
        for late in executor.late:
            yield late.token
    for entry in world.history:
        yield entry.token


def claim_tokens(world: World) -> Iterator[str]:
    """Find the claim tokens that anybody knows."""
    for event in world.events:
        yield event.token
    for dispatcher in world.dispatchers:
        yield dispatcher.token
    for late in world.late:
        yield late.token


def attempts(world: World) -> Iterator[int]:
    """Find the attempts that anybody knows."""
    assert world.row is not None
    yield world.row.attempt
    for executor in world.executors:
        yield executor.attempt
        for late in executor.late:
            yield late.attempt
    for entry in world.history:
        yield entry.attempt


def dispatch_numbers(world: World) -> Iterator[int]:
    """Find the dispatch numbers that anybody knows."""
    assert world.row is not None
    yield world.row.dispatch_no
    yield world.to_dispatch
    for event in world.events:
        yield event.number
    for dispatcher in world.dispatchers:
        yield dispatcher.event
    for late in world.late:
        yield late.event
