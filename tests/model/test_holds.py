"""The protocol as it is: nothing goes wrong, and once faults stop, every job ends.

Each setting is explored to its end. Together they hold every actor and every fault; the long ones mix them all.
"""

import re
from typing import get_args

import pytest

from tests.model.explorer import Explorer
from tests.model.exploring import explore
from tests.model.protocol import LeaseProtocol
from tests.model.setting import Fault, Setting, Wish

EXECUTORS = frozenset[Fault]({"crash", "late", "slow", "break", "replica"})
OUTBOX = frozenset[Fault]({"late", "slow", "dispatcher", "outage", "unconfirmed", "rejected"})
BROKER = frozenset[Fault]({"lost", "doubled", "cut"})
EVERY_FAULT = EXECUTORS | OUTBOX | BROKER
EVERY_WISH: frozenset[Wish] = frozenset(get_args(Wish))

SETTINGS = {
    "nothing goes wrong": Setting(cancellers=2, failures=True, wishes=2, wanted=EVERY_WISH),
    "calls get no answer": Setting(cancellers=1, failures=True, faults=3, kinds=frozenset({"late"})),
    "three executors die": Setting(cancellers=1, faults=3, kinds=frozenset({"crash"})),
    "executors die and their requests live on": Setting(faults=2, kinds=frozenset({"crash", "late"}), cancellers=1),
    "anything happens to executors, twice": Setting(faults=2, kinds=EXECUTORS),
    "runs fail, are handed back and cancelled": Setting(
        cancellers=1, failures=True, faults=1, kinds=EXECUTORS, wishes=2, wanted=EVERY_WISH - {"pause"}
    ),
    "a paused queue": Setting(
        cancellers=1, faults=1, kinds=frozenset({"crash", "doubled"}), wishes=2, wanted=frozenset({"pause"})
    ),
    "anything happens to dispatchers, three times": Setting(
        # Late requests are left to the next one: three at once find a gap (test_gaps.py).
        dispatchers=2, faults=3, kinds=OUTBOX - {"late"}, executors=1,
    ),
    "dispatchers and their late requests": Setting(dispatchers=2, faults=2, kinds=OUTBOX),
    "the broker loses, doubles and cuts": Setting(faults=3, kinds=BROKER | {"crash"}),
    "without a sweep all heals but a loss": Setting(sweep=False, faults=2, kinds=EVERY_FAULT - {"lost"}),
    "sessions alone notice the dead": Setting(reaper=False, sweep=False, faults=3, kinds=frozenset({"crash"})),
    "anything at all, once": Setting(
        dispatchers=2, cancellers=1, failures=True, faults=1, kinds=EVERY_FAULT, wishes=1, wanted=EVERY_WISH
    ),
}  # fmt: skip

LONG_SETTINGS = {
    "calls of many clients get no answer": Setting(cancellers=2, failures=True, faults=3, kinds=frozenset({"late"})),
    "anything happens to executors, three times": Setting(faults=3, kinds=EXECUTORS),
    "anything at all, twice": Setting(dispatchers=2, faults=2, kinds=EVERY_FAULT, cancellers=1, failures=True),
    "anything at all, twice, and a wish": Setting(faults=2, kinds=EVERY_FAULT, wishes=1, wanted=EVERY_WISH),
    # Three with rejects find a gap (test_gaps.py).
    "almost anything, three times": Setting(faults=3, kinds=EVERY_FAULT - {"rejected"}),
}


@pytest.mark.parametrize("title", SETTINGS)
def test_holds(title):
    found = explore(title, SETTINGS[title])
    assert not found.problem, str(found)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("title", LONG_SETTINGS)
def test_holds_for_long(title):
    found = explore(title, LONG_SETTINGS[title])
    assert not found.problem, str(found)


def test_the_model_goes_everywhere():
    """What never happens cannot go wrong: these are the corners that the settings are there for."""
    seen: set[str] = set()

    class Watched(LeaseProtocol):
        def steps(self, world):
            for step in super().steps(world):
                seen.add(re.sub(r" \d+", "", step.label))
                yield step

    everything = Setting(cancellers=1, failures=True, faults=1, kinds=EVERY_FAULT, wishes=1, wanted=EVERY_WISH)
    dead_but_heard = Setting(faults=2, kinds=frozenset({"crash", "late"}))
    for setting in (everything, dead_but_heard):
        Explorer(Watched(setting)).explore()
    assert seen >= {
        "a late create is carried out",
        "a late cancel is carried out: requested",
        "a cancel is answered: too late",
        "executor locks: session lost",
        "a late lock of executor is carried out: leased",
        "a late lock of executor is carried out: session lost",
        "a late heartbeat of executor is carried out: renewed",
        "a late report of executor is carried out: ended",
        "a late report of executor is carried out: lease lost",
        "executor renews its lease: lease lost",
        "executor reports failed: go on",
        "executor reports succeeded: cancel requested",
        "executor reports handed back: ended",
        "executor, which does not know the type, locks: not ours",
        "the grace of executor is over: its lease ends",
        "the grace of executor is over: nothing ends",
        "the job is due",
        "the reaper writes",
        "the sweep writes",
        "dispatcher settles event: failed",
        "a late claim of event is carried out",
    }
