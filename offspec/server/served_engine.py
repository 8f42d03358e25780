"""What a server needs of an engine."""

import threading
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from offspec.chat.answer_parts import Parts
from offspec.core.config import Constraint, SamplingParams
from offspec.core.events import Event
from offspec.core.model_info import ModelInfo

if TYPE_CHECKING:
    from offspec_planners.plan import Plan


class ServedEngine(Protocol):
    """The part of an engine that a server uses."""

    @property
    def context(self) -> int: ...

    @property
    def sequences(self) -> int: ...

    @property
    def plan(self) -> "Plan | None": ...

    @property
    def sampling_defaults(self) -> SamplingParams: ...

    @property
    def model_info(self) -> ModelInfo: ...

    def encode(
        self,
        prompt: Any,
        raw: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continues: bool = True,
    ) -> list[int]: ...

    def tokenize(self, text: str, special: bool = False) -> list[int]: ...

    def encode_infill(self, prefix: str, suffix: str) -> list[int]: ...

    def count_tokens(
        self, prompt: Any, *, raw: bool = False, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> int: ...

    def check(self, params: SamplingParams) -> None: ...

    def spell(self, ids: Sequence[int]) -> str: ...

    def parts(self, ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()) -> Parts: ...

    def answer_format(
        self,
        ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        format: Constraint | None = None,
        thought_tokens: int | None = None,
        required: bool = False,
    ) -> Constraint | None: ...

    def token_bytes(self, token: int) -> bytes: ...

    def submit(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        halt: threading.Event | None = None,
        trees: bool = False,
        shown: frozenset[int] = frozenset(),
        progress: bool = False,
    ) -> AsyncIterable[Event]: ...

    def close(self) -> None: ...


Loader = Callable[[Callable[[Event], None]], ServedEngine]  # takes a listener: progress, notices, passes
