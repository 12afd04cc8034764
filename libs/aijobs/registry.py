"""All job types that are installed, found through entry points (RG-2, RG-3).

A team adds a job type by installing a package with an entry point in the group `aijobs.job_types` that names a
`JobDefinition`; this repository's own job types are found in exactly the same way.
"""

from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pkgutil import resolve_name

from pydantic import BaseModel, ValidationError

from aijobs.definition import JobDefinition, Queue, QueueDefaults
from aijobs.errors import UnknownJobType

ENTRY_POINT_GROUP = "aijobs.job_types"


class BadDefinitions(Exception):
    """Some installed job type is unusable. The message lists every violation, one a line."""

    def __init__(self, violations: Iterable[str]) -> None:
        self.violations = tuple(violations)
        super().__init__("\n".join(self.violations))


class DuplicateJobType(BadDefinitions):
    """Two definitions have the same job type."""


class Registry:
    """The definitions by job type. Immutable once built.

    Raises:
        DuplicateJobType: two of them share a job type.

    """

    def __init__(self, definitions: Iterable[JobDefinition]) -> None:
        self._definitions: dict[str, JobDefinition] = {}
        for definition in definitions:
            if definition.job_type in self._definitions:
                raise DuplicateJobType([f"{definition.job_type}: defined twice"])
            self._definitions[definition.job_type] = definition

    def __getitem__(self, job_type: str) -> JobDefinition:
        """Return a definition.

        Raises:
            UnknownJobType: none has this name. The error names those there are.

        """
        try:
            return self._definitions[job_type]
        except KeyError:
            raise UnknownJobType(job_type, known=self) from None

    def __iter__(self) -> Iterator[str]:
        """Iterate over the job types, sorted."""
        return iter(sorted(self._definitions))

    def __len__(self) -> int:
        """Count the definitions."""
        return len(self._definitions)

    def values(self) -> list[JobDefinition]:
        """Return the definitions, sorted by job type."""
        return [self._definitions[job_type] for job_type in self]

    def filled(self, defaults: Mapping[Queue, QueueDefaults]) -> "Registry":
        """Return the registry with what definitions leave to their queues written into them (QU-1)."""
        return Registry(definition.filled(defaults) for definition in self.values())

    def __contains__(self, job_type: object) -> bool:
        """Tell whether a job type is defined."""
        return job_type in self._definitions

    @classmethod
    def installed(cls, *, load_code: bool) -> "Registry":
        """Build the registry from every installed entry point.

        Args:
            load_code: also load each executor and projector. Only the executor service does.

        Raises:
            BadDefinitions: at least one cannot be used; all violations of all of them are listed.
            DuplicateJobType: two share a job type.

        """
        definitions: list[JobDefinition] = []
        violations: list[str] = []
        for entry_point in sorted(metadata.entry_points(group=ENTRY_POINT_GROUP)):
            try:
                definition = entry_point.load()
            except ValidationError as error:
                violations += [
                    f"{entry_point.name}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()
                ]
                continue
            except Exception as error:  # noqa: BLE001 - somebody else's module may raise anything; all are listed
                violations.append(f"{entry_point.name}: cannot load {entry_point.value}: {error}")
                continue
            if not isinstance(definition, JobDefinition):
                violations.append(f"{entry_point.name}: {entry_point.value} is not a JobDefinition")
                continue
            definitions.append(definition)
            if load_code:
                violations += _unloadable(definition)
        if violations:
            raise BadDefinitions(violations)
        return cls(definitions)


def _unloadable(definition: JobDefinition) -> list[str]:
    violations = []
    for field, reference in (("executor", definition.executor), ("projector", definition.projector)):
        if reference is None:
            continue
        try:
            if not callable(resolve_name(reference)):
                violations.append(f"{definition.job_type}: {field} {reference} cannot be called")
        except Exception as error:  # noqa: BLE001 - as above
            violations.append(f"{definition.job_type}: {field} {reference} cannot be loaded: {error}")
    for field, schema in (("input", definition.input), ("output", definition.output)):
        name = model_reference(schema.model)
        if not _names(name, schema.model):
            # Any of its runs may get a process of its own, which has nothing but the name (EX-11).
            violations.append(
                f"{definition.job_type}: its {field} model cannot be imported as {name}; make it a class of a module"
            )
    return violations


def model_reference(model: type[BaseModel]) -> str:
    """Return the name under which another process finds a model, as `module:class`."""
    return f"{model.__module__}:{model.__qualname__}"


def _names(name: str, model: type[BaseModel]) -> bool:
    try:
        return resolve_name(name) is model
    except (ImportError, AttributeError, ValueError):
        return False
