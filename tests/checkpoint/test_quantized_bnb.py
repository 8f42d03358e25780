"""bitsandbytes checkpoints written by transformers: their weights, and refused variants."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
from bitsandbytes.nn.modules import Linear4bit
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.tensors import PackedInfo, stored_tensors
from offspec.core.errors import CheckpointError, HeaderError, MissingTensorError, UnsupportedModelError
from tests.support.quantized_files import change, refused, values_of

STATE = "quant_state.bitsandbytes__nf4"
NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,  # bitsandbytes itself is wrong on CPUs where rows end inside a block
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def own_values(module: Any) -> Tensor:
    """Return a module's weight as the library dequantizes it."""
    values: Tensor = dequantize_4bit(module.weight.data, module.weight.quant_state)
    return values.float()


def quantize(dense: Path, folder: Path, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Any:
    """Write the quantized model and return it."""
    model = AutoModelForCausalLM.from_pretrained(
        dense, quantization_config=BitsAndBytesConfig(**how), dtype=dtype
    )
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def nested_once(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, how = tmp_path_factory.mktemp("nested"), {"bnb_4bit_use_double_quant": True}
    quantize(dense, folder, load_in_4bit=True, bnb_4bit_quant_type="nf4", **how)
    return folder


@pytest.fixture
def nested(nested_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(nested_once, tmp_path / "nested"))


@pytest.fixture(scope="module")
def int8_once(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The model, and its folder."""
    folder = tmp_path_factory.mktemp("int8")
    return quantize(dense, folder, load_in_8bit=True), folder


@pytest.mark.parametrize(
    ("kind", "double", "dtype"),
    [("nf4", False, torch.bfloat16), ("fp4", True, torch.float16), ("nf4", True, torch.float32)],
)
def test_four_bits(dense: Path, tmp_path: Path, kind: str, double: bool, dtype: torch.dtype) -> None:
    how = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double}
    model = quantize(dense, tmp_path, dtype, load_in_4bit=True, **how)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.tensors.keys() == dict(model.named_parameters()).keys()
    packed = 0
    for name, module in model.named_modules():
        if isinstance(module, Linear4bit):
            packed += 1
            weight = checkpoint.tensors[f"{name}.weight"]
            assert weight.shape == (module.out_features, module.in_features)
            assert torch.equal(values_of(weight), own_values(module))
    assert packed == 7
    stored = load_file(tmp_path / "model.safetensors")
    kept = [tensor.nbytes for name, tensor in stored.items() if STATE[:11] not in name]
    assert checkpoint.nbytes == sum(kept)  # the JSON texts do not belong to the weights


def test_four_bits_stored_in_wider_numbers(dense: Path, tmp_path: Path) -> None:
    model = quantize(dense, tmp_path, load_in_4bit=True, bnb_4bit_quant_storage="bfloat16")
    module = model.get_submodule("model.layers.0.mlp.up_proj")
    assert module.weight.dtype == torch.bfloat16
    assert torch.equal(values_of(open_checkpoint(str(tmp_path)).tensors[NAME]), own_values(module))


def test_int8(int8_once: tuple[Any, Path]) -> None:
    model, folder = int8_once
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.tensors.keys() == dict(model.named_parameters()).keys()
    stored, weight = load_file(folder / "model.safetensors"), checkpoint.tensors[NAME]
    assert isinstance(weight, PackedInfo)
    own = int8_vectorwise_dequant(stored[NAME], stored[NAME.replace("weight", "SCB")])
    assert torch.equal(values_of(weight), own)


def test_the_fingerprint_is_of_all_parts(nested: Path) -> None:
    checkpoint = open_checkpoint(str(nested))
    names = [info.name for info in stored_tensors(checkpoint.tensors[NAME])]
    assert names[:2] == [NAME, f"{NAME}.absmax"] and len(names) == 5
    assert checkpoint.fingerprint == open_checkpoint(str(nested)).fingerprint
    config = json.loads((nested / "config.json").read_text())
    config["quantization_config"]["bnb_4bit_quant_type"] = "fp4"  # the tensors say what they are in
    (nested / "config.json").write_text(json.dumps(config))
    other = open_checkpoint(str(nested))
    assert other.fingerprint != checkpoint.fingerprint and other.tensors[NAME] == checkpoint.tensors[NAME]


def text(**changes: Any) -> Callable[[Tensor], Tensor]:
    """Return a change that replaces values of the JSON text in a tensor."""

    def make(tensor: Tensor) -> Tensor:
        state = json.loads(bytes(tensor.tolist())) | changes
        return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return make


@pytest.mark.parametrize(
    ("part", "make", "error"),
    [
        ("", lambda t: t[:-1].clone(), HeaderError),
        ("", lambda t: None, MissingTensorError),
        (".absmax", lambda t: None, MissingTensorError),
        (".absmax", lambda t: t[:-1].clone(), HeaderError),
        (".quant_map", lambda t: None, MissingTensorError),
        (".quant_map", lambda t: t[:15].clone(), HeaderError),
        (".quant_map", lambda t: t * 0.999, HeaderError),
        (".nested_absmax", lambda t: t.repeat(2), HeaderError),
        (".nested_quant_map", lambda t: t.half(), HeaderError),
        (f".{STATE}", lambda t: None, HeaderError),
        (f".{STATE}", lambda t: torch.full((40,), ord("["), dtype=torch.uint8), HeaderError),
        (f".{STATE}", lambda t: torch.zeros(2**20, dtype=torch.uint8), HeaderError),
        (f".{STATE}", text(quant_type="fp4"), HeaderError),
        (f".{STATE}", text(blocksize=128), HeaderError),
        (f".{STATE}", text(nested_blocksize=64), HeaderError),
        (f".{STATE}", text(nested_offset=float("nan")), HeaderError),
        (f".{STATE}", text(dtype="int8"), HeaderError),
        (f".{STATE}", text(shape=[64, 64]), HeaderError),
        (f".{STATE}", text(shape=[-96, -64]), HeaderError),
        (f".{STATE}", text(shape=6144), HeaderError),
    ],
)
def test_damaged_parts(
    nested: Path, part: str, make: Callable[[Tensor], Tensor | None], error: type[CheckpointError]
) -> None:
    assert NAME in refused(change(nested, f"{NAME}{part}", make), error)


def test_two_descriptions_of_one_weight(nested: Path) -> None:
    file = nested / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{NAME}.{STATE.replace('nf4', 'fp4')}"] = text(quant_type="fp4")(tensors[f"{NAME}.{STATE}"])
    save_file(tensors, file, metadata={"format": "pt"})
    assert NAME in refused(nested, HeaderError)


@pytest.mark.parametrize(
    ("part", "make", "error"),
    [
        ("SCB", lambda t: None, HeaderError),
        ("SCB", lambda t: t[:-1].clone(), HeaderError),
        ("SCB", lambda t: t.half(), HeaderError),
        ("weight", lambda t: None, MissingTensorError),
        ("weight_format", lambda t: torch.tensor(2, dtype=torch.uint8), UnsupportedModelError),
    ],
)
def test_int8_that_does_not_belong_together(
    int8_once: tuple[Any, Path],
    tmp_path: Path,
    part: str,
    make: Callable[[Tensor], Tensor | None],
    error: type[CheckpointError],
) -> None:
    folder = Path(shutil.copytree(int8_once[1], tmp_path / "int8"))
    assert "up_proj" in refused(change(folder, NAME.replace("weight", part), make), error)
