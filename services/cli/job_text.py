"""Jobs in words and columns."""

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from aijobs.rpc.job_states import TERMINAL_VALUES
from aijobs.v1 import job_pb2, job_service_pb2

STYLES = {
    job_pb2.JOB_STATE_QUEUED: "yellow",
    job_pb2.JOB_STATE_RUNNING: "cyan",
    job_pb2.JOB_STATE_SUCCEEDED: "green",
    job_pb2.JOB_STATE_FAILED: "red",
    job_pb2.JOB_STATE_CANCELLED: "magenta",
}


def state_word(state: "job_pb2.JobState.ValueType") -> str:
    """Return a state as people write it; one that this version does not know, as its number."""
    known = state in job_pb2.JobState.values()
    return job_pb2.JobState.Name(state).removeprefix("JOB_STATE_").lower() if known else f"state {int(state)}"


def moment(timestamp: Timestamp) -> datetime:
    """Return a time of the contract, aware."""
    return timestamp.ToDatetime(tzinfo=UTC)


def elapsed(job: job_pb2.Job, until: datetime) -> str:
    """Return the seconds since the job was created."""
    return f"{max((until - moment(job.create_time)).total_seconds(), 0):.1f} s"


def clock(timestamp: Timestamp) -> str:
    """Return a time for people, in UTC; empty if it never came."""
    return f"{moment(timestamp):%Y-%m-%d %H:%M:%S}Z" if timestamp.seconds else ""


def start_line(job: job_pb2.Job) -> str:
    """Return since when a job may start; it may still have to wait for an executor."""
    return f"not started before {clock(job.run_at)}"


def change_line(update: job_service_pb2.WatchJobResponse) -> str:
    """Return the line about one change: when, the state, what happened."""
    change = update.transition
    words = [_happening(change, update.job)]
    if change.attempt:
        words.append(f"attempt {change.attempt}")
    if change.reason:
        words.append(change.reason)
    when = elapsed(update.job, moment(change.time))
    return f"{when:>9}  {state_word(change.to_state):<9}  {', '.join(words)}"


def _happening(change: job_pb2.Transition, job: job_pb2.Job) -> str:
    """Return what happened; a kind that this version does not know, in its own words."""
    by = f" by {change.actor}" if change.actor.startswith("executor:") else ""
    match change.kind:
        case "retried":
            return "created to repeat " + (job.retry_of or "another job")
        case "lapsed":
            return "lease lapsed"
        case "handed_back" | "taken_over":
            return change.kind.replace("_", " ") + by
        case kind:
            return kind.replace("_", " ")


def presence_line(job: job_pb2.Job) -> str:
    """Return the line about a job as it is found when a watch begins."""
    when = elapsed(job, moment(job.finish_time) if job.state in TERMINAL_VALUES else datetime.now(UTC))
    words = [f"{job.progress} %"] if job.state == job_pb2.JOB_STATE_RUNNING else []
    if job.state == job_pb2.JOB_STATE_QUEUED and job.HasField("run_at"):
        words.append(start_line(job))
    return f"{when:>9}  {state_word(job.state):<9}  {', '.join([f'job {job.job_id}', *words])}"


def ending(job: job_pb2.Job) -> str:
    """Return one sentence about a job that has ended."""
    if job.state == job_pb2.JOB_STATE_SUCCEEDED:
        return f"succeeded after {elapsed(job, moment(job.finish_time))}: aijobs jobs get {job.job_id} --output"
    if job.HasField("error"):
        return f"{state_word(job.state)}: {job.error.code}: {job.error.message}"
    return state_word(job.state)


def fields(job: job_pb2.Job) -> dict[str, str]:
    """Return everything about a job that people read, in their order. Empty values are left out by the output."""
    usage = job.usage
    return {
        "job": job.job_id,
        "type": job.job_type,
        "state": state_word(job.state),
        "error": f"{job.error.code}: {job.error.message}" if job.HasField("error") else "",
        "user": job.user_id,
        "target": f"{job.target.type} {job.target.id}" if job.HasField("target") else "",
        "queue": job.queue,
        "priority": str(job.priority),
        "progress": f"{job.progress} %" if job.state == job_pb2.JOB_STATE_RUNNING else "",
        "labels": ", ".join(f"{key}={value}" for key, value in sorted(job.labels.items())),
        "key": job.idempotency_key,
        "retry of": job.retry_of,
        "follows": job.parent_job_id,
        "attempt": str(job.attempt or ""),
        "takeovers": str(job.takeover_count or ""),
        "retries": f"{job.retry_count} of {job.max_retries}",
        "created": clock(job.create_time),
        "run at": clock(job.run_at),
        "started": clock(job.start_time),
        "finished": clock(job.finish_time),
        "cancel": f"asked for at {clock(job.cancel_request_time)}" if job.HasField("cancel_request_time") else "",
        "usage": f"{usage.calls} calls, {usage.input_tokens} tokens in, {usage.output_tokens} out"
        if usage.calls
        else "",
        "artifacts": str(job.artifact_count or ""),
        "follow-ups": ", ".join(job.follow_up_job_ids),
        "hash": job.output_hash,
    }
