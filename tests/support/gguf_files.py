"""GGUF files of tiny random models, written as llama.cpp writes them."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from transformers import PreTrainedModel

from offspec.checkpoint import Checkpoint, open_checkpoint
from offspec.core.events import Event
from tests.support.gguf_hybrids import HYBRIDS, hybrid_keys, hybrid_tensors
from tests.support.versions import has_transformers

# transformers before 5.18 has tokenizers for some architectures only; those of Gemma need token scores.
_OF_5_17 = {"llama", "mistral3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "qwen35"}
_OF_5_17 |= {"phi3", "starcoder2", "mamba"}


class UnpackEnvironment(NamedTuple):
    """A place to write a GGUF file and unpack it."""

    file: Path
    cache: Path
    events: list[Event]

    def open(self, *, unpack: bool = False) -> Checkpoint:
        self.events.clear()
        return open_checkpoint(str(self.file), unpack=unpack, notify=self.events.append, cache_dir=self.cache)

    def cached_names(self) -> list[str]:
        """Names in all folders of the cache."""
        return sorted(file.name for file in self.cache.glob("*/*"))


PARTS = 3  # files that a model is split into
# Byte offset of the float16 scales in blocks of types that the gguf package cannot write.
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
SCALES |= {"IQ4_NL": (0,), "IQ4_XS": (0,), "IQ2_XXS": (0,)}
# Matrices that are never quantized.
_STAYS = re.compile(r"ssm_(a|d|conv1d|norm)\b|shortconv\.conv|ffn_gate_inp")


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    family: str,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    mixed: dict[str, gguf.GGMLQuantizationType] | None = None,
    keys: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
) -> None:
    """Write `model`: matrices as `kind`, vectors in float32. Types in SCALES get random blocks.

    Args:
        mixed: Other types for matrices whose names contain these words.
        keys: Keys to add; a key whose value is None is left out.
        tensors: Tensors to add.
        without: Tensors to leave out.

    Skips the test if transformers is too old for the tokenizer of this family.
    """
    hybrid = family in HYBRIDS
    family = family.split()[0]
    if family not in _OF_5_17 and not has_transformers("5.18"):
        pytest.skip(f"tokenizers of {family} files need transformers 5.18")
    writer = gguf.GGUFWriter(path, family)
    pairs = {
        **(_hybrid_keys if hybrid else _keys)(model, family),
        **_vocabulary(model.config.vocab_size),
        **(keys or {}),
    }
    for key, value in pairs.items():
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, data in {**(hybrid_tensors if hybrid else _tensors)(model, family), **(tensors or {})}.items():
        if name in without:
            continue
        chosen = next((other for word, other in (mixed or {}).items() if word in name), kind)
        chosen = chosen if data.ndim > 1 and not _STAYS.search(name) else gguf.GGMLQuantizationType.F32
        encode = random_blocks if chosen.name in SCALES else gguf.quantize
        writer.add_tensor(name, encode(np.ascontiguousarray(data), chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def split_gguf(
    whole: Path, folder: Path, *, first_empty: bool = False, stated: int | None = None
) -> list[Path]:
    """Write a model's tensors into PARTS files: all keys in the first, the part numbers in each."""
    reader = gguf.GGUFReader(whole)
    groups = PARTS - first_empty
    folder.mkdir(exist_ok=True)
    files = []
    for number in range(PARTS):
        files.append(folder / f"tiny-{number + 1:05}-of-{PARTS:05}.gguf")
        writer = gguf.GGUFWriter(files[-1], "llama")
        if number:
            del writer.kv_data[0]["general.architecture"]
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", PARTS)
        writer.add_int32("split.tensors.count", len(reader.tensors) if stated is None else stated)
        for field in () if number else reader.fields.values():
            if field.name.startswith("GGUF.") or field.name == "general.architecture":
                continue
            if field.types[0] == gguf.GGUFValueType.ARRAY:
                writer.add_array(field.name, field.contents())
            else:
                writer.add_key_value(field.name, field.contents(), field.types[0])
        for index, tensor in enumerate(reader.tensors):
            if index % groups + first_empty == number:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return files


def random_blocks(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return random blocks [rows, bytes] of a type, with small values, for a matrix of this shape."""
    random = np.random.default_rng(data.size)
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (data.size // size, nbytes), dtype=np.uint8)
    for place in SCALES[kind.name]:
        scales = random.uniform(2**-12, 2**-11, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(*data.shape[:-1], -1)


def _hybrid_keys(model: PreTrainedModel, family: str) -> dict[str, Any]:
    keys = {"vocab_size": model.config.vocab_size, **hybrid_keys(model, family)}
    return {f"{family}.{key}": value for key, value in keys.items()}


# Attributes of configurations, by the keys written for them.
_ATTRIBUTES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "attention.layer_norm_epsilon": "norm_epsilon",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_SCALING = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
}
_YARN = {
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_log_multiplier": "mscale_all_dim",
}


def _keys(model: PreTrainedModel, family: str) -> dict[str, Any]:
    config = model.config
    keys = {key: getattr(config, name, None) for key, name in _ATTRIBUTES.items()}
    if family.startswith("qwen"):
        keys["attention.sliding_window"] = None
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys |= dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), head)
    rope = config.rope_parameters
    keys["rope.freq_base"] = float(rope.get("full_attention", rope)["rope_theta"])
    keys["expert_count"] = keys["expert_count"] or getattr(config, "num_local_experts", None)
    if family == "gpt-oss":
        keys["expert_feed_forward_length"] = config.intermediate_size
    if config.model_type in ("gpt_oss", "ministral3"):
        names = _SCALING | (_YARN if config.model_type == "ministral3" else {})
        keys |= {f"rope.scaling.{key}": rope[name] for key, name in names.items()}
        keys["attention.temperature_scale"] = rope.get("llama_4_scaling_beta")
    return {f"{family}.{key}": value for key, value in keys.items()}


def _vocabulary(size: int) -> dict[str, Any]:
    """Bytes spelled as in GPT-2, after three control tokens; two merges.

    transformers before 5.18 reads a list of one as its only item.
    """
    plain = [chr(code) for code in range(33, 33 + size - 5)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<pad>", "<s>", "</s>", "!!", *plain, '""'],
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (2 + len(plain)),
        "tokenizer.ggml.merges": ["! !", '" "'],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}",
    }


def _tensors(model: PreTrainedModel, family: str) -> dict[str, np.ndarray]:
    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        data = tensor.float().numpy()
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if family == "gpt-oss" and ".experts." in name:
            found |= _of_gpt_oss(name, data)
            continue
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            gate, up = np.split(data, 2, axis=1)
            found[f"blk.{layer}.ffn_gate_exps.weight"] = gate
            found[f"blk.{layer}.ffn_up_exps.weight"] = up
            continue
        key = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert key, name
        if not key.endswith((".weight", ".bias")):
            key += ".weight"
        if family in ("llama", "mistral3") and (".attn_q." in key or ".attn_k." in key):
            heads = "num_attention_heads" if "_q." in key else "num_key_value_heads"
            data = _permute(data, getattr(model.config, heads))
        if family.startswith("gemma") and key.endswith("norm.weight"):
            data = data + 1
        if key.endswith("gate_inp_shexp.weight"):
            data = data[0]
        found[key] = data
    return found


def _of_gpt_oss(name: str, data: np.ndarray) -> dict[str, np.ndarray]:
    """Transpose the expert matrices and interleave columns of gate and up, as gpt-oss stores them."""
    part = name.rpartition(".")[2]
    kind = "bias" if part.endswith("_bias") else "weight"
    data = data if kind == "bias" else data.swapaxes(1, 2)
    prefix = f"blk.{name.split('.')[2]}"
    if part.startswith("down"):
        return {f"{prefix}.ffn_down_exps.{kind}": data}
    return {f"{prefix}.ffn_gate_exps.{kind}": data[:, ::2], f"{prefix}.ffn_up_exps.{kind}": data[:, 1::2]}


def _permute(data: np.ndarray, heads: int) -> np.ndarray:
    """Interleave the two halves of each head's rows, as llama.cpp's converter does for Llama."""
    halves = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
    return halves.swapaxes(1, 2).reshape(data.shape)
