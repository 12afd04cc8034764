"""deploy/compose.yaml and the Dockerfile: they cannot run in the tests, so hold what can be held."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped] # comes with yamllint, without type hints

from deploy.local.compose import COMPOSE_FILE, JOBS_ADDRESS, compose_variables
from deploy.local.containers import MYSQL_IMAGE, RABBITMQ_IMAGE
from deploy.local.stack import AIJOBS

DOCKERFILE = COMPOSE_FILE.with_name("Dockerfile")
ONE_SHOT = {"migrate", "policies"}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())["services"]
    return parsed


def test_it_runs_what_make_up_runs_locally(services):
    assert set(services) == {"mysql", "rabbitmq", *ONE_SHOT, *(service.name for service in AIJOBS.services)}


def test_images_are_pinned_and_those_of_the_tests(services):
    for service in services.values():
        assert re.search(r":\d[\w.-]*$", service["image"])
    assert services["mysql"]["image"] == MYSQL_IMAGE
    assert services["rabbitmq"]["image"] == RABBITMQ_IMAGE
    for image in re.findall(r"^FROM (\S+)", DOCKERFILE.read_text(), re.MULTILINE):
        assert re.search(r":\d[\w.-]*$", image)


def test_every_service_that_stays_has_a_healthcheck(services):
    for name, service in services.items():
        assert ("healthcheck" in service) is (name not in ONE_SHOT)
    done = {"condition": "service_completed_successfully"}
    assert services["jobs"]["depends_on"] == {"migrate": done}
    for name in ("dispatcher", "executor"):
        assert services[name]["depends_on"]["policies"] == done


def test_every_secret_comes_from_the_environment_file_and_is_required(services):
    asked = set(re.findall(r"\$\{(\w+):\?", COMPOSE_FILE.read_text()))
    written = compose_variables(AIJOBS, secret="s", database="d", broker="b", mint=lambda *_, **__: "t")
    assert asked == set(written)
    for service in services.values():
        for name, value in service.get("environment", {}).items():
            if re.search("PASS|SECRET|TOKEN|URL", name) and name != "MYSQL_RANDOM_ROOT_PASSWORD":
                assert "${" in value


def test_a_service_gets_no_more_than_it_needs(services):
    assert "AIJOBS_BROKER_URL" not in services["jobs"]["environment"]
    for name in ("dispatcher", "executor"):
        assert "AIJOBS_DATABASE_URL" not in services[name]["environment"]


def test_nothing_is_published_beyond_loopback(services):
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert f"{JOBS_ADDRESS}:50051" in ports


def test_the_image_is_installed_from_the_hashed_locks_and_runs_as_nobody():
    text = DOCKERFILE.read_text()
    installs = re.findall(r"pip install [^&\n]+", text)
    assert installs
    assert all("--require-hashes" in install or "--no-deps" in install for install in installs)
    assert re.search(r"^USER 65532", text, re.MULTILINE)


def test_the_image_copies_only_what_its_ignore_file_lets_through():
    allowed = {
        line.removeprefix("!").split("/")[0]
        for line in Path(f"{DOCKERFILE}.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    assert {source.split("/")[0] for sources in copied for source in sources.split()} == allowed
