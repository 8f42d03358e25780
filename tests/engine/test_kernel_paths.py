"""Tokens do not depend on the paths of kernels."""

from pathlib import Path

import pytest

from offspec.core.errors import RequestError
from offspec.model.devices import find_device
from offspec_kernels.backend import VARIABLE, Backend
from tests.support.answers import PROMPT, TargetAndDrafts, generate_tokens, sampling
from tests.support.kernel_device import device_of
from tests.support.tiny_models import reference, write_model


@pytest.mark.parametrize(
    ("path", "family", "tokens"),
    [
        ("reference", "gpt_oss", 12),
        ("eager", "gpt_oss", 12),
        # In Python, seconds for each token.
        pytest.param("triton", "gemma2", 3, marks=pytest.mark.exhaustive),
        pytest.param("triton", "gpt_oss", 3, marks=pytest.mark.exhaustive),
    ],
)
def test_tokens_are_the_same(
    path: Backend,
    family: str,
    tokens: int,
    trio: TargetAndDrafts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows, soft caps, sinks; a helpful and a hostile draft; compaction after each pass."""
    sampled = sampling(1.0, tokens, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
    kinds = ["sliding_attention", "full_attention"]
    model = write_model(tmp_path / "model", family, num_hidden_layers=2, layer_types=kinds)
    expected = generate_tokens(model, sampled)
    likeliest = tuple(reference(model, PROMPT, tokens))
    monkeypatch.setenv(VARIABLE, path)
    given = {"budget": 6, "width": 3, "device": device_of(path)}
    assert generate_tokens(model, sampled, draft=model, **given) == expected
    assert generate_tokens(model, sampling(0.0, tokens), draft=trio.hostile, **given) == [likeliest]


@pytest.mark.parametrize(
    ("path", "fix"), [("fastest", "reference, eager, triton"), ("triton", "TRITON_INTERPRET=1")]
)
def test_a_path_that_cannot_be_taken(path: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RequestError, match=fix):
        find_device("cpu")
