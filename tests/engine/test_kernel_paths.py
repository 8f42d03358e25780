"""The engine says the same whichever path its kernels take."""

from dataclasses import replace
from pathlib import Path

import pytest

from offspec import SamplingParams
from offspec.core.errors import RequestError
from offspec.model.device import find_device
from offspec_kernels.backend import VARIABLE, Backend
from tests.support.kernel_device import device_of
from tests.support.products import some
from tests.support.tiny_models import reference, tiny_engine, write_model

PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]


@pytest.mark.parametrize(
    ("path", "family", "tokens"),
    some(
        [
            *(
                (path, family, 12)
                for path in ("reference", "eager")
                for family in ("llama", "gemma2", "gpt_oss")
            ),
            *(("triton", family, 3) for family in ("gemma2", "gpt_oss")),  # in Python, seconds for each token
        ],
        ("reference", "gpt_oss", 12),
        ("eager", "gpt_oss", 12),
    ),
)
def test_tokens_are_the_same(
    path: Backend, family: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, soft caps, sinks; a draft that helps and one that is hostile; compaction after each pass."""
    greedy = SamplingParams(max_tokens=tokens, ignore_eos=True)
    sampled = replace(greedy, temperature=1.0, seed=3, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
    kinds = {} if family == "llama" else {"layer_types": ["sliding_attention", "full_attention"]}
    model = write_model(tmp_path / "model", family, num_hidden_layers=2, **kinds)
    hostile = write_model(tmp_path / "hostile", seed=9)
    with tiny_engine(model, "none", budget=1) as engine:
        expected = engine.generate(PROMPT, sampled).token_ids
    likeliest = reference(model, PROMPT, tokens)
    monkeypatch.setenv(VARIABLE, path)
    device = device_of(path)
    with tiny_engine(model, model, budget=6, width=3, device=device) as engine:
        assert engine.generate(PROMPT, sampled).token_ids == expected
    with tiny_engine(model, hostile, budget=6, width=3, device=device) as engine:
        assert list(engine.generate(PROMPT, greedy).token_ids) == likeliest


@pytest.mark.parametrize(
    ("path", "fix"), [("fastest", "reference, eager, triton"), ("triton", "TRITON_INTERPRET=1")]
)
def test_a_path_that_cannot_be_taken(path: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RequestError, match=fix):
        find_device("cpu")
