"""`aijobs jobs …`: create, get, watch, list and cancel."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from aijobs.canonical import NotStrictJson, parse
from aijobs.client.client import LARGEST_PAGE
from aijobs.errors import InvalidInput
from aijobs.states import JobState
from aijobs.v1 import job_pb2, job_service_pb2
from services.cli import job_text, watching
from services.cli.exits import CommandError, Exit
from services.cli.session import Session, session_of

app = typer.Typer(no_args_is_help=True, help="Create jobs, look at them, follow them, cancel them.")

User = Annotated[str, typer.Option("--user", help="The user on whose behalf to ask; anybody's job if not given.")]
JobId = Annotated[str, typer.Argument(metavar="ID", help="The job.")]


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
    watch: Annotated[bool, typer.Option("--watch", help="Follow the job until it has ended.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, create nothing.")] = False,
) -> None:
    """Create a job."""
    if watch and dry_run:
        raise typer.BadParameter("there is nothing to watch after --dry-run")
    session = session_of(context)
    payload, labels = _input(input_text, input_file), _labels(label or [])

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
                validate_only=dry_run,
            )
        _show_created(session, answer, dry_run=dry_run, watched=watch)
        if not watch:
            return Exit.OK
        async with session.client(watching.PATIENCE) as client:
            return await watching.watch(client, session.output, answer.job.job_id, user_id=user, after_sequence=0)

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


def _show_created(session: Session, answer: job_service_pb2.CreateJobResponse, *, dry_run: bool, watched: bool) -> None:
    if session.output.machine:
        session.output.document(answer)
    elif dry_run:
        session.output.text("the request is valid; nothing was created")
    else:
        found = "found the earlier job" if answer.deduplicated else "created job"
        differs = ", which was asked for differently" if answer.request_differs else ""
        session.output.text(f"{found} {answer.job.job_id}{differs}")
        if not watched:
            session.output.note(f"follow it: aijobs jobs watch {answer.job.job_id}")


def _input(text: str | None, file: str | None) -> str:
    """Return the input as JSON text, exactly as it was written.

    Raises:
        InvalidInput: no JSON.
        CommandError: the file cannot be read.
        typer.BadParameter: given twice.

    """
    if text is not None and file is not None:
        raise typer.BadParameter("give either --input or --input-file")
    if file is not None:
        try:
            text = sys.stdin.buffer.read().decode() if file == "-" else Path(file).read_bytes().decode()
        except UnicodeDecodeError as error:
            raise InvalidInput.field("input", f"{file} is not UTF-8 text") from error
        except OSError as error:
            message = f"cannot read {file}: {error.strerror}"
            raise CommandError(message, advice="Name a file that can be read.", status=Exit.BAD_INPUT) from error
    if text is None:
        return "{}"
    try:
        parse(text)
    except NotStrictJson as error:
        raise InvalidInput.field("input", str(error)) from error
    return text


def _labels(pairs: list[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"--label {pair!r} is not of the form K=V")
        if key in labels:
            raise typer.BadParameter(f"--label {key!r} was given twice")
        labels[key] = value
    return labels


def _end(status: Exit) -> None:
    if status is not Exit.OK:
        raise typer.Exit(status)
