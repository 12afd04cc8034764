"""Metrics are served where the settings say, and counted where things happen."""

import urllib.request
from urllib.error import URLError

import pytest

from aijobs import metrics
from aijobs.service import CannotRun

THINGS = metrics.counter("things", "Things that happened in a test", "kind")


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def test_counters_are_served_on_the_port_that_the_settings_name():
    with metrics.served("127.0.0.1:0") as port:
        assert port is not None
        THINGS.labels("odd").inc(2)
        assert 'aijobs_things_total{kind="odd"} 2.0' in scrape(port)
    with pytest.raises(URLError, match="refused"):
        scrape(port)


def test_without_an_address_nothing_is_served():
    with metrics.served(None) as port:
        assert port is None


def test_an_address_that_is_taken_is_named():
    with metrics.served("127.0.0.1:0") as port:
        another = metrics.served(f"127.0.0.1:{port}")
        with pytest.raises(CannotRun, match=f"127.0.0.1:{port}"), another:
            pass
