"""Tokenizers of both kinds: byte-level BPE, and words with byte fallback."""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = ["the cat sat on the mat, the cat sat", "日本語の文字 日本語", "🎉🎊 🎉🎊 👩‍🚀", "naïve café"] * 3


SPECIAL = ["<s>", "</s>", "<unk>"]


# Plain words, scripts of two to four bytes, combining characters, joined emoji, and the replacement
# character.
pieces = [*"the cat\n日本🎉é\u0301\u0600\ufffd▁", "the cat", "👩‍🚀", "\ufffd\ufffd", "  "]


def byte_level() -> tokenizers.Tokenizer:
    """Like GPT-2's, but without splitting into words, so that tokens end in the middle of characters."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """Like Llama 2's: words begin with a ▁ that is dropped at the start; rare characters are bytes."""
    pieces = ["▁", *"thecasonm", "▁t", "th", "▁th", "▁the", "at", "▁c", "▁cat", "日"]
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("▁", "t"), ("t", "h"), ("▁t", "h"), ("▁th", "e"), ("a", "t"), ("▁", "c"), ("▁c", "at")]
    model = models.BPE(
        {name: i for i, name in enumerate(names)},
        merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def saved(tokenizer: tokenizers.Tokenizer, folder: Path, **more: Any) -> Path:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **more
    )
    fast.save_pretrained(folder)
    return folder
