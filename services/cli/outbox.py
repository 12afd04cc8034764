"""`aijobs outbox …`: the events that are published, and those that could not be."""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Annotated

import typer

from aijobs.v1 import job_admin_service_pb2
from services.cli.exits import Exit
from services.cli.job_text import clock
from services.cli.session import Session, session_of

app = typer.Typer(
    no_args_is_help=True, help="Look at the outbox events, requeue dead ones and give up others. Needs the admin role."
)
#: Ids that one call takes.
BATCH = 100
_PREFIX = "OUTBOX_EVENT_STATUS_"
_MOST_COUNTED = 10_000


class Status(StrEnum):
    """Where an event is."""

    SCHEDULED = "scheduled"
    PENDING = "pending"
    PROCESSING = "processing"
    PUBLISHED = "published"
    DEAD = "dead"
    DISCARDED = "discarded"


#: What an operator has to do something about, or may wonder about.
_TOLD = (Status.SCHEDULED, Status.PENDING, Status.PROCESSING, Status.DEAD)

EventType = Annotated[str, typer.Option("--type", metavar="TYPE", help="Only events of this type.")]
Queue = Annotated[str, typer.Option("--queue", help="Only events of this queue.")]
Job = Annotated[str, typer.Option("--job", metavar="ID", help="Only events about this job.")]


@app.command("list")
def list_events(
    context: typer.Context,
    *,
    status: Annotated[list[Status] | None, typer.Option("--status", help="May be repeated.")] = None,
    event_type: EventType = "",
    queue: Queue = "",
    job_id: Job = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many.")] = 20,
) -> None:
    """List events, newest first, and how many there are that are not published."""
    session = session_of(context)

    async def command() -> tuple[
        Sequence[job_admin_service_pb2.OutboxEventInfo], job_admin_service_pb2.CountOutboxEventsResponse | None
    ]:
        found: list[job_admin_service_pb2.OutboxEventInfo] = []
        async with session.client() as client:
            async for event in client.list_outbox_events(
                statuses=[
                    job_admin_service_pb2.OutboxEventStatus.Value(_PREFIX + name.upper()) for name in status or ()
                ],
                event_type=event_type,
                job_id=job_id,
                queue=queue,
                page_size=min(limit, BATCH),
            ):
                found.append(event)
                if len(found) == limit:
                    break
            return found, None if session.output.machine else await client.count_outbox_events()

    found, counts = session.run(command)
    if session.output.machine:
        for event in found:
            session.output.document(event)
        return
    if found:
        rows = [
            (
                event.event_id,
                event.event_type,
                event.job_id,
                _word(event.status),
                event.queue,
                str(event.attempts),
                event.last_error,
                clock(event.create_time),
            )
            for event in found
        ]
        session.output.table(("EVENT", "TYPE", "JOB", "STATUS", "QUEUE", "ATTEMPTS", "ERROR", "CREATED"), rows)
    else:
        session.output.note("no such events")
    if counts is not None:
        session.output.note(_in_all(counts))


@app.command()
def requeue(
    context: typer.Context,
    event_ids: Annotated[list[str] | None, typer.Argument(metavar="EVENT...", help="Dead events, by id.")] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="All dead events.")] = False,
    event_type: EventType = "",
    queue: Queue = "",
    job_id: Job = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; say what would become of them.")] = False,
) -> None:
    """Have dead events published after all. Those that lead nowhere any more are discarded instead. Safe to repeat."""
    session = session_of(context)
    ids, filtered = event_ids or [], bool(event_type or queue or job_id)
    if sum((bool(ids), filtered, every)) != 1:
        raise typer.BadParameter("give either events, or --type, --queue and --job, or --all")

    async def command() -> tuple[list[job_admin_service_pb2.OutboxEventResult], bool]:
        results: list[job_admin_service_pb2.OutboxEventResult] = []
        async with session.client() as client:
            for batch in _batches(ids):
                results += await client.requeue_outbox_events(batch, dry_run=dry_run)
            if ids:
                return results, False
            answer = await client.requeue_dead_events(
                event_type=event_type, queue=queue, job_id=job_id, dry_run=dry_run
            )
            return list(answer.results), answer.more

    results, more = session.run(command)
    if not results:
        session.output.note("no such dead events")
    if more:
        session.output.note(f"there are more: these are the oldest {len(results)}" + ("" if dry_run else "; repeat it"))
    _end(session, results, would="would be " if dry_run else "")


@app.command()
def discard(
    context: typer.Context,
    event_ids: Annotated[list[str], typer.Argument(metavar="EVENT...", help="Events that are not published, by id.")],
) -> None:
    """Give up events that are not published yet. One that a job waits for cannot be given up. Safe to repeat."""
    session = session_of(context)

    async def command() -> list[job_admin_service_pb2.OutboxEventResult]:
        async with session.client() as client:
            return [result for batch in _batches(event_ids) for result in await client.discard_outbox_events(batch)]

    _end(session, session.run(command))


def _batches(event_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(event_ids), BATCH):
        yield event_ids[start : start + BATCH]


def _end(session: Session, results: Sequence[job_admin_service_pb2.OutboxEventResult], would: str = "") -> None:
    """Show what became of events; exit with `REFUSED` if any stays as it is."""
    for result in results:
        about = f"event {result.event_id}" + (f" of job {result.job_id}" if result.job_id else "")
        if session.output.machine:
            session.output.document(result)
        elif result.HasField("error"):
            session.output.text(f"{about} stays as it is: {result.error.message} ({result.error.reason})")
        elif result.outcome == job_admin_service_pb2.OUTBOX_EVENT_OUTCOME_REQUEUED:
            session.output.text(f"{about} {would}{'' if would else 'is '}requeued")
        else:
            session.output.text(f"{about} {would}{'' if would else 'is '}discarded: nobody waits for it")
    if any(result.HasField("error") for result in results):
        raise typer.Exit(Exit.REFUSED)


def _word(status: "job_admin_service_pb2.OutboxEventStatus.ValueType") -> str:
    known = status in job_admin_service_pb2.OutboxEventStatus.values()
    name = job_admin_service_pb2.OutboxEventStatus.Name(status) if known else f"status {int(status)}"
    return name.removeprefix(_PREFIX).lower()


def _in_all(counts: job_admin_service_pb2.CountOutboxEventsResponse) -> str:
    """Return one line that says how many events are not published, and which of them nobody can send."""
    by_status = {_word(each.status): each.count for each in counts.counts}
    words = [f"{_number(by_status.get(status, 0))} {status}" for status in _TOLD]
    parked = [f"{_number(each.count)} of type {each.event_type} that no dispatcher can send" for each in counts.parked]
    return "in all: " + ", ".join([*words, *parked])


def _number(count: int) -> str:
    return f"{count:,} or more" if count >= _MOST_COUNTED else f"{count:,}"
