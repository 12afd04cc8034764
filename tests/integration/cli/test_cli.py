"""`aijobs` as a process against a real server: what it prints, where, and what it exits with."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from aijobs.errors import (
    AijobsError,
    DeadlineExceeded,
    IdempotencyKeyReused,
    InternalError,
    InvalidInput,
    JobAlreadyCancelled,
    JobNotCancellable,
    JobNotFound,
    PermissionDenied,
    QuotaExceeded,
    QuotaViolation,
    ServerBusy,
    Unauthenticated,
    Unavailable,
    UnknownJobType,
)
from aijobs.rpc.auth import TokenVerifier
from aijobs.v1 import job_pb2, job_service_pb2
from tests.integration.cli.program import Ended, aijobs, environment, start
from tests.integration.rpc.serving import LIFE, ScriptedJobs, a_change, a_job, serving, the_job

SECRET = "0123456789abcdef0123456789abcdef"
JOB = a_job().job_id


async def raising(error: AijobsError, *arguments: str) -> Ended:
    async def fail(request, context):
        raise error

    async with serving(ScriptedJobs(create=fail, get=fail, cancel=fail)) as address:
        return await aijobs(*arguments, AIJOBS_ADDRESS=address)


CREATE = ("jobs", "create", "synthetic", "--user", "u-1")


@pytest.mark.parametrize(
    ("error", "arguments", "status"),
    [
        (InvalidInput.field("input.text", "too long"), CREATE, 2),
        (UnknownJobType("nope", known=["alpha"]), CREATE, 2),
        (JobNotFound("gone"), ("jobs", "get", "gone"), 3),
        (JobNotCancellable("the job has ended"), ("jobs", "cancel", "j"), 4),
        (JobAlreadyCancelled("j"), ("jobs", "cancel", "j"), 4),
        (IdempotencyKeyReused("idempotency_key: used for another request"), CREATE, 4),
        (PermissionDenied("needs the role admin"), ("jobs", "get", "j"), 4),
        (Unauthenticated("the token has expired"), ("jobs", "get", "j"), 4),
        (Unavailable("the database is away"), ("jobs", "get", "j"), 5),
        (DeadlineExceeded("too slow"), ("jobs", "get", "j"), 5),
        (ServerBusy("too many calls"), ("jobs", "get", "j"), 5),
        (InternalError("something went wrong"), ("jobs", "get", "j"), 70),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, AijobsError) else "",
)
async def test_an_error_is_two_sentences_and_a_status(
    error: AijobsError, arguments: Sequence[str], status: int
) -> None:
    ended = await raising(error, *arguments)
    assert ended == Ended(status=status, out="", err=f"error: {error.message}\n{error.advice}\n")


async def test_an_error_for_programs_is_one_json_document() -> None:
    ended = await raising(InvalidInput.field("input.text", "too long"), *CREATE, "--json")
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert json.loads(ended.err)["error"] == {
        "message": "input.text: too long",
        "advice": InvalidInput.advice,
        "reason": "INVALID_INPUT",
        "status": "INVALID_ARGUMENT",
        "violations": [{"field": "input.text", "description": "too long"}],
        "quota_violations": [],
    }


async def test_a_reached_limit_is_named_for_programs() -> None:
    limit = QuotaViolation("user:u-1", "30 of 30 jobs today")
    ended = await raising(QuotaExceeded("no more jobs today", quota_violations=[limit]), *CREATE, "--json")
    assert (ended.status, ended.out) == (5, "")
    assert json.loads(ended.err)["error"]["quota_violations"] == [
        {"subject": "user:u-1", "description": "30 of 30 jobs today"}
    ]


async def test_nobody_at_the_address_is_said_within_seconds() -> None:
    async with asyncio.timeout(10):
        ended = await aijobs("--address", "127.0.0.1:1", "jobs", "get", "x")
    assert ended.status == 5
    assert ended.err.startswith("error: the service at 127.0.0.1:1 cannot be reached: connection refused\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--address", "nonsense", "jobs", "get", "x"), "bad address 'nonsense'"),
        (("jobs", "get"), "Missing argument 'ID'"),
        (("jobs", "frobnicate"), "No such command"),
        (("jobs", "list", "--state", "sleeping"), "'queued', 'running'"),
        ((*CREATE, "--input", "{nonsense"), "input: not JSON"),
        ((*CREATE, "--input", '{"a":1,"a":2}'), "duplicate key"),
        ((*CREATE, "--input", "{}", "--input-file", "-"), "either --input or --input-file"),
        ((*CREATE, "--input-file", "no/such/file"), "cannot read no/such/file: No such file"),
        ((*CREATE, "--label", "nonsense"), "not of the form K=V"),
        ((*CREATE, "--watch", "--dry-run"), "nothing to watch"),
        ((*CREATE, "--run-at", "tomorrow"), "--run-at 'tomorrow' is no time in ISO 8601"),
        ((*CREATE, "--run-at", "2026-12-24T18:00"), "--run-at '2026-12-24T18:00' has no time zone: add Z"),
        ((*CREATE, "--run-at", "9999-12-31T23:59-01:00"), "--run-at '9999-12-31T23:59-01:00' is no time"),
        ((*CREATE, "--run-at", "2026-12-24T18:00Z", "--delay", "90"), "either --run-at or --delay"),
        ((*CREATE, "--delay", "-1"), "'--delay'"),
        ((*CREATE, "--delay", "nan"), "'--delay'"),
        (("executors", "drain"), "Missing argument 'ID'"),
        (("queues", "pause"), "Missing argument 'QUEUE'"),
        (("platform", "maybe"), "No such command 'maybe'"),
        (("token", "--role", "admin", "--subject", "me"), "AIJOBS_TOKEN_SECRET must have at least 32 bytes"),
        (("migrate",), "Missing option '--database-url'"),
    ],
)
async def test_bad_usage_names_what_is_wrong_and_exits_2(arguments: Sequence[str], words: str) -> None:
    ended = await aijobs(*arguments)
    assert (ended.status, ended.out) == (2, "")
    assert words in ended.err


async def test_a_bad_token_in_the_environment_is_refused_without_repeating_it() -> None:
    ended = await aijobs("jobs", "get", "x", AIJOBS_TOKEN="canary é")
    assert ended.status == 2
    assert "bad token" in ended.err
    assert "canary" not in ended.err


async def test_create_sends_everything_and_says_what_to_do_next(tmp_path: Path) -> None:
    jobs = ScriptedJobs()
    file = tmp_path / "input.json"
    file.write_text('{"n": 1.0}')
    async with serving(jobs) as address:
        options = ("--key", "k", "--strict-key", "--label", "a=b", "--label", "c=d=e", "--priority", "7")
        ended = await aijobs(*CREATE, "--input-file", str(file), *options, AIJOBS_ADDRESS=address)
        piped = await aijobs(*CREATE, "--input-file", "-", stdin=b'{"n": 2}', AIJOBS_ADDRESS=address)
    assert ended.status == piped.status == 0
    assert ended.out == f"created job {JOB}\n"
    assert ended.err == f"follow it: aijobs jobs watch {JOB}\n"
    first, second = jobs.requests
    assert (first.input_json, second.input_json) == ('{"n": 1.0}', '{"n": 2}')
    assert dict(first.labels) == {"a": "b", "c": "d=e"}
    assert (first.user_id, first.job_type, first.idempotency_key) == ("u-1", "synthetic", "k")
    assert (first.strict_idempotency, first.overrides.priority) == (True, 7)


@pytest.mark.parametrize("time", ["2026-12-24T18:00:00Z", "2026-12-24T20:00+02:00", "20261224T180000Z"])
async def test_create_sends_when_the_job_may_start_and_repeats_it_in_utc(time: str) -> None:
    async def create(request, context):
        return job_service_pb2.CreateJobResponse(job=a_job(run_at=request.run_at))

    jobs = ScriptedJobs(create=create)
    async with serving(jobs) as address:
        ended = await aijobs(*CREATE, "--run-at", time, AIJOBS_ADDRESS=address)
    assert (ended.status, ended.out) == (0, f"created job {JOB}, not started before 2026-12-24 18:00:00Z\n")
    assert jobs.requests[0].run_at.ToDatetime(tzinfo=UTC) == datetime(2026, 12, 24, 18, tzinfo=UTC)


async def test_a_delay_counts_from_now() -> None:
    jobs = ScriptedJobs()
    async with serving(jobs) as address:
        before = datetime.now(UTC)
        ended = await aijobs(*CREATE, "--delay", "90", AIJOBS_ADDRESS=address)
        after = datetime.now(UTC)
    assert ended.status == 0
    delay = timedelta(seconds=90)
    assert before + delay <= jobs.requests[0].run_at.ToDatetime(tzinfo=UTC) <= after + delay


async def test_a_job_without_a_time_may_start_at_once() -> None:
    jobs = ScriptedJobs()
    async with serving(jobs) as address:
        await aijobs(*CREATE, AIJOBS_ADDRESS=address)
    assert not jobs.requests[0].HasField("run_at")


async def test_a_dry_run_creates_nothing() -> None:
    jobs = ScriptedJobs()
    async with serving(jobs) as address:
        ended = await aijobs(*CREATE, "--dry-run", AIJOBS_ADDRESS=address)
    assert (ended.status, ended.out) == (0, "the request is valid; nothing was created\n")
    assert jobs.requests[0].validate_only


def living(life: tuple[tuple[str, str], ...] = LIFE, **fields: object) -> ScriptedJobs:
    async def watch(request, context):
        yield the_job("QUEUED", 1)
        for sequence in range(request.after_sequence + 1, len(life) + 1):
            change = a_change(sequence, life)
            if sequence == len(life):
                change.job.MergeFrom(job_pb2.Job(**fields))  # type: ignore[arg-type]
                change.job.finish_time.FromSeconds(1_800_000_003)
            yield change

    return ScriptedJobs(watch=watch)


async def test_a_watched_job_that_succeeds_exits_0_and_shows_each_state() -> None:
    async with serving(living()) as address:
        ended = await aijobs(*CREATE, "--watch", AIJOBS_ADDRESS=address)
    assert ended.status == 0
    created, *changes, ending = ended.out.splitlines()
    assert created == f"created job {JOB}"
    assert [line.split() for line in changes] == [
        ["1.0", "s", "queued", "created"],
        ["2.0", "s", "running", "locked"],
        ["3.0", "s", "succeeded", "succeeded"],
    ]
    assert ending == f"succeeded after 3.0 s: aijobs jobs get {JOB} --output"


@pytest.mark.parametrize(("kind", "words"), [("failed", "failed: TIMEOUT: It took too long."), ("cancelled", "cancel")])
async def test_a_watched_job_that_does_not_succeed_exits_1(kind: str, words: str) -> None:
    error = {"error": job_pb2.JobError(code="TIMEOUT", message="It took too long.")} if kind == "failed" else {}
    life = (*LIFE[:2], (kind, kind.upper()))
    async with serving(living(life, **error)) as address:
        ended = await aijobs("jobs", "watch", JOB, AIJOBS_ADDRESS=address)
    assert ended.status == 1
    assert words in ended.out.splitlines()[-1]


async def test_a_watch_for_programs_is_one_document_a_line() -> None:
    async with serving(living()) as address:
        ended = await aijobs("--json", "jobs", "watch", JOB, "--from", "1", AIJOBS_ADDRESS=address)
    assert (ended.status, ended.err) == (0, "")
    documents = [json.loads(line) for line in ended.out.splitlines()]
    assert [document["job"]["state"] for document in documents] == [
        "JOB_STATE_QUEUED",
        "JOB_STATE_RUNNING",
        "JOB_STATE_SUCCEEDED",
    ]
    assert [document["transition"]["sequence"] for document in documents[1:]] == ["2", "3"]


async def test_a_watch_says_in_words_what_became_of_the_leases() -> None:
    changes: tuple[tuple[str, str, int, str, str], ...] = (
        ("retried", "QUEUED", 0, "caller:kim", "once more"),
        ("locked", "RUNNING", 1, "executor:e-1", ""),
        ("handed_back", "QUEUED", 1, "executor:e-1", "SHUTTING_DOWN"),
        ("dispatched_again", "QUEUED", 1, "engine", ""),
        ("locked", "RUNNING", 2, "executor:e-2", ""),
        ("lapsed", "QUEUED", 2, "engine", "SESSION_LOST"),
        ("taken_over", "RUNNING", 3, "executor:e-3", ""),
        ("taken_over", "RUNNING", 4, "engine", ""),
        ("news_from_tomorrow", "RUNNING", 4, "engine", ""),
        ("succeeded", "SUCCEEDED", 4, "executor:e-3", ""),
    )

    async def watch(request, context):
        yield the_job("QUEUED", 1)
        for sequence, (kind, state, attempt, actor, reason) in enumerate(changes, 1):
            to_state = job_pb2.JobState.Value(f"JOB_STATE_{state}")
            transition = job_pb2.Transition(
                sequence=sequence, kind=kind, to_state=to_state, attempt=attempt, actor=actor, reason=reason
            )
            yield job_service_pb2.WatchJobResponse(job=a_job(state, sequence, retry_of="j-0"), transition=transition)

    async with serving(ScriptedJobs(watch=watch)) as address:
        ended = await aijobs("jobs", "watch", JOB, "--from", "0", AIJOBS_ADDRESS=address)
    assert [" ".join(line.split()[2:]) for line in ended.out.splitlines()[:-1]] == [
        "queued created to repeat j-0, once more",
        "running locked, attempt 1",
        "queued handed back by executor:e-1, attempt 1, SHUTTING_DOWN",
        "queued dispatched again, attempt 1",
        "running locked, attempt 2",
        "queued lease lapsed, attempt 2, SESSION_LOST",
        "running taken over by executor:e-3, attempt 3",
        "running taken over, attempt 4",
        "running news from tomorrow, attempt 4",
        "succeeded succeeded, attempt 4",
    ]


async def test_a_watch_of_a_waiting_job_says_until_when() -> None:
    async def watch(request, context):
        first = the_job("QUEUED", 1)
        first.job.run_at.FromSeconds(1_800_003_600)
        yield first
        running = a_change(2)
        running.job.run_at.FromSeconds(1_800_003_600)
        yield running
        yield a_change(3)

    async with serving(ScriptedJobs(watch=watch)) as address:
        ended = await aijobs("jobs", "watch", JOB, AIJOBS_ADDRESS=address)
    first, *changes = ended.out.splitlines()
    assert first.endswith(f"queued     job {JOB}, not started before 2027-01-15 09:00:00Z")
    assert "before" not in "".join(changes)


async def test_get_shows_start_time_takeovers_and_the_jobs_that_it_belongs_to_if_there_are_any() -> None:
    async def get(request, context):
        if request.job_id != JOB:
            return job_service_pb2.GetJobResponse(job=a_job())
        job = a_job(takeover_count=2, retry_of="j-0", parent_job_id="j-1", follow_up_job_ids=["j-2", "j-3"])
        job.run_at.FromSeconds(1_800_003_600)
        return job_service_pb2.GetJobResponse(job=job)

    async with serving(ScriptedJobs(get=get)) as address:
        shown = await aijobs("jobs", "get", JOB, AIJOBS_ADDRESS=address)
        plain = await aijobs("jobs", "get", "plain", AIJOBS_ADDRESS=address)
    lines = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert {"run at 2027-01-15 09:00:00Z", "takeovers 2", "retry of j-0", "follows j-1", "follow-ups j-2, j-3"} <= set(
        lines
    )
    assert not {"run at", "takeovers", "retry of", "follows", "follow-ups"} & {
        line.partition("  ")[0] for line in plain.out.splitlines()
    }


async def test_get_shows_a_job_and_only_its_output_on_request() -> None:
    async def get(request, context):
        output = '{"b":1,"a":2.0}' if request.view == job_pb2.JOB_VIEW_FULL else ""
        return job_service_pb2.GetJobResponse(job=a_job("SUCCEEDED", 3, output_json=output, labels={"x": "\x1b[2J"}))

    async with serving(ScriptedJobs(get=get)) as address:
        shown = await aijobs("jobs", "get", JOB, AIJOBS_ADDRESS=address)
        output = await aijobs("jobs", "get", JOB, "--output", AIJOBS_ADDRESS=address)
        machine = await aijobs("jobs", "get", JOB, "--json", AIJOBS_ADDRESS=address)
    assert ["state", "succeeded"] in [line.split() for line in shown.out.splitlines()]
    assert "\x1b" not in shown.out
    assert "x=\\x1b[2J" in shown.out
    assert output.out == '{"b":1,"a":2.0}\n'
    assert json.loads(machine.out)["output_json"] == '{"b":1,"a":2.0}'
    assert machine.out.count("\n") == 1


async def test_the_output_of_a_job_that_has_none_is_refused() -> None:
    async with serving() as address:
        ended = await aijobs("jobs", "get", JOB, "--output", AIJOBS_ADDRESS=address)
    assert (ended.status, ended.out) == (4, "")
    assert "has no output: it is queued" in ended.err


async def test_list_filters_and_stops_at_the_limit() -> None:
    async def list_jobs(request, context):
        return job_service_pb2.ListJobsResponse(jobs=[a_job()] * request.page_size, next_page_token="more")

    jobs = ScriptedJobs(list_jobs=list_jobs)
    async with serving(jobs) as address:
        options = ("--user", "u", "--type", "t", "--state", "failed", "--state", "queued", "--queue", "q")
        table = await aijobs("jobs", "list", *options, "--limit", "3", AIJOBS_ADDRESS=address)
        documents = await aijobs("jobs", "list", "--json", "--limit", "150", AIJOBS_ADDRESS=address)
    request = jobs.requests[0]
    assert (request.user_id, request.job_type, request.queue, len(request.states)) == ("u", "t", "q", 2)
    heading, *rows = table.out.splitlines()
    assert heading.split() == ["JOB", "TYPE", "STATE", "USER", "CREATED"]
    assert [row.split()[:4] for row in rows] == [[JOB, "synthetic", "queued", "u-1"]] * 3
    assert [json.loads(line)["job_id"] for line in documents.out.splitlines()] == [JOB] * 150


async def test_cancel_says_truthfully_what_happened() -> None:
    async def cancel(request, context):
        outcome = (
            job_service_pb2.CANCEL_OUTCOME_REQUESTED if request.reason else job_service_pb2.CANCEL_OUTCOME_CANCELLED
        )
        return job_service_pb2.CancelJobResponse(outcome=outcome, job=a_job())

    async with serving(ScriptedJobs(cancel=cancel)) as address:
        queued = await aijobs("jobs", "cancel", JOB, AIJOBS_ADDRESS=address)
        running = await aijobs("jobs", "cancel", JOB, "--reason", "enough", AIJOBS_ADDRESS=address)
    assert queued.out == f"job {JOB} is cancelled\n"
    assert running.out == f"job {JOB} is running and was asked to stop; it will end cancelled\n"


async def test_types_lists_them_and_shows_the_schemas_of_one() -> None:
    async with serving() as address:
        every = await aijobs("types", AIJOBS_ADDRESS=address)
        one = await aijobs("types", "beta", AIJOBS_ADDRESS=address)
        none = await aijobs("types", "gamma", AIJOBS_ADDRESS=address)
    assert [line.split()[0] for line in every.out.splitlines()] == ["TYPE", "alpha", "beta"]
    assert '"text": {\n      "type": "string"' in one.out
    assert none.status == 2
    assert "known: alpha, beta" in none.err


async def test_a_token_made_here_lets_its_role_in() -> None:
    async with serving(verifier=TokenVerifier(SECRET)) as address:
        made = await aijobs("token", "--role", "user", "--subject", "u-1", AIJOBS_TOKEN_SECRET=SECRET)
        assert made.status == 0
        token = made.out.strip()
        allowed = await aijobs("jobs", "get", JOB, AIJOBS_ADDRESS=address, AIJOBS_TOKEN=token)
        refused = await aijobs(*CREATE, AIJOBS_ADDRESS=address, AIJOBS_TOKEN=token)
        without = await aijobs("jobs", "get", JOB, AIJOBS_ADDRESS=address)
    assert (allowed.status, refused.status, without.status) == (0, 4, 4)
    assert "needs the role backend" in refused.err
    assert "AIJOBS_TOKEN" in without.err


async def test_ctrl_c_ends_a_watch_cleanly_with_130() -> None:
    left = asyncio.Event()

    async def watch(request, context):
        try:
            yield the_job("QUEUED", 1)
            await asyncio.Event().wait()
        finally:
            left.set()

    async with serving(ScriptedJobs(watch=watch)) as address, asyncio.timeout(30):
        process = await start("jobs", "watch", JOB, AIJOBS_ADDRESS=address)
        assert process.stdout is not None
        await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
        await left.wait()
    assert (process.returncode, err) == (130, b"")


async def test_a_reader_that_goes_away_ends_it_without_a_word() -> None:
    async def watch(request, context):
        for number in range(1_000_000):
            change = a_change(2)
            change.transition.sequence = number + 2
            yield change

    async with serving(ScriptedJobs(watch=watch)) as address, asyncio.timeout(30):
        for mode in ((), ("--json",)):
            read, write = os.pipe()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.cli", *mode, "jobs", "watch", JOB),
                stdout=write,
                stderr=asyncio.subprocess.PIPE,
                env=environment(AIJOBS_ADDRESS=address),
            )
            os.close(write)
            await asyncio.to_thread(os.read, read, 1)
            os.close(read)
            _, err = await process.communicate()
            assert (process.returncode, err) == (141, b"")


async def test_on_a_terminal_a_watch_draws_and_ends_the_same() -> None:
    held = asyncio.Event()

    async def watch(request, context):
        assert request.include_progress
        yield the_job("RUNNING", 2, progress=40)
        await held.wait()
        yield a_change(3)

    master, terminal = os.openpty()
    async with serving(ScriptedJobs(watch=watch)) as address, asyncio.timeout(30):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.cli", "jobs", "watch", JOB),
            stdout=terminal,
            stderr=terminal,
            env=environment(AIJOBS_ADDRESS=address, TERM="xterm"),
        )
        os.close(terminal)
        drawn = await read_until(master, b"40%")
        held.set()
        drawn += await read_until(master, b"--output")
        assert await process.wait() == 0
    os.close(master)
    assert b"\x1b[" in drawn


async def read_until(master: int, words: bytes) -> bytes:
    seen = b""
    while words not in seen:
        try:
            seen += await asyncio.to_thread(os.read, master, 65_536)
        except OSError as error:
            raise AssertionError(seen.decode()) from error  # the process has ended
    return seen


async def test_help_documents_every_exit_status_as_the_page_does() -> None:
    ended = await aijobs("--help")
    page = (Path(__file__).parents[3] / "docs/cli.md").read_text()
    for status in (0, 1, 2, 3, 4, 5, 70, 130, 141):
        assert f"| {status} |" in page
        assert f" {status} " in ended.out.replace("\n", " ")


async def test_an_argument_that_is_no_text_is_bad_usage() -> None:
    ended = await aijobs("jobs", "create", "synthetic", "--user", "m\udcff")
    assert (ended.status, ended.out) == (2, "")
    assert "no valid UTF-8" in ended.err


async def test_a_priority_out_of_range_is_bad_usage() -> None:
    ended = await aijobs("jobs", "create", "synthetic", "--user", "m", "--priority", "999999999999")
    assert ended.status == 2
    assert "--priority" in ended.err


@pytest.mark.parametrize(("redirection", "status"), [(">&-", 0), (">/dev/full", 74)])
async def test_an_output_that_takes_nothing_is_no_bug(redirection: str, status: int) -> None:
    async with serving(living()) as address:
        shell = await asyncio.create_subprocess_shell(
            f"{sys.executable} -m services.cli --json jobs get {JOB} {redirection}",
            env={**os.environ, "AIJOBS_ADDRESS": address},
            stderr=asyncio.subprocess.PIPE,
        )
        _, err = await shell.communicate()
    assert shell.returncode == status, err.decode()
    assert b"Traceback" not in err
