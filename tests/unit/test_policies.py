"""deploy/rabbitmq.json: limits that can be changed while there are queues."""

import json
import re

from aijobs.broker.topology import (
    DEAD_LETTER_QUEUE,
    DEAD_LETTER_QUEUE_ARGUMENTS,
    DELIVERY_LIMIT,
    WORK_QUEUE_ARGUMENTS,
    WORK_QUEUES,
)
from deploy.policies import DEFINITIONS

FILE = json.loads(DEFINITIONS.read_text())


def covering(queue: str) -> list[dict[str, object]]:
    return [policy["definition"] for policy in FILE["policies"] if re.search(policy["pattern"], queue)]


def test_the_file_holds_policies_alone_and_no_secret():
    assert list(FILE) == ["policies"]


def test_every_queue_of_ours_has_one_policy():
    assert [covering(queue) for queue in WORK_QUEUES] == [[{"delivery-limit": DELIVERY_LIMIT}]] * len(WORK_QUEUES)
    (dead,) = covering(DEAD_LETTER_QUEUE)
    assert set(dead) == {"max-length", "message-ttl"}
    assert covering("someone-elses") == []


def test_what_a_policy_says_is_in_no_queues_arguments():
    """Arguments would win over the policy, and cannot be changed."""
    declared = {name.removeprefix("x-") for name in (*WORK_QUEUE_ARGUMENTS, *DEAD_LETTER_QUEUE_ARGUMENTS)}
    assert declared & {limit for policy in FILE["policies"] for limit in policy["definition"]} == set()
