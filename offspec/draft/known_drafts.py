"""Published drafts for well-known targets, by hub id, and the choice made by `--draft auto`.

Nothing here is downloaded or checked; opening a draft checks whether it fits. Trained heads precede small
models of the same family, the better kind first.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from offspec.checkpoint.known_models import known_config, known_models
from offspec.checkpoint.open import DEMO, DEMO_WIDE
from offspec.core.config import LOOKUPS, MTP, SELF_DRAFT
from offspec.draft.kinds import KINDS


@dataclass(frozen=True, slots=True)
class KnownDraft:
    """A published draft for a target.

    Args:
        id: Value for `--draft`.
        kind: A key of KINDS, or "model".
        reason: Short reason to use it.
        target: The model it drafts for.
        share: Its weights as a share of the target's, by their names; 0 for a head or if the names have no
            sizes.
    """

    id: str
    kind: str
    reason: str
    target: str
    share: float = 0.0

    @property
    def trained(self) -> bool:
        """Whether it is a head, trained for this target."""
        return self.kind != "model"


_MIXED = LOOKUPS[0]  # mixed with every draft, since it costs next to nothing
# Maximum share of the target's weights and of its stored bytes: a larger model takes too long to draft.
_SMALL, _SMALL_BYTES = 1 / 6, 0.3

_MODEL = "a small model with the same vocabulary"

_LLAMA_3 = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"
_LLAMA_2 = "meta-llama/Llama-2-7b-chat-hf", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
# By prefix of a name: models of one vocabulary, the largest first.
_SIBLINGS = {
    "llama-3-": _LLAMA_3,
    "llama-3.": _LLAMA_3,
    "llama-2-": _LLAMA_2,
    "vicuna-": _LLAMA_2[1:],
    "mistral-small-3.1-": ("alamios/Mistral-Small-3.1-DRAFT-0.5B",),
    "qwen2.5-": ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
    "qwen3-": ("Qwen/Qwen3-8B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"),
}

_HEADS: dict[str, dict[str, tuple[str, ...]]] = {  # by kind, the best first, and target
    "eagle3": {
        "meta-llama/Llama-3.1-8B-Instruct": (
            "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
            "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
        ),
        "meta-llama/Llama-3.3-70B-Instruct": (
            "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
            "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
            "lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge",
        ),
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": ("yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",),
        "lmsys/vicuna-13b-v1.3": ("yuhuili/EAGLE3-Vicuna1.3-13B",),
        "Qwen/Qwen3-1.7B": ("AngelSlim/Qwen3-1.7B_eagle3",),
        "Qwen/Qwen3-4B": ("AngelSlim/Qwen3-4B_eagle3",),
        "Qwen/Qwen3-8B": ("AngelSlim/Qwen3-8B_eagle3", "RedHatAI/Qwen3-8B-speculator.eagle3"),
        "Qwen/Qwen3-14B": ("AngelSlim/Qwen3-14B_eagle3", "RedHatAI/Qwen3-14B-speculator.eagle3"),
        "Qwen/Qwen3-32B": ("AngelSlim/Qwen3-32B_eagle3", "RedHatAI/Qwen3-32B-speculator.eagle3"),
        "Qwen/Qwen3-30B-A3B": ("AngelSlim/Qwen3-a3B_eagle3",),
        "Qwen/Qwen3-30B-A3B-Instruct-2507": ("RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3",),
        "Qwen/Qwen3-235B-A22B": ("RedHatAI/Qwen3-235B-A22B-speculator.eagle3",),
        "Qwen/Qwen3-235B-A22B-Instruct-2507": ("RedHatAI/Qwen3-235B-A22B-Instruct-2507-speculator.eagle3",),
        "openai/gpt-oss-20b": ("RedHatAI/gpt-oss-20b-speculator.eagle3",),
        "openai/gpt-oss-120b": ("RedHatAI/gpt-oss-120b-speculator.eagle3", "lmsys/EAGLE3-gpt-oss-120b-bf16"),
    },
    "eagle": {
        "meta-llama/Meta-Llama-3-8B-Instruct": ("yuhuili/EAGLE-LLaMA3-Instruct-8B",),
        "meta-llama/Meta-Llama-3-70B-Instruct": ("yuhuili/EAGLE-LLaMA3-Instruct-70B",),
        "meta-llama/Llama-3.1-8B-Instruct": ("yuhuili/EAGLE-LLaMA3.1-Instruct-8B",),
        "meta-llama/Llama-2-7b-chat-hf": ("yuhuili/EAGLE-llama2-chat-7B",),
        "meta-llama/Llama-2-13b-chat-hf": ("yuhuili/EAGLE-llama2-chat-13B",),
        "meta-llama/Llama-2-70b-chat-hf": ("yuhuili/EAGLE-llama2-chat-70B",),
        "lmsys/vicuna-7b-v1.3": ("yuhuili/EAGLE-Vicuna-7B-v1.3",),
        "lmsys/vicuna-13b-v1.3": ("yuhuili/EAGLE-Vicuna-13B-v1.3",),
        "lmsys/vicuna-33b-v1.3": ("yuhuili/EAGLE-Vicuna-33B-v1.3",),
        "mistralai/Mixtral-8x7B-Instruct-v0.1": ("yuhuili/EAGLE-mixtral-instruct-8x7B",),
        "Qwen/Qwen2-7B-Instruct": ("yuhuili/EAGLE-Qwen2-7B-Instruct",),
        "Qwen/Qwen2-72B-Instruct": ("yuhuili/EAGLE-Qwen2-72B-Instruct",),
        "Qwen/Qwen2.5-7B-Instruct": ("leptonai/EAGLE-Qwen2.5-7B-Instruct",),
    },
    "medusa": {
        "lmsys/vicuna-7b-v1.3": ("FasterDecoding/medusa-vicuna-7b-v1.3",),
        "lmsys/vicuna-13b-v1.3": ("FasterDecoding/medusa-vicuna-13b-v1.3",),
        "lmsys/vicuna-33b-v1.3": ("FasterDecoding/medusa-vicuna-33b-v1.3",),
    },
    "mlp_speculator": {
        "meta-llama/Meta-Llama-3-8B-Instruct": ("ibm-ai-platform/llama3-8b-accelerator",),
        "meta-llama/Meta-Llama-3-70B-Instruct": ("ibm-ai-platform/llama3-70b-accelerator",),
        "meta-llama/Llama-3.1-8B-Instruct": ("ibm-ai-platform/llama3-8b-accelerator",),
        "meta-llama/Llama-3.1-70B-Instruct": ("ibm-ai-platform/llama3-70b-accelerator",),
        "meta-llama/Llama-2-13b-chat-hf": ("ibm-ai-platform/llama-13b-accelerator",),
        "meta-llama/Llama-2-70b-chat-hf": ("ibm-ai-platform/llama2-70b-accelerator",),
    },
}
# Suffixes of model names that mark further training, after which a head for the base model predicts badly.
_OTHERWISE_TRAINED = re.compile(r"base|thinking|instruct|embedding|coder|(?<![a-z])vl(?![a-z])|\d{4}")
_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
)


def known_drafts(target: str, config: Mapping[str, Any] | None = None) -> tuple[KnownDraft, ...]:
    """Return the published drafts for a target, the best kind first; empty if the target is not well known.

    Args:
        target: A hub id, a folder or a file, recognized by the last part of its name.
        config: Contents of its config.json, which may name the model or have the shape of a known one; then
            the drafts of all models of that shape are returned.
    """
    if target == DEMO_WIDE:
        return (KnownDraft(DEMO, "model", "the small model that it is a wide copy of", target),)
    config = config or {}
    found: dict[str, KnownDraft] = {}
    modules = config.get("num_nextn_predict_layers")
    if isinstance(modules, int) and modules > 0:
        found[MTP] = KnownDraft(MTP, MTP, KINDS[MTP].reason, target)
    for names in ((target,), (str(config.get("_name_or_path") or ""),), _of_shape(config)):
        drafts = [draft for name in names for draft in _named(name)]
        drafts.sort(key=lambda draft: [*KINDS, "model"].index(draft.kind))
        for draft in drafts:
            found.setdefault(draft.id, draft)
        if drafts:
            break
    return tuple(found.values())


def _named(name: str) -> Iterator[KnownDraft]:
    """Yield the drafts of the target whose name is a prefix of this one, and smaller models of its family."""
    stem = _stem(name)
    targets = dict.fromkeys(target for heads in _HEADS.values() for target in heads)
    named = [target for target in targets if re.match(rf"{re.escape(_stem(target))}(?![a-z0-9])", stem)]
    target = max(named, key=len, default="")
    if target and not _OTHERWISE_TRAINED.search(stem.removeprefix(_stem(target))):
        for kind, heads in _HEADS.items():
            for head in heads.get(target, ()):
                yield KnownDraft(head, kind, KINDS[kind].reason, target)
    for family, siblings in _SIBLINGS.items():
        if stem.startswith(family):
            for sibling in siblings:
                share = _billions(sibling) / _billions(name)
                if share < 1:
                    yield KnownDraft(sibling, "model", _MODEL, name, share)


def _stem(name: str) -> str:
    """Return the distinctive part of a name in lower case: "meta-llama/Meta-Llama-3-8B" gives
    "llama-3-8b".
    """
    return PurePath(name).name.lower().removeprefix("meta-").removesuffix("-hf")


def _billions(name: str) -> float:
    """Return the parameters in billions according to a model's name; infinity if the name has no size."""
    sizes = re.findall(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)b(?![a-z])", _stem(name))
    return float(sizes[0]) if sizes else float("inf")


def _of_shape(config: Mapping[str, Any]) -> tuple[str, ...]:
    shape = [config.get(key) for key in _SHAPE]
    if None in shape:
        return ()
    return tuple(
        name for name in known_models() if [(known_config(name) or {}).get(key) for key in _SHAPE] == shape
    )


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The draft sources that "auto" selects.

    Args:
        names: Names of the sources.
        line: A notice for the user; "" if there is nothing to explain.
    """

    names: tuple[str, ...]
    line: str = ""


def choose_draft(
    known: Sequence[KnownDraft],
    is_cached: Callable[[str], bool],
    why_unusable: Callable[[str], str | None],
    *,
    may_download: bool,
    bits: float = 16,
) -> DraftChoice:
    """Choose the first usable draft.

    The order is: a cached trained head; a model of the target's family, several times smaller; a self-draft;
    a head to download, or else the smallest model.

    Args:
        known: Published drafts for the target, the best kind first.
        is_cached: Returns whether a hub id needs no download.
        why_unusable: Opens a draft and returns a clause why it cannot be used; None if it can.
        may_download: Whether downloading a small model is preferred to a self-draft.
        bits: Bits per stored weight of the target; a small model's are stored in 16.
    """
    refused = list[str]()

    def usable(name: str) -> bool:
        if (problem := why_unusable(name)) is not None:
            refused.append(problem)
        return problem is None

    most = min(_SMALL, _SMALL_BYTES * bits / 16)
    small = [draft for draft in known if not draft.trained and draft.share <= most]
    heads = [draft for draft in known if draft.trained and is_cached(draft.id)]
    for draft in (*heads, *(draft for draft in small if may_download or is_cached(draft.id))):
        if usable(draft.id):
            return DraftChoice((draft.id, _MIXED), f"draft: {draft.id}, {draft.reason}, with {_MIXED}")
    if usable(SELF_DRAFT):
        return DraftChoice((SELF_DRAFT, _MIXED), _other_than(known, small, refused))
    tried = {draft.id for draft in small} if may_download else set[str]()
    left = [draft for draft in known if not is_cached(draft.id) and draft.id not in tried]
    # Without room for a self-draft, a head is the most likely to fit, or else the smallest model.
    fetched = next(iter([draft for draft in left if draft.trained] or left[-1:]), None)
    if fetched is not None and usable(fetched.id):
        line = f"draft: {fetched.id}, {fetched.reason}, with {_MIXED}, since {refused[-1]}"
        return DraftChoice((fetched.id, _MIXED), line)
    return DraftChoice((_MIXED,), f"draft: {_MIXED} alone, since {'; '.join(refused)}")


def _other_than(known: Sequence[KnownDraft], small: Sequence[KnownDraft], refused: Sequence[str]) -> str:
    """Return a notice for a self-draft: why a cached draft was refused, or which draft could be
    downloaded.
    """
    if refused:
        return f"draft: the target itself, quantized, with {_MIXED}, since {refused[0]}"
    trained = [draft for draft in known if draft.trained]
    if not (trained or small):
        return ""
    best = (trained or small)[0]
    kind = f"{best.target} has a trained head" if trained else "a small model of its family may be faster"
    return f'draft: the target itself, quantized, with {_MIXED}; {kind}, which `draft="{best.id}"` fetches'
