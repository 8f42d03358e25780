"""The list of models: GET /v1/models and /v1/models/{model}, in OpenAI's shape or in Anthropic's."""

from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from offspec.server.responses import json_response
from offspec.server.service import Service


def is_anthropic(headers: Headers) -> bool:
    """Whether a request is for Anthropic's API: it says so where a path is both's."""
    return "anthropic-version" in headers


async def listing(request: Request) -> Response:
    """All names of the one model that is served."""
    service: Service = request.app.state.service
    data = [_model(request, name) for name in service.names]
    if is_anthropic(request.headers):
        ends = {"first_id": service.names[0], "last_id": service.names[-1]}
        return json_response({"data": data, "has_more": False, **ends})
    return json_response({"object": "list", "data": data})


async def one(request: Request) -> Response:
    """The model of this name. Raises Fault for another."""
    service: Service = request.app.state.service
    name = request.path_params["model"]
    service.check_name(name)
    return json_response(_model(request, name))


def _model(request: Request, name: str) -> dict[str, Any]:
    service: Service = request.app.state.service
    created, context = service.created, service.context
    if is_anthropic(request.headers):
        at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        sizes = {} if context is None else {"max_input_tokens": context, "max_tokens": context}
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": at,
            "lifecycle": "active",
            **sizes,
        }
    # Each name is the one that some clients read: LM Studio and OpenRouter, vLLM, llama.cpp, LiteLLM.
    names = ("context_length", "max_model_len", "max_context_length", "max_input_tokens")
    sizes = {} if context is None else dict.fromkeys(names, context)
    return {"id": name, "object": "model", "created": created, "owned_by": "offspec", **sizes}
