"""The application: which path leads where."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from offspec.core.cache_dir import cache_root
from offspec.core.private import RESPONSES
from offspec.server import (
    anthropic,
    anthropic_reply,
    llama_cpp,
    models,
    ollama,
    ollama_models,
    ollama_reply,
    openai_batches,
    openai_chat,
    openai_common,
    openai_completions,
    openai_files,
    openai_kept_responses,
    openai_responses,
    tokenizing,
    web_page,
)
from offspec.server.batch.jobs import BatchJobs
from offspec.server.bodies import Limits
from offspec.server.cors import with_cors
from offspec.server.faults import Fault, internal
from offspec.server.guard import Guard
from offspec.server.responses import json_response
from offspec.server.service import Service
from offspec.server.stored_responses import StoredResponses

ROUTES = (
    Route("/v1/chat/completions", openai_chat.create, methods=["POST"]),
    Route("/v1/completions", openai_completions.create, methods=["POST"]),
    Route("/v1/messages", anthropic.create, methods=["POST"]),
    Route("/v1/messages/count_tokens", anthropic.count_tokens, methods=["POST"]),
    Route("/v1/responses", openai_responses.create, methods=["POST"]),
    Route("/v1/responses/{id}", openai_kept_responses.retrieve, methods=["GET"]),
    Route("/v1/responses/{id}", openai_kept_responses.delete, methods=["DELETE"]),
    Route("/v1/responses/{id}/input_items", openai_kept_responses.input_items, methods=["GET"]),
    Route("/v1/files", openai_files.create, methods=["POST"]),
    Route("/v1/files", openai_files.listing, methods=["GET"]),
    Route("/v1/files/{id}", openai_files.retrieve, methods=["GET"]),
    Route("/v1/files/{id}", openai_files.delete, methods=["DELETE"]),
    Route("/v1/files/{id}/content", openai_files.content, methods=["GET"]),
    Route("/v1/batches", openai_batches.create, methods=["POST"]),
    Route("/v1/batches", openai_batches.listing, methods=["GET"]),
    Route("/v1/batches/{id}", openai_batches.retrieve, methods=["GET"]),
    Route("/v1/batches/{id}/cancel", openai_batches.cancel, methods=["POST"]),
    Route("/v1/models", models.listing, methods=["GET"]),
    Route("/v1/models/{model:path}", models.one, methods=["GET"]),
    Route("/api/chat", ollama.chat, methods=["POST"]),
    Route("/api/generate", ollama.generate, methods=["POST"]),
    Route("/api/show", ollama_models.show, methods=["POST"]),
    Route("/api/tags", ollama_models.tags, methods=["GET"]),
    Route("/api/ps", ollama_models.running, methods=["GET"]),
    Route("/api/version", ollama_models.version, methods=["GET"]),
    Route("/completion", llama_cpp.completion, methods=["POST"]),
    Route("/infill", llama_cpp.infill, methods=["POST"]),
    Route("/props", llama_cpp.props, methods=["GET"]),
    Route("/slots", llama_cpp.slots, methods=["GET"]),
    Route("/tokenize", tokenizing.tokenize, methods=["POST"]),
    Route("/detokenize", tokenizing.detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizing.tokenizer_info, methods=["GET"]),
    *web_page.ROUTES,
)
# Faults have the shape of the API whose path a request's begins with, and else that of OpenAI.
SHAPES: Mapping[str, Callable[[Fault], dict[str, Any]]] = {
    "/v1/messages": anthropic_reply.error_body,
    "/api/": ollama_reply.error_body,
    **dict.fromkeys(("/completion", "/infill", "/props", "/slots"), llama_cpp.error_body),
    **dict.fromkeys(("/tokenize", "/detokenize"), llama_cpp.error_body),
}
UPLOADS = frozenset({"/v1/files"})  # paths whose bodies are forms with a file
OPEN = frozenset({"/health", *(route.path for route in web_page.ROUTES)})  # paths that need no key


def make_app(
    service: Service,
    *,
    key: str | None = None,
    local: bool = False,
    limits: Limits | None = None,
    origins: Sequence[str] = (),
    responses: StoredResponses | None = None,
    batches: BatchJobs | None = None,
    strict: bool = False,
) -> ASGIApp:
    """The application in front of a service.

    key, local, limits, origins: see `Guard`. responses: where those of the Responses API are kept, by
    default a folder of the cache. batches: files and batches, by default those of the model in the user's
    data folder. strict: refuse fields of requests that are unknown or have no effect.
    """
    own = (Route("/health", _health), Route("/metrics", _metrics))
    known = {route.path for route in (*ROUTES, *own)}
    handlers = {Fault: _faulted, HTTPException: _not_routed, Exception: _failed}
    app = Starlette(routes=[*own, *ROUTES], exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.state.service = service
    app.state.strict, app.state.ignored_names = strict, set[str]()
    app.state.responses = responses or StoredResponses(cache_root() / RESPONSES)
    app.state.batches = batches or BatchJobs(service)

    def ended(path: str, status: int, seconds: float) -> None:
        service.metrics.requested(path if path in known else "other", status, seconds)

    guard = Guard(
        app,
        write_fault,
        key=key,
        is_open=OPEN.__contains__,
        is_upload=UPLOADS.__contains__,
        local=local,
        limits=limits,
        origins=origins,
        ended=ended,
    )
    return with_cors(guard, origins) if origins else guard


def write_fault(path: str, fault: Fault, asked: Headers | None = None) -> Response:
    """A fault as the API at this path says it, or the one that the headers of the request ask for."""
    shapes = (shape for start, shape in SHAPES.items() if path.startswith(start))
    shape = next(shapes, openai_common.error_body)
    if asked is not None and models.is_anthropic(asked):
        shape = anthropic_reply.error_body
    headers = {} if fault.retry_after is None else {"retry-after": str(fault.retry_after)}
    if fault.kind == "authentication":
        headers["www-authenticate"] = "Bearer"
    return json_response(shape(fault), fault.status, headers)


async def _faulted(request: Request, fault: Exception) -> Response:
    assert isinstance(fault, Fault)
    return write_fault(request.url.path, fault, request.headers)


async def _failed(request: Request, error: Exception) -> Response:
    """A bug, which is raised once more for the log."""
    return write_fault(request.url.path, internal(), request.headers)


async def _not_routed(request: Request, error: Exception) -> Response:
    """No such path, or no such method there."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        message = f"{request.method} is not for {path[:200]}"
    else:
        message = f"there is nothing at {path[:200]}"
    response = write_fault(path, Fault("not_found", message), request.headers)
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


async def _health(request: Request) -> Response:
    """Whether requests are answered, and how far loading is while they are not."""
    service: Service = request.app.state.service
    told: dict[str, Any] = {"status": service.state, "model": service.names[0]}
    if service.state == "ready":
        return json_response({**told, "waiting": service.queue_length})
    progress = service.progress
    if service.state == "loading":
        told |= {name: getattr(progress, name) for name in ("stage", "detail", "done", "total", "unit")}
    return json_response(told, 503, {"retry-after": "5"})


async def _metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    return Response(service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")
