"""How fast two dispatchers carry a backlog from the outbox to RabbitMQ (OB-7)."""

import asyncio
from collections import Counter
from datetime import timedelta

import pytest

from services.jobs.store.tables import outbox_events
from tests.acceptance.conftest import MakeEngine
from tests.acceptance.test_dispatchers import backlog
from tests.acceptance.waiting import until
from tests.benchmarks.conftest import Report

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

EACH = 20_000


async def test_two_dispatchers(make_engine: MakeEngine, report: Report) -> None:
    engine = await make_engine(AIJOBS_QUEUE_DEPTH="100000")
    await engine.start()
    await asyncio.gather(engine.executor.kill(), engine.dispatcher.kill())
    await backlog(engine, 2 * EACH)
    await asyncio.gather(engine.dispatcher.start(), engine.add("dispatcher"))

    async def all_published() -> bool:
        return await engine.count_where(outbox_events, status="published") == 2 * EACH

    await until(all_published, "every event is published", within=timedelta(seconds=600))
    rows = await engine.read(outbox_events)
    settled = sorted(row["settled_at"] for row in rows)
    shares = Counter(row["locked_by"] for row in rows)
    seconds = (settled[-1] - settled[0]).total_seconds()
    report("events_published", 2 * EACH / seconds, "1/s", dispatchers=2, events=2 * EACH)
    report("smaller_share", min(shares.values()) / (2 * EACH), "of all", dispatchers=2)
