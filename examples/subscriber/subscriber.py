"""A program that hears of the ends of jobs. Copy it, and put what you want to do into `Inbox._effect`.

    exchange aijobs.events ── ai.job.* ──▶ queue example.job-ends ──▶ this program
                                                   └── unreadable ──▶ queue example.job-ends.dead

No end is lost and none is handled twice: the id of an event is written down in the same transaction as what is done
about it, and the message is acknowledged after that.
"""

import asyncio
import logging
import os
import signal
import sqlite3
from contextlib import closing

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue
from aio_pika.exceptions import AMQPError, ChannelInvalidStateError

from aijobs.completion import EXCHANGE, ROUTING_KEYS, CompletionEvent

QUEUE = "example.job-ends"
DEAD_QUEUE = f"{QUEUE}.dead"
#: Messages that the broker hands over before the first of them is acknowledged.
PREFETCH = 10
CONNECT_SECONDS = 5
#: Between two attempts to connect: at first, and at most.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
#: Whatever goes wrong with a broker or a database that is away for a while.
FAULTS = (AMQPError, OSError, TimeoutError, ChannelInvalidStateError, RuntimeError, sqlite3.OperationalError)

TABLES = """
CREATE TABLE IF NOT EXISTS handled (event_id TEXT PRIMARY KEY, at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP);
CREATE TABLE IF NOT EXISTS ends (job_id TEXT PRIMARY KEY, state TEXT NOT NULL, sequence INTEGER NOT NULL);
DELETE FROM handled WHERE at < datetime('now', '-14 days');
"""


class Inbox:
    """What was handled and what came of it. A short transaction each: it may block the event loop."""

    def __init__(self, path: str) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.executescript(TABLES)
        self.close = self._database.close

    def take(self, event: CompletionEvent) -> bool:
        """Handle an event; False: it was handled before.

        Raises:
            sqlite3.OperationalError: the database is locked, full or gone; nothing was done.

        """
        self._database.execute("BEGIN IMMEDIATE")
        with self._database:
            fresh = "INSERT INTO handled (event_id) VALUES (?) ON CONFLICT DO NOTHING"
            if not self._database.execute(fresh, (event.event_id,)).rowcount:
                return False
            self._effect(event)
            return True

    def _effect(self, event: CompletionEvent) -> None:
        """Keep how the job ended, unless something later is known of it. Yours: a row for your own outbox, say."""
        self._database.execute(
            "INSERT INTO ends (job_id, state, sequence) VALUES (?, ?, ?) ON CONFLICT (job_id) DO UPDATE"
            " SET state = excluded.state, sequence = excluded.sequence WHERE excluded.sequence > ends.sequence",
            (event.job_id, event.state, event.sequence),
        )


async def handle(message: AbstractIncomingMessage, inbox: Inbox) -> None:
    """Handle one message and settle it."""
    if message.routing_key not in ROUTING_KEYS.values():
        # `ai.job.*` also brings what was added after this was written.
        await message.ack()
        return
    try:
        event = CompletionEvent.model_validate_json(message.body)
    except ValueError:
        say(f"unreadable: message {message.message_id}, now in {DEAD_QUEUE}")
        await message.reject(requeue=False)
        return
    if not inbox.take(event):
        say(f"again: event {event.event_id}")
    elif (event.error_code or "").startswith("CREDENTIAL_"):
        say(f"job {event.job_id} {event.state}: its user needs a new key ({event.error_code})")
    else:
        say(f"job {event.job_id} {event.state}" + (f": {event.error_code}" if event.error_code else ""))
    await message.ack()


async def declare(channel: AbstractChannel) -> AbstractQueue:
    """Declare our queues and bind the one to read. The exchange is the engine's: it is there once that has started."""
    await channel.declare_queue(DEAD_QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
    queue = await channel.declare_queue(
        QUEUE,
        durable=True,
        arguments={
            "x-queue-type": "quorum",
            # The default exchange leads to the queue of that name.
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": DEAD_QUEUE,
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        },
    )
    await queue.bind(EXCHANGE, routing_key="ai.job.*")
    return queue


async def receive(url: str, inbox: Inbox) -> None:
    """Handle messages, one after the other, until the connection breaks.

    Raises:
        Exception: one of FAULTS. Messages that were not acknowledged come again.

    """
    arrived: asyncio.Queue[AbstractIncomingMessage | None] = asyncio.Queue()

    def gone(*_: object) -> None:
        arrived.put_nowait(None)

    connection = await aio_pika.connect(url, timeout=CONNECT_SECONDS, client_properties={"connection_name": QUEUE})
    async with connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=PREFETCH)
        queue = await declare(channel)
        connection.close_callbacks.add(gone)
        channel.close_callbacks.add(gone)
        # Of a consumer that the broker cancels, as when somebody deletes the queue, aio-pika itself says nothing.
        (await channel.get_underlay_channel()).on_consumer_cancel_callbacks.add(gone)
        await queue.consume(arrived.put)
        say(f"subscribed to {EXCHANGE}")
        while (message := await arrived.get()) is not None:
            await handle(message, inbox)
    raise ConnectionError("no longer consuming")


async def subscribe(url: str, inbox: Inbox) -> None:
    """Receive for ever, connecting again whenever the broker was away.

    Not with aio-pika's robust connection: it keeps on to one address, and consumers may come back without a word.
    """
    loop, pause = asyncio.get_running_loop(), FIRST_PAUSE
    while True:
        began = loop.time()
        try:
            await receive(url, inbox)
        except FAULTS as error:
            say(f"not subscribed ({type(error).__name__}); trying again")
        pause = FIRST_PAUSE if loop.time() - began > LONGEST_PAUSE else min(2 * pause, LONGEST_PAUSE)
        await asyncio.sleep(pause)


async def main(url: str, database: str) -> None:
    """Run until SIGTERM or SIGINT. To be cut off anywhere is harmless: see the head of this file."""
    with closing(Inbox(database)) as inbox:
        work = asyncio.create_task(subscribe(url, inbox))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, work.cancel)
        try:
            await work
        except asyncio.CancelledError:
            say("stopped")


def say(text: str) -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)


if __name__ == "__main__":
    # A broken connection is one line here; the libraries would add tracebacks of their own.
    for library in ("aio_pika", "aiormq"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    asyncio.run(
        main(
            os.environ.get("SUBSCRIBER_BROKER_URL", "amqp://guest:guest@127.0.0.1:5672/"),
            os.environ.get("SUBSCRIBER_DATABASE", "subscriber.db"),
        )
    )
