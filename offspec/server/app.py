"""ASGI application: routes and error responses."""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from offspec.server import (
    anthropic,
    llama_cpp,
    models,
    ollama,
    openai_batches,
    stored_responses,
    web_page,
)
from offspec.server.admission import AdmissionMiddleware
from offspec.server.api_errors import (
    ApiError,
    anthropic_error,
    internal,
    llama_cpp_error,
    ollama_error,
    openai_error,
)
from offspec.server.batch import lines
from offspec.server.batch.jobs import BatchJobs
from offspec.server.cors import with_cors
from offspec.server.endpoint import Endpoint
from offspec.server.reply import json_response
from offspec.server.service import Service

ENDPOINTS: Mapping[str, Endpoint[Any]] = {
    **lines.ENDPOINTS,
    "/v1/messages": Endpoint(anthropic.Body, anthropic.create),
    "/v1/messages/count_tokens": Endpoint(anthropic.CountTokensBody, anthropic.count_tokens),
    "/completion": Endpoint(llama_cpp.CompletionBody, llama_cpp.completion),
    "/infill": Endpoint(llama_cpp.InfillBody, llama_cpp.infill),
    "/tokenize": Endpoint(llama_cpp.TokenizeBody, llama_cpp.tokenize),
    "/detokenize": Endpoint(llama_cpp.DetokenizeBody, llama_cpp.detokenize),
}
ROUTES = (
    *(Route(path, endpoint.respond, methods=["POST"]) for path, endpoint in ENDPOINTS.items()),
    Route("/v1/responses/{id}", stored_responses.retrieve, methods=["GET"]),
    Route("/v1/responses/{id}", stored_responses.delete, methods=["DELETE"]),
    Route("/v1/responses/{id}/input_items", stored_responses.input_items, methods=["GET"]),
    Route("/v1/files", openai_batches.create_file, methods=["POST"]),
    Route("/v1/files", openai_batches.list_files, methods=["GET"]),
    Route("/v1/files/{id}", openai_batches.retrieve_file, methods=["GET"]),
    Route("/v1/files/{id}", openai_batches.delete_file, methods=["DELETE"]),
    Route("/v1/files/{id}/content", openai_batches.content, methods=["GET"]),
    Route("/v1/batches", openai_batches.create, methods=["POST"]),
    Route("/v1/batches", openai_batches.listing, methods=["GET"]),
    Route("/v1/batches/{id}", openai_batches.retrieve, methods=["GET"]),
    Route("/v1/batches/{id}/cancel", openai_batches.cancel, methods=["POST"]),
    Route("/v1/models", models.list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", models.retrieve, methods=["GET"]),
    Route("/api/chat", ollama.chat, methods=["POST"]),
    Route("/api/generate", ollama.generate, methods=["POST"]),
    Route("/api/show", models.show, methods=["POST"]),
    Route("/api/tags", models.tags, methods=["GET"]),
    Route("/api/ps", models.running, methods=["GET"]),
    Route("/api/version", models.version, methods=["GET"]),
    Route("/props", llama_cpp.props, methods=["GET"]),
    Route("/slots", llama_cpp.slots, methods=["GET"]),
    Route("/tokenizer_info", llama_cpp.tokenizer_info, methods=["GET"]),
    *web_page.ROUTES,
)
# Format of errors by the prefix of the path; OpenAI's for all other paths.
SHAPES: Mapping[str, Callable[[ApiError], dict[str, Any]]] = {
    "/v1/messages": anthropic_error,
    "/api/": ollama_error,
    **dict.fromkeys(("/completion", "/infill", "/props", "/slots"), llama_cpp_error),
    **dict.fromkeys(("/tokenize", "/detokenize"), llama_cpp_error),
}


def make_app(service: Service, batches: BatchJobs, *, local: bool = False) -> ASGIApp:
    """Return the ASGI application of a server.

    Args:
        service: Service that answers requests.
        batches: Files and batches of clients.
        local: See `AdmissionMiddleware`.
    """
    monitoring = (Route("/health", _health), Route("/metrics", _metrics))
    known = {route.path for route in (*ROUTES, *monitoring)}
    handlers = {ApiError: _on_api_error, HTTPException: _on_http_exception, Exception: _on_exception}
    app = Starlette(routes=[*monitoring, *ROUTES], exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.state.service, app.state.batches = service, batches

    def on_request_end(path: str, status: int, seconds: float) -> None:
        service.metrics.record_request(path if path in known else "other", status, seconds)

    admission = AdmissionMiddleware(app, error_response, service.settings, local, on_request_end)
    origins = service.settings.origins
    return with_cors(admission, origins) if origins else admission


def error_response(path: str, error: ApiError, request_headers: Headers) -> Response:
    """Return an error response in the format of the API at this path.

    Headers of Anthropic's clients select Anthropic's format, because some paths belong to several APIs.
    """
    shapes = (shape for start, shape in SHAPES.items() if path.startswith(start))
    shape = next(shapes, openai_error)
    if models.is_anthropic(request_headers):
        shape = anthropic_error
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.kind == "authentication":
        headers["www-authenticate"] = "Bearer"
    return json_response(shape(error), error.status, headers)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(request.url.path, error, request.headers)


async def _on_exception(request: Request, error: Exception) -> Response:
    """Respond to an unexpected exception. Starlette raises it again, so that the log contains it."""
    return error_response(request.url.path, internal(), request.headers)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Respond to an unknown path, or to a method that the path does not allow."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        message = f"method {request.method} is not allowed for {path[:200]}"
    else:
        message = f"unknown path {path[:200]}"
    response = error_response(path, ApiError("not_found", message), request.headers)
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


async def _health(request: Request) -> Response:
    """Return the state of the server, and the progress while the model is loading."""
    service: Service = request.app.state.service
    body: dict[str, Any] = {"status": service.state, "model": service.names[0]}
    if service.state == "ready":
        return json_response({**body, "waiting": service.queue_length})
    progress = service.progress
    if service.state == "loading":
        body |= {name: getattr(progress, name) for name in ("stage", "detail", "done", "total", "unit")}
    return json_response(body, 503, {"retry-after": "5"})


async def _metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    return Response(service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")
