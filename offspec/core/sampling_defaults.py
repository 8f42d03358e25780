"""Sampling defaults of a model, user overrides, and their display."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from offspec.core.config import SamplingParams
from offspec.core.errors import RequestError
from offspec.core.values import short_repr

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")  # fields without effect on greedy decoding
FROM_MODEL = (*_SAMPLING, "repetition_penalty")
_SHOWN = (*FROM_MODEL, "presence_penalty", "frequency_penalty")
_GREEDY = SamplingParams()


def model_defaults(generation: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters of a generation_config.json; greedy decoding if it sets none.

    As in vLLM, any of `temperature`, `top_p`, `top_k` and `min_p` enables sampling unless `do_sample` is
    false, and a missing temperature is 1. Raises RequestError for an invalid value.
    """
    samples = generation.get("do_sample")
    if samples is False:
        return _GREEDY
    if samples not in (None, True):
        raise RequestError(f"do_sample must be true or false, not {short_repr(samples)}")
    values = {name: value for name in FROM_MODEL if (value := generation.get(name)) is not None}
    if values.get("top_k") == -1:  # some models write "all" this way
        values["top_k"] = 0
    samples = samples or any(name in values for name in _SAMPLING)
    return SamplingParams(**{"temperature": 1.0 if samples else 0.0, **values})


@dataclass(frozen=True, slots=True)
class SamplingOverrides:
    """Sampling parameters set by the user; the model's defaults apply to all others.

    Args:
        values: Fields of `SamplingParams` by name.
        greedy: Whether to ignore the model's defaults and use temperature 0, unless `values` or a request
            sets a temperature.

    Raises:
        RequestError: Invalid type, or value out of range.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    greedy: bool = False

    def __post_init__(self) -> None:
        SamplingParams(**self.values)

    @classmethod
    def all_of(cls, params: SamplingParams) -> "SamplingOverrides":
        """Return overrides for every parameter, so that no model default applies."""
        return cls({each.name: getattr(params, each.name) for each in fields(params)})

    def apply_to(self, defaults: SamplingParams) -> SamplingParams:
        """Return `defaults` with the overrides applied."""
        return replace(_GREEDY if self.greedy else defaults, **self.values)

    def summary(self, defaults: SamplingParams, hint: str) -> str:
        """Return the parameters of a model with these defaults on one line.

        hint: text appended after the source if the model sets any of the parameters.
        """
        params = self.apply_to(defaults)
        text = describe_values(sampling_values(params))
        if params == self.apply_to(_GREEDY):
            return text
        source = "generation_config.json" + " and options" * any(name in self.values for name in FROM_MODEL)
        return f"{text} (from {source}); {hint}"


def sampling_values(params: SamplingParams) -> dict[str, float]:
    """Return by name the temperature and all filters and penalties that have an effect."""
    return {
        name: value
        for name in _SHOWN
        if (value := getattr(params, name)) != getattr(_GREEDY, name) or name == "temperature"
    }


def describe_values(values: Mapping[str, float]) -> str:
    """Format sampling values on one line, such as "temperature 0.6, top_p 0.95"."""
    return ", ".join(f"{name} {value:g}" for name, value in values.items())
