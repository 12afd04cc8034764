"""What the protocol does not promise as it is. Each is rare and heals; when one is closed, its test says so by failing.

They need requests that are carried out after their callers have gone on, so each takes two or three faults at once.
"""

from tests.model.exploring import explore
from tests.model.setting import Setting


def test_a_late_lock_can_give_a_lease_to_nobody():
    """The executor has had this lease and handed it back; the copy of its lock is granted all the same.

    The reaper ends such a lease (`test_holds.py` shows that), which counts as a takeover.
    """
    found = explore(
        "late lock",
        Setting(faults=1, kinds=frozenset({"late"}), wishes=1, wanted=frozenset({"handed back"}), knows_leases=True),
    )
    assert found.problem == "an executor was given a lease that it does not know of"


def test_a_late_hello_can_cost_a_healthy_executor_its_leases():
    """The hello of a stream that was given up counts the epoch up after the hello of the stream that is used."""
    found = explore("late hello", Setting(faults=2, kinds=frozenset({"break", "late hello"})))
    assert found.problem == "an executor lost its lease although its session was open"


def test_a_late_claim_and_a_late_settle_can_count_one_failure_twice():
    """The event keeps its token when it is settled, so the late claim takes it again under the same one."""
    found = explore("late settle", Setting(faults=3, kinds=frozenset({"rejected", "late"})))
    assert found.problem == "violated: an event's attempts are those that failed"


def test_after_a_sign_of_life_a_death_is_noticed_by_the_reaper_only():
    """The sign ends the suspicion for good, and a stream that is broken already cannot break once more."""
    found = explore("break", Setting(faults=2, kinds=frozenset({"break", "crash"}), reaper=False))
    assert found.problem.startswith("dead end")
    late = explore("late", Setting(faults=2, kinds=frozenset({"late", "crash"}), reaper=False))
    assert late.problem.startswith("dead end")
