"""What a request may say beside its prompt and its parameters."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from offspec.core.config import FOR_PARAMS, PARAMS, Settings
from offspec.core.keywords import check_keywords

Draft = str | Path | Sequence[str | Path]  # names, joined by commas or one by one


class SharedOptions(TypedDict, total=False):
    """Options that hold as well for many requests as for one.

    Args:
        raw: Continue text as it is, without the chat template.
        draft: Which of the engine's `sources` draft, by default what was loaded for it; "none": no draft.
        speculate: False decodes one token a pass: the same tokens, slowly.
        chat_template_kwargs: Variables for the chat template, such as {"enable_thinking": False}.
    """

    raw: bool
    draft: Draft | None
    speculate: bool
    chat_template_kwargs: Mapping[str, Any] | None


class RequestOptions(SharedOptions, total=False):
    """Options of one request, beside those that it shares with others.

    Args:
        halt: Once it is set, from any thread, the pass under way is broken off and the answer ends.
        trees: Send a TreeSeen for every pass.
        shown: Special tokens that are spelt out in the text, as `Engine.parts` needs it.
    """

    halt: threading.Event | None
    trees: bool
    shown: frozenset[int]


def check_options(given: Iterable[str]) -> None:
    """Raise TypeError for a name that is no option of a request; say where it belongs."""
    settings = "it is a setting of the engine, as in offspec.load(model, {}=...)"
    elsewhere = {FOR_PARAMS: PARAMS, settings: Settings.__annotations__}
    check_keywords(given, RequestOptions.__annotations__, "option", elsewhere)
