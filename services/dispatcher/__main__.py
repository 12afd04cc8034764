"""`python -m services.dispatcher`: run the dispatcher until SIGTERM."""

import asyncio
import sys

from aijobs import logs, metrics
from aijobs.broker.rabbitmq import RabbitMqBroker
from aijobs.broker.settings import broker_urls
from aijobs.service import run_service
from aijobs.settings import load
from services.dispatcher import app
from services.dispatcher.settings import DispatcherSettings


def main() -> int:
    """Run the service and return its exit status: 0 stopped, 1 failed, 2 started wrongly."""
    settings = load(DispatcherSettings)
    logs.configure("dispatcher", settings.log_level)
    broker = RabbitMqBroker(broker_urls(settings.broker_url))

    async def run(stop: asyncio.Event) -> None:
        with metrics.served(settings.metrics_listen):
            await app.build(settings, broker).run(stop)

    return run_service(run)


if __name__ == "__main__":
    sys.exit(main())
