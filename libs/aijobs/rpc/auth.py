"""Who calls: bearer tokens (JWT, RFC 7519, HS256) and the caller that a handler sees (AP-4).

Without a secret there is nothing to verify: every caller has every role, and the server listens on loopback only.
"""

import re
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import jwt

from aijobs.errors import Unauthenticated
from aijobs.rpc.address import Address
from aijobs.rpc.roles import Role

AUDIENCE = "aijobs"
#: RFC 7518, section 3.2: a key for HS256 has at least the size of the hash. PyJWT only warns.
SHORTEST_SECRET = 32
LEEWAY = timedelta(seconds=30)
_ALGORITHM = "HS256"
_SUBJECT = re.compile(r"^[!-~]{1,128}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who makes a call. `subject` is the user id of a caller with the user role."""

    subject: str
    roles: frozenset[Role]

    @property
    def may_act_for_anyone(self) -> bool:
        """True for backends and admins; everybody else sees only what belongs to its own subject."""
        return not self.roles.isdisjoint({Role.BACKEND, Role.ADMIN})


#: Every caller of a server without a secret.
ANYONE = Caller(subject="anonymous", roles=frozenset(Role))

_caller: ContextVar[Caller] = ContextVar("aijobs_caller")


def current_caller() -> Caller:
    """Return the caller of the call that is being handled.

    Raises:
        LookupError: used outside of a call.

    """
    return _caller.get()


def set_current_caller(caller: Caller) -> None:
    """Let the handler of this call see its caller; done by the interceptor, in the task of the call."""
    _caller.set(caller)


class TokenVerifier:
    """Verifies bearer tokens.

    Args:
        secret: the shared secret, at least 32 bytes in UTF-8.

    Raises:
        ValueError: the secret is too short.

    """

    def __init__(self, secret: str) -> None:
        self._secret = _checked(secret)

    def verify(self, token: str) -> Caller:
        """Return the caller that a token stands for.

        Roles that this version does not know are left out, so that tokens may be newer than the server.

        Raises:
            Unauthenticated: the token does not hold. The message says why and never repeats the token.

        """
        try:
            claims = jwt.decode(
                token,
                self._secret,
                algorithms=[_ALGORITHM],
                audience=AUDIENCE,
                leeway=LEEWAY,
                options={"require": ["exp", "iat", "aud", "sub", "roles"]},
            )
        except jwt.ExpiredSignatureError as error:
            raise Unauthenticated("the token has expired") from error
        except jwt.ImmatureSignatureError as error:
            raise Unauthenticated("the token is not valid yet") from error
        except jwt.MissingRequiredClaimError as error:
            raise Unauthenticated(f"the token has no claim {error.claim!r}") from error
        except jwt.InvalidAudienceError as error:
            raise Unauthenticated(f"the token is not for the audience {AUDIENCE!r}") from error
        except jwt.InvalidAlgorithmError as error:
            raise Unauthenticated(f"the token is not signed with {_ALGORITHM}") from error
        except jwt.InvalidSignatureError as error:
            raise Unauthenticated("the token's signature does not hold") from error
        except jwt.InvalidTokenError as error:
            raise Unauthenticated("the token is malformed") from error
        subject, roles = claims["sub"], claims["roles"]
        if not isinstance(subject, str) or not _SUBJECT.match(subject):
            raise Unauthenticated("the token's subject must be 1 to 128 printable ASCII characters without blanks")
        if not isinstance(roles, list) or not all(isinstance(role, str) for role in roles):
            raise Unauthenticated("the token's roles must be a list of texts")
        return Caller(subject=subject, roles=frozenset(role for role in Role if role in roles))


def mint_token(
    secret: str, *, subject: str, roles: Iterable[Role], lifetime: timedelta, now: datetime | None = None
) -> str:
    """Make a token.

    Args:
        secret: the shared secret, at least 32 bytes in UTF-8.
        subject: 1 to 128 printable ASCII characters without blanks.
        roles: what its bearer may do.
        lifetime: how long it holds.
        now: when it was issued, aware; the present time if unset.

    Raises:
        ValueError: the secret or the subject is not as it must be.

    """
    if not _SUBJECT.match(subject):
        raise ValueError("a token's subject must be 1 to 128 printable ASCII characters without blanks")
    issued = datetime.now(UTC) if now is None else now
    claims = {
        "sub": subject,
        "roles": sorted(Role(role).value for role in roles),
        "aud": AUDIENCE,
        "iat": issued,
        "exp": issued + lifetime,
    }
    return jwt.encode(claims, _checked(secret), algorithm=_ALGORITHM)


def require_loopback(listen: str) -> None:
    """Refuse to serve without tokens on an address that other machines can reach.

    Raises:
        ValueError: the address is not on loopback, or is none at all.

    """
    if not Address.parse(listen).is_loopback:
        raise ValueError(
            f"{listen} can be reached from other machines, and without AIJOBS_TOKEN_SECRET every caller has every "
            f"role: set it to at least {SHORTEST_SECRET} random bytes, or listen on 127.0.0.1"
        )


def _checked(secret: str) -> str:
    if len(secret.encode()) < SHORTEST_SECRET:
        raise ValueError(
            f"AIJOBS_TOKEN_SECRET must have at least {SHORTEST_SECRET} bytes; `openssl rand -hex 32` makes one"
        )
    return secret
