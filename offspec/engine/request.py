"""Requests to an engine and their options."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar

from offspec.core.config import FOR_PARAMS, PARAMS, SamplingParams, Settings, checked_params
from offspec.core.errors import RequestError
from offspec.core.events import Event
from offspec.core.setting import check_keywords

T = TypeVar("T")
Draft = str | Path | Sequence[str | Path]  # names, separated by commas or as a sequence


class SharedOptions(TypedDict, total=False):
    """Options that can apply to several requests.

    Args:
        raw: Continue the text without applying the chat template.
        draft: Draft sources to use, out of the engine's `sources`. Default: the sources requested by `load`;
            "none": no draft.
        speculate: False decodes one token per pass: the same tokens, but slower.
        chat_template_kwargs: Variables for the chat template, such as {"enable_thinking": False}.
    """

    raw: bool
    draft: Draft | None
    speculate: bool
    chat_template_kwargs: Mapping[str, Any] | None


class RequestOptions(SharedOptions, total=False):
    """Options of a single request, in addition to `SharedOptions`.

    Args:
        halt: Setting it, from any thread, cancels the current pass and ends the answer.
        trees: Send a TreeSeen event for every pass.
        shown: Special tokens to include in the text, as required by `Engine.parts`.
    """

    halt: threading.Event | None
    trees: bool
    shown: frozenset[int]


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids of a prompt, and the settings for its continuation.

    Args:
        ids: Token ids of the prompt.
        params: Sampling parameters, with a seed.
        sources: Names of the draft sources; empty to decode one token per pass.
        halt: Ends the answer with the text so far; may be set from any thread.
        trees: Whether to send TreeSeen events.
        shown: Special tokens to include in the text; others are omitted.
        fresh: Whether to compute the whole prompt, even if a cache has a prefix of it.
    """

    ids: Sequence[int]
    params: SamplingParams
    sources: tuple[str, ...] = ()
    halt: threading.Event = field(default_factory=threading.Event)
    trees: bool = False
    shown: frozenset[int] = frozenset()
    fresh: bool = False


class ScheduledRequest(Protocol):
    """A scheduled request, which receives the events of its answer."""

    gaps: list[float]

    @property
    def request(self) -> Request: ...

    def cancel(self) -> object: ...

    def cancelled(self) -> bool: ...

    def is_due(self, shared: bool) -> bool: ...

    def on_progress(self, event: Event) -> None: ...

    def put(
        self, events: Sequence[Event], *, ended: bool = False, error: BaseException | None = None
    ) -> None: ...


def check_options(given: Iterable[str]) -> None:
    """Raise TypeError for an unknown option of a request, with a hint where a misplaced name belongs."""
    settings = "it is a setting of the engine, as in offspec.load(model, {}=...)"
    elsewhere = {FOR_PARAMS: PARAMS, settings: Settings.__annotations__}
    check_keywords(given, RequestOptions.__annotations__, "option", elsewhere)


def with_params(
    prompts: Iterable[T], params: SamplingParams | Iterable[SamplingParams] | None
) -> list[tuple[T, SamplingParams]]:
    """Return pairs of prompt and parameters; one set of parameters may serve all. Raises RequestError."""
    if isinstance(prompts, str):
        raise RequestError(
            "`generate_many` takes a list of prompts, not a single text: put the text in brackets"
        )
    every = [*prompts]
    if isinstance(params, Iterable) and not isinstance(params, str | Mapping):
        each = [*params]
    else:
        each = [checked_params(params)] * len(every)
    if len(each) != len(every):
        raise RequestError(
            f"{len(each)} `params` were given for {len(every)} prompts; give one for each prompt"
        )
    return [*zip(every, each, strict=True)]
