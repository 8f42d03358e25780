"""Drafts with another vocabulary: the predictions of their model, in the target's tokens."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from offspec.core.config import SamplingParams
from offspec.draft.base import Children, Drafter, Scorer
from offspec.draft.cross_vocab.drafter import CrossVocabDrafter, Retokenizer
from offspec.draft.cross_vocab.vocab_map import VocabMap
from offspec.draft.grow.tree_grower import GrowthPolicy
from offspec.draft.lm import LMDrafter
from offspec.draft.mix.mixture import Mixture
from offspec.draft.mix.sources import Sources
from offspec.engine.batched_pass import BatchedPass
from offspec.engine.decode_state import DecodeState
from offspec.engine.sequence_pass import DecodingConfig, SequencePass
from offspec.model.loaded import LoadedModel
from offspec.model.tokenizer import load_tokenizer
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec_planners.acceptance import Calibration
from tests.support.drafter_logits import CALLS, CHAINS, TOKENS, node_logits, paths, tree_below
from tests.support.tiny_models import VOCABULARY, load_all, open_model, write_model

CPU = torch.device("cpu")
IDS = [1, 5, 9, 17, 33, 64, 20, 21, 22, 9]
ORDER = [0, 1, 2, *random.Random(4).sample(range(3, VOCABULARY), VOCABULARY - 3)]  # new id to old id


def words(folder: Path, names: Sequence[str]) -> Any:
    """Return a tokenizer of these words, saved next to a model."""
    model = models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[3])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    fast.save_pretrained(folder)
    return load_tokenizer(folder)


def names(order: Sequence[int]) -> list[str]:
    return ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in order[3:])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the draft, with the target's vocabulary unchanged."""
    return write_model(tmp_path_factory.mktemp("draft"), "llama", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def shuffled(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same model with its tokens in another order."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.weight.copy_(module.weight[ORDER].clone())
    other = tmp_path_factory.mktemp("shuffled")
    model.save_pretrained(other)
    words(other, names(ORDER))
    return other


def plain(folder: Path, device: torch.device = CPU) -> LMDrafter:
    model = open_model(folder, device=device)
    load_all(model, 64)
    return LMDrafter("draft", model.tree_model, model.device, model.close)


def translated(folder: Path, target: Any, device: torch.device = CPU) -> CrossVocabDrafter:
    draft = load_tokenizer(folder)
    vocab = VocabMap.between(target, draft)
    return CrossVocabDrafter(plain(folder, device), vocab, Retokenizer(vocab, target, draft), device)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return words(tmp_path_factory.mktemp("target"), names(range(VOCABULARY)))


def test_reordered_vocabulary(folder: Path, shuffled: Path, target: Any) -> None:
    """The draft gives the same predictions, pass after pass, and after rewinding."""
    one, other = plain(folder), translated(shuffled, target)
    ids = list(IDS)
    steps = ((0, [0, 1, 3, 5], CALLS), (0, [0, 2], CHAINS), (6, [0], CALLS), (0, [0, 1], CHAINS))
    for length, accepted, calls in steps:
        if length:
            ids = [*ids[:length], 40, 41]
            one.rewind(length)
            other.rewind(length)
        torch.testing.assert_close(
            node_logits(other, ids, calls), node_logits(one, ids, calls), atol=1e-4, rtol=1e-4
        )
        one.commit(accepted)
        other.commit(accepted)
        tree = tree_below(0)
        ids += [*(int(tree.token[node]) for node in accepted[1:]), 50]
    one.close()
    other.close()


def greedy_scorer() -> Scorer:
    return Scorer(LogitsProcessor(SamplingParams(), VOCABULARY, []), None, Calibration(), children=8)


def predicted_logits(drafter: Drafter, ids: Sequence[int], scorer: Scorer) -> list[Children]:
    tree = tree_below(ids[-1])
    drafter.start(ids)
    with torch.no_grad():
        return [drafter.expand(tree, list(nodes), scorer) for nodes in CALLS]


LACKING = (TOKENS[2], 64)  # a word of the tree, and one of the prompt


def test_partly_different_vocabulary(folder: Path, target: Any, tmp_path: Path) -> None:
    """Against a naive implementation: the prompt's text in the draft's words, paths word by word."""
    write_model(tmp_path, "llama", seed=7, tie_word_embeddings=False)
    order = [0, 1, 2, *random.Random(5).sample(range(3, VOCABULARY + 20), VOCABULARY - 3)]
    order = [i + 1000 if i in LACKING else i for i in order]
    draft = words(tmp_path, names(order))
    place = {name: i for i, name in enumerate(names(order))}
    drafter = translated(tmp_path, target)
    scorer = greedy_scorer()
    text = " ".join(f"w{i}" for i in IDS[1:])
    read = [1, *draft(text, add_special_tokens=False)["input_ids"]]
    model: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    answers = predicted_logits(drafter, IDS, scorer)
    rows = [(answer, row) for answer in answers for row in range(len(answer.token))]
    nodes_in_order = [node for nodes in CALLS for node in nodes]
    reached = 0
    for node, (answer, row) in zip(nodes_in_order, rows, strict=True):
        path = [place.get(f"w{i}") for i in paths()[node]]
        if None in path:
            assert not np.isfinite(answer.log_prob[row]).any()
            continue
        reached += 1
        with torch.no_grad():
            logits = model(torch.tensor([[*read, *path]])).logits[0, -1]
        wide = torch.full((VOCABULARY,), -torch.inf)
        for name, i in place.items():
            old = ["<pad>", "<bos>", "<eos>"].index(name) if name[0] == "<" else int(name[1:])
            if old < VOCABULARY:
                wide[old] = logits[i]
        likely = wide.log_softmax(0)
        expected = scorer.children(wide[None], [[]], [0], [len(path)])
        assert answer.token[row].tolist() == expected.token[0].tolist()
        np.testing.assert_allclose(answer.log_prob[row], likely[answer.token[row]], atol=1e-4)
    assert 3 <= reached < len(nodes_in_order)
    drafter.close()


def test_root_missing_from_the_draft(folder: Path, target: Any, tmp_path: Path) -> None:
    """The draft lacks the root's token; later passes are as if it had been inactive."""
    write_model(tmp_path, "llama", seed=7, tie_word_embeddings=False)
    words(tmp_path, [name if name != "w9" else "other" for name in names(range(VOCABULARY))])
    drafter = translated(tmp_path, target)
    scorer = greedy_scorer()
    predicted_logits(drafter, [1, 5, 8], scorer)
    drafter.commit([0, 1])
    silent = predicted_logits(drafter, [1, 5, 8, TOKENS[0], 9], scorer)
    assert [answer.token.shape for answer in silent] == [(len(nodes), 0) for nodes in CALLS]
    drafter.commit([0, 2])
    after = node_logits(drafter, [1, 5, 8, TOKENS[0], 9, TOKENS[1], 20])
    model: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = model(torch.tensor([[1, 5, 8, TOKENS[0], TOKENS[1], 20]])).logits[0, -1]
    known = [i for i in range(VOCABULARY) if i != 9]
    torch.testing.assert_close(after[0][known], logits[known], atol=1e-4, rtol=1e-4)
    assert after[0][9] == -torch.inf
    drafter.close()


def test_prompt_without_draft_tokens(folder: Path, target: Any) -> None:
    """Its tokenizer may drop a whole text."""
    draft = load_tokenizer(folder)
    draft.backend_tokenizer.normalizer = normalizers.Replace(tokenizers.Regex(".+"), "")
    vocab = VocabMap.between(target, draft)
    drafter = CrossVocabDrafter(plain(folder), vocab, Retokenizer(vocab, target, draft), CPU)
    scorer = greedy_scorer()
    silent = predicted_logits(drafter, IDS[1:], scorer)
    assert [answer.token.shape for answer in silent] == [(len(nodes), 0) for nodes in CALLS]
    drafter.commit([0, 1])
    assert all(
        answer.token.shape[1] for answer in predicted_logits(drafter, [*IDS[1:], TOKENS[0], 9], scorer)
    )
    drafter.close()


SOME = (40, 41, 42, 43)


def answer(target: LoadedModel, drafter: Drafter | None, params: SamplingParams, most: int = 24) -> list[int]:
    """Return at least `most` tokens; all of a pass are included."""
    sequence = DecodeState(target, Sources({"draft": drafter} if drafter else {}))
    sequence.begin(IDS)
    processor = LogitsProcessor(params, VOCABULARY, IDS)
    noise = None if params.greedy else GumbelNoise(params.seed or 0, VOCABULARY, target.device)
    mixture = Mixture.single(drafter, Scorer(processor, noise, Calibration())) if drafter else None
    decoding = DecodingConfig(processor, noise, mixture, GrowthPolicy(24, 4), stop=lambda token: False)
    passes = 0
    while len(sequence.ids) < len(IDS) + most:
        BatchedPass(target, [SequencePass(sequence, decoding, max_depth=8)], max_nodes=1).run()
        passes += 1
    assert drafter is None or passes < most / 2, "it drafts well, being the same model"
    return sequence.ids[len(IDS) : len(IDS) + most]


@pytest.mark.usefixtures("drafters_stay")
@pytest.mark.parametrize(
    ("lacking", "temperature", "device"),
    [((), 0.0, "cpu"), (SOME, 0.7, "cpu"), pytest.param(SOME, 0.7, "cuda", marks=pytest.mark.gpu)],
    indirect=["device"],
)
def test_output_is_unchanged_with_another_vocabulary(
    folder: Path,
    shuffled: Path,
    target: Any,
    temperature: float,
    lacking: tuple[int, ...],
    device: torch.device,
    tmp_path: Path,
) -> None:
    """Output is unchanged whatever tokens the draft lacks."""
    shutil.copytree(shuffled, tmp_path / "draft")
    words(tmp_path / "draft", names([i + 1000 if i in lacking else i for i in ORDER]))
    params = SamplingParams(temperature=temperature, seed=5)
    found = []
    for drafter in (None, translated(tmp_path / "draft", target, device)):
        model = open_model(folder, device=device if drafter else CPU)
        load_all(model, 128)
        found.append(answer(model, drafter, params))
        model.close()
        if drafter:
            drafter.close()
    assert found[0] == found[1] and len(set(found[0])) > 3
