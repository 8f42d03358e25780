"""Which EAGLE heads are opened, by real published configurations, and what is said of those that are not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.core.errors import CheckpointError, DraftError, MissingTensorError, OffspecError, TruncatedError
from offspec.draft.base import Wants
from offspec.draft.heads.base import TargetShape
from offspec.draft.heads.eagle import opened, recognises
from offspec.draft.heads.eagle_files import EAGLE, EAGLE3, EagleFormat, read_format
from offspec.draft.heads.files import HeadFiles, open_files
from tests.draft.eagle_published import (
    GPT_OSS_SPECULATORS,
    LLAMA3_EAGLE,
    LLAMA3_EAGLE3,
    Listed,
    Shapes,
    layer_shapes,
    third_shapes,
)
from tests.support.eagle_files import HIDDEN, LAYERS, Head, make_head, write_head
from tests.support.tiny_models import VOCABULARY

_TINY = TargetShape("tiny", HIDDEN, VOCABULARY, LAYERS, torch.float32, torch.device("cpu"), None)
_LLAMA3_8B = TargetShape("Llama-3-8B", 4096, 128256, 32, torch.bfloat16, torch.device("cpu"), None)
_GPT_OSS_20B = TargetShape("gpt-oss-20b", 2880, 201088, 24, torch.bfloat16, torch.device("cpu"), None)


def _parsed(config: dict[str, Any], shapes: Shapes, target: TargetShape = _LLAMA3_8B) -> EagleFormat:
    files = Listed(config, shapes)
    assert recognises(config, files.names)
    return read_format(files, target)


def test_the_published_eagle_configuration_parses() -> None:
    embedding = {"embed_tokens.weight": (128256, 4096)}
    found = _parsed(LLAMA3_EAGLE, {**layer_shapes("layers.0.", 4096), "fc.weight": (4096, 8192), **embedding})
    assert found.kind == EAGLE and found.taps == () and found.config.rope_parameters["rope_theta"] == 5e5
    assert found.config.num_key_value_heads == 8 and found.config.head_dim == 128
    assert len(found.stored) == 10 and "fc.bias" not in found.stored


def test_the_published_eagle3_configuration_parses() -> None:
    found = _parsed(LLAMA3_EAGLE3, third_shapes("midlayer."))
    assert found.kind == EAGLE3 and found.taps == (2, 16, 29) and not found.norm_before_residual
    assert found.config.rope_parameters["rope_theta"] == 10000.0 and found.config.rms_norm_eps == 1e-5
    assert found.stored["self_attn.q_proj.weight"] == "midlayer.self_attn.q_proj.weight"


def test_the_published_speculators_configuration_parses() -> None:
    """Its heads are together wider than its layer."""
    found = _parsed(GPT_OSS_SPECULATORS, third_shapes("layers.0.", 2880, 2880, 512), _GPT_OSS_20B)
    assert found.kind == EAGLE3 and found.taps == (2, 12, 21) and found.norm_before_residual
    assert found.config.rope_parameters["rope_theta"] == 5e5 and found.config.head_dim == 64


def test_what_speculators_leaves_out_is_as_in_llama() -> None:
    layer = {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    config = {"speculators_model_type": "eagle", "transformer_layer_config": layer, "fusion_bias": False}
    shapes = {**layer_shapes("transformer.", 4096), "fusion_fc.weight": (4096, 8192)}
    found = _parsed(config, shapes)
    assert found.kind == EAGLE and found.stored["fc.weight"] == "fusion_fc.weight"
    assert found.config.hidden_size == 4096 and found.config.num_attention_heads == 32


def test_positions_are_scaled_as_the_layer_says() -> None:
    scaling = {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    given = {**LLAMA3_EAGLE3, "max_position_embeddings": 131072, "rope_scaling": scaling}
    assert _parsed(given, third_shapes("midlayer.")).config.rope_parameters["rope_type"] == "llama3"


def test_others_are_left_to_others() -> None:
    llama, layer = {"model_type": "llama"}, "layers.0.self_attn.q_proj.weight"
    assert not recognises(llama, [f"model.{layer}", "lm_head.weight"])
    assert not recognises(llama, ["fc.weight", "fc.bias"])
    assert not recognises({"speculators_model_type": "dflash"}, ["fc.weight", layer])
    assert recognises({}, ["fc.weight", layer])


def _files(folder: Path, head: Head) -> HeadFiles:
    files = open_files(write_head(folder / "head", head), "some/head")
    assert files is not None
    return files


def test_what_is_asked_of_the_target(tmp_path: Path) -> None:
    eagle, eagle3 = (opened(_files(tmp_path / kind, make_head(kind)), _TINY) for kind in ("eagle", "eagle3"))
    assert eagle.kind == "eagle" and eagle.shares_head and eagle.wants == Wants(last=True)
    assert eagle3.kind == "eagle3" and not eagle3.shares_head and eagle3.wants == Wants(layers=(2, 4, 5))
    assert eagle.name == "EAGLE" and eagle3.name == "EAGLE-3 (40 of 96 tokens)"
    assert eagle.fingerprint != eagle3.fingerprint


_NESTED = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 8, 2]}}
REFUSED: dict[str, tuple[Head, str]] = {
    "hidden size": (make_head("eagle", width=24), "hidden size 24, and tiny has 32"),
    "hidden size of the target": (
        make_head("eagle3", outer={"target_hidden_size": 64}, width=24, own_embedding=True),
        "hidden size 64, and tiny has 32",
    ),
    "vocabulary": (
        make_head("eagle", config={"vocab_size": 50}),
        r"vocabulary of 50 tokens .*, and tiny has 96",
    ),
    "taps beyond": (make_head("eagle3", outer=_NESTED), r"inputs of layers \[2, 9, 3\]"),
    "taps of no kind": (
        make_head("eagle3", outer={"eagle_aux_hidden_state_layer_ids": "2,3"}),
        "inputs of layers '2,3'",
    ),
    "number of taps": (
        make_head("eagle3", outer={"eagle_aux_hidden_state_layer_ids": [2, 3]}),
        r"'fc.weight' is \[32, 96\] and not \[32, 64\]",
    ),
    "no embedding": (
        make_head("eagle3", width=24, outer={"target_hidden_size": 32}),
        "lacks the tensor 'embed_tokens.weight'",
    ),
    "activation": (make_head("eagle", config={"hidden_act": "loud"}), "no Llama layer"),
    "size of no number": (make_head("eagle", config={"hidden_size": "wide"}), "no Llama layer"),
    "positions": (
        make_head("eagle", config={"rope_scaling": {"rope_type": "odd", "factor": 2.0}}),
        "no Llama layer",
    ),
    "an epsilon of no number": (
        make_head("eagle", config={"rms_norm_eps": float("nan")}),
        "rms_norm_eps is nan",
    ),
    "no heads": (make_head("eagle", config={"num_attention_heads": 0}), "no Llama layer"),
    "a negative size": (make_head("eagle", config={"intermediate_size": -1}), "intermediate_size is -1"),
    "heads that share unevenly": (
        make_head("eagle", config={"num_key_value_heads": 3}),
        "4 heads do not share 3 evenly",
    ),
    "an odd head": (make_head("eagle", config={"head_dim": 7}), "head_dim.*7"),
    "a huge head": (replace(make_head("eagle"), config={"head_dim": 10**9}), r"'.*proj\.weight' is \["),
    "endless positions": (make_head("eagle", config={"rope_theta": float("nan")}), "no finite numbers"),
    "heads": (make_head("eagle", config={"num_attention_heads": 8}), "self_attn.k_proj.weight"),
    "draft vocabulary": (
        make_head("eagle3", speculators=True, outer={"target_hidden_size": "32"}),
        "target_hidden_size: '32'",
    ),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_does_not_fit_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    head, said = REFUSED[name]
    with pytest.raises((DraftError, MissingTensorError), match=said) as caught:
        opened(_files(tmp_path, head), _TINY)
    assert "\n" not in str(caught.value) and "some/head" in str(caught.value)


def test_speculators_must_say_where_the_norm_is(tmp_path: Path) -> None:
    """Those who read the format do not agree on what is meant where it says nothing."""
    folder = write_head(tmp_path / "head", make_head("eagle3", speculators=True))
    config = json.loads((folder / "config.json").read_text())
    del config["norm_before_residual"]
    (folder / "config.json").write_text(json.dumps(config))
    files = open_files(folder, "some/head")
    assert files is not None
    with pytest.raises(DraftError, match="norm_before_residual is true or false"):
        opened(files, _TINY)


def test_a_part_that_is_there_twice(tmp_path: Path) -> None:
    head = make_head("eagle")
    head.tensors["midlayer.post_attention_layernorm.weight"] = torch.ones(32)
    with pytest.raises(DraftError, match=r"twice, as '.*layernorm\.weight' and"):
        opened(_files(tmp_path, head), _TINY)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_missing_tensor_is_named(kind: str, tmp_path: Path) -> None:
    head = make_head(kind)
    del head.tensors["mlp.up_proj.weight"]
    with pytest.raises(OffspecError, match=r"mlp\.up_proj\.weight"):
        opened(_files(tmp_path, head), _TINY)


@pytest.mark.parametrize(
    "extra", ["self_attn.q_norm.weight", "embed_layernorm.weight", "layers.1.mlp.gate.weight"]
)
def test_varieties_that_would_be_misread_are_refused(extra: str, tmp_path: Path) -> None:
    head = make_head("eagle")
    head.tensors[extra] = torch.ones(8)
    with pytest.raises(DraftError, match="not supported"):
        opened(_files(tmp_path, head), _TINY)


@pytest.mark.parametrize("kind", [[], {"a": 1}, 3])
def test_a_kind_that_is_no_word(kind: Any) -> None:
    assert not recognises({"speculators_model_type": kind}, ["fc.weight", "layers.0.self_attn.q_proj.weight"])


@pytest.mark.parametrize("offset", [57, -1], ids=["beyond", "twice"])
def test_ids_beyond_the_vocabulary_are_found_before_loading(offset: int, tmp_path: Path) -> None:
    head = make_head("eagle3")
    head.tensors["d2t"][39] = offset if offset > 0 else head.tensors["d2t"][38] + offset
    with pytest.raises(DraftError, match="'d2t'"):
        opened(_files(tmp_path, head), _TINY)


@pytest.mark.parametrize("speculators", [False, True])
def test_a_truncated_file_is_found_when_it_is_opened(speculators: bool, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", make_head("eagle3", speculators=speculators))
    (file,) = (path for path in folder.iterdir() if path.suffix != ".json")
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises((TruncatedError, CheckpointError)) as caught:
        open_files(folder, "some/head")
    assert "\n" not in str(caught.value)


def test_a_head_of_the_taps_that_are_published_fits_no_shallow_target(tmp_path: Path) -> None:
    with pytest.raises(DraftError, match="target of 4 layers"):
        opened(_files(tmp_path, make_head("eagle3")), replace(_TINY, layers=4))


def test_a_configuration_that_is_absent_is_no_llama_of_this_size(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", make_head("eagle"))
    (folder / "config.json").write_text(json.dumps({}))
    files = open_files(folder, "some/head")
    assert files is not None and recognises(files.config, files.names)
    with pytest.raises(DraftError, match="hidden size 4096"):
        opened(files, _TINY)
