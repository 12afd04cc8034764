"""Logs: one JSON object a line on stderr, in UTC, without payloads and secrets (AP-6).

Libraries that log through the standard library come out in the same form. Tracebacks show code and the kind of the
error; texts of validation errors are left out, since they repeat the input.
"""

import logging
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import TextIO

import structlog
from pydantic import ValidationError
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

MASK = "[hidden]"
LONGEST_VALUE = 2000

#: Keys whose values never reach a log. Counts such as `input_tokens` are numbers and stay.
_HIDDEN = re.compile(
    r"^(input|output|payload|prompt|messages?_content|content|snapshot|variables|feedback|answer|body|projection)(_json)?$"
    r"|secret|password|passwd|authorization|credential|api_?key|private_?key|access_?key"
    r"|(^|_)token$|^dsn$|(^|_)url$"
)

#: SQLAlchemy appends the bound values, that is payloads, to the text of its errors.
_PARAMETERS = re.compile(r"\[parameters: .*", re.DOTALL)


def configure(service: str, level: str, stream: TextIO | None = None) -> None:
    """Set up logging for this process. Called once, by its `__main__`.

    Args:
        service: name of the service, in every line.
        level: "debug", "info", "warning" or "error".
        stream: where to write; stderr if unset.

    """

    def add_service(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {"service": service, **event}

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_service,
        structlog.processors.StackInfoRenderer(),
        structlog.processors.ExceptionRenderer(render_exception),
        hide,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(default=_name_only),
            ],
        )
    )
    threading.excepthook = _on_thread_exception
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # Libraries log requests, statements and frames at their lower levels: only what goes wrong is ours to know.
    # The AMQP client logs a traceback for every connection that ends; the broker layer says it in a line.
    for name in ("aio_pika", "aiormq"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    for name in (
        "asyncio",
        "grpc",
        "httpx",
        "httpx2",
        "httpcore2",
        "openai",
        "sqlalchemy",
        "alembic",
    ):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def hide(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Mask the values of keys that name secrets or payloads, at any depth, and cut long texts."""
    return {key: _hidden(key, value) for key, value in event.items()}


def render_exception(exc_info: ExcInfo) -> str:
    """Return the traceback of an exception and of those it came from, oldest first."""
    return "\n".join(reversed(list(_chain(exc_info[1]))))


def _hidden(key: str, value: object) -> object:
    if key.startswith("_"):  # structlog's own
        return value
    if value is not None and _HIDDEN.search(key.lower()):
        return MASK
    match value:
        case dict():
            return {str(inner): _hidden(str(inner), item) for inner, item in value.items()}
        case list() | tuple():
            return [_hidden("", item) for item in value]
        case str() if len(value) > LONGEST_VALUE and key != "exception":
            return value[:LONGEST_VALUE] + "…"
        case _:
            return value


def _chain(error: BaseException | None) -> Iterator[str]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = "".join(traceback.format_tb(error.__traceback__))
        yield f"{frames}{type(error).__module__}.{type(error).__qualname__}: {_message(error)}"
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                yield from _chain(inner)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _message(error: BaseException) -> str:
    if isinstance(error, ValidationError):
        problems = error.errors(include_input=False, include_url=False, include_context=False)
        return "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['type']}" for problem in problems)
    return _PARAMETERS.sub("[parameters hidden]", str(error))[:LONGEST_VALUE]


def _name_only(value: object) -> str:
    """Stand for a value that is no JSON: its text could hold anything, so only numbers and the like show theirs."""
    return value if isinstance(value, str) else f"<{type(value).__qualname__}>"


def place_of(error: BaseException) -> str:
    """Name an exception and the last places that it passed, without its message: that may repeat what a user wrote."""
    places = []
    trace = error.__traceback__
    while trace is not None:
        places.append(f"{trace.tb_frame.f_globals.get('__name__', '?')}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " < ".join([type(error).__name__, *reversed(places[-3:])])


def _on_thread_exception(arguments: threading.ExceptHookArgs) -> None:
    """Log a thread that failed like everything else: Python's own traceback repeats the exception's message."""
    error = arguments.exc_value
    structlog.get_logger("aijobs").error("a thread failed", error=place_of(error) if error is not None else "?")
