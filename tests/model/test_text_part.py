"""The language model of a multimodal model: parts built, tensors read, and errors for missing ones."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from offspec import MissingTensorError, SamplingParams
from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.meta_model import OmittedModule, meta_model
from offspec.model.attention import TreeContext
from offspec.model.loaded import LoadedModel
from offspec.model.skeleton import skeleton_of
from tests.support.packed_models import packed_checkpoint, to_grouped
from tests.support.tiny_models import load_all, open_model, tiny_engine, write_config, write_model
from tests.support.versions import needs_transformers
from tests.support.wrappers import plain_prompt, small_whole

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_whole("llava")
    config.text_config.hidden_size, config.text_config.intermediate_size = 64, 128
    return write_config(tmp_path_factory.mktemp("llava") / "model", config)


def rename(source: Path, folder: Path, change: Callable[[str], str | None]) -> Path:
    """Return a copy of a model with renamed or omitted tensors."""
    folder.mkdir()
    for file in source.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = {change(name): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    kept = {name: tensor for name, tensor in tensors.items() if name is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def answer(folder: Path) -> list[int]:
    with tiny_engine(folder, folder, budget=8, context=64) as engine:
        return list(engine.generate(plain_prompt(engine._assembly.target.skeleton.config), GREEDY).token_ids)


def is_seen(name: str) -> bool:
    return "vision" in name or "projector" in name


def test_vision_parts_are_neither_built_nor_read_nor_counted(llava: Path, tmp_path: Path) -> None:
    model, whole = open_model(llava), open_checkpoint(str(llava))
    assert any(is_seen(name) for name in whole.tensors)
    assert not any(is_seen(name) for name in model.skeleton.model.state_dict())
    blind = rename(llava, tmp_path / "blind", lambda name: None if is_seen(name) else name)
    other = open_model(blind)
    assert model.layer_bytes == other.layer_bytes and model.non_layer_bytes == other.non_layer_bytes
    read = {
        weight.name
        for binder in (*model.layers, *model._rest)
        for recipe in binder.recipes
        for weight, _ in recipe.sources
    }
    assert read and not any(map(is_seen, read))
    model.close()
    other.close()
    assert answer(blind) == answer(llava)


def test_vision_parts_are_never_constructed() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("gemma3n")  # its vision part is from a library that may not be installed
    skeleton = skeleton_of(config, torch.bfloat16)
    assert isinstance(skeleton.model.model.vision_tower, OmittedModule)
    assert isinstance(skeleton.model.model.embed_vision, OmittedModule)
    assert len(skeleton.layers) == config.text_config.num_hidden_layers
    assert skeleton.layers_prefix == "model.language_model.layers"
    with pytest.raises(RuntimeError, match="built for another modality"):
        skeleton.model.model.vision_tower(torch.zeros(1))
    assert not any(
        isinstance(part, OmittedModule) for part in meta_model(AutoConfig.for_model("llama")).modules()
    )


def test_image_separators_are_not_required() -> None:
    from transformers import AutoConfig

    skeleton = skeleton_of(AutoConfig.for_model("llava_next"), torch.bfloat16)
    names = skeleton.model.state_dict()
    assert all(name.startswith(("model.language_model.", "lm_head.")) for name in names)


@pytest.mark.parametrize("family", ["qwen3_5", "minicpmv4_6"])
def test_the_text_part_of_a_hybrid_is_found(family: str) -> None:
    model = meta_model(small_whole(family))
    names = set(model.state_dict())
    assert any(name.endswith("layers.0.linear_attn.A_log") for name in names)
    assert not any("vision_tower.encoder" in name for name in names)


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ("language_model.model.", "model.language_model."),
        ("thinker.language.model.", "model.language_model."),  # not in any of transformers' tables
    ],
)
def test_tensors_are_found_under_other_prefixes(new: str, old: str, llava: Path, tmp_path: Path) -> None:
    def change(name: str) -> str:
        plain = (
            "model." * name.startswith("language_model.model.") + name
        )  # as the model's conversion mapping reads it
        plain = plain.replace("model.language_model.model.", old).replace("language_model.lm_head", "lm_head")
        head = new.removesuffix("model.") + "lm_head.weight"
        return head if plain == "lm_head.weight" else plain.replace(old, new)

    assert answer(rename(llava, tmp_path / "model", change)) == answer(llava)


def test_a_language_model_with_the_names_of_a_wrapper(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain", "qwen3", vocab_size=128)
    inside = rename(plain, tmp_path / "inside", lambda name: f"llm.{name}")
    assert answer(inside) == answer(plain)


@needs_transformers("5.23")
def test_text_that_the_wrapper_cannot_run_uses_the_language_model_alone(tmp_path: Path) -> None:
    """Gemma 3n asks its vision part for the image tokens, and there is no vision part."""
    from transformers import AutoConfig

    plain = write_model(tmp_path / "plain", "gemma3n_text", vocab_size=128)
    inside = rename(
        plain, tmp_path / "inside", lambda name: f"model.language_{name}".replace("language_lm", "lm")
    )
    text = AutoConfig.from_pretrained(plain)
    AutoConfig.for_model("gemma3n", text_config=text.to_dict()).save_pretrained(inside)
    assert answer(inside) == answer(plain)


def test_a_missing_text_tensor_is_named(llava: Path, tmp_path: Path) -> None:
    lost = "layers.1.mlp.up_proj.weight"
    folder = rename(llava, tmp_path / "model", lambda name: None if name.endswith(lost) else name)
    with pytest.raises(MissingTensorError, match=f"model.language_model.{lost}") as caught:
        open_model(folder)
    assert " more of" not in str(caught.value)


def test_a_missing_tensor_is_not_replaced_by_a_similar_one(tmp_path: Path) -> None:
    """A missing tensor is not taken from another part with a tensor of the same name and shape.

    The search for a missing layer under other names also ends.
    """
    lost = "model.layers.1.mlp.up_proj.weight"
    folder = write_model(tmp_path / "plain", "qwen3")
    moved = rename(folder, tmp_path / "moved", lambda name: f"mtp.{name}" if name == lost else name)
    with pytest.raises(MissingTensorError, match=lost):
        open_model(moved)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config["layer_types"] += config["layer_types"][-1:]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(MissingTensorError, match=r"lacks model\.layers\.3"):
        open_model(folder)


def test_packed_text_part_of_a_vision_model(llava: Path, tmp_path: Path) -> None:
    checkpoint, dense = packed_checkpoint(llava, tmp_path / "packed", to_grouped(8))
    packed = LoadedModel(checkpoint.folder, checkpoint.tensors, torch.float32, torch.device("cpu"))
    plain = open_model(dense)
    assert packed.is_packed and not plain.is_packed
    found = []
    for model in (packed, plain):
        load_all(model, 16)
        with torch.no_grad():
            context = TreeContext.chain(9, torch.device("cpu"))
            found.append(model.tree_model.hidden(torch.tensor(range(9, 18)), context))
        model.close()
    assert torch.equal(*found)
