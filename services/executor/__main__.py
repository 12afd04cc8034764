"""`python -m services.executor`: run the executor until SIGTERM."""

import asyncio
import sys

from aijobs import logs, metrics
from aijobs.broker.rabbitmq import RabbitMqBroker
from aijobs.broker.settings import broker_urls
from aijobs.registry import BadDefinitions, Registry
from aijobs.service import run_service
from aijobs.settings import load
from services.executor import app
from services.executor.settings import ExecutorSettings


def main() -> int:
    """Run the service and return its exit status: 0 stopped, 1 failed, 2 started wrongly."""
    settings = load(ExecutorSettings)
    logs.configure("executor", settings.log_level)
    try:
        registry = Registry.installed(load_code=True)
    except BadDefinitions as error:
        print(error, file=sys.stderr)  # noqa: T201 - read by whoever starts the service
        return 2
    broker = RabbitMqBroker(broker_urls(settings.broker_url))

    async def run(stop: asyncio.Event) -> None:
        with metrics.served(settings.metrics_listen):
            await app.build(settings, registry, broker).run(stop)

    return run_service(run)


if __name__ == "__main__":
    sys.exit(main())
