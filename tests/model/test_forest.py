"""Rows of several sequences in one pass: the same bits as in passes of each sequence alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.core.errors import UnsupportedModelError
from offspec.model.attention import TreeContext
from offspec.model.cache import TreeCache
from offspec.model.kv_tensors import PerSequenceTensor, parts_in
from offspec.model.loaded import LoadedModel
from offspec.model.pass_parts import SequenceRows, order_of, split_pass, to_input_order
from offspec.model.probe.small_config import small_config
from offspec.model.row_counts import RowCounts
from offspec.sampling.token_tree import TokenTree
from offspec_planners.placement import Placement, Tier
from tests.support.exhaustive import sampled_params
from tests.support.tiny_models import (
    FAMILIES,
    HYBRIDS,
    nothing,
    open_model,
    write_config,
    write_hybrid,
    write_model,
)

_LATENTS = ("bailing_hybrid", "deepseek_v3", "kimi_linear")  # expanded between cache and attention
# A model's own attention, with and without biases, and keys selected by an index.
_OTHERS: dict[str, dict[str, Any]] = {
    "bloom": {},
    "deepseek_v32": {},
    "falcon": {"alibi": True, "new_decoder_architecture": False},
    "mpt": {},
}
_EVERY = (*FAMILIES, *HYBRIDS, *_OTHERS)
_USUAL = ("llama", "qwen3_moe", "gemma4_text", "qwen3_5_text", "deepseek_v3")
_TREE = TokenTree.build(
    range(5, 26, 3), (-1, 0, 0, 1, 1, 3, 2), [0.0] * 7
)  # a text uses the first nodes of it
_CHUNK = 16


@dataclass
class _Text:
    """Sequence: committed tokens, and number of nodes of its trees."""

    ids: list[int]
    nodes: int


def _texts() -> list[_Text]:
    return [
        _Text([3 + (7 * i * i + start * i) % 90 for i in range(rows)], nodes)
        for start, rows, nodes in ((1, 37, 7), (2, 1, 1), (3, 19, 5), (4, 8, 0))
    ]


def _rows(text: _Text, cache: TreeCache, device: torch.device) -> SequenceRows:
    """Return the uncached tokens, with a tree below the last."""
    pending, nodes = text.ids[cache.length :], text.nodes
    tokens, context = TreeContext.of_step(
        [*pending, *_TREE.token[:nodes].tolist()],
        [*range(cache.length, len(text.ids)), *(len(text.ids) + _TREE.depth[:nodes]).tolist()],
        _TREE.ancestors()[:nodes, :nodes],
        prefix=cache.length,
        causal=len(pending),
        device=device,
    )
    return SequenceRows(tokens, context, cache)


def _commit(text: _Text, cache: TreeCache) -> None:
    """Commit the path to the tree's fourth node."""
    path = [node for node in (0, 1, 3) if node < text.nodes]
    cache.commit(len(text.ids) - cache.length, path)
    text.ids += [5 + 3 * node for node in path]


def _passes(model: LoadedModel, together: bool) -> list[list[torch.Tensor]]:
    """Return the states of each sequence in three passes, including auxiliary ones."""
    texts, found, tree_model = _texts(), list[list[torch.Tensor]](), model.tree_model
    caches = [model.new_cache(64) for _ in texts]
    tree_model.aux_layers = (1, len(model.layers))
    for _ in range(3):
        rows = [_rows(text, cache, model.device) for text, cache in zip(texts, caches, strict=True)]
        rows = [some for some in rows if len(some.tokens)]
        made = list[torch.Tensor]()
        for group in [rows] if together else [[alone] for alone in rows]:
            states = tree_model.hidden_of(group)
            made += torch.cat([states, *tree_model.aux_hidden_states.values()], 1).split(
                [len(one.tokens) for one in group]
            )
        found.append(made)
        for text, cache in zip(texts, caches, strict=True):
            _commit(text, cache)
    return found


def _check(model: LoadedModel) -> None:
    with torch.no_grad():
        alone, together = _passes(model, False), _passes(model, True)
    assert [len(made) for made in alone] == [4, 3, 3]
    for one, other in zip(alone, together, strict=True):
        for mine, its in zip(one, other, strict=True):
            assert mine.isfinite().all() and torch.equal(mine, its)
    model.close()


def _write(folder: Path, family: str) -> Path:
    if family in HYBRIDS:
        return write_hybrid(folder, family)
    if family in FAMILIES:
        return write_model(folder, family)
    from transformers import CONFIG_MAPPING

    return write_config(folder, small_config(CONFIG_MAPPING[family](**_OTHERS[family])))


def _load_all(model: LoadedModel, chunk: int = _CHUNK) -> None:
    everything = Placement.in_memory(len(model.layers), range(len(model.layers)), 0)
    model.load(everything, 64, nothing, chunk)


@pytest.mark.parametrize("family", sampled_params(_EVERY, *_USUAL))
def test_each_sequence_has_the_same_result_as_alone(family: str, tmp_path: Path) -> None:
    model = open_model(_write(tmp_path, family))
    assert model.skeleton.supports_batching is (family not in _OTHERS)
    assert model.skeleton.attention_per_sequence is (family in _LATENTS)
    _load_all(model)
    _check(model)


@pytest.mark.parametrize(
    ("family", "chunk", "int8"),
    sampled_params(
        [("gpt_oss", 1024, False), ("qwen3_5_text", 3, True), ("gemma4_text", 6, True)],
        ("gemma4_text", 6, True),
    ),
)
def test_chunks_of_any_size_and_caches_in_8_bits(family: str, chunk: int, int8: bool, tmp_path: Path) -> None:
    model = open_model(_write(tmp_path, family), int8_cache=int8)
    _load_all(model, chunk)
    _check(model)


@pytest.mark.parametrize(("family", "calls"), [("qwen3_moe", 2), ("deepseek_v3", 2), ("deepseek_v32", 7)])
def test_products_cover_all_sequences(family: str, calls: int, tmp_path: Path) -> None:
    """Once for prompts and once for trees, if the model supports it."""
    model = open_model(_write(tmp_path, family))
    _load_all(model, 128)
    counted = list[int]()
    layer: Any = model.skeleton.layers[1]
    hook = layer.mlp.register_forward_pre_hook(lambda mlp, given: counted.append(1))
    caches = [model.new_cache(64) for _ in _texts()]
    with torch.no_grad():
        model.tree_model.hidden_of([_rows(*own, model.device) for own in zip(_texts(), caches, strict=True)])
    hook.remove()
    assert len(counted) == calls
    model.close()


def test_a_layer_is_entered_once_per_pass(tmp_path: Path) -> None:
    """Its weights are streamed once for all sequences."""
    model, done = open_model(write_model(tmp_path)), list[int]()
    model.load(Placement.in_memory(len(model.layers), (), 2), 64, nothing, _CHUNK)
    model.tree_model.on_layer = done.append
    with torch.no_grad():
        _passes(model, True)
    assert done == [1, 2, 3] * 3
    model.close()


def test_split_pass_groups_rows() -> None:
    """Prompts before trees, no sequence twice, at most a chunk except for a single sequence."""
    cpu = torch.device("cpu")
    rows = [_rows(text, TreeCache(1, 4), cpu) for text in _texts()]
    parts = split_pass(rows, 20, RowCounts(4), merges=True)
    assert [[(rows.index(piece.sequence), piece.rows) for piece in part.pieces] for part in parts] == [
        [(0, 18)], [(0, 19), (1, 1)], [(2, 19)], [(3, 8)], [(0, 7), (1, 1), (2, 5)],
    ]  # fmt: skip
    assert [part.padding for part in parts] == [2, 0, 1, 0, 3]
    together = torch.cat([own.tokens for own in rows])[order_of(parts)]
    assert together[-4:].tolist() == [17, 17, 17, 17], "copies of the last row"
    assert torch.equal(to_input_order(together, parts), torch.cat([own.tokens for own in rows]))


def test_a_prompt_and_its_tree_share_a_part_if_both_fit() -> None:
    rows = [_rows(text, TreeCache(1, 4), torch.device("cpu")) for text in _texts()[:1]]  # 37 and a tree of 7

    def counts(chunk: int, mixes: bool) -> list[int]:
        parts = split_pass(rows, chunk, RowCounts(4), mixes=mixes)
        together = torch.cat([own.tokens for own in rows])[order_of(parts)]
        assert torch.equal(to_input_order(together, parts), rows[0].tokens)
        return [part.rows - part.padding for part in parts]

    assert counts(44, True) == [44]
    assert counts(44, False) == [37, 7]
    assert counts(43, True) == [37, 7], "all rows or none: the chunk is full"


def test_keys_of_several_sequences_support_only_attention() -> None:
    keys = [torch.randn(1, 2, rows, 4) for rows in (3, 5)]
    parted = PerSequenceTensor(keys)
    assert parted.shape == (1, 2, 8, 4)
    assert all(torch.equal(*both) for both in zip(parts_in(parted), keys, strict=True))
    with pytest.raises(UnsupportedModelError):
        parted * 2
    with pytest.raises(UnsupportedModelError):
        parted[:, :, :3]


@pytest.mark.gpu
@pytest.mark.parametrize("hosted", [False, True])
def test_on_a_device(hosted: bool, tmp_path: Path) -> None:
    """On one device or two, including values that layers store for later layers.

    The activation is one that a simulated device computes alike at any place, as real devices do.
    """
    folder = write_model(tmp_path, "gemma4_text", hidden_act="relu", hidden_activation="relu")
    model = open_model(folder, device=torch.device("cuda", 0))
    tiers = tuple(Tier.CPU if hosted and layer % 2 else Tier.DEVICE for layer in range(len(model.layers)))
    model.load(Placement(tiers, 2, 2, Tier.DEVICE), 64, nothing, _CHUNK)
    _check(model)
