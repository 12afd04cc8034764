"""`python -m services.jobs`: run the jobs service until SIGTERM."""

import asyncio
import sys

from aijobs import logs, metrics
from aijobs.registry import BadDefinitions, Registry
from aijobs.service import run_service
from aijobs.settings import load
from services.jobs import app
from services.jobs.settings import JobsSettings


def main() -> int:
    """Run the service and return its exit status: 0 stopped, 1 failed, 2 started wrongly."""
    settings = load(JobsSettings)
    logs.configure("jobs", settings.log_level)
    try:
        registry = Registry.installed(load_code=False)
    except BadDefinitions as error:
        print(error, file=sys.stderr)  # noqa: T201 - read by whoever starts the service
        return 2

    async def run(stop: asyncio.Event) -> None:
        with metrics.served(settings.metrics_listen):
            await app.build(settings, registry).run(stop)

    return run_service(run)


if __name__ == "__main__":
    sys.exit(main())
