"""Descriptions of the served model in the APIs of OpenAI, Anthropic and Ollama: /v1/models, /api/tags etc."""

import hashlib
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from offspec.core.model_info import ModelInfo
from offspec.core.sampling_defaults import sampling_values
from offspec.server.endpoint import read_request
from offspec.server.ollama import check_name, written_time
from offspec.server.openai_common import llama_settings
from offspec.server.reply import json_response
from offspec.server.service import Service

# Fields from which clients read the context size: LM Studio and OpenRouter, vLLM, llama.cpp, LiteLLM.
_CONTEXT = ("context_length", "max_model_len", "max_context_length", "max_input_tokens")
_VERSION = "0.12.11"  # version of Ollama with this API; clients may require a minimum version
_CENTURY = 100 * 365 * 86400  # reported time until the model is unloaded, in seconds


def is_anthropic(headers: Headers) -> bool:
    """Return whether the headers mark a request as Anthropic's, on paths that OpenAI's API shares."""
    return "anthropic-version" in headers


async def list_models(request: Request) -> Response:
    """List the names of the served model."""
    service: Service = request.app.state.service
    data = [_entry(request, name) for name in service.names]
    if is_anthropic(request.headers):
        ends = {"first_id": service.names[0], "last_id": service.names[-1]}
        return json_response({"data": data, "has_more": False, **ends})
    return json_response({"object": "list", "data": data})


async def retrieve(request: Request) -> Response:
    """Return the model of this name. Raises ApiError if the name is unknown."""
    service: Service = request.app.state.service
    name = request.path_params["model"]
    service.check_name(name)
    return json_response(_entry(request, name))


def _entry(request: Request, name: str) -> dict[str, Any]:
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


class ShowBody(Struct):
    """Body of /api/show. name: legacy name of `model`."""

    model: str = ""
    name: str = ""
    verbose: Any = None  # ignored


async def version(request: Request) -> Response:
    """Return the version of Ollama that has this API."""
    return json_response({"version": _VERSION})


async def tags(request: Request) -> Response:
    """List the names of the served model in Ollama's format."""
    service: Service = request.app.state.service
    return json_response({"models": [_ollama_entry(service, name) for name in service.names]})


async def running(request: Request) -> Response:
    """List the model if it is loaded."""
    service: Service = request.app.state.service
    if service.state != "ready":
        return json_response({"models": []})
    until = written_time(service.created + _CENTURY)
    more = {"expires_at": until, "size_vram": 0, "context_length": service.context}
    return json_response({"models": [_ollama_entry(service, service.names[0]) | more]})


async def show(request: Request) -> Response:
    """Return properties of the model. Raises ApiError while it is loading."""
    service: Service = request.app.state.service
    body = (await read_request(request, ShowBody)).body
    check_name(service, body.model or body.name)
    info, defaults = service.engine.model_info, llama_settings(service.defaults)
    capabilities = {"tools": info.tools, "thinking": info.thinking, "insert": info.infill_ends is not None}
    return json_response(
        {
            "modelfile": "",
            "parameters": "\n".join(f"{name} {value:g}" for name, value in defaults.items()),
            "template": info.chat_template,
            "details": _ollama_details(info),
            "model_info": {
                "general.architecture": info.architecture,
                "general.parameter_count": info.parameters,
                f"{info.architecture}.context_length": service.context,
            },
            "capabilities": ["completion", *(name for name, supported in capabilities.items() if supported)],
            "modified_at": written_time(service.created),
        }
    )


def _ollama_entry(service: Service, name: str) -> dict[str, Any]:
    info = service.engine.model_info if service.state == "ready" else ModelInfo("")
    name = name if ":" in name else f"{name}:latest"
    return {
        "name": name,
        "model": name,
        "modified_at": written_time(service.created),
        "size": info.nbytes,
        "digest": hashlib.sha256(f"{name} {info}".encode("utf-8", "replace")).hexdigest(),
        "details": _ollama_details(info),
    }


def _ollama_details(info: ModelInfo) -> dict[str, Any]:
    millions = info.parameters / 1e6
    return {
        "parent_model": "",
        "format": info.file_format,
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": f"{millions / 1000:.1f}B" if millions >= 1000 else f"{millions:.2f}M",
        "quantization_level": info.weights,
    }
