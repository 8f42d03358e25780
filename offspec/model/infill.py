"""Fill in the middle (Bavarian et al. 2022): text between a prefix and a suffix, by a tokenizer's marks."""

from collections.abc import Mapping
from dataclasses import dataclass

# Before the prefix, before the suffix, and before the text to write.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
_ENDS = (
    *("<|endoftext|>", "▁<EOT>", "<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<|file_sep|>"),
    *("<|file_separator|>", "<file_sep>"),
)


@dataclass(frozen=True, slots=True)
class InfillMarks:
    """Ids of the marks before prefix, suffix and middle, and of tokens that end the middle."""

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]


def infill_marks(vocabulary: Mapping[str, int]) -> InfillMarks | None:
    """Return the marks of a vocabulary; None if it has none that are known."""
    for names in _MARKS:
        if all(name in vocabulary for name in names):
            prefix, suffix, middle = (vocabulary[name] for name in names)
            ends = (vocabulary[name] for name in (*names, *_ENDS) if name in vocabulary)
            return InfillMarks(prefix, suffix, middle, tuple(ends))
    return None
