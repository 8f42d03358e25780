"""A transformers model on the meta device: all of the architecture, none of the weights."""

import warnings
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from transformers import cache_utils

from offspec.checkpoint.meta_model import Unmade, meta_model
from offspec.checkpoint.ranges import one_line
from offspec.core.errors import CheckpointError, UnsupportedModelError
from offspec.core.replaced import Replacement
from offspec.model import attention, experts
from offspec.model.positions import scale_in_attention
from offspec.model.probe.cache_rows import NOTHING_KEPT, CacheRows
from offspec.model.recurrence.functions import tree_functions

_LONGEST_REASON = 300  # characters


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The model and the names by which its parts are found.

    model: the causal LM; decoder: its stack of layers with embedding and final norm; layers: the stack;
    layers_prefix: what parameter names of layer i begin with, before `.i.`; embedding and head: names of
    the two weights, the same name where they are tied. rows: what positions take in the cache, where that was
    measured; branches: whether a token tree may be more than one path. masked: whether its layers are to be
    given a tree as a dense mask; closed: whether they compute attention in their own way, which is why.
    merges: whether rows of several sequences may go through a layer together, each attending to its own keys;
    apart: and attention takes one sequence after the other. wraps: of how many values the tuples are that
    layers return; 0: they return no tuples. functions: of transformers, replaced during a pass.
    cache_keyword: what the decoder calls its cache.
    """

    model: Any
    decoder: Any
    layers: torch.nn.ModuleList
    layers_prefix: str
    embedding: str
    head: str
    rows: CacheRows = NOTHING_KEPT
    branches: bool = True
    masked: bool = False
    closed: bool = False
    merges: bool = False
    apart: bool = False
    wraps: int = 0
    functions: tuple[Replacement, ...] = ()
    cache_keyword: str = "past_key_values"

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def has_no_states(self) -> bool:
        """Whether its layers were measured, and carry neither a state nor the tail of a convolution."""
        return bool(self.rows.kept) and not (self.rows.state_numbers or self.rows.tail_numbers)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def context_length(self) -> int:
        """Positions the model was made for."""
        for name in ("max_position_embeddings", "n_positions", "seq_length"):
            value = getattr(self.config, name, None)
            if isinstance(value, int):
                return value
        return 2048

    @property
    def tied(self) -> bool:
        return self.embedding == self.head

    def layer_of(self, parameter: str) -> int | None:
        """The index of the layer that a parameter belongs to, None for the rest of the model."""
        prefix = self.layers_prefix + "."
        if not parameter.startswith(prefix):
            return None
        return int(parameter[len(prefix) :].split(".", 1)[0])


def skeleton_of(config: Any, dtype: torch.dtype) -> Skeleton:
    """The model of a configuration as transformers reads it, its parameters on meta, its buffers real.

    The configuration loses what it says of quantised weights. Raises UnsupportedModelError, by the family's
    name, for what cannot be streamed; whether it can be run over a token tree is not tried here.
    """
    from transformers import AttentionInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    _refuse(config)
    for part in (config, config.get_text_config()):  # packed weights are values before a module sees them
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    AttentionInterface.register(attention.NAME, attention.attend_tree)
    ALL_EXPERTS_FUNCTIONS.register(experts.NAME, experts.run_experts)
    model = _model(config, attention.NAME, dtype)
    skeleton = _find_parts(model, config) if model is not None else None
    if skeleton is None:
        skeleton = _find_parts(_model(config, "eager", dtype), config, closed=True)
        assert skeleton is not None
        return replace(skeleton, masked=True, closed=True)
    layers = _cache_layers(config.get_text_config())
    selects = any(isinstance(layer, cache_utils.DynamicIndexedLayer) for _, layer in layers)
    return replace(skeleton, masked=selects)


def _model(config: Any, attention_name: str, dtype: torch.dtype) -> Any:
    """The model with this attention; None where it does not know it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = meta_model(
                config, attn_implementation=attention_name, experts_implementation=experts.NAME, dtype=dtype
            )
    except KeyError as error:
        if attention.NAME in str(error):
            return None
        raise _impossible(error) from error
    except ValueError as error:
        raise UnsupportedModelError(
            _first_line(f"{config.model_type} is not a decoder-only language model offspec can run: {error}")
        ) from error
    except Exception as error:  # a size of 0, an unknown name: whatever it fails on
        raise _impossible(error) from error
    model.eval()
    scale_in_attention(model)
    return model


def _refuse(config: Any) -> None:
    family = config.model_type
    try:
        text = config.get_text_config()
    except ValueError as error:
        raise UnsupportedModelError(_first_line(f"{family} is not one language model: {error}")) from error
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{family} is an encoder-decoder model; offspec runs decoder-only ones")
    if not getattr(text, "num_hidden_layers", 0):
        raise CheckpointError("config.json describes a model without layers")
    # By what transformers' own cache keeps for each layer.
    more = {kind for kind, layer in _cache_layers(text) if type(layer).__module__ != cache_utils.__name__}
    if more:
        kinds = " and ".join(sorted(more))
        raise UnsupportedModelError(
            f"{family} has {kinds} layers, which keep more of a token than its keys and values"
        )


def _cache_layers(text: Any) -> list[tuple[str, Any]]:
    """Kind and cache layer of each layer; empty for a configuration that says too little.

    Families that keep more than keys and values, or a state, define a cache layer next to their model. So the
    module of the class decides: its name and the names of the kinds differ between versions of transformers.
    """
    try:
        layers = cache_utils.DynamicCache(config=text).layers
    except Exception:  # the model then shows what it is
        return []
    kinds = getattr(text, "layer_types", None) or ["recurrent"] * len(layers)
    return list(zip(kinds, layers, strict=False))


def _find_parts(model: Any, config: Any, closed: bool = False) -> Skeleton | None:
    """The skeleton; None where the model computes attention in its own way, and is not said to be closed."""
    family = config.model_type
    found = _stacks(model, model.get_decoder())
    if len(found) == 1 and config.sub_configs:
        model = text_part(model, found[0][0])
    alone = found[0][0] if len(found) == 1 else model
    functions = () if closed else tree_functions(model)
    # Hybrids often say nothing of it.
    if not closed and not functions and not alone._supports_attention_backend:
        return None
    model.tie_weights()
    names = {id(module): name for name, module in model.named_modules()}
    output = model.get_output_embeddings()
    if len(found) != 1 or output is None:
        raise UnsupportedModelError(
            f"{family} has no single stack of decoder layers with a head; it cannot be streamed"
        )
    decoder, layers = found[0]
    embedding = names[id(model.get_input_embeddings())] + ".weight"
    head = names[id(output)] + ".weight"
    takes_parameters = "cache_params" in signature(type(decoder).forward).parameters
    tied = head in (getattr(model, "all_tied_weights_keys", None) or {})
    return Skeleton(
        model=model,
        decoder=decoder,
        layers=layers,
        layers_prefix=names[id(layers)],
        embedding=embedding,
        head=embedding if tied else head,
        functions=functions,
        cache_keyword="cache_params" if takes_parameters else "past_key_values",
    )


def _stacks(model: Any, decoder: Any) -> list[tuple[Any, torch.nn.ModuleList]]:
    """Models with all of the layers right below them: the decoder, or where it has none, parts for text."""
    from transformers import PreTrainedModel

    text = model.config.get_text_config()
    count = text.num_hidden_layers
    parts_for_text = [
        part
        for part in model.modules()
        if isinstance(part, PreTrainedModel) and isinstance(part.config, type(text))
    ]
    for parts in ([decoder], parts_for_text):
        found = [
            (part, child)
            for part in parts
            for child in part.children()
            if isinstance(child, torch.nn.ModuleList) and len(child) == count
        ]
        if found:
            return found
    return []


def text_part(model: Any, decoder: torch.nn.Module) -> Any:
    """The innermost model around `decoder` that has a head, with what lies beside these two replaced.

    Text that needs such a part fails loudly, and a trial of the architecture then tells.

    Args:
        model: As transformers makes it, changed in place.
        decoder: A part of it: its stack of layers with embedding and final norm.
    """
    outer: Any
    for outer in reversed(way_to(model, decoder)):
        if outer.get_output_embeddings() is not None:
            model = outer
            break
    way = way_to(model, decoder)
    kept = {id(part) for part in way} | {id(decoder), id(model.get_output_embeddings())}
    kept.add(id(model.get_input_embeddings()))
    for part in way:
        for name, child in part.named_children():
            if not any(id(inner) in kept for inner in child.modules()):
                setattr(part, name, Unmade())
    for part in way[1:]:  # as what stands between two pictures
        for name in part._parameters:
            setattr(part, name, None)
    return model


def way_to(model: torch.nn.Module, inner: torch.nn.Module) -> list[torch.nn.Module]:
    """`model` and the parts that lie around `inner` in it, from the outside to the inside."""
    if model is inner:
        return []
    for child in model.children():
        if any(part is inner for part in child.modules()):
            return [model, *way_to(child, inner)]
    return [model]


def _impossible(error: Exception) -> CheckpointError:
    return CheckpointError(f"config.json describes a model that cannot be: {of_config(error)}")


def of_config(error: Exception) -> str:
    """In one line, why a library cannot make anything of a configuration."""
    if isinstance(error, ZeroDivisionError):
        return "one of its sizes is 0; fetch the file again"
    return one_line(error, _LONGEST_REASON)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]
