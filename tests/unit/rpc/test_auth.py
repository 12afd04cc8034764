"""Tokens and the loopback rule, without a server."""

from datetime import UTC, datetime, timedelta

import pytest

from aijobs.errors import Unauthenticated
from aijobs.rpc.auth import ANYONE, LEEWAY, Caller, TokenVerifier, current_caller, mint_token, require_loopback
from aijobs.rpc.roles import Role

SECRET = "s" * 32
HOUR = timedelta(hours=1)


def test_a_minted_token_gives_its_caller_back() -> None:
    token = mint_token(SECRET, subject="u-1", roles=[Role.USER, Role.ADMIN], lifetime=HOUR)
    assert TokenVerifier(SECRET).verify(token) == Caller(subject="u-1", roles=frozenset({Role.USER, Role.ADMIN}))


@pytest.mark.parametrize("secret", ["", "short", "s" * 31])
def test_a_short_secret_is_refused_by_both_sides_without_repeating_it(secret: str) -> None:
    for use in (
        lambda: TokenVerifier(secret),
        lambda: mint_token(secret, subject="x", roles=[Role.USER], lifetime=HOUR),
    ):
        with pytest.raises(ValueError, match="AIJOBS_TOKEN_SECRET must have at least 32 bytes") as caught:
            use()
        assert "short" not in str(caught.value)


def test_the_secret_is_measured_in_bytes() -> None:
    TokenVerifier("é" * 16)


@pytest.mark.parametrize(("late", "accepted"), [(LEEWAY / 2, True), (LEEWAY * 2, False)])
def test_clocks_may_differ_by_the_leeway(late: timedelta, accepted: bool) -> None:
    token = mint_token(SECRET, subject="x", roles=[], lifetime=HOUR, now=datetime.now(UTC) - HOUR - late)
    if accepted:
        TokenVerifier(SECRET).verify(token)
    else:
        with pytest.raises(Unauthenticated, match="has expired"):
            TokenVerifier(SECRET).verify(token)


def test_a_token_from_the_future_is_not_valid_yet() -> None:
    token = mint_token(SECRET, subject="x", roles=[], lifetime=HOUR, now=datetime.now(UTC) + HOUR)
    with pytest.raises(Unauthenticated, match="not valid yet"):
        TokenVerifier(SECRET).verify(token)


@pytest.mark.parametrize("subject", ["", "two words", "é", "x" * 129])
def test_a_subject_that_cannot_be_a_user_id_is_refused(subject: str) -> None:
    with pytest.raises(ValueError, match="subject"):
        mint_token(SECRET, subject=subject, roles=[Role.USER], lifetime=HOUR)


@pytest.mark.parametrize(
    ("roles", "anyone"),
    [({Role.BACKEND}, True), ({Role.ADMIN}, True), ({Role.USER}, False), ({Role.EXECUTOR, Role.DISPATCHER}, False)],
)
def test_backends_and_admins_act_for_anyone(roles: set[Role], anyone: bool) -> None:
    assert Caller(subject="x", roles=frozenset(roles)).may_act_for_anyone is anyone


def test_without_tokens_every_caller_has_every_role() -> None:
    assert ANYONE.roles == frozenset(Role)


def test_outside_of_a_call_there_is_no_caller() -> None:
    with pytest.raises(LookupError):
        current_caller()


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "127.8.8.8:0", "localhost:50051", "[::1]:50051"])
def test_loopback_is_fine_without_a_secret(listen: str) -> None:
    require_loopback(listen)


@pytest.mark.parametrize("listen", ["0.0.0.0:50051", "[::]:50051", "10.0.0.1:50051", "jobs.example:50051"])
def test_everything_else_is_not_and_the_variable_is_named(listen: str) -> None:
    with pytest.raises(ValueError, match="AIJOBS_TOKEN_SECRET"):
        require_loopback(listen)
