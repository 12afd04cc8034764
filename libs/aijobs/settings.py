"""Settings from environment variables with the prefix `AIJOBS_`.

A process with bad settings does not start: it names each variable, what is wrong with it and what is allowed, and exits
with status 2. Values of secrets are never shown.
"""

import re
import sys
from datetime import timedelta
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from aijobs.identifiers import is_identifier
from aijobs.rpc.address import Address
from aijobs.rpc.auth import TokenVerifier, require_loopback
from aijobs.service import CannotRun

PREFIX = "AIJOBS_"
#: Exit status of a process that was started wrongly.
BAD_USAGE = 2

#: Names of variables whose values are not repeated: URLs hold passwords.
_CONFIDENTIAL = re.compile(r"SECRET|TOKEN|PASSWORD|KEY|URL|DSN|CREDENTIAL")

#: Longer ones do not fit into a call's metadata.
LONGEST_TOKEN = 8000

SettingsT = TypeVar("SettingsT", bound=BaseSettings)


def _seconds(value: Any) -> Any:
    """Read a number of seconds; pydantic alone would also take ISO 8601 and clock times."""
    if isinstance(value, str):
        try:
            return timedelta(seconds=float(value))
        except (ValueError, OverflowError) as error:
            raise ValueError("Input should be a number of seconds") from error
    return value


#: A span of time, written in the environment as a number of seconds.
Seconds = Annotated[timedelta, BeforeValidator(_seconds)]


class ServiceSettings(BaseSettings):
    """What every service has. Each adds its own and may give another default for `listen`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="ignore", frozen=True)

    #: Where to serve gRPC, as `host:port`; port 0 picks a free one.
    listen: str = "127.0.0.1:50051"
    #: Where to serve metrics for Prometheus over HTTP, as `host:port`; unset: nowhere.
    metrics_listen: str | None = None
    #: Verifies the tokens of callers. Without it everybody may do everything, on loopback only.
    token_secret: SecretStr | None = None
    #: What the service shows to the services that it calls.
    token: SecretStr | None = None
    #: What is logged, as JSON lines on standard error.
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    #: How long running work may take to finish after SIGTERM.
    drain_time: Annotated[Seconds, Field(ge=timedelta(0), le=timedelta(hours=1))] = Field(
        default=timedelta(seconds=20), validation_alias="AIJOBS_DRAIN_SECONDS"
    )

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _listen_is_an_address(cls, listen: str | None) -> str | None:
        if listen is not None:
            Address.parse(listen)
        return listen

    @field_validator("token_secret")
    @classmethod
    def _secret_is_long_enough(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None:
            TokenVerifier(secret.get_secret_value())
        return secret

    @field_validator("token")
    @classmethod
    def _token_fits_a_header(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and not is_identifier(token.get_secret_value(), most=LONGEST_TOKEN):
            raise ValueError("must be one line of printable ASCII characters without blanks")
        return token

    @model_validator(mode="after")
    def _open_servers_need_a_secret(self) -> Self:
        if self.token_secret is None:
            require_loopback(self.listen)
        return self

    def verifier(self) -> TokenVerifier | None:
        """Return the verifier for the secret, None without one."""
        return None if self.token_secret is None else TokenVerifier(self.token_secret.get_secret_value())

    def own_token(self) -> str | None:
        """Return the token to show to other services, None without one."""
        return None if self.token is None else self.token.get_secret_value()


class BadSettings(CannotRun):
    """Settings cannot be used. The message has one line for each problem and names the variable."""


def read(settings: type[SettingsT], **given: Any) -> SettingsT:
    """Read settings from the environment.

    Args:
        settings: what to read.
        given: values that the environment does not decide.

    Raises:
        BadSettings: some cannot be used.

    """
    try:
        return settings(**given)
    except ValidationError as error:
        lines = [_problem(settings, dict(problem)) for problem in error.errors(include_url=False)]
    except SettingsError as error:
        field = re.search(r'field "(\w+)"', str(error))
        lines = [f"{_variable(settings, field[1] if field else '')}: Input should be JSON"]
    # Not from the error above: it repeats the values, which may be secret.
    raise BadSettings("\n".join(lines))


def load(settings: type[SettingsT]) -> SettingsT:
    """Read the settings of a process from the environment.

    Raises:
        SystemExit: with status 2, after one line on stderr for each problem.

    """
    try:
        return read(settings)
    except BadSettings as error:
        print(error, file=sys.stderr)  # noqa: T201 - logging is configured by the settings that are missing
        raise SystemExit(BAD_USAGE) from None


def _problem(settings: type[BaseModel], problem: dict[str, Any]) -> str:
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not problem["loc"]:  # about several variables; the message names them
        return message
    variable = _variable(settings, str(problem["loc"][0]))
    if problem["type"] == "missing":
        return f"{variable}: required, but not set"
    shown = problem["type"] != "value_error" and not _CONFIDENTIAL.search(variable)
    return f"{variable}: {message}" + (f"; got {str(problem['input'])[:80]!r}" if shown else "")


def _variable(settings: type[BaseModel], location: str) -> str:
    """Return the environment variable of a field, which pydantic names by field or by alias."""
    field: FieldInfo | None = settings.model_fields.get(location)
    alias = field.validation_alias if field is not None else location
    if isinstance(alias, str) and alias.startswith(PREFIX):
        return alias
    return f"{PREFIX}{location.upper()}"
