"""The broker's policies, limits that can be changed while there are queues: `python policies.py HOST:PORT`.

`rabbitmq.json` beside this file is a RabbitMQ definitions file that holds nothing else, so that
`rabbitmqctl import_definitions` takes it too. It is not loaded when a node boots: an empty node that has definitions to
load makes no default user.

For containers: it needs nothing but Python and the management API, whose login is in RABBITMQ_USER and
RABBITMQ_PASSWORD. Doing it again changes nothing.
"""

import base64
import http.client
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

DEFINITIONS = Path(__file__).with_name("rabbitmq.json")
TIMEOUT_SECONDS = 10


def policies(vhost: str = "/") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield path and body of the calls (PUT) to the management API that set them in a virtual host."""
    for policy in json.loads(DEFINITIONS.read_text(encoding="utf-8"))["policies"]:
        body = {name: policy[name] for name in ("pattern", "apply-to", "priority", "definition")}
        yield f"/api/policies/{quote(vhost, safe='')}/{policy['name']}", body


def main(address: str, user: str, password: str) -> None:
    """Set the policies.

    Raises:
        OSError: the management API does not answer or refuses.

    """
    login = base64.b64encode(f"{user}:{password}".encode()).decode()
    headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
    for path, body in policies():
        connection = http.client.HTTPConnection(address, timeout=TIMEOUT_SECONDS)
        try:
            connection.request("PUT", path, json.dumps(body), headers)
            status = connection.getresponse().status
        finally:
            connection.close()
        if status >= http.HTTPStatus.BAD_REQUEST:
            raise OSError(f"the broker's management API answered {status} to {path}")
        print(f"set {path}")


if __name__ == "__main__":
    main(sys.argv[1], os.environ["RABBITMQ_USER"], os.environ["RABBITMQ_PASSWORD"])
