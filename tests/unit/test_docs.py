"""The documents: links resolve, and what they name is there."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import completion_schema, errors_page, settings_page

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "examples", "libs", "services", "deploy", "protos", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])
READING_ORDER = [
    "protos/aijobs/v1/job_service.proto",
    "services/jobs/rpc/job_servicer.py",
    "services/jobs/creation.py",
    "services/dispatcher/relay.py",
    "services/executor/consumer.py",
    "services/executor/engine/engine.py",
    "services/jobs/execution.py",
    "services/jobs/lifecycle.py",
    "services/jobs/store/changes.py",
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
REQUIREMENT = re.compile(r"\b(?:LC|CR|RG|OB|QU|EX|PJ|HA|AR|AP)-\d+\b")
#: Hosts of package and image registries, in parts so that this file does not name them either.
REGISTRIES = ("py" + "pi.", "python" + "hosted.", "docker" + ".io", "docker" + ".com", "ghcr" + ".io", "quay" + ".io")
FOREIGN_PATH = re.compile(r"(?<![\w./:}-])/(?:work|tmp|home|root|usr|opt|etc|var|mnt|srv)\b|~/|(?<![\w/])\.\./shared")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def sources() -> Iterator[Path]:
    """Yield every source file of code and contract."""
    for folder in ("libs", "services", "protos", "deploy", "tests"):
        for pattern in ("*.py", "*.proto"):
            yield from (ROOT / folder).rglob(pattern)


def fenced(text: str) -> Iterator[str]:
    """Yield the lines inside of code blocks."""
    for number, block in enumerate(re.split(r"^```.*$", text, flags=re.MULTILINE)):
        if number % 2:
            yield from block.splitlines()


def prose(text: str) -> str:
    """Return the text without its code blocks."""
    return "".join(re.split(r"^```.*$", text, flags=re.MULTILINE)[::2])


def anchors(page: Path) -> set[str]:
    """Return what a fragment can name: the headings, as forges make anchors of them."""
    headings = re.findall(r"^#+ (.+)$", prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_resolves_inside_the_project(page) -> None:
    for target in LINK.findall(prose(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.is_relative_to(ROOT), target
        assert linked.exists(), target
        if fragment:
            assert fragment in anchors(linked), target


def test_every_document_is_linked_from_another_one() -> None:
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in LINK.findall(prose(page.read_text()))
    }
    alone = [named(page) for page in PAGES if page.is_relative_to(ROOT / "docs") and page not in linked]
    assert alone == []


def test_the_reading_order_goes_from_create_to_succeeded() -> None:
    section = (ROOT / "README.md").read_text().partition("## Reading order")[2].partition("\n## ")[0]
    items = re.findall(r"^\d\. \[([^\]]+)\]\(([^)]+)\) - .+$", section, re.MULTILINE)
    assert items == [(path, path) for path in READING_ORDER]
    assert [path for path in READING_ORDER if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_make_target_that_is_named_exists(page) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = page.read_text()
    call = r"make (?:[A-Z]+=\S+ )*([a-z][a-z-]*)"
    mentioned = set(re.findall(f"`{call}", text))
    mentioned |= {match[1] for line in fenced(text) if (match := re.match(call, line))}
    assert mentioned <= targets


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_variable_that_is_named_is_read_by_something(page) -> None:
    known = set(settings_page.OTHERS)
    for settings in settings_page.SERVICES.values():
        known |= {settings_page.variable(name, field) for name, field in settings.model_fields.items()}
    assert set(re.findall(r"\bAIJOBS_[A-Z_]*[A-Z]\b", page.read_text())) <= known


@pytest.mark.parametrize("service", settings_page.SERVICES)
def test_every_variable_of_a_service_has_a_row_that_says_what_it_is_for(service) -> None:
    section = settings_page.page().partition(f"\n## {service}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `AIJOBS_")]
    fields = settings_page.SERVICES[service].model_fields
    assert sorted(row[0].strip("`") for row in rows) == sorted(settings_page.variable(*item) for item in fields.items())
    assert [row for row in rows if len(row) != 4 or len(row[3]) < 10] == []


def test_generated_pages_are_what_the_code_gives() -> None:
    assert settings_page.PAGE.read_text() == settings_page.page()
    assert errors_page.PAGE.read_text() == errors_page.page()
    assert completion_schema.PAGE.read_text() == completion_schema.page()


def requirements() -> list[tuple[str, str, str]]:
    """Return id, status and tests of each requirement."""
    text = (ROOT / "docs" / "requirements.md").read_text()
    return re.findall(r"^\| ([A-Z]{2}-\d+) \| [^|]+ \| ([^|]+) \| ([^|]*) \|$", text, re.MULTILINE)


def test_every_requirement_has_one_line_and_a_status() -> None:
    rows = requirements()
    assert [name for name, count in Counter(name for name, _, _ in rows).items() if count > 1] == []
    assert len(rows) == len(re.findall(r"^\| [A-Z]{2}-", (ROOT / "docs" / "requirements.md").read_text(), re.MULTILINE))
    assert [name for name, status, _ in rows if not re.match(r"(done|partly: .+|not yet)\b", status)] == []


def test_every_requirement_that_code_cites_is_listed() -> None:
    known = {name for name, _, _ in requirements()}
    cited = {(found, named(path)) for path in sources() for found in REQUIREMENT.findall(path.read_text())}
    assert sorted((found, path) for found, path in cited if found not in known) == []


def test_the_tests_that_requirements_name_exist() -> None:
    # The acceptance tests come as one; before that there are only those of `make up`.
    accepted = (ROOT / "tests" / "acceptance" / "test_path.py").exists()
    files = {file for _, _, tests in requirements() for file in re.findall(r"`([^`]+)`", tests)}
    assert files
    wanted = {file for file in files if accepted or not file.startswith("tests/acceptance/")}
    assert sorted(file for file in wanted if not (ROOT / file).is_file()) == []


def test_the_documents_that_code_names_exist() -> None:
    named_in_code = {
        found
        for path in sources()
        for found in re.findall(r"\bdocs/[\w-]+\.md\b", path.read_text())
        if path != Path(__file__)
    }
    assert named_in_code
    assert sorted(page for page in named_in_code if not (ROOT / page).is_file()) == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_no_document_names_a_registry_or_a_path_outside_of_the_project(page) -> None:
    text = page.read_text()
    assert [host for host in REGISTRIES if host in text.lower()] == []
    assert FOREIGN_PATH.findall(text) == []
