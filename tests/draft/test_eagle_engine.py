"""EAGLE heads in an engine: they are told the target's own states, and change nothing of what it says."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from offspec.core.config import SamplingParams
from offspec.draft.heads import files
from offspec.draft.heads.state_drafter import StateDrafter
from offspec.model.parts import TargetParts
from tests.draft.eagle_heads import open_head
from tests.support.eagle_files import LAYERS, Head, make_head, write_head
from tests.support.products import some
from tests.support.tiny_models import VOCABULARY, load_all, open_model, reference, tiny_engine, write_model

PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]


_CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("engine") / "target", num_hidden_layers=LAYERS)


def _loaded(head: Head, folder: Path, place: Path, device: torch.device = _CPU) -> StateDrafter:
    model = open_model(folder, device=device)
    load_all(model, 16)
    parts = TargetParts(model)
    drafter = open_head(write_head(place, head), parts).load(parts, 64)
    assert isinstance(drafter, StateDrafter)
    return drafter


def _states(head: Head, folder: Path, ids: list[int]) -> torch.Tensor:
    """[n, E] of all positions but the last, from transformers' own hidden states."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        every = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    if head.kind == "eagle":
        last: torch.Tensor = every[-1][0]  # behind the final norm
        return last
    return torch.cat([every[tap][0] for tap in head.taps], dim=1) @ head.tensors["fc.weight"].T


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_states_are_the_targets_and_answers_its_own(
    kind: str, folder: Path, device: torch.device, tmp_path: Path
) -> None:
    head = make_head(kind)
    drafter = _loaded(head, folder, tmp_path / "head", device)
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    settings = {"budget": 12, "width": 4, "more": lambda target: {"head": drafter}}
    with tiny_engine(folder, "none", device=device, **settings) as engine:
        for prompt in (PROMPT, [*PROMPT[:6], 70, 71]):  # the next begins as the last did
            said = engine.generate(prompt, greedy).token_ids
            assert list(said) == reference(folder, prompt, 12)
            ids = [*prompt, *said]
            known = drafter._known.of(0, drafter._known.end)
            assert drafter._known.start == 0 and len(known) > len(prompt)
            assert drafter._layer.cache.length > len(prompt), "it was asked"
            wanted = _states(head, folder, ids)[: len(known)]
            torch.testing.assert_close(known.cpu(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "vocabulary"),
    some(
        [(kind, VOCABULARY + more) for kind in ("eagle", "eagle3") for more in (-2, 2)],
        ("eagle", VOCABULARY + 2),
        ("eagle3", VOCABULARY - 2),
    ),
)
def test_a_vocabulary_with_another_padding(
    kind: str, vocabulary: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that the head lacks are embedded as its last, and none beyond the target's are guessed."""
    monkeypatch.setattr(files, "_PADDING", 40)
    folder = write_model(tmp_path / "target", num_hidden_layers=LAYERS, vocab_size=vocabulary)
    drafter = _loaded(make_head(kind, own_embedding=True, known=VOCABULARY), folder, tmp_path / "head")
    if kind == "eagle3":
        assert drafter.name == f"EAGLE-3 ({min(vocabulary, VOCABULARY)} of {vocabulary} tokens)"
    prompt = [*PROMPT, vocabulary - 1]
    with tiny_engine(folder, "none", budget=12, width=4, more=lambda target: {"head": drafter}) as engine:
        said = engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=12)).token_ids
    assert list(said) == reference(folder, prompt, 12)
    assert drafter._known.end == 0 and drafter._layer.cache.length == 0, "closed with the engine"
