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

EXECUTORS = frozenset[Fault]({"crash", "late", "slow", "break", "replica", "late hello"})
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
    # Four find a gap (test_gaps.py).
    "anything happens to a dispatcher, three times": Setting(faults=3, kinds=OUTBOX, executors=1),
    "anything happens to dispatchers, twice": Setting(dispatchers=2, faults=2, kinds=OUTBOX),
    "the broker loses, doubles and cuts": Setting(faults=3, kinds=BROKER | {"crash"}),
    "without a sweep all heals but a loss": Setting(sweep=False, faults=2, kinds=EVERY_FAULT - {"lost"}),
    "sessions alone notice the dead": Setting(
        reaper=False, sweep=False, faults=3, kinds=frozenset({"crash", "late lock"})
    ),
    "late hellos cost no session": Setting(executors=1, faults=3, kinds=frozenset({"break", "late hello"})),
    "late locks give what was given back to nobody": Setting(
        faults=2,
        kinds=frozenset({"late lock", "break"}),
        wishes=1,
        wanted=frozenset({"handed back"}),
        knows_leases=True,
    ),
    "anything at all, once": Setting(
        dispatchers=2, cancellers=1, failures=True, faults=1, kinds=EVERY_FAULT, wishes=1, wanted=EVERY_WISH
    ),
}  # fmt: skip

LONG_SETTINGS = {
    "calls of many clients get no answer": Setting(cancellers=2, failures=True, faults=3, kinds=frozenset({"late"})),
    "anything happens to executors, three times": Setting(faults=3, kinds=EXECUTORS),
    "anything at all, twice": Setting(dispatchers=2, faults=2, kinds=EVERY_FAULT, cancellers=1, failures=True),
    "anything at all, twice, and a wish": Setting(faults=2, kinds=EVERY_FAULT, wishes=1, wanted=EVERY_WISH),
    "anything happens to dispatchers, three times": Setting(dispatchers=2, faults=3, kinds=OUTBOX),
    "late hellos of executors that die": Setting(faults=3, kinds=frozenset({"break", "late hello", "crash"})),
    "late hellos, four times": Setting(faults=4, kinds=frozenset({"break", "late hello"})),
    "late locks give what was given back to nobody, three times": Setting(
        faults=3,
        kinds=frozenset({"late", "break", "late hello"}),
        wishes=1,
        wanted=frozenset({"handed back"}),
        knows_leases=True,
    ),
    "anything at all, three times": Setting(faults=3, kinds=EVERY_FAULT),
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
    heard_too_late = Setting(faults=2, kinds=frozenset({"break", "late hello"}))
    for setting in (everything, dead_but_heard, heard_too_late):
        Explorer(Watched(setting)).explore()
    assert seen >= {
        "a late create is carried out",
        "a late cancel is carried out: requested",
        "a cancel is answered: too late",
        "executor locks: session lost",
        "a late lock of executor is carried out: leased",
        "a late lock of executor is carried out: session lost",
        "a late lock of executor is carried out: not ours",
        "a late hello of executor is carried out: session open",
        "a late hello of executor is carried out: session lost",
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
