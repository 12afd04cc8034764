"""EX-2: the taxonomy is one table, and every code finds its row."""

import pytest

from aijobs.failures import TAXONOMY, Again, ExecutionFailed, treatment


@pytest.mark.parametrize(
    ("code", "again"),
    [
        ("PROVIDER_TIMEOUT", Again.YES),
        ("PROVIDER_ANYTHING_NEW", Again.YES),
        ("PROVIDER_REQUEST_REJECTED", Again.NEVER),
        ("VALIDATION_AMBIGUOUS", Again.YES),
        ("CONTENT_SAFETY_OUTPUT", Again.NEVER),
        ("TIMEOUT", Again.BY_ABORT_STRATEGY),
        ("CREDENTIAL_MISSING", Again.NEVER),
        ("BUDGET_EXHAUSTED", Again.NEVER),
        ("INTERNAL_HANDLER_ERROR", Again.ONCE),
        ("NEVER_HEARD_OF", Again.ONCE),
        ("", Again.ONCE),
    ],
)
def test_a_code_is_found_by_itself_or_by_its_prefix(code: str, again: Again) -> None:
    assert treatment(code).again == again


def test_public_texts_are_sentences_without_inner_things() -> None:
    for entry in TAXONOMY.values():
        assert entry.public.endswith(".")
        assert not any(character in entry.public for character in ":\\{}<>")


@pytest.mark.parametrize("wrong", [{"internal": ValueError("x")}, {"feedback": 7}, {"retry_after": 5}])
def test_a_failure_is_checked_where_it_is_raised(wrong: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        ExecutionFailed(**{"code": "PROVIDER_X", "internal": "x", **wrong})  # type: ignore[arg-type]
