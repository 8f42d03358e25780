"""Experts: single ones, grouped ones on a GPU, different shapes; and layers with shared parameters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from offspec.core.errors import CheckpointError
from offspec.model import experts
from offspec.model.experts import run_experts
from offspec.model.loaded import LoadedModel
from offspec.stream.direct_reader import DirectReader
from offspec.stream.disk_stream import read_unit
from offspec_kernels.row_linear import grouped_linear
from tests.support.exhaustive import sampled_params
from tests.support.expert_models import EXPERT_FAMILIES, write_experts
from tests.support.tiny_models import load_all, open_model, write_hybrid, write_model

CUDA = torch.device("cuda", 0)
EXPERTS, HIDDEN, INNER = 8, 16, 32


def check(model: LoadedModel) -> None:
    """Compare each expert with the layer's parameters made at once, and check that none is missing."""
    reader = DirectReader()
    whole, dense = dict[str, torch.Tensor](), set[str]()
    for binder, without in zip(model.layers, model.dense, strict=True):
        whole |= binder.materialize(read_unit(binder.layout, reader).tensor)
        dense |= set(without.parameters)
    paths: dict[int, str] = {id(module): name for name, module in model.skeleton.model.named_modules()}
    checked, names = 0, set[str]()
    for found in model.experts.modules:
        for expert, unit in enumerate(found.units):
            memory = read_unit(unit.layout, reader).tensor
            unit.arrange(memory)
            made = unit.make_parameters(memory)
            for name, tensor in made.items():
                path = f"{paths[id(found.module)]}.{name}"
                names.add(path)
                assert tensor.dtype == whole[path].dtype and torch.equal(tensor, whole[path][expert])
            checked += 1
    assert checked == model.experts.count > 0
    assert names | dense == set(whole) and not names & dense
    reader.close()


@pytest.mark.parametrize(
    "family", sampled_params(EXPERT_FAMILIES, "mixtral", "gpt_oss", "nemotron_h", one_in=2)
)
def test_a_single_expert_equals_its_part_of_the_layer(family: str, tmp_path: Path) -> None:
    """In the stored dtype and in another one."""
    folder = write_experts(tmp_path / "model", family)
    for dtype in (torch.float32, torch.bfloat16):
        model = open_model(folder, dtype)
        check(model)
        model.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_gates_and_ups_are_not_copied(family: str, tmp_path: Path) -> None:
    """Whether they are adjacent in the file, sorted by name, or made adjacent after a read."""
    folder = write_experts(tmp_path / "model", family)
    model, reader = open_model(folder), DirectReader()
    unit = model.experts.units[5]
    memory = read_unit(unit.layout, reader).tensor
    unit.arrange(memory)
    owner = memory.untyped_storage().data_ptr()
    assert all(
        tensor.untyped_storage().data_ptr() == owner for tensor in unit.make_parameters(memory).values()
    )
    model.close()


def test_an_only_expert_stays_in_its_layer(tmp_path: Path) -> None:
    model = open_model(
        write_experts(tmp_path / "model", "mixtral", num_local_experts=1, num_experts_per_tok=1)
    )
    assert model.experts.count == 0 and model.experts.slot_bytes == 0
    assert all(dense is whole for dense, whole in zip(model.dense, model.layers, strict=True))
    model.close()


@pytest.mark.parametrize(
    ("name", "kept", "message"),
    [
        (
            "experts.1.down_proj",
            -2,
            r"1.down_proj.weight has shape \[30, 24\], but .* must have equal shapes",
        ),
        (
            "experts.1.up_proj",
            -2,
            r"experts.1.up_proj.weight has shape \[22, 32\], but .* must have equal shapes",
        ),
        (".down_proj", -2, r"config.json requires \[4, 32, 24\]"),
        (".gate_proj", -2, r"config.json requires \[4, 48, 32\]"),
        ("experts.3.", 0, r"of shape \[3, .*config.json requires \[4, "),
    ],
)
def test_experts_of_different_shapes_are_refused(tmp_path: Path, name: str, kept: int, message: str) -> None:
    folder = write_model(tmp_path, "qwen3_moe", num_hidden_layers=1)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    changed = [other for other in tensors if name in other]
    assert changed
    for each in changed:
        tensors[each] = tensors[each][:kept].clone()
        if not kept:
            del tensors[each]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message) as raised:
        open_model(folder)
    assert "\n" not in str(raised.value)


def test_layers_with_shared_parameters_each_read_them(tmp_path: Path) -> None:
    """A checkpoint stores them once; the slots of both layers need all of them."""
    model = open_model(write_hybrid(tmp_path, "zamba2"))
    layers: list[Any] = list(model.skeleton.layers)
    shares = [index for index, layer in enumerate(layers) if hasattr(layer, "shared_transformer")]
    first, second = (model.layer_bytes[index] for index in shares)
    assert abs(first - second) < first / 10
    load_all(model, 16)
    one, other = (list(layers[index].shared_transformer.parameters()) for index in shares)
    assert one and not any(part.is_meta for part in one + other)
    assert all(a.equal(b) for a, b in zip(one, other, strict=True))
    model.close()


def test_layers_that_return_tuples_are_measured(tmp_path: Path) -> None:
    model = open_model(write_hybrid(tmp_path, "bamba"))
    attends = [kind == "full_attention" for kind in model.skeleton.config.layers_block_type]
    assert any(attends) and [bool(kept) for kept in model.skeleton.rows.kept] == attends
    assert model.skeleton.rows.state_numbers
    model.close()


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Run experts on the device, compare with the CPU, and return whether they ran grouped."""
    products = list[int]()

    def noted(rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        products.append(len(rows))
        return grouped_linear(rows, *args, **kwargs)

    def run(module: Any, rows: int, chosen: int) -> bool:
        products.clear()
        drawn = torch.Generator().manual_seed(rows)
        hidden = torch.randint(-3, 4, (rows, HIDDEN), generator=drawn).float()
        names = torch.rand(rows, EXPERTS, generator=drawn).argsort()[:, :chosen]
        weights = torch.randint(1, 4, (rows, chosen), generator=drawn).float()
        with torch.no_grad():
            outputs = run_experts(module, *(of.to(CUDA) for of in (hidden, names, weights))).cpu()
        expected = (
            _alone(module, hidden).gather(1, names[..., None].expand(-1, -1, HIDDEN)) * weights[..., None]
        ).sum(1)
        torch.testing.assert_close(outputs, expected)
        return bool(products)

    monkeypatch.setattr(experts, "grouped_linear", noted)
    return run


def _alone(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return each expert's output for each row, [T, E, H], computed on the CPU."""
    inner = torch.einsum("th,eih->tei", hidden, module.up_proj.cpu())
    outputs = torch.einsum("tei,ehi->teh", inner, module.down_proj.cpu())
    norm = getattr(module, "post_expert_norm", None)
    return outputs if norm is None else torch.nn.functional.rms_norm(outputs, (HIDDEN,))


def _experts() -> Any:
    """Return experts with small integer weights and no gate."""
    module: Any = torch.nn.Module()
    module.is_transposed = module.has_gate = module.has_bias = False
    module.num_experts, module.act_fn = EXPERTS, torch.nn.Identity()
    drawn = torch.Generator().manual_seed(0)
    module.up_proj = torch.randint(-3, 4, (EXPERTS, INNER, HIDDEN), generator=drawn).float().to(CUDA)
    module.down_proj = torch.randint(-3, 4, (EXPERTS, HIDDEN, INNER), generator=drawn).float().to(CUDA)
    return module


@pytest.mark.gpu
def test_few_rows_run_in_one_grouped_product(together: Callable[..., bool]) -> None:
    """A plan reserves memory for one expert at a time, to which all rows may be routed."""
    for rows in (1, 3, 70):
        assert together(_experts(), rows, 2)
    assert together(_experts(), 1, EXPERTS)
    assert not together(_experts(), 600, EXPERTS)
    module = _experts()
    module.post_expert_norm = torch.nn.RMSNorm(HIDDEN, device=CUDA)
    assert not together(module, 3, 2), "a norm after each expert"
