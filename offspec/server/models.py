"""The list of models: GET /v1/models and /v1/models/{model}, in OpenAI's shape or in Anthropic's."""

from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from offspec.core.sampling_defaults import sampling_values
from offspec.server.reply import json_response
from offspec.server.service import Service

# Names of the context's size that clients read: LM Studio and OpenRouter, vLLM, llama.cpp, LiteLLM.
_CONTEXT = ("context_length", "max_model_len", "max_context_length", "max_input_tokens")


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
    more: dict[str, Any] = {}
    if service.state == "ready":
        more = {"default_sampling": sampling_values(service.defaults)}
    if is_anthropic(request.headers):
        at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if context is not None:
            more |= {"max_input_tokens": context, "max_tokens": context}
        about = {"type": "model", "id": name, "display_name": name, "created_at": at, "lifecycle": "active"}
        return {**about, **more}
    if context is not None:
        more |= dict.fromkeys(_CONTEXT, context)
    return {"id": name, "object": "model", "created": created, "owned_by": "offspec", **more}
