"""A job type whose code kills its process at a chosen place: once, as long as a marker file is there."""

import ctypes
import os
import signal
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, model_validator

from aijobs.definition import Execution, JobDefinition, Metadata, Queue, Routing, Schema
from aijobs.job_type import Artifact, ExecutionContext, ProjectedJob, Projection, artifact_id


class Wanted(BaseModel):
    place: str
    marker: str

    @model_validator(mode="after")
    def _die(self) -> Self:
        die("input", self)
        return self


class Output(BaseModel):
    wanted: Wanted

    @model_validator(mode="after")
    def _die(self) -> Self:
        die("output", self.wanted)
        return self


def die(place: str, wanted: Wanted) -> None:
    """End the process without a word if this is the place and the marker is there."""
    marker = Path(wanted.marker)
    if wanted.place == place and marker.exists():
        marker.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def spawn(wanted: Wanted) -> None:
    """Start a process and hang, the first time: with the interpreter's lock held, nothing here gets its turn."""
    marker = Path(wanted.marker)
    if wanted.place == "spawn" and not marker.exists():
        child = subprocess.Popen(["sleep", "600"])
        marker.write_text(f"{os.getpid()} {child.pid}")
        ctypes.PyDLL(None).sleep(600)


async def execute(context: ExecutionContext[Wanted]) -> Output:
    """Die, or answer."""
    die("handler", context.input)
    spawn(context.input)
    return Output(wanted=context.input)


def project(job: ProjectedJob, output: Output) -> Projection:
    """Die, or make one artifact."""
    die("projector", output.wanted)
    artifact = Artifact(type="mortal", artifact_id=artifact_id(job.job_id, "mortal", 0), ordinal=0, content={})
    return Projection(artifacts=[artifact])


def definition(job_type: str, **execution: Any) -> JobDefinition:
    """Define a mortal job type."""
    return JobDefinition(
        job_type=job_type,
        metadata=Metadata(label="Mortal", description="For tests", domain="maintenance", version="1.0.0"),
        routing=Routing(queue=Queue.INTERACTIVE),
        execution=Execution(timeout=timedelta(seconds=60), max_retries=0, **execution),
        input=Schema(version="1", model=Wanted),
        output=Schema(version="1", model=Output),
        executor=f"{__name__}:execute",
        projector=f"{__name__}:project",
    )


DEFINITION = definition("mortal")
ALONE = definition("mortal_alone", isolation="process")
