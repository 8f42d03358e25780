"""Sampling defaults: those of a model, what users set over them, and how they are shown."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from offspec.core.config import SamplingParams
from offspec.core.errors import RequestError
from offspec.core.values import shown

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")  # fields that mean nothing to greedy decoding
FROM_MODEL = (*_SAMPLING, "repetition_penalty")
_SHOWN = (*FROM_MODEL, "presence_penalty", "frequency_penalty")
_GREEDY = SamplingParams()


def model_defaults(generation: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters that a generation_config.json sets; greedy ones if it sets none.

    As in vLLM, any of `temperature`, `top_p`, `top_k` and `min_p` means sampling unless `do_sample` is false,
    and a missing temperature is 1. Raises RequestError for an invalid value.
    """
    samples = generation.get("do_sample")
    if samples is False:
        return _GREEDY
    if samples not in (None, True):
        raise RequestError(f"do_sample must be true or false, not {shown(samples)}")
    values = {name: value for name in FROM_MODEL if (value := generation.get(name)) is not None}
    if values.get("top_k") == -1:  # as some models write "all"
        values["top_k"] = 0
    samples = samples or any(name in values for name in _SAMPLING)
    return SamplingParams(**{"temperature": 1.0 if samples else 0.0, **values})


@dataclass(frozen=True, slots=True)
class SamplingOverrides:
    """Sampling parameters that a user set; the model's defaults hold for the others.

    Args:
        values: Fields of `SamplingParams` by name.
        greedy: Whether to ignore the model's defaults: temperature 0 unless `values` or a request sets one.

    Raises:
        RequestError: A value of another type, or outside its range.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    greedy: bool = False

    def __post_init__(self) -> None:
        SamplingParams(**self.values)

    @classmethod
    def all_of(cls, params: SamplingParams) -> "SamplingOverrides":
        """Overrides that leave nothing to the model."""
        return cls({each.name: getattr(params, each.name) for each in fields(params)})

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """The parameters of a model with these defaults."""
        return replace(_GREEDY if self.greedy else defaults, **self.values)

    def summary(self, defaults: SamplingParams, hint: str) -> str:
        """The parameters of a model with these defaults, on one line.

        hint: follows where the model sets some of them, after their source.
        """
        params = self.over(defaults)
        text = described(sampling_values(params))
        if params == self.over(_GREEDY):
            return text
        source = "generation_config.json" + " and options" * any(name in self.values for name in FROM_MODEL)
        return f"{text} (from {source}); {hint}"


def sampling_values(params: SamplingParams) -> dict[str, float]:
    """Temperature and, where they change anything, the filters and penalties, by name."""
    return {
        name: value
        for name in _SHOWN
        if (value := getattr(params, name)) != getattr(_GREEDY, name) or name == "temperature"
    }


def described(values: Mapping[str, float]) -> str:
    """Sampling values on one line, such as "temperature 0.6, top_p 0.95"."""
    return ", ".join(f"{name} {value:g}" for name, value in values.items())
