"""Following a job on the screen: a line for each change, and while it runs a bar below them."""

from collections.abc import Iterable
from contextlib import aclosing, nullcontext
from datetime import UTC, datetime, timedelta

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn

from aijobs.client import Client
from aijobs.rpc.job_states import TERMINAL_VALUES
from aijobs.v1 import job_pb2, job_service_pb2
from services.cli.exits import Exit
from services.cli.job_text import STYLES, change_line, elapsed, ending, presence_line, state_word
from services.cli.output import Output

#: How long a watch goes on without an answer.
PATIENCE = timedelta(seconds=30)


async def watch(
    client: Client, output: Output, job_id: str, *, user_id: str = "", after_sequence: int | None = None
) -> Exit:
    """Show a job until it has ended and return what the process exits with.

    Raises:
        AijobsError: of `Client.watch`.

    """
    updates = client.watch(job_id, user_id=user_id, after_sequence=after_sequence, include_progress=output.live)
    last: job_pb2.Job | None = None
    async with aclosing(updates):
        with _Bar(output) if output.live else nullcontext() as bar:
            async for update in updates:
                # Where the job is says nothing new if its history follows.
                news = last is None and (after_sequence is None or update.job.sequence <= after_sequence)
                _show(output, update, presence=news)
                last = update.job
                if bar is not None:
                    bar.show(last)
    if last is None:
        return Exit.BUG
    if not output.machine:
        output.text(ending(last), style=STYLES.get(last.state, ""))
    return Exit.OK if last.state == job_pb2.JOB_STATE_SUCCEEDED else Exit.NOT_AS_WISHED


def _show(output: Output, update: job_service_pb2.WatchJobResponse, *, presence: bool) -> None:
    if output.machine:
        output.document(update)
    elif update.HasField("transition"):
        output.text(change_line(update), style=STYLES.get(update.transition.to_state, ""))
    elif presence:
        output.text(presence_line(update.job), style=STYLES.get(update.job.state, ""))


class _Bar(Progress):
    """The line below the others while the job has not ended."""

    def __init__(self, output: Output) -> None:
        self._job: job_pb2.Job | None = None  # first: rich draws while it is built
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=40),
            TaskProgressColumn(),
            TextColumn("{task.fields[elapsed]}"),
            console=output.console,
            transient=True,
        )
        self._line: TaskID = self.add_task("waiting", total=None, elapsed="")

    def show(self, job: job_pb2.Job) -> None:
        """Show where the job is; a queued one has no percentage."""
        self._job = job
        running = job.state == job_pb2.JOB_STATE_RUNNING
        self.update(
            self._line,
            description=state_word(job.state),
            completed=job.progress if running else 0,
            total=100 if running else None,
            visible=job.state not in TERMINAL_VALUES,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        """Bring the clock up to date with each drawing."""
        if self._job is not None:
            for task in self.tasks:
                task.fields["elapsed"] = elapsed(self._job, datetime.now(UTC))
        return super().get_renderables()
