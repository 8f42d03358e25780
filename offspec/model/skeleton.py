"""transformers model on the meta device: the whole architecture without weights."""

import warnings
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from transformers import cache_utils

from offspec.checkpoint.meta_model import OmittedModule, meta_model
from offspec.checkpoint.ranges import one_line
from offspec.core.errors import CheckpointError, UnsupportedModelError
from offspec.core.monkeypatch import Replacement
from offspec.model import attention, experts
from offspec.model.positions import scale_in_attention
from offspec.model.probe.cache_rows import NOTHING_KEPT, CacheRows
from offspec.model.recurrence.functions import tree_functions

_LONGEST_REASON = 300  # characters


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Model on the meta device, with its parts and their names.

    Args:
        model: Causal language model.
        decoder: Stack of layers with embedding and final norm.
        layers: Decoder layers.
        layers_prefix: Prefix of the parameter names of layer i, before `.i.`.
        embedding: Name of the embedding weight.
        head: Name of the head weight, equal to `embedding` if they are tied.
        rows: Cache size per position, if measured.
        branches: Whether a token tree may have more than one path.
        masked: Whether the layers need the tree as a dense mask.
        own_attention: Whether the layers have their own attention code, which is why they need a mask.
        supports_batching: Whether rows of several sequences may share a layer call, each row attending to its
            own sequence's keys.
        attention_per_sequence: Whether attention nevertheless runs one sequence at a time.
        output_tuple_size: Length of the tuples that layers return; 0 if they return no tuples.
        functions: transformers functions replaced during a pass.
        cache_keyword: Name of the decoder's cache parameter.
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
    own_attention: bool = False
    supports_batching: bool = False
    attention_per_sequence: bool = False
    output_tuple_size: int = 0
    functions: tuple[Replacement, ...] = ()
    cache_keyword: str = "past_key_values"

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def is_stateless(self) -> bool:
        """Whether the layers were measured and have neither recurrent states nor convolution tails."""
        return bool(self.rows.kept) and not (self.rows.state_numbers or self.rows.tail_numbers)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def context_length(self) -> int:
        """Context length of the model in positions."""
        for name in ("max_position_embeddings", "n_positions", "seq_length"):
            value = getattr(self.config, name, None)
            if isinstance(value, int):
                return value
        return 2048

    @property
    def tied(self) -> bool:
        return self.embedding == self.head

    def layer_of(self, parameter: str) -> int | None:
        """Return the index of a parameter's layer, or None for the rest of the model."""
        prefix = self.layers_prefix + "."
        if not parameter.startswith(prefix):
            return None
        return int(parameter[len(prefix) :].split(".", 1)[0])


def skeleton_of(config: Any, dtype: torch.dtype) -> Skeleton:
    """Build the transformers model of a configuration, with parameters on meta and real buffers.

    The quantization settings are removed from the configuration. Raises UnsupportedModelError, with the name
    of the model type, if the model cannot be streamed. Support for token trees is not tested here.
    """
    from transformers import AttentionInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    _refuse(config)
    for part in (config, config.get_text_config()):  # modules only see unpacked values
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    AttentionInterface.register(attention.NAME, attention.attend_tree)
    ALL_EXPERTS_FUNCTIONS.register(experts.NAME, experts.run_experts)
    model = _model(config, attention.NAME, dtype)
    skeleton = _find_parts(model, config) if model is not None else None
    if skeleton is None:
        skeleton = _find_parts(_model(config, "eager", dtype), config, own_attention=True)
        assert skeleton is not None
        return replace(skeleton, masked=True, own_attention=True)
    layers = _cache_layers(config.get_text_config())
    selects = any(isinstance(layer, cache_utils.DynamicIndexedLayer) for _, layer in layers)
    return replace(skeleton, masked=selects)


def _model(config: Any, attention_name: str, dtype: torch.dtype) -> Any:
    """Build the model with this attention function; return None if the model does not support it."""
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
    except Exception as error:  # a size of 0, an unknown name, or any other bad value
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
    # Detected by the class of transformers' own cache for each layer.
    more = {kind for kind, layer in _cache_layers(text) if type(layer).__module__ != cache_utils.__name__}
    if more:
        kinds = " and ".join(sorted(more))
        raise UnsupportedModelError(f"{family} has {kinds} layers, which cache more than keys and values")


def _cache_layers(text: Any) -> list[tuple[str, Any]]:
    """Return kind and cache layer of each layer; empty if the configuration lacks information.

    Models that cache more than keys and values or a state define a cache layer class next to their model. So
    the module of the class decides, because class names and kind names differ between versions of
    transformers.
    """
    try:
        layers = cache_utils.DynamicCache(config=text).layers
    except Exception:  # errors in the configuration show when the model is built
        return []
    kinds = getattr(text, "layer_types", None) or ["recurrent"] * len(layers)
    return list(zip(kinds, layers, strict=False))


def _find_parts(model: Any, config: Any, own_attention: bool = False) -> Skeleton | None:
    """Return the skeleton, or None if the model has its own attention and `own_attention` is not set."""
    family = config.model_type
    found = _stacks(model, model.get_decoder())
    if len(found) == 1 and config.sub_configs:
        model = text_part(model, found[0][0])
    alone = found[0][0] if len(found) == 1 else model
    functions = () if own_attention else tree_functions(model)
    # Hybrid models often do not declare it.
    if not own_attention and not functions and not alone._supports_attention_backend:
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
    """Return modules that directly contain all layers: the decoder, or if it has none, parts for text."""
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
    """Return the innermost model around `decoder` with a head, all other parts replaced by placeholders.

    If text needs a replaced part, the trial of the architecture fails with an error.

    Args:
        model: transformers model, changed in place.
        decoder: Part of the model: the stack of layers with embedding and final norm.
    """
    outer: Any
    for outer in reversed(module_path(model, decoder)):
        if outer.get_output_embeddings() is not None:
            model = outer
            break
    path = module_path(model, decoder)
    kept = {id(part) for part in path} | {id(decoder), id(model.get_output_embeddings())}
    kept.add(id(model.get_input_embeddings()))
    for part in path:
        for name, child in part.named_children():
            if not any(id(inner) in kept for inner in child.modules()):
                setattr(part, name, OmittedModule())
    for part in path[1:]:  # such as separators between images
        for name in part._parameters:
            setattr(part, name, None)
    return model


def module_path(model: torch.nn.Module, inner: torch.nn.Module) -> list[torch.nn.Module]:
    """Return `model` and its parts that contain `inner`, from the outermost to the innermost."""
    if model is inner:
        return []
    for child in model.children():
        if any(part is inner for part in child.modules()):
            return [model, *module_path(child, inner)]
    return [model]


def _impossible(error: Exception) -> CheckpointError:
    return CheckpointError(f"config.json describes an invalid model: {config_error_reason(error)}")


def config_error_reason(error: Exception) -> str:
    """Return in one line why a library rejects a configuration."""
    if isinstance(error, ZeroDivisionError):
        return "one of its sizes is 0; fetch the file again"
    return one_line(error, _LONGEST_REASON)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]
