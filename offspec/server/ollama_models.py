"""Ollama's descriptions of models: /api/tags, /api/ps, /api/show and /api/version."""

import hashlib
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from offspec.core.model_info import ModelInfo
from offspec.server.endpoint import read_request
from offspec.server.ollama import check_name
from offspec.server.ollama_reply import written_time
from offspec.server.openai_common import llama_settings
from offspec.server.reply import json_response
from offspec.server.service import Service

_VERSION = "0.12.11"  # of Ollama, whose API this is: clients require some version or a later one
_CENTURY = 100 * 365 * 86400  # seconds that the model stays loaded


class ShowBody(Struct):
    """A request of /api/show. name: an older name of `model`."""

    model: str = ""
    name: str = ""
    verbose: Any = None  # without effect


async def version(request: Request) -> Response:
    """The version of Ollama whose API this is."""
    return json_response({"version": _VERSION})


async def tags(request: Request) -> Response:
    """All names of the one model that is served."""
    service: Service = request.app.state.service
    return json_response({"models": [_model(service, name) for name in service.names]})


async def running(request: Request) -> Response:
    """The model, once it is loaded."""
    service: Service = request.app.state.service
    if service.state != "ready":
        return json_response({"models": []})
    until = written_time(service.created + _CENTURY)
    more = {"expires_at": until, "size_vram": 0, "context_length": service.context}
    return json_response({"models": [_model(service, service.names[0]) | more]})


async def show(request: Request) -> Response:
    """Return facts about the model. Raises Fault while it is loading."""
    service: Service = request.app.state.service
    body = (await read_request(request, ShowBody)).body
    check_name(service, body.model or body.name)
    info, defaults = service.engine.model_info, llama_settings(service.defaults)
    able = {"tools": info.tools, "thinking": info.thinking, "insert": info.infill_ends is not None}
    return json_response(
        {
            "modelfile": "",
            "parameters": "\n".join(f"{name} {value:g}" for name, value in defaults.items()),
            "template": info.chat_template,
            "details": _details(info),
            "model_info": {
                "general.architecture": info.architecture,
                "general.parameter_count": info.parameters,
                f"{info.architecture}.context_length": service.context,
            },
            "capabilities": ["completion", *(name for name, has in able.items() if has)],
            "modified_at": written_time(service.created),
        }
    )


def _model(service: Service, name: str) -> dict[str, Any]:
    info = service.engine.model_info if service.state == "ready" else ModelInfo("")
    name = name if ":" in name else f"{name}:latest"
    return {
        "name": name,
        "model": name,
        "modified_at": written_time(service.created),
        "size": info.nbytes,
        "digest": hashlib.sha256(f"{name} {info}".encode("utf-8", "replace")).hexdigest(),
        "details": _details(info),
    }


def _details(info: ModelInfo) -> dict[str, Any]:
    millions = info.parameters / 1e6
    return {
        "parent_model": "",
        "format": info.file_format,
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": f"{millions / 1000:.1f}B" if millions >= 1000 else f"{millions:.2f}M",
        "quantization_level": info.weights,
    }
