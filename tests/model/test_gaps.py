"""What the protocol does not promise as it is. Each is rare and heals; when one is closed, its test says so by failing.

They need requests that are carried out after their callers have gone on, or a process that dies at a bad moment.
"""

import pytest

from tests.model.exploring import explore
from tests.model.setting import Setting


@pytest.mark.parametrize(
    "refused",
    [
        Setting(faults=1, kinds=frozenset({"late"}), wishes=1, wanted=frozenset({"pause"}), knows_leases=True),
        Setting(
            faults=2,
            kinds=frozenset({"late", "doubled"}),
            wishes=1,
            wanted=frozenset({"handed back"}),
            knows_leases=True,
        ),
    ],
    ids=["paused", "leased"],
)
def test_a_late_lock_whose_other_copy_was_refused_can_give_a_lease_to_nobody(refused):
    """No lease was ever had with its token, so it is granted when the job can be locked again.

    The reaper ends such a lease (`test_holds.py` shows that), which counts as a takeover.
    """
    found = explore("late lock", refused)
    assert found.problem == "an executor was given a lease that it does not know of"


def test_a_late_claim_and_a_late_settle_can_count_one_failure_twice():
    """An event keeps only the token of its last claim: once there was another one, an old one may take it again.

    Four faults at least: with three, whichever they are, nothing is wrong (`test_holds.py`).
    """
    found = explore("late settle", Setting(faults=4, kinds=frozenset({"rejected", "late", "outage"}), executors=1))
    assert found.problem == "violated: an event's attempts are those that failed"


@pytest.mark.parametrize("faults", [frozenset({"break", "crash"}), frozenset({"late", "crash"})], ids=["break", "late"])
def test_after_a_sign_of_life_a_death_is_noticed_by_the_reaper_only(faults):
    """The sign, which may be a late one, ends the suspicion for good; a broken stream cannot break once more."""
    found = explore("death after a sign", Setting(faults=2, kinds=faults, reaper=False))
    assert found.problem.startswith("dead end")
    assert "nothing ends" in " ".join(found.trace)
