"""Quantized checkpoints: the same logits as transformers, and tokens that do not depend on drafts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
)

from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.tensors import PackedInfo
from offspec.core.errors import CheckpointError, MissingTensorError
from offspec.model.attention import TreeContext
from offspec_planners.placement import Placement
from tests.support import packers
from tests.support.answers import PROMPT, TargetAndDrafts, generate_tokens, sampling
from tests.support.exhaustive import sampled_params
from tests.support.expert_models import on_demand_placement
from tests.support.tiny_models import nothing, open_model, tiny_engine, write_model

IDS = torch.tensor([5, 9, 17, 33, 64, 20, 21, 22, 9, 41, 3, 90])
LAYERS = 2
Quantize = Callable[..., object]  # (the dense folder, the packed one)


def write_bitsandbytes(dense: Path, packed: Path, dtype: torch.dtype, **how: Any) -> Any:
    """Write a model quantized by bitsandbytes, and return it."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        dense, quantization_config=BitsAndBytesConfig(**how), dtype=dtype
    )
    model.save_pretrained(packed)
    for file in dense.glob("token*"):
        (packed / file.name).write_bytes(file.read_bytes())
    return model


def four_bits(**how: Any) -> Quantize:
    return lambda dense, packed: write_bitsandbytes(dense, packed, torch.float32, load_in_4bit=True, **how)


def int8(dense: Path, packed: Path) -> None:
    """Return the dequantized values, too, since bitsandbytes would also round the inputs."""
    write_bitsandbytes(dense, packed, torch.float32, load_in_8bit=True)
    stored, values = load_file(packed / "model.safetensors"), load_file(dense / "model.safetensors")
    for name in stored:
        if name.endswith("SCB"):
            weight = name.replace("SCB", "weight")
            values[weight] = stored[weight].double().mul(stored[name].double()[:, None] / 127).float()
    save_file(values, dense / "model.safetensors", metadata={"format": "pt"})


def packing(settings: dict[str, Any], pack: Callable[..., packers.PackedWeight], **how: Any) -> Quantize:
    def quantize(dense: Path, packed: Path, which: str = ".layers.") -> None:
        packers.requantize(dense, packed, settings, lambda shape: pack(shape, **how), which)

    return quantize


def compressing(format: str, dtype: torch.dtype, **weights: Any) -> Quantize:
    group = {"targets": ["Linear"], "weights": weights}
    settings = {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return packing(settings, packers.compressed, format=format, dtype=dtype, **weights)


@dataclass(frozen=True)
class Case:
    """own: Load options for transformers; None if a dense checkpoint of the same values replaces it."""

    quantize: Quantize
    own: dict[str, Any] | None = None


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
ORDERED = GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2", "bits": 8}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]}
FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": FLOAT4}},
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt"}}
DEQUANTIZED = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
CASES = {
    "nf4": Case(four_bits(bnb_4bit_quant_type="nf4"), {}),
    "fp4 nested": Case(four_bits(bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True), {}),
    "int8": Case(int8),
    "awq": Case(packing(AWQ, packers.awq, group=32)),
    "gptq": Case(packing(GPTQ, packers.gptq, group=32)),
    "gptq by importance": Case(
        packing(ORDERED, packers.gptq, bits=8, group=32, desc_act=True, less_one=False)
    ),
    "compressed int4": Case(compressing("pack-quantized", torch.float32, **INT4), DEQUANTIZED),
    "compressed int4 of bfloat16": Case(compressing("pack-quantized", torch.bfloat16, **INT4)),
    "compressed nvfp4": Case(packing(NVFP4, packers.nvfp4, divided=True)),
    "modelopt nvfp4": Case(packing(MODELOPT, packers.nvfp4)),
    "fp8": Case(
        packing(FP8, packers.fp8, block=(64, 64)),
        {"quantization_config": FineGrainedFP8Config(weight_block_size=(64, 64), dequantize=True)},
    ),
}


@dataclass(frozen=True)
class World:
    case: Case
    packed: Path
    dense: Path


# Of the others the bytes are unpacked in tests/checkpoint, and here a path that these take.
MORE = ("fp4 nested", "int8", "awq", "compressed int4 of bfloat16", "compressed nvfp4")


@pytest.fixture(
    scope="module",
    params=sampled_params(CASES, "nf4", "gptq by importance", "fp8", rare=lambda name: name not in MORE),
)
def plan_env(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("models")
    case = CASES[request.param]
    dense = write_model(
        folder / "dense",
        spread=0.15,
        hidden_size=128,
        intermediate_size=256,
        head_dim=32,
        num_hidden_layers=LAYERS,
    )
    torch.manual_seed(4)
    case.quantize(dense, folder / "packed")
    return World(case, folder / "packed", dense)


def logits(folder: Path) -> torch.Tensor:
    """[12, V], every layer streamed."""
    model = open_model(folder)
    model.load(Placement.in_memory(LAYERS, [], 2), len(IDS), nothing)
    try:
        with torch.no_grad():
            hidden = model.tree_model.hidden(IDS, TreeContext.chain(len(IDS), torch.device("cpu")))
            return model.tree_model.logits(hidden).clone()
    finally:
        model.close()


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # which says how to load, not what
def test_the_logits_of_transformers(plan_env: World) -> None:
    tensors = open_checkpoint(str(plan_env.packed)).tensors
    packed = [name for name, weight in tensors.items() if isinstance(weight, PackedInfo)]
    assert len(packed) == 7 * LAYERS
    own = plan_env.case.own
    model: Any = AutoModelForCausalLM.from_pretrained(
        plan_env.dense if own is None else plan_env.packed,
        dtype=torch.float32,
        attn_implementation="eager",
        **(own or {}),
    )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # or bitsandbytes multiplies in bfloat16
    with torch.no_grad():
        expected = model(IDS[None]).logits[0]
    assert expected.std() > 0.5
    torch.testing.assert_close(logits(plan_env.packed), expected, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("drafters_stay")
def test_tokens_do_not_depend_on_the_guesses(plan_env: World, trio: TargetAndDrafts) -> None:
    params = [sampling(temperature) for temperature in (0.0, 1.0)]
    expected = generate_tokens(plan_env.packed, *params, prompt=PROMPT)
    assert expected[0] != expected[1] and len(set(expected[1])) > 4
    drafts = ((trio.hostile, 7, ()), ("auto", 32, ()), (plan_env.packed, 32, (0,)))
    for draft, budget, resident in drafts:
        with tiny_engine(plan_env.packed, draft, budget=budget, resident=resident) as engine:
            results = [engine.generate(PROMPT, one) for one in params]
            assert [result.token_ids for result in results] == expected, draft
            assert all(result.bytes_streamed > 0 for result in results)
            assert draft != plan_env.packed or results[0].tokens_per_pass > 2


@pytest.mark.parametrize(
    ("family", "which", "packed_weights", "name"),
    sampled_params(
        [
            ("qwen3_moe", ".experts.", 3 * 4 * 3, "gptq"),
            ("qwen3_moe", ".experts.", 3 * 4 * 3, "modelopt nvfp4"),
            ("deepseek_v3", ".experts.", 2 * 4 * 3, "compressed int4"),
            ("llama", "lm_head", 1, "compressed nvfp4"),
            ("llama", "lm_head", 1, "fp8"),
        ],
        ("qwen3_moe", ".experts.", 3 * 4 * 3, "modelopt nvfp4"),
        ("llama", "lm_head", 1, "fp8"),
    ),
)
def test_packed_experts_and_heads(
    family: str, which: str, packed_weights: int, name: str, device: torch.device, tmp_path: Path
) -> None:
    """Experts merged into one parameter, and an output head, compared with the same values unpacked."""
    dense, packed = tmp_path / "dense", tmp_path / "packed"
    write_model(dense, family, hidden_size=64, moe_intermediate_size=64, tie_word_embeddings=False)
    CASES[name].quantize(dense, packed, which)
    tensors = open_checkpoint(str(packed)).tensors
    assert sum(isinstance(weight, PackedInfo) for weight in tensors.values()) == packed_weights
    params = sampling(1.0, 12)
    expected = generate_tokens(dense, params)
    assert generate_tokens(packed, params, draft="auto", budget=16, device=device) == expected
    if family != "llama" and device.type == "cpu":
        with tiny_engine(packed, "auto", budget=16, placement=on_demand_placement(3, 5)) as engine:
            assert [engine.generate(PROMPT, params).token_ids] == expected
            store = engine._assembly.target.store
            assert store is not None and store.stats.hits < store.stats.requested


def test_weights_of_another_model_and_none(tmp_path: Path) -> None:
    dense = write_model(tmp_path / "dense", hidden_size=64, intermediate_size=64, head_dim=16)
    CASES["awq"].quantize(dense, tmp_path / "awq")
    file, name = tmp_path / "awq" / "model.safetensors", "model.layers.1.mlp.up_proj"
    whole = load_file(file)
    named = {f"{name}.{part}": tensor for part, tensor in packers.awq((128, 64), 32).tensors.items()}
    save_file(whole | named, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj.weight has shape \[128, 64\].*requires \[64, 64\]"):
        open_model(file.parent)
    kept = {part: tensor for part, tensor in whole.items() if name not in part}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(MissingTensorError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        open_model(file.parent)
