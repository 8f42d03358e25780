"""The tokenizer over HTTP, as llama.cpp and vLLM have it: /tokenize, /detokenize and /tokenizer_info."""

from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from offspec.server.endpoint import ApiRequest
from offspec.server.faults import Fault
from offspec.server.openai_common import TokenIds
from offspec.server.reply import json_response
from offspec.server.service import Service


class TokenizeBody(Struct):
    """A request of /tokenize: `content` as llama.cpp has it, or `prompt` as vLLM has it."""

    content: str | None = None
    add_special: bool = False
    with_pieces: bool = False
    prompt: str | None = None
    add_special_tokens: bool = True
    model: str = ""


class DetokenizeBody(Struct):
    """A request of /detokenize."""

    tokens: TokenIds = []
    model: str = ""


async def tokenize(request: ApiRequest[TokenizeBody]) -> Response:
    """Token ids of a text of any length."""
    service, body = request.service, request.body
    text, special = body.content, body.add_special
    if text is None:
        text, special = body.prompt, body.add_special_tokens
    if text is None:
        raise Fault("invalid_request", "content is missing", field="content")
    ids = await service.tokenize(text, special)
    tokens: list[Any] = [_piece(service, token) for token in ids] if body.with_pieces else ids
    return json_response({"tokens": tokens, "count": len(ids), "max_model_len": service.context})


async def detokenize(request: ApiRequest[DetokenizeBody]) -> Response:
    """The text of token ids."""
    text = await request.service.detokenize(request.body.tokens)
    return json_response({"content": text, "prompt": text})


async def tokenizer_info(request: Request) -> Response:
    """Return the tokenizer's configuration. Raises Fault while the model is loading."""
    service: Service = request.app.state.service
    info = service.engine.model_info
    return json_response(
        {
            "bos_token": info.bos_token or None,
            "eos_token": info.eos_token or None,
            "chat_template": info.chat_template or None,
            "model_max_length": service.context,
        }
    )


def _piece(service: Service, token: int) -> dict[str, Any]:
    """A token and its text; its bytes if they are a part of a character."""
    utf8 = service.engine.token_bytes(token)
    try:
        return {"id": token, "piece": utf8.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(utf8)}
