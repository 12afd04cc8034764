"""The text form of addresses: `host:port`, with an IPv6 host in brackets."""

import ipaddress
import re
from dataclasses import dataclass

#: What a client may write in front of host and port. `dns` re-resolves, which headless Kubernetes services need.
SCHEMES = ("dns:///", "ipv4:", "ipv6:")
_ADDRESS = re.compile(r"^(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A host and a port. Port 0 asks a server to pick one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read `host:port`, `127.0.0.1:50051` or `[::1]:50051`.

        Raises:
            ValueError: the text is nothing of the kind. The message says what is expected.

        """
        match = _ADDRESS.match(text)
        if match is None or int(match["port"]) > 65535:  # noqa: PLR2004 - the largest TCP port
            raise ValueError(f"bad address {text[:100]!r}: expected host:port, for example 127.0.0.1:50051")
        if match["v6"]:
            try:
                ipaddress.IPv6Address(match["v6"])
            except ValueError as error:
                raise ValueError(f"bad address {text[:100]!r}: {match['v6']} is no IPv6 address") from error
        return cls(host=match["v6"] or match["host"], port=int(match["port"]))

    @property
    def is_loopback(self) -> bool:
        """True if only processes of the same machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        """Return the text form."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def check_target(text: str) -> str:
    """Return the address of a service as a client may name it: `host:port` or `dns:///host:port`.

    Raises:
        ValueError: it is neither, or the port is 0.

    """
    scheme = next((scheme for scheme in SCHEMES if text.startswith(scheme)), "")
    if Address.parse(text.removeprefix(scheme)).port == 0:
        raise ValueError(f"bad address {text!r}: port 0 names no service")
    return text
