"""Heads in an engine: ones that know an answer by heart are accepted, and what is said stays the target's.

Their outputs are solved for: as many hidden states as an answer has tell all of its tokens apart.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from offspec.core.config import SamplingParams
from offspec.core.events import unheard
from offspec.draft.base import Drafter
from offspec.draft.heads.open import open_head
from offspec.model.loaded import LoadedModel
from offspec.model.parts import TargetParts
from tests.support.heads_files import HIDDEN, Tensors, target_shape, write_head
from tests.support.tiny_models import VOCABULARY, reference, tiny_engine, write_model

PROMPT = [5, 9, 17, 33, 64, 20]
TOKENS = 17
DEPTH = 3
# None is guessed before the first, and one more token comes with each.
PASSES = 1 + (TOKENS - 1) // (DEPTH + 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("engine") / "target")


@pytest.fixture(scope="module")
def learnt(folder: Path) -> tuple[list[int], torch.Tensor]:
    """The target's answer behind the prompt, and its final states [n, H]."""
    ids = [*PROMPT, *reference(folder, PROMPT, TOKENS)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        states: torch.Tensor = model.model(torch.tensor([ids])).last_hidden_state[0]
    return ids, states


def solved(inputs: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """An output matrix [V, I] that finds each of the tokens [n] likeliest for its input [n, I]."""
    wanted = 20 * torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY).double()
    found: torch.Tensor = torch.linalg.lstsq(inputs.double(), wanted, driver="gelsd").solution
    return found.T.float().contiguous()


def medusa(ids: list[int], states: torch.Tensor) -> Tensors:
    tensors: Tensors = {}
    for head in range(DEPTH):
        count = len(ids) - 2 - head
        tensors[f"{head}.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN)
        tensors[f"{head}.1.weight"] = solved(states[:count], ids[2 + head :])
    return tensors


@pytest.mark.usefixtures("drafters_stay")
def test_heads_that_know_the_answer(
    folder: Path, learnt: tuple[list[int], torch.Tensor], device: torch.device, tmp_path: Path
) -> None:
    head = open_head(str(write_head(tmp_path, None, medusa(*learnt))), target_shape(), unheard)
    assert head is not None
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

    def load(target: LoadedModel) -> dict[str, Drafter]:
        return {"medusa": head.load(TargetParts(target), 64)}

    with tiny_engine(folder, "none", budget=12, width=4, more=load, device=device) as engine:
        found = engine.generate(PROMPT, greedy)
        assert [*PROMPT, *found.token_ids] == learnt[0]
        assert found.passes == PASSES
        other = [*PROMPT[:3], 70, 71]  # begins as the last did, and is not known
        assert list(engine.generate(other, greedy).token_ids) == reference(folder, other, TOKENS)
