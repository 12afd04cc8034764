"""Prometheus metrics on a port of their own: off unless AIJOBS_METRICS_LISTEN names one.

Each part counts what it does in counters and gauges of its own module, created with `counter` and `gauge`. Labels have
few values: job types, reasons and outcomes that the code names, never users or ids.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, start_http_server

from aijobs.rpc.address import Address
from aijobs.service import CannotRun

PREFIX = "aijobs"


def counter(name: str, help_text: str, *labels: str) -> Counter:
    """Make a counter; Prometheus shows it as `aijobs_<name>_total`."""
    return Counter(f"{PREFIX}_{name}", help_text, labels)


def gauge(name: str, help_text: str, *labels: str) -> Gauge:
    """Make a gauge; Prometheus shows it as `aijobs_<name>`."""
    return Gauge(f"{PREFIX}_{name}", help_text, labels)


@contextmanager
def served(listen: str | None) -> Iterator[int | None]:
    """Serve the metrics of this process beside the block; yields the port, None if there is no address.

    Raises:
        CannotRun: the address is taken.

    """
    if listen is None:
        yield None
        return
    address = Address.parse(listen)
    try:
        server, thread = start_http_server(address.port, address.host)
    except OSError as error:
        raise CannotRun(f"cannot serve metrics on {listen}: {error.strerror or error}") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
