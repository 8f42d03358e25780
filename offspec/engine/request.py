"""A request to an engine, and the options that it takes."""

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


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as token ids, and how to continue it.

    Args:
        ids: The prompt.
        params: How tokens are chosen, with a seed.
        sources: Names of the draft sources; none to decode one token per pass.
        halt: May be set from any thread, to end the answer with what there is.
        trees: Whether to send TreeSeen events.
        shown: Special tokens that are in the text, which has no others.
        fresh: Whether all of the prompt is computed, whatever caches hold of it.
    """

    ids: Sequence[int]
    params: SamplingParams
    sources: tuple[str, ...] = ()
    halt: threading.Event = field(default_factory=threading.Event)
    trees: bool = False
    shown: frozenset[int] = frozenset()
    fresh: bool = False


class Submitted(Protocol):
    """A request in the hands of the scheduler, and where the events of its answer go."""

    gaps: list[float]

    @property
    def request(self) -> Request: ...

    def cancel(self) -> object: ...

    def cancelled(self) -> bool: ...

    def is_due(self, shared: bool) -> bool: ...

    def progressed(self, event: Event) -> None: ...

    def put(
        self, events: Sequence[Event], *, ended: bool = False, error: BaseException | None = None
    ) -> None: ...


def check_options(given: Iterable[str]) -> None:
    """Raise TypeError for a name that is no option of a request; say where it belongs."""
    settings = "it is a setting of the engine, as in offspec.load(model, {}=...)"
    elsewhere = {FOR_PARAMS: PARAMS, settings: Settings.__annotations__}
    check_keywords(given, RequestOptions.__annotations__, "option", elsewhere)


def with_params(
    prompts: Iterable[T], params: SamplingParams | Iterable[SamplingParams] | None
) -> list[tuple[T, SamplingParams]]:
    """Each of several prompts with its parameters, which may be the same for all. Raises RequestError."""
    if isinstance(prompts, str):
        raise RequestError("`generate_many` takes a list of prompts, not one text: put it in brackets")
    every = [*prompts]
    if isinstance(params, Iterable) and not isinstance(params, str | Mapping):
        each = [*params]
    else:
        each = [checked_params(params)] * len(every)
    if len(each) != len(every):
        raise RequestError(f"there are {len(each)} `params` for {len(every)} prompts; give one for each")
    return [*zip(every, each, strict=True)]
