"""What is declared on the broker, and by what names. Declaring is idempotent; every service does it when it connects.

    aijobs (direct) ── ai-interactive, ai-background     quorum queues: durable, replicated where there is a cluster
    aijobs.dead-letter (fanout) ── aijobs.dead           poison messages, kept for people
    aijobs.events (topic)                                ai.job.completed|failed|cancelled, for other backends

Arguments of a queue cannot be changed once it exists, so only what must be there from the start is declared; limits
are policies of the broker, in `deploy/rabbitmq.json`.
"""

from aijobs.definition import Queue

WORK_EXCHANGE = "aijobs"
DEAD_LETTER_EXCHANGE = "aijobs.dead-letter"
DEAD_LETTER_QUEUE = "aijobs.dead"
EVENTS_EXCHANGE = "aijobs.events"
WORK_QUEUES = tuple(str(queue) for queue in Queue)
#: A message that was rejected more often is put aside; on RabbitMQ by a policy, whose limit is this one.
DELIVERY_LIMIT = 20

WORK_QUEUE_ARGUMENTS = {
    "x-queue-type": "quorum",
    "x-dead-letter-exchange": DEAD_LETTER_EXCHANGE,
    # A dead letter is moved only once its new queue has confirmed it; that needs reject-publish.
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
}
DEAD_LETTER_QUEUE_ARGUMENTS = {"x-queue-type": "quorum"}
