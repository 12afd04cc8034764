"""`aijobs demo`: one real job, from CreateJob to its result, on the embedded engine.

Exits 0 only if the job succeeded. Needs no server, no key and no network: the `offline` provider answers.
"""

import asyncio
import json
import signal
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console
from rich.json import JSON
from rich.panel import Panel
from rich.table import Table

from aijobs import logs
from aijobs.client import Client
from aijobs.errors import AijobsError
from aijobs.registry import BadDefinitions
from aijobs.service import CannotRun
from aijobs.settings import load
from aijobs.v1 import job_pb2
from services.executor.gateway.settings import ModelSettings, ProviderName
from services.standalone.engine import embedded

REQUEST = Path("examples") / "structured_generation.json"
DOCUMENT = Path("examples") / "document.md"
USER = "demo"
LIMIT = timedelta(seconds=120)
PROVIDERS = {
    ProviderName.OFFLINE: (
        "Provider: [bold]offline[/]. It is no language model: it answers from the text itself, by counting words.\n"
        "Set AIJOBS_PROVIDER=openai, AIJOBS_PROVIDER_BASE_URL and AIJOBS_MODEL_PRIMARY to ask a real one."
    ),
    ProviderName.OPENAI: "Provider: [bold]openai[/], the server and the model that your environment names.",
}
TELLING = {
    "created": "job, snapshot and event stored in one transaction",
    "locked": "published, consumed, leased to an executor",
    "execution_failed": "an execution failed; the engine tries again",
    "succeeded": "output validated, hashed, committed with its artifact",
    "failed": "no result",
    "cancelled": "cancelled",
}
COLOURS = {"queued": "yellow", "running": "blue", "succeeded": "green", "failed": "red", "cancelled": "magenta"}


def run() -> int:
    """Run the demo and return the exit status."""
    logs.configure("aijobs", "error")
    console = Console(highlight=False)
    if not (REQUEST.exists() and DOCUMENT.exists()):
        console.print(f"the demo reads {REQUEST} and {DOCUMENT}: run it in the folder of a clone")
        return 2
    try:
        return asyncio.run(_within_limits(console, load(ModelSettings).provider))
    except AijobsError as error:
        console.print(f"[red]the demo failed:[/] {error.message}. {error.advice}")
        return 1
    except (BadDefinitions, CannotRun) as error:
        console.print("[red]the demo cannot start:[/]")
        console.print(str(error), markup=False, soft_wrap=True)
        return 2


async def _within_limits(console: Console, provider: ProviderName) -> int:
    """Run the story until it ends, takes too long, a service breaks, or somebody stops it."""
    broken, stopped = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    story = asyncio.create_task(_run(console, provider, broken))
    ends = [story, asyncio.create_task(broken.wait()), asyncio.create_task(stopped.wait())]
    try:
        done, _ = await asyncio.wait(ends, timeout=LIMIT.total_seconds(), return_when=asyncio.FIRST_COMPLETED)
        if not done:
            console.print(
                f"[red]the job has not ended within {LIMIT.seconds} s:[/] does an executor have slots for it?"
            )
    finally:
        for end in ends:
            end.cancel()
        await asyncio.wait(ends)
    if story.cancelled():
        if stopped.is_set():
            console.print("[red]the demo was stopped[/]")
        return 1
    return story.result()


async def _run(console: Console, provider: ProviderName, stop: asyncio.Event) -> int:
    request = json.loads(REQUEST.read_text())
    text = DOCUMENT.read_text()
    request["document"] = text
    console.print(
        Panel(
            f"[bold]{DOCUMENT}[/], {len(text.split())} words, is to become JSON that fits a schema.\n"
            f"{PROVIDERS[provider]}",
            title="aijobs: one job from CreateJob to succeeded",
            title_align="left",
            border_style="dim",
        )
    )
    with tempfile.TemporaryDirectory(prefix="aijobs-demo-") as folder:
        async with (
            embedded(Path(folder) / "demo.db", stop) as address,
            Client(address) as client,
        ):
            created = await client.create("structured_generation", user_id=USER, input=request)
            job_id = created.job.job_id
            console.print(f"\n  job [bold]{job_id}[/]\n")
            async for update in client.watch(job_id, after_sequence=0):
                if update.HasField("transition"):
                    _show(console, update.transition, created.job.create_time)
            job = await client.get(job_id, full=True)
    return _result(console, job, provider)


def _show(console: Console, transition: job_pb2.Transition, created: Timestamp) -> None:
    elapsed = (transition.time.ToNanoseconds() - created.ToNanoseconds()) / 1e6
    state = job_pb2.JobState.Name(transition.to_state).removeprefix("JOB_STATE_").lower()
    console.print(
        f"  {elapsed:8.1f} ms  [{COLOURS[state]}]{state:<10}[/] [dim]{TELLING.get(transition.kind, transition.kind)}[/]"
    )


def _result(console: Console, job: job_pb2.Job, provider: ProviderName) -> int:
    if job.state != job_pb2.JOB_STATE_SUCCEEDED:
        console.print(f"\n[red]not succeeded:[/] {job.error.code}: {job.error.message}")
        return 1
    output: Mapping[str, Any] = json.loads(job.output_json)
    console.print()
    console.rule("validated output", align="left", style="green")
    # In a panel its lines would be cut off.
    console.print(JSON.from_data(output), soft_wrap=True)
    console.rule(style="green")
    facts = Table.grid(padding=(0, 2))
    facts.add_row("  hash", job.output_hash[:16] + "…", "SHA-256 over its canonical JSON (RFC 8785)")
    facts.add_row("  artifact", job.artifacts[0].type, job.artifacts[0].id)
    facts.add_row(
        "  usage",
        f"{job.usage.calls} call",
        f"{job.usage.input_tokens} tokens in, {job.usage.output_tokens} out, provider {provider}",
    )
    console.print(facts)
    console.print("\n  Next: [bold]make dev[/] keeps the engine running and says how to call it.\n")
    return 0
