import pytest
from pydantic import ValidationError

from aijobs.job_type import ModelTier
from services.executor.gateway.offline.provider import OfflineProvider
from services.executor.gateway.openai_compatible import OpenAiCompatible
from services.executor.gateway.settings import ModelSettings, build_provider


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ("", "_BASE_URL", "_API_KEY", "_JSON_MODE"):
        monkeypatch.delenv(f"AIJOBS_PROVIDER{name}", raising=False)
    for name in ("PRIMARY", "STRONG"):
        monkeypatch.delenv(f"AIJOBS_MODEL_{name}", raising=False)


def test_without_settings_the_offline_provider_serves_both_tiers():
    settings = ModelSettings()
    assert isinstance(build_provider(settings), OfflineProvider)
    assert settings.models == {ModelTier.PRIMARY: "offline", ModelTier.STRONG: "offline"}


async def test_an_openai_compatible_provider_is_built_from_the_environment(monkeypatch):
    monkeypatch.setenv("AIJOBS_PROVIDER", "openai")
    monkeypatch.setenv("AIJOBS_PROVIDER_BASE_URL", "http://127.0.0.1:11434/v1")
    monkeypatch.setenv("AIJOBS_PROVIDER_API_KEY", "canary")
    monkeypatch.setenv("AIJOBS_MODEL_PRIMARY", "small")
    monkeypatch.setenv("AIJOBS_MODEL_STRONG", "large")
    settings = ModelSettings()
    assert settings.models == {ModelTier.PRIMARY: "small", ModelTier.STRONG: "large"}
    assert "canary" not in repr(settings)
    provider = build_provider(settings)
    assert isinstance(provider, OpenAiCompatible)
    await provider.close()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"AIJOBS_PROVIDER": "openai"}, "AIJOBS_MODEL_PRIMARY"),
        ({"AIJOBS_PROVIDER": "openai", "AIJOBS_MODEL_PRIMARY": "m", "AIJOBS_PROVIDER_API_KEY": " "}, "API_KEY"),
        ({"AIJOBS_PROVIDER": "magic"}, "'offline' or 'openai'"),
        ({"AIJOBS_PROVIDER_JSON_MODE": "xml"}, "'json_object' or 'json_schema'"),
        ({"AIJOBS_PROVIDER_BASE_URL": "ftp://x"}, "provider_base_url"),
        ({"AIJOBS_PROVIDER_BASE_URL": "http://a:b@127.0.0.1/v1"}, "AIJOBS_PROVIDER_BASE_URL"),
        ({"AIJOBS_MODEL_PRIMARY": "a b"}, "model_primary"),
    ],
)
def test_a_bad_value_is_named(monkeypatch, values, named):
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError, match=named):
        ModelSettings()
