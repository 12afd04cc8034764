"""The settings that dispatcher and executor share: where the jobs service and the broker are."""

from urllib.parse import urlsplit

from pydantic import SecretStr, field_validator

from aijobs.rpc.address import check_target
from aijobs.settings import ServiceSettings


class BrokeredSettings(ServiceSettings):
    """Settings of a service between the jobs service and the broker."""

    #: The jobs service, as `host:port`, or `dns:///host:port` to follow a name's changing addresses.
    address: str = "127.0.0.1:50051"
    #: `amqp://user:password@host:port/vhost`; several nodes separated by commas.
    broker_url: SecretStr

    @field_validator("address")
    @classmethod
    def _address_is_one(cls, address: str) -> str:
        check_target(address)
        return address

    @field_validator("broker_url")
    @classmethod
    def _broker_url_is_one(cls, url: SecretStr) -> SecretStr:
        broker_urls(url)
        return url


def broker_urls(setting: SecretStr) -> list[str]:
    """Split a comma-separated list of AMQP URLs.

    Raises:
        ValueError: one of them is none. The message does not repeat it, since it may hold a password.

    """
    urls = [url.strip() for url in setting.get_secret_value().split(",") if url.strip()]
    for number, url in enumerate(urls, start=1):
        if not _is_amqp(url):
            raise ValueError(f"address {number} is not an AMQP URL; use amqp://user:password@host:port/vhost")
    if not urls:
        raise ValueError("no address; use amqp://user:password@host:port/vhost")
    return urls


def _is_amqp(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("amqp", "amqps") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, broken brackets
        return False
