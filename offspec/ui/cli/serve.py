"""`offspec serve`: from options to a server."""

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
from offspec.ui.told import with_options

EPILOG = """[bold]Examples[/]

The small model that comes with the project, for clients on this machine:

  offspec serve demo

Then, in any client of OpenAI's API, the address is http://127.0.0.1:8000/v1:

  curl http://127.0.0.1:8000/v1/chat/completions -H "content-type: application/json" \\
    -d '{"model": "demo", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

A large model for a network, with a key, under a name of your choice:

  OFFSPEC_API_KEY=... offspec serve ./Qwen3-32B --draft ./Qwen3-0.6B --host 0.0.0.0 --alias qwen

[bold]/health[/] says how far loading is, [bold]/metrics[/] is for Prometheus.
"""

_NEEDED = ("starlette", "uvicorn", "prometheus_client", "python_multipart")
_KEPT = 4 * 10**9  # bytes of conversations on disk, where the user does not say: clients take turns


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
    """Answer the clients of OpenAI's API over HTTP. Sampling options are the defaults of requests.

    Server:
        host (ADDRESS): Where to listen. `0.0.0.0` is every network; give a key then.
        port (N): Port to listen at; 0 takes a free one.
        api_key (KEY): What clients must send. Better given in the environment, where other users cannot see
            it.
        max_queue (N): Requests that may wait while others are answered. Those beyond are refused with status
            429.
        cors_origin (ORIGIN): Let web pages of this origin use the server from a browser, such as
            `http://localhost:3000`; `*` allows every page. May be given several times. Without it only the
            server's own page can.
        alias (NAME): What requests call the model, beside its own name. May be given several times; the first
            is shown.
        tool_grammar: Hold calls of tools to the names and schemas of the request's tools while they are made.
        open_schemas: Allow objects of a JSON schema properties that it does not name, as JSON Schema does. By
            default they are closed unless the schema says otherwise, since small models add one after the
            other.
        strict: Refuse requests with fields that are unknown or have no effect, to find mistakes in your own
            code. By default such fields are ignored and logged.
        quiet: Nothing on stderr but warnings and errors.
    """
    config = options.config(converses=True, cache_size=_KEPT, sequences=AUTO)
    sampling = options.overrides()
    if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
        raise RequestError("--api-key must be letters, digits and signs of ASCII, without spaces")
    check_installed()
    checks.check_files(config, options.plan)

    from offspec.server.cors import checked_origin
    from offspec.server.run import serve
    from offspec.server.settings import Settings
    from offspec.ui.chat.setup import open_engine

    names = tuple(dict.fromkeys([*(alias or ()), own_name(options.model)]))
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
    """Raises RequestError where a library of the server is missing."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise missing_package(missing[0], "serve")


def own_name(model: str) -> str:
    """What a model is called that no alias names: a hub id as it is, of a path the last part."""
    path = Path(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


class _Lines(logging.Formatter):
    """Lines in which settings are named as options."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return with_options(super().formatMessage(record))


@contextmanager
def _log_on_stderr(quiet: bool) -> Iterator[None]:
    """Lines of the server, and errors of the library under it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines("%(asctime)s %(message)s", "%H:%M:%S"))
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
