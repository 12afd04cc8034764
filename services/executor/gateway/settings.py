"""Which provider answers, and with which models. Every name begins with `AIJOBS_`."""

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, assert_never

from pydantic import AnyHttpUrl, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from aijobs.job_type import ModelTier
from services.executor.gateway.offline.provider import OfflineProvider
from services.executor.gateway.openai_compatible import JsonMode, OpenAiCompatible
from services.executor.gateway.provider import Provider

ModelName = Annotated[str, Field(pattern=r"^[!-~]{1,128}$")]


class ProviderName(StrEnum):
    """The providers there are."""

    OFFLINE = "offline"
    OPENAI = "openai"


class ModelSettings(BaseSettings):
    """Settings of the gateway; an executor's settings inherit from it.

    Raises:
        pydantic.ValidationError: a value is out of bounds, or one that the provider needs is missing; the message
            names the variable.

    """

    model_config = SettingsConfigDict(env_prefix="AIJOBS_", frozen=True)

    #: Who answers: `offline` needs nothing; `openai` is any server that speaks OpenAI's chat completions.
    provider: ProviderName = ProviderName.OFFLINE
    #: Where that server is, without credentials. Only used with `openai`.
    provider_base_url: AnyHttpUrl = AnyHttpUrl("https://api.openai.com/v1")
    #: Its key; a server that wants none gets "none".
    provider_api_key: SecretStr = SecretStr("none")
    #: How it is told to answer in JSON; not every server knows `json_schema`.
    provider_json_mode: JsonMode = JsonMode.OBJECT
    #: The model of the tier `primary`, as the provider names it; required with `openai`.
    model_primary: ModelName | None = None
    #: The model of the tier `strong`; the primary model serves it too if none is named.
    model_strong: ModelName | None = None

    @model_validator(mode="after")
    def _complete(self) -> "ModelSettings":
        if self.provider is ProviderName.OPENAI:
            if self.model_primary is None:
                raise ValueError("AIJOBS_MODEL_PRIMARY: name a model; AIJOBS_PROVIDER=openai needs one")
            if not self.provider_api_key.get_secret_value().strip():
                raise ValueError("AIJOBS_PROVIDER_API_KEY: is empty; unset it if the server wants no key")
        if self.provider_base_url.username or self.provider_base_url.password:
            raise ValueError("AIJOBS_PROVIDER_BASE_URL: must not hold credentials; use AIJOBS_PROVIDER_API_KEY")
        return self

    @property
    def models(self) -> Mapping[ModelTier, str]:
        """The model for each tier."""
        primary = self.model_primary or self.provider.value
        return {ModelTier.PRIMARY: primary, ModelTier.STRONG: self.model_strong or primary}


def build_provider(settings: ModelSettings) -> Provider:
    """Build the provider that the settings name. It opens no connection yet."""
    match settings.provider:
        case ProviderName.OFFLINE:
            return OfflineProvider()
        case ProviderName.OPENAI:
            return OpenAiCompatible(
                name=settings.provider.value,
                base_url=str(settings.provider_base_url),
                api_key=settings.provider_api_key,
                json_mode=settings.provider_json_mode,
                now=lambda: datetime.now(UTC),
            )
        case _:
            assert_never(settings.provider)
