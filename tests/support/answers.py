"""A target with two drafts, and the answers of engines over tiny models."""

from pathlib import Path
from typing import Any, NamedTuple

from offspec import SamplingParams
from tests.support.tiny_models import disturb, tiny_engine, write_model

PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]


class TargetAndDrafts(NamedTuple):
    """A target, a draft that agrees with it in part, and a draft that never agrees."""

    target: Path
    near: Path
    hostile: Path


def write_trio(folder: Path, layers: int = 4, **sizes: Any) -> TargetAndDrafts:
    target, near = (
        write_model(folder / name, num_hidden_layers=layers, **sizes) for name in ("target", "near")
    )
    disturb(near)
    return TargetAndDrafts(target, near, write_model(folder / "hostile", "qwen2", seed=5, **sizes))


def sampling(temperature: float, tokens: int = 16, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=7, max_tokens=tokens, ignore_eos=True, **more)


def generate_tokens(
    folder: Path, *params: SamplingParams, draft: Path | str = "none", prompt: Any = PROMPT, **options: Any
) -> list[tuple[int, ...]]:
    """Return the tokens of one answer for each of the parameters; without a draft, nothing is speculated."""
    if draft == "none":
        options.setdefault("budget", 1)
    with tiny_engine(folder, draft, **options) as engine:
        return [engine.generate(prompt, one).token_ids for one in params]
