"""The fused forward compared with transformers' own, in float32: trees, prompts, commits, other shapes."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.model.attention import TreeContext
from offspec.model.fused import linear
from offspec.model.fused import model as lean
from offspec.model.fused.model import FusedModel, build_fused_model
from offspec.model.loaded import LoadedModel
from offspec.model.pass_parts import SequenceRows
from offspec.model.runner import TreeModel
from offspec.sampling.token_tree import TokenTree
from tests.support.exhaustive import sampled_params
from tests.support.tensor_bytes import tensor_bytes
from tests.support.tiny_models import CALIBRATION, load_all, open_model, write_model

_CPU = torch.device("cpu")
_SPREAD = 0.2  # of the weights: random layers with larger ones multiply every rounding error


def _rope(kind: str, theta: float = 1e4, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **more}


_FACTORS = {"factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **_FACTORS)
_LONG = _rope(
    "longrope",
    short_factor=[1.0, 1.5, 2.0, 2.5],
    long_factor=[2.0, 3.0, 4.0, 5.0],
    original_max_position_embeddings=24,
)
_TWO_ROPES = {"sliding_attention": _rope("default"), "full_attention": _rope("linear", 1e6, factor=8.0)}
_SOME_WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

# Each family once with its optional settings, and once without.
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3}),
    "llama, no groups": ("llama", {"num_key_value_heads": 4, "hidden_act": "gelu"}),
    "mistral": ("mistral", {}),
    "mistral, no window": ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", _SOME_WINDOWS),
    "qwen3": ("qwen3", {"rope_parameters": _rope("yarn", **_FACTORS), "head_dim": 16}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3, no window": ("phi3", {"sliding_window": None, "rope_parameters": _LONG}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"final_logit_softcapping": 3.0}),
    "gemma2, no caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3_text", {"rope_parameters": _TWO_ROPES, "final_logit_softcapping": 3.0}),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in ("gpt2", "gemma3n_text", "olmo", "mixtral")},
    "relu": ("llama", {"hidden_act": "relu"}),
    "sees ahead": ("gemma", {"use_bidirectional_attention": True}),
    "dynamic rope": ("llama", {"rope_parameters": _rope("dynamic", factor=2.0)}),
}


def _loaded(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    model = open_model(folder, dtype)
    load_all(model, 64)
    return model


def _take(model: LoadedModel) -> FusedModel:
    found = build_fused_model(model.skeleton, 64, _CPU, lambda index: model.layers[index].unbind())
    assert found is not None
    return found


def _fixed(model: FusedModel) -> FusedModel:
    """Return the same model with steps of fixed shape, and its own cache."""
    return FusedModel(model.skeleton, model._shape, model._layers, 64, _CPU, static=True)


def _pair(name: str, folder: Path) -> tuple[LoadedModel, LoadedModel]:
    family, overrides = PLAIN[name]
    write_model(folder, family, spread=_SPREAD, **overrides)
    return _loaded(folder), _loaded(folder)


@pytest.fixture(params=["mistral", "gemma3"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[LoadedModel, LoadedModel]:
    return _pair(request.param, tmp_path)


class _Both:
    """Runs the same rows through two models and compares the results."""

    def __init__(self, truth: TreeModel, other: FusedModel) -> None:
        self.models = truth, other
        # A norm after attention scales up a short vector and its rounding errors: even the reference differs
        # from float64 by 3e-5 then.
        self.tolerance = 1e-4 if other._layers[0].post_attention_norm is not None else 1e-5
        self.generator = torch.Generator().manual_seed(4)

    def run(self, pending: int, parents: list[int], before: int = 0) -> None:
        """Run `pending` rows of a chain (in the first step of a tree), then one with `before` rows run."""
        rows = pending + len(parents)
        fresh = rows if not before else len(parents) - before
        tokens = torch.randint(3, 90, (fresh,), generator=self.generator)
        tree = TokenTree.build(range(len(parents)), parents, [0.0] * len(parents))
        depth, sees = tree.depth.tolist(), torch.from_numpy(tree.ancestors())
        outs = []
        for model in self.models:
            prefix = model.cache.length
            position = [*range(prefix, prefix + pending), *(prefix + pending + d for d in depth)]
            context = TreeContext(prefix, torch.tensor(position), pending, sees)
            with torch.inference_mode():
                outs.append(model.logits(model.hidden(tokens, context)))
        assert outs[0].shape == outs[1].shape and outs[0].std() > 0.1
        assert torch.allclose(outs[0], outs[1], atol=self.tolerance, rtol=self.tolerance)
        assert torch.equal(outs[0].argmax(-1), outs[1].argmax(-1))

    def commit(self, pending: int, nodes: list[int]) -> None:
        with torch.inference_mode():
            for model in self.models:
                model.cache.commit(pending, nodes)

    def rewind(self, length: int) -> None:
        for model in self.models:
            model.cache.rewind(length)


def _conversation(both: _Both) -> None:
    tree = [-1, 0, 0, 1, 1, 2, 5]
    both.run(9, tree[:1])
    both.run(9, tree[:3], before=1)
    both.run(9, tree, before=3)
    both.commit(9, [0, 2, 5, 6])  # a path that is not the first rows
    both.run(3, tree[:1])  # with three tokens that were not drafted
    both.run(3, tree[:5], before=1)
    both.rewind(13)  # cancelled in the middle
    both.run(0, [-1, 0, 0, 0])
    both.commit(0, [0])  # a path that is the first rows
    both.rewind(4)  # another prompt with the same beginning
    both.run(12, [-1, 0])


@pytest.mark.parametrize(
    "name", sampled_params(PLAIN, "llama", "mistral", "qwen3", "phi3", "gemma", "gemma2", "gemma3")
)
def test_the_fused_model_matches_transformers(name: str, tmp_path: Path) -> None:
    """So do steps of fixed shape: those of a CUDA graph, operation by operation on the CPU."""
    truth, other = _pair(name, tmp_path)
    lean_ = _take(other)
    _conversation(_Both(truth.tree_model, lean_))
    truth.tree_model.cache.rewind(0)
    _conversation(_Both(truth.tree_model, _fixed(lean_)))


def test_rows_of_several_sequences_match_separate_passes(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """Attention of few rows is then one product; one sequence has more rows and a longer text."""
    model = _take(pair[1])
    generator, caches = torch.Generator().manual_seed(2), [model.cache.empty_copy() for _ in range(3)]
    for counts in ((20, 1, 9), (3, 7, 1)):  # the second time after the first was committed
        rows = [
            SequenceRows(
                torch.randint(3, 90, (count,), generator=generator),
                TreeContext(
                    prefix=cache.length,
                    position=torch.arange(cache.length, cache.length + count),
                    causal=0,
                    ancestors=torch.ones(count, count, dtype=torch.bool).tril(),
                ),
                cache,
            )
            for count, cache in zip(counts, caches, strict=True)
        ]
        together = model.hidden_of(rows).split(counts)
        for own, found in zip(rows, together, strict=True):
            own.cache.rewind(own.cache.length)
            assert torch.allclose(found, model.hidden_of([own]), atol=1e-4, rtol=1e-4)
            own.cache.commit(len(found), [])


def test_long_prompts_run_in_chunks_and_the_cache_grows(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lean, "_CHUNK", 7)
    lean_ = _take(pair[1])
    for model in (lean_, _fixed(lean_)):
        both = _Both(pair[0].tree_model, model)
        both.run(100, [-1, 0, 1])  # the capacity is 64
        both.commit(100, [0, 1])
        both.run(1, [-1, 0, 0])
        both.rewind(0)


def test_a_step_can_be_cancelled_before_each_layer(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """With busy processes a step may take a second: it must notice them, and Ctrl-C, while it runs."""
    lean_ = _take(pair[1])
    both = _Both(pair[0].tree_model, lean_)
    both.run(9, [-1, 0])
    both.commit(9, [0])
    end, none = lean_.cache.length, torch.zeros(0, 0, dtype=torch.bool)
    tokens, context = torch.arange(3, 6), TreeContext(end, torch.arange(end, end + 3), 3, none)
    for last in range(len(lean_.skeleton.layers)):
        looks = iter(range(last))

        def look(looks: Iterator[int] = looks) -> None:
            if next(looks, None) is None:
                raise KeyboardInterrupt

        lean_.check_cancelled = look
        with pytest.raises(KeyboardInterrupt):
            lean_.hidden(tokens, context)
        assert next(looks, None) is None
    lean_.check_cancelled = None
    both.run(2, [-1, 0])


@pytest.mark.parametrize("static", [False, True])
def test_unused_cache_rows_have_no_effect(tmp_path: Path, static: bool) -> None:
    folder = write_model(tmp_path / "model", "qwen3", spread=_SPREAD)
    lean_, truth = _take(_loaded(folder)), _loaded(folder).tree_model
    lean_ = _fixed(lean_) if static else lean_
    both = _Both(truth, lean_)
    both.run(5, [-1, 0, 0])
    both.commit(5, [0])
    # At fixed shapes the rest of the cache is multiplied by zero, so its values must be finite.
    poison = 1e30 if static else torch.nan
    lean_.cache.block[:, :, 6:] = poison
    both.run(0, [-1, 0, 0, 1])
    both.commit(0, [0, 1, 3])
    both.run(1, [-1])


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_shapes_keep_their_own_forward(name: str, tmp_path: Path) -> None:
    family, overrides = REFUSED[name]
    model = _loaded(write_model(tmp_path / "model", family, **overrides))
    before = {key: id(value) for key, value in model.skeleton.layers[0].named_parameters()}
    assert build_fused_model(model.skeleton, 64, _CPU, pytest.fail) is None
    assert {key: id(value) for key, value in model.skeleton.layers[0].named_parameters()} == before


def test_weights_are_in_memory_once(tmp_path: Path) -> None:
    """While layers are fused, at most one layer is in memory in both forms."""
    model, alive = _loaded(write_model(tmp_path / "model")), list[int]()
    layers = model.skeleton.layers
    originals = [[weakref.ref(each.untyped_storage()) for each in layer.parameters()] for layer in layers]
    matrices = sum(4 * each.numel() for layer in layers for each in layer.parameters() if each.dim() == 2)

    def release(index: int) -> None:
        model.layers[index].unbind()
        gc.collect()
        alive.append(sum(any(ref() is not None for ref in refs) for refs in originals))

    lean_ = build_fused_model(model.skeleton, 64, _CPU, release)
    assert lean_ is not None and len(alive) == 3
    assert all(count <= 3 - index for index, count in enumerate(alive))
    assert all(parameter.is_meta for layer in layers for parameter in layer.parameters())
    fused = [x for layer in lean_._layers for x in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    kept = sum(tensor_bytes(product) for product in fused if isinstance(product, linear.DenseLinear))
    assert kept == matrices


def test_shared_weights_are_not_changed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tie_word_embeddings=True)
    target, draft = _loaded(folder), open_model(folder)
    draft.load_quantized(4, True, 64, lambda done, total: None, CALIBRATION, target.rest_tensors)
    before = {name: (id(tensor), tensor.clone()) for name, tensor in target.rest_tensors.items()}
    lean_ = _take(draft)
    with torch.inference_mode():
        lean_.logits(lean_.hidden(torch.arange(9), TreeContext.chain(9, _CPU)))
    lean_.close()
    for name, tensor in target.rest_tensors.items():
        assert id(tensor) == before[name][0] and torch.equal(tensor, before[name][1])


def test_bfloat16_layouts_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model", "qwen2", spread=_SPREAD)
    models = [_take(_loaded(folder, torch.bfloat16))]
    monkeypatch.setattr(linear, "has_mkldnn_bf16_linear", lambda: False)
    models.append(_take(_loaded(folder, torch.bfloat16)))
    outs = []
    for model in models:
        with torch.inference_mode():
            outs.append(model.logits(model.hidden(torch.arange(3, 23), TreeContext.chain(20, _CPU))).float())
    assert outs[0].std() > 0.5
    assert (outs[0] - outs[1]).abs().max() < 0.1 * outs[0].std()


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_without_torchs_packed_products_plain_ones_are_used(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    class _Missing:
        def __getattr__(self, name: str) -> Any:
            raise error(name)

    for space, can in (("mkldnn", linear.has_mkldnn_bf16_linear), ("aten", linear.has_int4_matmul)):
        monkeypatch.setattr(torch.ops, space, _Missing())
        can.cache_clear()
        try:
            assert not (can() if space == "mkldnn" else can(_CPU, torch.float32))
        finally:
            can.cache_clear()
