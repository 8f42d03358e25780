"""Rotary position scaling of a GGUF file, which transformers' own reader ignores."""

import math
from collections.abc import Mapping
from typing import Any

from offspec.checkpoint.gguf.dequantize import read_rows
from offspec.checkpoint.gguf.header import GgufHeader
from offspec.checkpoint.ranges import INSTEAD, damaged
from offspec.core.errors import MissingTensorError, UnsupportedModelError

ROPE_FACTORS = "rope_freqs.weight"
# Training values of every Llama since 3.1; a file holds only the factors derived from them.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
_YARN = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "attn_factor": "attention_factor",
}


def set_rope(config: Any, arch: str, header: GgufHeader, more: Mapping[str, Any] | None = None) -> None:
    """Complete the configuration's rotary parameters, with `more` parameters of the architecture.

    Raises UnsupportedModelError for an unknown scaling, HeaderError for invalid numbers.
    """
    scaling = _scaling(arch, header)
    base = _positive(header, f"{arch}.rope.freq_base") or 10_000.0
    if ROPE_FACTORS in header.tensors:
        if scaling:
            raise UnsupportedModelError(f"{header.path} scales positions in two ways: {INSTEAD}")
        scaling = _llama3(config, base, header)
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    own = {"rope_theta": base, **scaling, **(more or {})}
    config.rope_parameters = {"rope_type": "default", **parameters, **own}


def set_gemma_rope(config: Any, arch: str, header: GgufHeader) -> None:
    """Apply `set_rope` to global-attention layers and to sliding-window layers."""
    scaling = _scaling(arch, header)
    theta = _positive(header, f"{arch}.rope.freq_base") or 1_000_000.0
    local = _positive(header, f"{arch}.rope.freq_base_swa") or 10_000.0
    config.rope_parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": theta, **scaling},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def set_gpt_oss_rope(config: Any, arch: str, header: GgufHeader) -> None:
    """Apply `set_rope` for gpt-oss, whose ramp between frequencies has fractional bounds."""
    config.rope_parameters = {"rope_type": "default"}  # the default is that of gpt-oss-20b
    is_yarn = _scaling(arch, header).get("rope_type") == "yarn"
    set_rope(config, arch, header, {"truncate": False} if is_yarn else {})


def _scaling(arch: str, header: GgufHeader) -> dict[str, Any]:
    """Return the scaling declared in the metadata, as rope parameters of transformers."""
    prefix = f"{arch}.rope.scaling"
    kind = header.metadata.get(f"{prefix}.type", "linear")  # llama.cpp's meaning of a factor without a type
    name = f"{prefix}.factor"
    if name not in header.metadata:
        name = f"{arch}.rope.scale_linear"  # older name, from when linear was the only type
    if kind == "none" or header.metadata.get(name) in (None, 0, 1):
        return {}
    factor = _positive(header, name)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        stated = {name: _positive(header, f"{prefix}.{key}") for key, name in _YARN.items()}
        more = {name: value for name, value in stated.items() if value is not None}
        return {"rope_type": "yarn", "factor": factor, **more}
    raise UnsupportedModelError(
        f"{header.path} scales positions by {str(kind)[:40]!r}, which is not supported: {INSTEAD}"
    )


def _positive(header: GgufHeader, key: str) -> float | None:
    """Return a number above 0 from the metadata, None if absent. Raises HeaderError for any other value."""
    value = header.metadata.get(key)
    if value is None or (type(value) in (int, float) and 0 < value < math.inf):
        return value
    damaged(header.path, f"invalid {key}: {str(value)[:40]!r}")


def _llama3(config: Any, base: float, header: GgufHeader) -> dict[str, Any]:
    """Find the scaling factor from a table of factors per frequency, and check it against all of them."""
    import numpy as np

    given = read_rows(header.tensors[ROPE_FACTORS], 0, 1)[0]
    size = config.head_dim
    factor = round(float(given.max(initial=0)), 3)
    expected = [_factor(2 * math.pi * base ** (2 * i / size), factor) for i in range(size // 2)]
    if given.size != size // 2 or not np.allclose(given, expected, rtol=1e-3):
        raise UnsupportedModelError(f"{header.path} has position factors that are not Llama 3's: {INSTEAD}")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


def _factor(wavelength: float, factor: float) -> float:
    """Return by how much Llama 3 slows a frequency of this wavelength, in tokens."""
    if wavelength < _ORIGINAL / _HIGH:
        return 1.0
    if wavelength > _ORIGINAL / _LOW:
        return factor
    smooth = (_ORIGINAL / wavelength - _LOW) / (_HIGH - _LOW)
    return 1 / ((1 - smooth) / factor + smooth)


PHI_TABLES = _LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def set_phi_rope(config: Any, arch: str, header: GgufHeader) -> None:
    """Apply `set_rope` with the tables of Phi-3.

    Raises HeaderError for tables whose length is not half of the rotary size, MissingTensorError if only one
    is present.
    """
    set_rope(config, arch, header, _phi_rope(config, header))


def _phi_rope(config: Any, header: GgufHeader) -> dict[str, Any]:
    size = config.hidden_size // config.num_attention_heads
    rotated = header.metadata.get("phi3.rope.dimension_count") or size
    found: dict[str, Any] = {"partial_rotary_factor": rotated / size}
    if _LONG not in header.tensors and _SHORT not in header.tensors:
        return found
    get = header.metadata.get
    original = get("phi3.rope.scaling.original_context_length") or config.max_position_embeddings
    config.original_max_position_embeddings = original
    if (size_factor := get("phi3.rope.scaling.attn_factor")) is not None:
        found["attention_factor"] = size_factor
    return {
        **found,
        "rope_type": "longrope",
        "factor": config.max_position_embeddings / original,
        "original_max_position_embeddings": original,
        "long_factor": _table(header, _LONG, rotated // 2),
        "short_factor": _table(header, _SHORT, rotated // 2),
    }


def _table(header: GgufHeader, name: str, length: int) -> list[float]:
    if name not in header.tensors:
        raise MissingTensorError(f"{header.path} lacks the tensor {name}; download it again")
    values = read_rows(header.tensors[name], 0, 1)[0]
    if values.size != length:
        damaged(header.path, f"tensor {name} has {values.size} factors for {length} frequencies")
    return [float(value) for value in values]
