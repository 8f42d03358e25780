"""`offspec serve`: run an HTTP server."""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from offspec.core.config import AUTO
from offspec.core.errors import RequestError, missing_package
from offspec.ui.cli import checks
from offspec.ui.cli import options as opt
from offspec.ui.messages import with_options

EPILOG = """[bold]Examples[/]

The demo model, for clients on this machine:

  offspec serve demo

Base URL for any OpenAI-compatible client: http://127.0.0.1:8000/v1

  curl http://127.0.0.1:8000/v1/chat/completions -H "content-type: application/json" \\
    -d '{"model": "demo", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

A large model for a network, with an API key, under a name of your choice:

  OFFSPEC_API_KEY=... offspec serve ./Qwen3-32B --draft ./Qwen3-0.6B --host 0.0.0.0 --alias qwen

[bold]/health[/] reports loading progress, [bold]/metrics[/] is for Prometheus.
"""

_NEEDED = ("starlette", "uvicorn", "prometheus_client", "python_multipart")
_KEPT = 4 * 10**9  # default cache size on disk, in bytes: clients evict each other's conversations


@opt.takes_options
def serve(
    options: opt.Options,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="OFFSPEC_API_KEY")] = None,
    max_queue: Annotated[int, typer.Option(min=0)] = 32,
    alias: list[str] | None = None,
    tool_grammar: Literal["on", "off"] = "on",
    open_schemas: bool = False,
    strict: bool = False,
    cors_origin: list[str] | None = None,
    quiet: bool = False,
) -> None:
    """Run an OpenAI- and Anthropic-compatible HTTP server.

    Sampling options set defaults for requests that omit them.

    Server:
        host (ADDRESS): Address to listen on. `0.0.0.0` accepts connections from every network; set an API key
            then.
        port (N): Port to listen on; 0 selects a free one.
        api_key (KEY): API key that clients must send. Prefer the environment variable, which other users
            cannot see in the process list.
        max_queue (N): Maximum number of queued requests; further ones are rejected with status 429.
        cors_origin (ORIGIN): Origin whose web pages may use the server, such as `http://localhost:3000`, or
            `*` for all. Repeatable. Default: the server's own page only.
        alias (NAME): Extra name for the model in requests. Repeatable; the first is listed in /v1/models.
        tool_grammar: Constrain tool calls to the names and schemas of the request's tools.
        open_schemas: Allow properties that a JSON schema does not name, as in the JSON Schema standard. By
            default they are forbidden unless the schema sets `additionalProperties`.
        strict: Reject requests with unknown or ineffective fields, to find mistakes in a client. By default
            such fields are ignored and logged.
        quiet: Suppress everything on stderr except warnings and errors.
    """
    config = options.config(converses=True, cache_size=_KEPT, sequences=AUTO)
    sampling = options.overrides()
    if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
        raise RequestError("--api-key must be ASCII letters, digits and punctuation, without spaces")
    check_installed()
    checks.check_files(config, options.plan)

    from offspec.server.cors import checked_origin
    from offspec.server.run import serve
    from offspec.server.settings import Settings
    from offspec.ui.chat.setup import open_engine

    names = tuple(dict.fromkeys([*(alias or ()), default_model_name(options.model)]))
    origins = tuple(map(checked_origin, cors_origin or ()))
    settings = Settings(
        host,
        port,
        names,
        api_key,
        sampling,
        max_queue,
        origins=origins,
        strict=strict,
        tool_grammar=tool_grammar == "on",
        open_schemas=open_schemas,
    )
    with _log_on_stderr(quiet):
        serve(lambda notify: open_engine(config, options.plan, notify), settings)


def check_installed() -> None:
    """Raise RequestError if a library that the server needs is not installed."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise missing_package(missing[0], "serve")


def default_model_name(model: str) -> str:
    """Return the name of a model without an alias: the hub id itself, or the last part of a path."""
    path = Path(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


class _LogFormatter(logging.Formatter):
    """Formatter that names settings as command-line options."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return with_options(super().formatMessage(record))


@contextmanager
def _log_on_stderr(quiet: bool) -> Iterator[None]:
    """Log the server's messages, and errors of uvicorn, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LogFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    loggers = {"offspec.server": logging.WARNING if quiet else logging.INFO, "uvicorn": logging.ERROR}
    for name, level in loggers.items():
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name in loggers:
            logging.getLogger(name).removeHandler(handler)
            logging.getLogger(name).setLevel(logging.NOTSET)
