"""The model can fail: each of these flaws, put into the protocol, is found, in the setting in which it shows."""

from collections.abc import Iterator

import pytest

from services.jobs import lifecycle
from tests.model import rules
from tests.model.exploring import explore
from tests.model.flaws import Flaw
from tests.model.rules import NOW
from tests.model.setting import Fault, Setting, Wish


def setting(flaw: Flaw, *faults: Fault, wishes: frozenset[Wish] = frozenset(), **others) -> Setting:
    """Let every named fault happen once, in any order, or one of them more often."""
    return Setting(
        flaws=frozenset({flaw}),
        faults=len(faults),
        kinds=frozenset(faults),
        wishes=len(wishes),
        wanted=wishes,
        **others,
    )


CAUGHT = [
    (setting(Flaw.NO_FENCE_AT_REPORT, "slow"), "a report without the present lease changed the job"),
    (setting(Flaw.LAPSE_NOT_RECORDED, "crash"), "a lease lapsed twice"),
    (setting(Flaw.SETTLE_WITHOUT_TOKEN, "slow", dispatchers=2), "an event was settled by a claim that had ended"),
    (setting(Flaw.CANCEL_UNSEEN_BY_SUCCESS, cancellers=1), "a job succeeded after a cancel was acknowledged"),
    (setting(Flaw.CANCEL_UNSEEN_BY_FAILURE, cancellers=1, failures=True), "a job failed after a cancel was"),
    (setting(Flaw.REAPER_LOOKS_ONCE, "slow"), "the reaper ended a lease that had been renewed"),
    (setting(Flaw.EPOCH_UNSEEN_BY_LOCK, "break", "late"), "a session that is over was given a lease"),
    (setting(Flaw.BREAK_UNSEEN_BY_LOCK, "crash", "late"), "a dead executor was given a lease after its session had"),
    (setting(Flaw.LOCK_AS_SIGN_OF_LIFE, "crash", "late lock", reaper=False), "dead end"),
    (
        setting(Flaw.USED_TOKEN_UNSEEN, "late lock", wishes=frozenset({"handed back"}), knows_leases=True),
        "an executor was given a lease that it does not know of",
    ),
    (
        setting(Flaw.HELLO_NUMBER_UNSEEN, "break", "late hello"),
        "an executor lost its lease although its session was open",
    ),
    (
        setting(Flaw.SETTLED_EVENT_CLAIMED_AGAIN, "rejected", "late", "late"),
        "an event's attempts are those that failed",
    ),
    (setting(Flaw.EPOCH_UNSEEN_BY_SUSPICION, "break", "break"), "an executor lost its lease by the suspicion of a"),
    (setting(Flaw.SAME_DISPATCH_AFTER_REFUSAL, wishes=frozenset({"pause"})), "two events under one dedupe key"),
    (setting(Flaw.SAME_DISPATCH_AFTER_REFUSAL, wishes=frozenset({"unknown type"})), "two events under one dedupe key"),
    (
        setting(Flaw.SAME_DISPATCH_AFTER_REFUSAL, "doubled", wishes=frozenset({"handed back for later"})),
        "two events under one dedupe key",
    ),
    (setting(Flaw.ATTEMPT_COUNTED_AT_CLAIM), "an event's attempts are those that failed"),
    (setting(Flaw.ACKNOWLEDGED_BEFORE_LOCK, "crash", sweep=False), "dead end"),
    (setting(Flaw.LOCKS_FORGOTTEN, "late"), "a repeated lock was not recognised"),
    (setting(Flaw.REPORTS_FORGOTTEN, "late"), "a repeated report was not recognised"),
    (setting(Flaw.CANCELS_FORGOTTEN, "late", cancellers=1), "a repeated cancel got another answer"),
    (setting(Flaw.HAND_BACK_AS_LAPSE, wishes=frozenset({"handed back"})), "a hand-back was counted"),
]


NAMES = [min(flawed.flaws).name for flawed, _ in CAUGHT]


@pytest.mark.parametrize(("flawed", "problem"), CAUGHT, ids=NAMES)
def test_is_caught(flawed, problem):
    (flaw,) = flawed.flaws
    found = explore(flaw, flawed)
    assert problem in found.problem
    assert found.trace


def test_no_flaw_is_forgotten():
    assert {flaw for flawed, _ in CAUGHT for flaw in flawed.flaws} == set(Flaw)


@pytest.mark.parametrize("flawed", [flawed for flawed, _ in CAUGHT], ids=NAMES)
def test_without_its_flaw_nothing_is_wrong(flawed):
    """Else the flaw would not be what was caught."""
    sound = Setting(**{name: getattr(flawed, name) for name in flawed.__slots__} | {"flaws": frozenset()})
    assert not explore("sound", sound).problem


def test_a_lost_message_needs_the_sweep():
    lost = Setting(faults=1, kinds=frozenset({"lost"}), sweep=False)
    assert explore("no sweep", lost).problem.startswith("dead end")


def test_the_sweep_heals_a_message_acknowledged_too_early():
    early = setting(Flaw.ACKNOWLEDGED_BEFORE_LOCK, "crash")
    assert not explore("sweep", early).problem


@pytest.fixture
def forgetful_rules() -> Iterator[None]:
    """What the rules said is remembered; not beyond a test that changes them."""

    def forget() -> None:
        for rule in vars(rules).values():
            if hasattr(rule, "cache_clear"):
                rule.cache_clear()

    forget()
    yield
    forget()


@pytest.mark.usefixtures("forgetful_rules")
def test_the_real_rules_decide_about_a_cancel(monkeypatch):
    """The model has no rules of its own: what is wrong in `lifecycle.py` is wrong here."""
    monkeypatch.setattr(lifecycle, "_require_no_cancel", lifecycle._require_lease)
    found = explore("rules that do not look for a cancel", Setting(cancellers=1))
    assert found.problem == "a job succeeded after a cancel was acknowledged"


@pytest.mark.usefixtures("forgetful_rules")
def test_the_real_rules_decide_about_a_lapse(monkeypatch):
    monkeypatch.setattr(lifecycle, "_lapsed", lambda _: {**lifecycle.NO_LEASE, "lapsed_at": NOW})
    found = explore("a lapse that dispatches nothing", Setting(faults=1, kinds=frozenset({"crash"})))
    assert found.problem == "two events under one dedupe key"
