"""Ways in which the protocol could be wrong. The model has to find out about every one of them."""

from enum import StrEnum


class Flaw(StrEnum):
    """A check that is left out, or a write that is forgotten."""

    NO_FENCE_AT_REPORT = "a report is taken from whoever sends it"
    LAPSE_NOT_RECORDED = "a lapse does not write lapsed_at, so the lease stays as it is"
    SETTLE_WITHOUT_TOKEN = "an event is settled by whoever settles it"
    CANCEL_UNSEEN_BY_SUCCESS = "a success is taken after a cancel was requested"
    CANCEL_UNSEEN_BY_FAILURE = "a failure is taken after a cancel was requested"
    REAPER_LOOKS_ONCE = "the reaper ends what it has read, without looking again"
    EPOCH_UNSEEN_BY_LOCK = "a lock is taken from a session that is over"
    BREAK_UNSEEN_BY_LOCK = "a lock is taken from a session that broke"
    LOCK_AS_SIGN_OF_LIFE = "a lock ends the suspicion of whoever sends it"
    USED_TOKEN_UNSEEN = "a lock is taken although its token had a lease before"
    HELLO_NUMBER_UNSEEN = "a hello begins a session although a later one was heard"
    EPOCH_UNSEEN_BY_SUSPICION = "leases end by the suspicion of a session that is over"
    SETTLED_EVENT_CLAIMED_AGAIN = "a claim takes an event that was settled under its own token"
    SAME_DISPATCH_AFTER_REFUSAL = "a refused lock does not count dispatch_no up"
    ATTEMPT_COUNTED_AT_CLAIM = "an event's attempt is counted when it is claimed"
    ACKNOWLEDGED_BEFORE_LOCK = "an executor acknowledges its message before it locks the job"
    LOCKS_FORGOTTEN = "a repeated lock is not recognised"
    REPORTS_FORGOTTEN = "a repeated report is not recognised"
    CANCELS_FORGOTTEN = "a repeated cancel is not recognised"
    HAND_BACK_AS_LAPSE = "a hand-back is taken for a lost lease"
