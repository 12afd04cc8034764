"""Why an execution failed, and what follows from it: one table (EX-2).

A handler raises `ExecutionFailed` with a code. Exact codes are looked up first, then the longest prefix. The jobs
service decides by the same table whether the run may try again, so executor and jobs service never disagree.

    code                      again?              what the user reads
    PROVIDER_*                yes, with backoff   the model could not be reached, try later
    VALIDATION_*              yes, with feedback  the model's answer did not fit
    TIMEOUT                   by abort strategy   it took too long
    INTERNAL_*, unknown ones  once                something broke on our side
    all others                no                  their own sentences
"""

import re
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

CODE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


class Again(StrEnum):
    """Whether a failed execution may be followed by another one, `max_retries` permitting."""

    NEVER = "never"
    ONCE = "once"
    BY_ABORT_STRATEGY = "by_abort_strategy"
    YES = "yes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """What the taxonomy says about a code."""

    again: Again
    public: str


#: Key: a full code, or a prefix ending in `_`.
TAXONOMY: dict[str, Treatment] = {
    "PROVIDER_": Treatment(again=Again.YES, public="The AI model is not available right now. Please try again later."),
    # The provider understood us and said no: the same request gets the same answer.
    "PROVIDER_REQUEST_REJECTED": Treatment(
        again=Again.NEVER, public="The AI model did not accept the request. Please contact support."
    ),
    "VALIDATION_": Treatment(again=Again.YES, public="The answer did not fit what was asked."),
    "CONTENT_SAFETY_": Treatment(again=Again.NEVER, public="The content was refused by the safety check."),
    "TIMEOUT": Treatment(again=Again.BY_ABORT_STRATEGY, public="The job took too long and was stopped."),
    "CREDENTIAL_": Treatment(again=Again.NEVER, public="The model key is missing, expired or refused."),
    "BUDGET_EXHAUSTED": Treatment(again=Again.NEVER, public="The job reached its usage limit."),
    "UNSUPPORTED_SCHEMA": Treatment(
        again=Again.NEVER,
        public="The offline provider cannot answer for this output schema. Its documentation lists what it knows.",
    ),
    # The same output would be refused again.
    "INTERNAL_RESULT_REFUSED": Treatment(
        again=Again.NEVER, public="Something went wrong on our side. Please contact support."
    ),
    "INTERNAL_": Treatment(again=Again.ONCE, public="Something went wrong on our side. Please try again."),
}


def treatment(code: str) -> Treatment:
    """Look up a code. A code that nothing matches is treated as `INTERNAL_*`."""
    if code in TAXONOMY:
        return TAXONOMY[code]
    prefixes = [prefix for prefix in TAXONOMY if prefix.endswith("_") and code.startswith(prefix)]
    return TAXONOMY[max(prefixes, key=len, default="INTERNAL_")]


class ExecutionFailed(Exception):
    """Raised by a handler, or by what it calls, to fail one execution of a job.

    Raises:
        ValueError: the code is not one of at most 64 capitals, digits and underscores.
        TypeError: a text is none, or `retry_after` is no span.

    Attributes:
        code: code of the taxonomy, for example `PROVIDER_TIMEOUT`.
        internal: for operators; may name hosts and models, never keys, prompts or answers.
        feedback: for the next prompt, in words for a model; empty if there is nothing to say.
        retry_after: the provider's wish for how long to wait, if it had one.

    """

    def __init__(self, code: str, internal: str, *, feedback: str = "", retry_after: timedelta | None = None) -> None:
        if not CODE.fullmatch(code):
            raise ValueError(f"not a failure code: {code[:80]!r}")
        # Here, where whoever raises it sees it; the report of a run is no place for a surprise.
        texts: tuple[object, ...] = (internal, feedback)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("internal and feedback are texts")
        span: object = retry_after
        if not isinstance(span, timedelta | None):
            raise TypeError("retry_after is a timedelta, or None")
        super().__init__(f"{code}: {internal}")
        self.code = code
        self.internal = internal
        self.feedback = feedback
        self.retry_after = retry_after
