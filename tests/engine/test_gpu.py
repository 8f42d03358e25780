"""The same engine on a CUDA device: the same tokens as on the CPU, streamed through two rings."""

from pathlib import Path

import pytest
import torch

from offspec import SamplingParams
from tests.tiny import reference, tiny_engine, write_model

pytestmark = pytest.mark.gpu
PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """float32 that is float32: TF32 would make near-ties of what is none."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt2", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("draft", ["auto", "same", "hostile", "none"])
def test_tokens_are_those_of_the_cpu(family: str, draft: str, tmp_path: Path) -> None:
    cuda = torch.device("cuda")
    model = write_model(tmp_path / "model", family)
    hostile = write_model(tmp_path / "hostile", seed=9)
    named = {"same": model, "hostile": hostile}.get(draft, draft)
    greedy = SamplingParams(max_tokens=20, ignore_eos=True)
    sampled = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=3, top_p=0.9)
    with tiny_engine(model, "none", budget=1) as engine:
        expected = engine.generate(PROMPT, sampled).token_ids
    for slots, expand in ((1, True), (3, False)):
        with tiny_engine(model, named, slots=slots, expand=expand, device=cuda) as engine:
            assert list(engine.generate(PROMPT, greedy).token_ids) == reference(model, PROMPT, 20)
            assert engine.generate(PROMPT, sampled).token_ids == expected


def test_resident_and_streamed_layers_together(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", num_hidden_layers=5)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = reference(model, PROMPT, 20)
    for resident in ((), (0, 2), range(5)):
        with tiny_engine(model, "auto", resident=resident, device=torch.device("cuda")) as engine:
            assert list(engine.generate(PROMPT, params).token_ids) == expected
