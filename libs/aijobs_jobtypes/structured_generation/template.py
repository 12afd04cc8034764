"""Prompt templates: jinja2 syntax, cut down to `{{ name }}`.

Callers send templates, so nothing of jinja2 is ever run: the text is parsed, everything but placeholders is refused,
and rendering puts strings next to each other. What a variable holds is never read as a template.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jinja2 import Environment, TemplateSyntaxError, nodes


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A place for a variable."""

    name: str


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template: texts and placeholders in order."""

    parts: tuple[str | Placeholder, ...]

    @property
    def names(self) -> frozenset[str]:
        """The variables it needs."""
        return frozenset(part.name for part in self.parts if isinstance(part, Placeholder))

    def length(self, variables: Mapping[str, str]) -> int:
        """Count the characters that rendering would give, without rendering: a variable may be used very often."""
        return sum(len(variables[part.name] if isinstance(part, Placeholder) else part) for part in self.parts)

    def render(self, variables: Mapping[str, str]) -> str:
        """Fill the placeholders; nothing is escaped.

        Raises:
            KeyError: a variable is missing.

        """
        return "".join(variables[part.name] if isinstance(part, Placeholder) else part for part in self.parts)


def parse(source: str) -> Template:
    """Parse a template.

    Raises:
        ValueError: names the line and what is not allowed there.

    """
    # Escaping is for HTML; a prompt is plain text. Nothing is rendered by jinja2 anyway.
    environment = Environment(autoescape=False, keep_trailing_newline=True)  # noqa: S701 - see above
    try:
        tree = environment.parse(source)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply; only {{ name }} is supported") from error
    return Template(tuple(_part(node) for output in tree.body for node in _outputs(output)))


def _outputs(node: nodes.Node) -> list[nodes.Expr]:
    if not isinstance(node, nodes.Output):
        raise _refused(node)
    return node.nodes


def _part(node: nodes.Node) -> str | Placeholder:
    match node:
        case nodes.TemplateData():
            return node.data
        case nodes.Name():
            return Placeholder(node.name)
        case _:
            raise _refused(node)


def _refused(node: nodes.Node) -> ValueError:
    return ValueError(f"line {node.lineno}: {type(node).__name__} is not supported; only {{{{ name }}}} is")
