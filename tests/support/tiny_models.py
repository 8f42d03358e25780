"""Tiny random models of many families, saved as real checkpoints, and engines over them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from offspec.checkpoint import open_checkpoint
from offspec.core.config import LOOKUPS, EngineConfig
from offspec.core.events import Event, ignore_event
from offspec.draft.lm import LMDrafter
from offspec.draft.lookup.ngram import NgramLookup
from offspec.draft.lookup.suffix import SuffixLookup
from offspec.draft.mix.sources import Sources
from offspec.engine.engine import Engine
from offspec.model.loaded import LoadedModel
from offspec.model.tokenizer import TextCodec, load_tokenizer
from offspec.plan.load import Assembly
from offspec_planners.placement import Placement

VOCABULARY = 96
CALIBRATION = [3 + (5 * i * i + i) % 90 for i in range(48)]
_CPU = torch.device("cpu")
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

_SLIDING, _FULL = "sliding_attention", "full_attention"
_UNTIED = {
    "tie_word_embeddings": False
}  # with random tied embeddings, these families only repeat their last token

# Additions to the common configuration, and overrides of it, for each family.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {},
    "phi": {"head_dim": None},
    "phi3": {"sliding_window": 7},
    "gemma": {},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, **_UNTIED},
    "gemma3_text": {
        "sliding_window": 5,
        "query_pre_attn_scalar": 8,
        "layer_types": [_SLIDING, _SLIDING, _FULL],
        **_UNTIED,
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 6, "layer_types": [_SLIDING, _FULL, _SLIDING]},
    "cohere": {},
    "cohere2": {"sliding_window": 6, "layer_types": [_SLIDING, _SLIDING, _FULL]},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.8},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "starcoder2": {"sliding_window": 6},
    "gpt_neox": {"num_key_value_heads": 4},
    "smollm3": {},
    "helium": {},
    "ernie4_5": {},
    "seed_oss": {},
    "arcee": {},
    "exaone4": {"sliding_window": 6, "layer_types": [_SLIDING, _SLIDING, _FULL]},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512, "n_inner": 48},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "qwen2_moe": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": [_SLIDING, _FULL, _SLIDING],
        **_EXPERTS,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_moe": _EXPERTS,
    "deepseek_v3": {
        "head_dim": None,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 1,
        "layer_types": [_SLIDING, _FULL, _FULL],
        "sliding_window": 5,
        "intermediate_size": [48] * 3,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        **_UNTIED,
    },
    "gemma4_text": {  # layers of two head sizes; the last layer is wider and has no keys of its own
        "num_kv_shared_layers": 1,
        "layer_types": [_SLIDING, _FULL, _FULL],
        "sliding_window": 5,
        "global_head_dim": 16,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        **_UNTIED,
    },
    "llama4_text": {  # the middle layer attends to all, without rotary embedding, and scales queries
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "attention_chunk_size": 6,
        "floor_scale": 4,
        "no_rope_layers": [1, 0, 1],
        "interleave_moe_layer_step": 2,
    },
    "mimo_v2_flash": {
        "num_attention_heads": 8,
        "v_head_dim": 6,
        "sliding_window": 6,
        "layer_types": [_FULL, _SLIDING, _SLIDING],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "layer_types": [_SLIDING, _FULL, _SLIDING],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip

# Families with recurrent layers, and settings that make small models narrow and use each kind of layer.
HYBRIDS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {},
    "bamba": {"attn_layer_indices": [1, 3]},
    "falcon_h1": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
    },
    "falcon_mamba": {"hidden_size": 64},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {},
    "lfm2": {"layer_types": ["conv", _FULL] * 16},
    "lfm2_moe": {"layer_types": ["conv", _FULL] * 16},
    "lfm3": {},
    "mamba": {"hidden_size": 64},
    "mamba2": {"hidden_size": 512, "num_heads": 16, "n_groups": 2, "state_size": 32},
    "nemotron_h": {},
    "olmo_hybrid": {},
    "qwen3_5_moe_text": {},
    "qwen3_5_text": {},
    "qwen3_next": {},
    "zamba2": {},
}


def write_model(
    folder: Path, family: str = "llama", seed: int = 0, spread: float = 0.5, **overrides: Any
) -> Path:
    """Write a random float32 model and a word-level tokenizer; a larger `spread` makes predictions surer."""
    from transformers import AutoConfig

    wanted = {**_COMMON, **FAMILIES.get(family, {}), **overrides}
    config = AutoConfig.for_model(
        family, **{key: value for key, value in wanted.items() if value is not None}
    )
    return write_config(folder, config, seed, lambda matrix: spread)


_SEEDS = {"zamba2": 4}  # with other seeds it repeats itself, or transformers differs with and without a cache


def write_hybrid(folder: Path, family: str, seed: int | None = None) -> Path:
    """Write a small random model of one of HYBRIDS; the default seed gives varied output."""
    from transformers import CONFIG_MAPPING

    from offspec.model.probe.small_config import small_config

    given = {**HYBRIDS[family], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return write_config(
        folder,
        small_config(CONFIG_MAPPING[family](**given).get_text_config()),
        _SEEDS.get(family, 0) if seed is None else seed,
    )


def write_config(
    folder: Path,
    config: Any,
    seed: int = 0,
    spread: Callable[[torch.Tensor], float] = lambda matrix: 1.5 * matrix.shape[-1] ** -0.5,
) -> Path:
    """Write a random model of any configuration; `spread` is the standard deviation for each matrix."""
    torch.manual_seed(seed)
    model = auto_class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, spread(parameter))
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    write_tokenizer(folder, config.get_text_config().vocab_size)
    return folder


def auto_class(config: Any) -> Any:
    """Return the class of transformers that builds the whole model of a configuration, with its encoders."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    flat = config.get_text_config() is config and type(config) in AutoModelForCausalLM._model_mapping
    whole = type(config) in AutoModelForMultimodalLM._model_mapping
    return AutoModelForMultimodalLM if whole and not flat else AutoModelForCausalLM


def disturb(folder: Path) -> None:
    """Change a model's weights a little, so that it agrees in part with the original."""
    from safetensors.torch import load_file, save_file

    torch.manual_seed(3)
    file = folder / "model.safetensors"
    tensors = {
        name: tensor * (1 + 0.03 * torch.randn_like(tensor)) for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def write_tokenizer(folder: Path, size: int = VOCABULARY) -> None:
    """Write a word-level tokenizer: token i is the word "w<i>"; 0 is padding, 1 begin, 2 end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    wrapped.chat_template = "{% for m in messages %}w10 {{ m['content'] }} w11 {% endfor %}"
    wrapped.save_pretrained(folder)


def open_model(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device = _CPU,
    more_devices: Sequence[torch.device] = (),
    *,
    int8_cache: bool = False,
) -> LoadedModel:
    checkpoint = open_checkpoint(str(folder))
    return LoadedModel(
        checkpoint.folder, checkpoint.tensors, dtype, device, more=more_devices, int8_cache=int8_cache
    )


def load_all(model: LoadedModel, capacity: int) -> None:
    """Keep every layer in memory."""
    model.load(Placement.in_memory(len(model.layers), range(len(model.layers)), 0), capacity, nothing)


def _drafter(model: LoadedModel, capacity: int, lean: bool, target: LoadedModel | None = None) -> LMDrafter:
    """target: the model that the draft is a quantized copy of."""
    drafts = (model.fused_model(capacity) if lean else None) or model.tree_model
    shared = target.tree_model.cache if target is not None else None
    return LMDrafter("draft", drafts, model.device, model.close, shared)


def nothing(done: int, total: int) -> None:
    """Ignore progress."""


def tiny_engine(
    folder: Path,
    draft: Path | str = "auto",
    *,
    budget: int = 64,
    width: int = 8,
    resident: Sequence[int] = (),
    slots: int = 2,
    placement: Placement | None = None,
    context: int = 256,
    verify: str = "coupled",
    dtype: torch.dtype = torch.float32,
    expand: bool = True,
    lean: bool = True,
    device: torch.device = _CPU,
    more_devices: Sequence[torch.device] = (),
    wrap: Callable[[Any], Any] | None = None,
    more: Callable[[LoadedModel], Mapping[str, Any]] | None = None,
    notify: Callable[[Event], None] = ignore_event,
    int8_cache: bool = False,
    chunk: int | None = None,
    cache_size: int = 0,
    sequences: int = 1,
) -> Engine:
    """An engine with a given placement instead of a planned one.

    Args:
        folder: Of the target, or a GGUF file.
        draft: A folder, "self", "none", or "auto" for "self"; lookups may follow after commas.
        more: Makes other drafters for the target, by name.
        resident, slots: A placement in one memory, unless a whole `placement` is given.
        lean: Draft with the fused forward pass if the family has one.
    """
    checkpoint = open_checkpoint(str(folder))
    codec = TextCodec(load_tokenizer(checkpoint.folder), checkpoint.folder, checkpoint.config)
    target = open_model(folder, dtype, device, more_devices, int8_cache=int8_cache)
    if placement is None:
        placement = Placement.in_memory(len(target.layers), resident, slots)
        placement = replace(placement, staging=2 if device.type != "cpu" else 0)
    target.load(placement, context + budget, nothing, chunk, context=context)
    draft = str(draft).replace("auto", "self")
    main, *others = draft.split(",")
    drafters: dict[str, Any] = {}
    if main == "self":
        quantized = open_model(folder, dtype, device)
        quantized.load_quantized(4, expand, context, nothing, CALIBRATION, target.rest_tensors)
        drafters[main] = _drafter(quantized, context, lean, target)
    elif main != "none" and main not in LOOKUPS:
        other = open_model(Path(main), dtype, device)
        load_all(other, context)
        drafters[main] = _drafter(other, context, lean)
    if wrap is not None:
        drafters = {name: wrap(drafter) for name, drafter in drafters.items()}
    drafters |= more(target) if more is not None else {}
    names = [name for name in dict.fromkeys((*drafters, main, *others)) if name != "none"]
    config = EngineConfig(
        model=str(folder),
        draft=",".join(names) or "none",
        budget=budget,
        width=width,
        dtype="float32",
        verify=verify,
        cache_size=cache_size,
    )
    sources = Sources(drafters, {"suffix": SuffixLookup(), "lookup": NgramLookup()})
    assembly = Assembly(
        target,
        sources,
        codec,
        context,
        placement,
        1 << 40,
        target_fingerprint=checkpoint.fingerprint,
        sequences=sequences,
    )
    return Engine(config, assembly, notify)


def reference(folder: Path, prompt: Sequence[int], tokens: int, *, cached: bool = True) -> list[int]:
    """Return the greedy tokens of transformers' own `generate`; cached: with its own cache."""
    from transformers import AutoConfig

    model: Any = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    model.generation_config.forced_eos_token_id = None  # at the end of the text, whatever the model gives
    out = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=tokens,
        use_cache=cached,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(prompt) :]]
