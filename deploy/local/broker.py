"""A RabbitMQ server as its clients see it: AMQP for messages, the management API for virtual hosts.

Creating a virtual host takes 20 ms through the management API and 300 ms through `rabbitmqctl`, which starts an Erlang
machine each time. The plugin comes with every RabbitMQ and costs no measurable start-up time.
"""

import asyncio
import base64
import http.client
import json
import re
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

import aio_pika
from aio_pika.exceptions import AMQPError

from deploy.local.database import UnreachableError
from deploy.policies import policies

MANAGEMENT_PORT = 15672
_TIMEOUT_SECONDS = 5
_NAME = re.compile(r"^[A-Za-z0-9_.-]{1,64}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepth:
    """What is in a queue at this moment: messages that wait for a consumer, and the number of consumers."""

    ready: int
    consumers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAddress:
    """Where a broker is and how to log in. The user is an administrator."""

    host: str
    port: int
    management_port: int
    user: str
    password: str

    @classmethod
    def parse(cls, text: str, *, management_port: int = MANAGEMENT_PORT) -> "BrokerAddress":
        """Read an AMQP URL such as `amqp://user:password@host:5672`; a virtual host is ignored.

        Raises:
            ValueError: it is no AMQP URL.

        """
        parts = urlsplit(text)
        if parts.scheme != "amqp" or not parts.hostname:
            raise ValueError("expected a URL like amqp://user:password@host:5672")
        return cls(
            host=parts.hostname,
            port=parts.port or 5672,
            management_port=management_port,
            user=unquote(parts.username or "guest"),
            password=unquote(parts.password or "guest"),
        )

    def url(self, vhost: str = "/") -> str:
        """Return the AMQP URL of a virtual host, password included."""
        login = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}"
        return f"amqp://{login}@{self.host}:{self.port}/{quote(vhost, safe='')}"

    async def set_policies(self, vhost: str = "/") -> None:
        """Give a virtual host the policies of `deploy/rabbitmq.json`.

        Raises:
            UnreachableError: the management API does not answer or refuses.

        """
        for path, body in policies(vhost):
            await self._request("PUT", path, body)

    async def create_vhost(self, name: str) -> str:
        """Create a virtual host that holds nothing but our policies, and return its AMQP URL.

        Raises:
            ValueError: the name is not 1 to 64 letters, digits, `_`, `.` and `-`.
            UnreachableError: the management API does not answer or refuses.

        """
        await self._request("PUT", f"/api/vhosts/{_checked(name)}")
        permissions = {"configure": ".*", "write": ".*", "read": ".*"}
        await self._request("PUT", f"/api/permissions/{name}/{quote(self.user, safe='')}", permissions)
        await self.set_policies(name)
        return self.url(name)

    async def delete_vhost(self, name: str) -> None:
        """Delete a virtual host with all that is in it, closing its connections; nothing happens if there is none.

        Raises:
            ValueError: the name is not 1 to 64 letters, digits, `_`, `.` and `-`.
            UnreachableError: the management API does not answer or refuses.

        """
        await self._request("DELETE", f"/api/vhosts/{_checked(name)}", missing_is_fine=True)

    async def depth(self, queue: str, *, vhost: str = "/") -> QueueDepth:
        """Count a queue's messages, exactly and at this moment (the management API's figures are seconds old).

        Raises:
            UnreachableError: the broker does not answer.
            aio_pika.exceptions.ChannelNotFoundEntity: there is no such queue.

        """
        try:
            connection = await aio_pika.connect(self.url(vhost), timeout=_TIMEOUT_SECONDS)
        except (OSError, TimeoutError, AMQPError) as error:
            raise UnreachableError(f"the broker {self}: {error}") from error
        async with connection:
            channel = await connection.channel()
            result = (await channel.declare_queue(queue, passive=True)).declaration_result
            return QueueDepth(ready=result.message_count or 0, consumers=result.consumer_count or 0)

    async def ping(self) -> None:
        """Log in over AMQP and ask the management API.

        Raises:
            UnreachableError: one of them did not work within 5 s.

        """
        await self._request("GET", "/api/vhosts")
        try:
            connection = await aio_pika.connect(self.url(), timeout=_TIMEOUT_SECONDS)
        except (OSError, TimeoutError, AMQPError) as error:
            raise UnreachableError(f"the broker {self}: {error}") from error
        await connection.close()

    async def _request(self, method: str, path: str, body: object = None, *, missing_is_fine: bool = False) -> None:
        status = await asyncio.to_thread(self._status, method, path, body)
        if status == http.HTTPStatus.NOT_FOUND and missing_is_fine:
            return
        if status >= http.HTTPStatus.BAD_REQUEST:
            raise UnreachableError(f"the management API of the broker {self} answered {status} to {method} {path}")

    def _status(self, method: str, path: str, body: object) -> int:
        connection = http.client.HTTPConnection(self.host, self.management_port, timeout=_TIMEOUT_SECONDS)
        login = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(f"the management API of the broker {self}: {error}") from error
        finally:
            connection.close()

    def __str__(self) -> str:
        """Return the address without the password."""
        return f"{self.user}@{self.host}:{self.port} (management: port {self.management_port})"


def _checked(name: str) -> str:
    if not _NAME.match(name):
        raise ValueError(f"bad virtual host name {name!r}: expected 1 to 64 letters, digits, '_', '.' and '-'")
    return name
