"""Requests for text between a prefix and a suffix (fill in the middle)."""

from dataclasses import replace

from offspec.server.exchange import Ask
from offspec.server.faults import invalid, unsupported
from offspec.server.service import Service


def with_suffix(ask: Ask, suffix: str, service: Service, field: str = "suffix") -> Ask:
    """The request with a suffix, and the tokens that end text before it. field: of the body.

    Raises Fault if the model's tokenizer has no marks for it, or the prompt is not text.
    """
    ends = service.engine.model_info.infill_ends
    if ends is None:
        raise unsupported(field, "this model's tokenizer has no marks for it; leave it out")
    if not isinstance(ask.prompt, str):
        raise invalid(field, "the prompt must be text")
    params = replace(ask.params, stop_token_ids=(*ask.params.stop_token_ids, *ends))
    return replace(ask, raw=True, suffix=suffix, params=params)
