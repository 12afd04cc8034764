"""`aijobs jobs …`: create, get, watch, list, cancel and retry."""

from typing import Annotated

import typer

from aijobs.client.client import LARGEST_PAGE
from aijobs.states import JobState
from aijobs.v1 import job_admin_service_pb2, job_pb2, job_service_pb2
from services.cli import job_options, job_text, watching
from services.cli.exits import CommandError, Exit
from services.cli.session import Session, session_of

#: As far ahead as the service takes it, in seconds.
MOST_DELAY = 366 * 86_400

app = typer.Typer(no_args_is_help=True, help="Create jobs, look at them, follow them, cancel and retry them.")

User = Annotated[str, typer.Option("--user", help="The user on whose behalf to ask; anybody's job if not given.")]
JobId = Annotated[str, typer.Argument(metavar="ID", help="The job.")]
Watch = Annotated[bool, typer.Option("--watch", help="Follow the job until it has ended.")]


@app.command()
def create(
    context: typer.Context,
    job_type: Annotated[str, typer.Argument(metavar="TYPE", help="Name of a job type; see `aijobs types`.")],
    *,
    user: Annotated[str, typer.Option("--user", help="The user that the job belongs to.")],
    input_text: Annotated[str | None, typer.Option("--input", metavar="JSON", help="What the job works on.")] = None,
    input_file: Annotated[
        str | None, typer.Option("--input-file", metavar="FILE", help="The same from a file; - is standard input.")
    ] = None,
    key: Annotated[str, typer.Option("--key", help="Idempotency key: finds an earlier job again.")] = "",
    strict_key: Annotated[
        bool, typer.Option("--strict-key", help="Refuse if that job was asked for differently.")
    ] = False,
    label: Annotated[list[str] | None, typer.Option("--label", metavar="K=V", help="May be repeated.")] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", min=0, max=100, help="From 0 (first) to 100 (last).")
    ] = None,
    run_at: Annotated[
        str | None,
        typer.Option("--run-at", metavar="TIME", help="When it may start, in ISO 8601 with a zone: 2026-12-24T18:00Z."),
    ] = None,
    delay: Annotated[
        int | None,
        typer.Option("--delay", metavar="SECONDS", min=0, max=MOST_DELAY, help="The same, counted by this machine."),
    ] = None,
    watch: Watch = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, create nothing.")] = False,
) -> None:
    """Create a job."""
    if watch and dry_run:
        raise typer.BadParameter("there is nothing to watch after --dry-run")
    session = session_of(context)
    payload, labels = job_options.input_json(input_text, input_file), job_options.labels(label or [])
    start = job_options.run_at(run_at, delay)

    async def command() -> Exit:
        async with session.client() as client:
            answer = await client.create(
                job_type,
                user_id=user,
                input_json=payload,
                idempotency_key=key,
                strict_idempotency=strict_key,
                labels=labels,
                priority=priority,
                run_at=start,
                validate_only=dry_run,
            )
        _show_created(session, answer, dry_run=dry_run, watched=watch)
        return await _follow(session, answer.job.job_id, user) if watch else Exit.OK

    _end(session.run(command))


@app.command()
def get(
    context: typer.Context,
    job_id: JobId,
    user: User = "",
    output: Annotated[
        bool, typer.Option("--output", help="Write the job's output, as JSON, and nothing else.")
    ] = False,
) -> None:
    """Show a job."""
    session = session_of(context)

    async def command() -> job_pb2.Job:
        async with session.client() as client:
            return await client.get(job_id, user_id=user, full=output or session.output.machine)

    job = session.run(command)
    if output:
        if not job.output_json:
            state = job_text.state_word(job.state)
            advice = f"Follow it with `aijobs jobs watch {job.job_id}`; only succeeded jobs have one."
            raise CommandError(f"job {job.job_id} has no output: it is {state}", advice=advice, status=Exit.REFUSED)
        session.output.json_text(job.output_json)
    elif session.output.machine:
        session.output.document(job)
    else:
        session.output.fields(job_text.fields(job))


@app.command()
def watch(
    context: typer.Context,
    job_id: JobId,
    user: User = "",
    after: Annotated[
        int | None, typer.Option("--from", metavar="N", min=0, help="Also the changes after number N; 0 for all.")
    ] = None,
) -> None:
    """Follow a job until it has ended. The exit status says how: 0 succeeded, 1 failed or cancelled."""
    session = session_of(context)

    async def command() -> Exit:
        async with session.client(watching.PATIENCE) as client:
            return await watching.watch(client, session.output, job_id, user_id=user, after_sequence=after)

    _end(session.run(command))


@app.command("list")
def list_jobs(
    context: typer.Context,
    *,
    user: Annotated[str, typer.Option("--user", help="Only this user's jobs.")] = "",
    job_type: Annotated[str, typer.Option("--type", help="Only jobs of this type.")] = "",
    state: Annotated[list[JobState] | None, typer.Option("--state", help="May be repeated.")] = None,
    queue: Annotated[str, typer.Option("--queue", help="Only jobs of this queue.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many at most.")] = 20,
) -> None:
    """List jobs, newest first."""
    session = session_of(context)

    async def command() -> list[job_pb2.Job]:
        jobs: list[job_pb2.Job] = []
        async with session.client() as client:
            pages = client.list(
                user_id=user, job_type=job_type, states=state or (), queue=queue, page_size=min(limit, LARGEST_PAGE)
            )
            async for job in pages:
                jobs.append(job)
                if len(jobs) == limit:
                    break
        return jobs

    jobs = session.run(command)
    if session.output.machine:
        for job in jobs:
            session.output.document(job)
    elif jobs:
        rows = [
            (job.job_id, job.job_type, job_text.state_word(job.state), job.user_id, job_text.clock(job.create_time))
            for job in jobs
        ]
        session.output.table(("JOB", "TYPE", "STATE", "USER", "CREATED"), rows)
    else:
        session.output.note("no such jobs")


@app.command()
def cancel(
    context: typer.Context,
    job_id: JobId,
    user: User = "",
    reason: Annotated[str, typer.Option("--reason", help="Words for the job's history.")] = "",
) -> None:
    """Cancel a job: a queued one at once, a running one as soon as it can stop."""
    session = session_of(context)

    async def command() -> job_service_pb2.CancelJobResponse:
        async with session.client() as client:
            return await client.cancel(job_id, user_id=user, reason=reason)

    answer = session.run(command)
    if session.output.machine:
        session.output.document(answer)
    elif answer.outcome == job_service_pb2.CANCEL_OUTCOME_REQUESTED:
        session.output.text(f"job {job_id} is running and was asked to stop; it will end cancelled")
    else:
        session.output.text(f"job {job_id} is cancelled")


@app.command()
def retry(
    context: typer.Context,
    job_id: JobId,
    reason: Annotated[str, typer.Option("--reason", help="Words for the new job's history.")] = "",
    watch: Watch = False,
) -> None:
    """Make a new job with the input of one that failed or was cancelled. Needs the admin role."""
    session = session_of(context)

    async def command() -> Exit:
        async with session.client() as client:
            job = await client.retry(job_id, reason=reason)
        if session.output.machine:
            # As `create` does, so that programs find the new job's id at the same place.
            session.output.document(job_admin_service_pb2.RetryJobResponse(job=job))
        else:
            session.output.text(f"created job {job.job_id}, which repeats {job.retry_of or job_id}")
            if not watch:
                _say_how_to_follow(session, job)
        return await _follow(session, job.job_id) if watch else Exit.OK

    _end(session.run(command))


def _show_created(session: Session, answer: job_service_pb2.CreateJobResponse, *, dry_run: bool, watched: bool) -> None:
    if session.output.machine:
        session.output.document(answer)
    elif dry_run:
        session.output.text("the request is valid; nothing was created")
    else:
        found = "found the earlier job" if answer.deduplicated else "created job"
        differs = ", which was asked for differently" if answer.request_differs else ""
        start = f", {job_text.start_line(answer.job)}" if answer.job.HasField("run_at") else ""
        session.output.text(f"{found} {answer.job.job_id}{differs}{start}")
        if not watched:
            _say_how_to_follow(session, answer.job)


def _say_how_to_follow(session: Session, job: job_pb2.Job) -> None:
    session.output.note(f"follow it: aijobs jobs watch {job.job_id}")


async def _follow(session: Session, job_id: str, user: str = "") -> Exit:
    """Show a new job from its beginning to its end."""
    async with session.client(watching.PATIENCE) as client:
        return await watching.watch(client, session.output, job_id, user_id=user, after_sequence=0)


def _end(status: Exit) -> None:
    if status is not Exit.OK:
        raise typer.Exit(status)
