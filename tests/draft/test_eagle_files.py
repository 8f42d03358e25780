"""Which EAGLE heads are opened, by real published configurations, and what is said of those that are not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.core.errors import CheckpointError, DraftError, MissingTensorError, TruncatedError
from offspec.draft.base import Wants
from offspec.draft.heads.base import TargetShape
from offspec.draft.heads.eagle import opened, recognises
from offspec.draft.heads.eagle_files import EAGLE, EAGLE3, EagleFormat, read_format
from offspec.draft.heads.files import HeadFiles, open_files
from tests.support.eagle_files import HIDDEN, LAYERS, Head, make_head, write_head
from tests.support.tiny_models import VOCABULARY

Shapes = dict[str, tuple[int, ...]]
_TINY = TargetShape("tiny", HIDDEN, VOCABULARY, LAYERS, torch.float32, torch.device("cpu"), None)
_LLAMA3_8B = TargetShape("Llama-3-8B", 4096, 128256, 32, torch.bfloat16, torch.device("cpu"), None)
_GPT_OSS_20B = TargetShape("gpt-oss-20b", 2880, 201088, 24, torch.bfloat16, torch.device("cpu"), None)

# traineagle3/config.json of github.com/SafeAILab/EAGLE, published as yuhuili/EAGLE3-LLaMA3.1-Instruct-8B.
LLAMA3_EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float16",
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}
# EAGLE-LLaMA3-Instruct-8B.json of the same, published as yuhuili/EAGLE-LLaMA3-Instruct-8B.
LLAMA3_EAGLE = {**LLAMA3_EAGLE3, "rope_theta": 500000.0, "bias": False}
del LLAMA3_EAGLE["draft_vocab_size"]
# nm-testing/for_testing_gptoss20b_spec_eagle3, by the makers of RedHatAI's heads.
GPT_OSS_SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 32000,
    "norm_before_residual": True,
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "openai/gpt-oss-20b"}},
    "speculators_model_type": "eagle3",
    "target_hidden_size": None,
    "transformer_layer_config": {
        "attention_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "model_type": "llama",
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "vocab_size": 201088,
    },
}


class Listed(HeadFiles):
    """Files of a configuration and shapes alone, as large as the published ones."""

    def __init__(self, config: dict[str, Any], shapes: Shapes) -> None:
        super().__init__("published/head", Path(), [], config)
        self._tensors |= {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def layer_shapes(prefix: str, given: int, width: int = 4096, inner: int = 14336, pair: int = 1024) -> Shapes:
    """Of a layer whose queries are 4096 wide; given: what its attention takes."""
    return {
        f"{prefix}self_attn.q_proj.weight": (4096, given),
        f"{prefix}self_attn.k_proj.weight": (pair, given),
        f"{prefix}self_attn.v_proj.weight": (pair, given),
        f"{prefix}self_attn.o_proj.weight": (width, 4096),
        f"{prefix}mlp.gate_proj.weight": (inner, width),
        f"{prefix}mlp.up_proj.weight": (inner, width),
        f"{prefix}mlp.down_proj.weight": (width, inner),
        f"{prefix}post_attention_layernorm.weight": (width,),
    }


def third_shapes(prefix: str, width: int = 4096, inner: int = 14336, pair: int = 1024) -> Shapes:
    """Of an EAGLE-3 head of 32000 tokens."""
    return {
        **layer_shapes(prefix, 2 * width, width, inner, pair),
        f"{prefix}input_layernorm.weight": (width,),
        f"{prefix}hidden_norm.weight": (width,),
        "fc.weight": (width, 3 * width),
        "norm.weight": (width,),
        "lm_head.weight": (32000, width),
        "d2t": (32000,),
        "t2d": (128256,),
    }


def _parsed(config: dict[str, Any], shapes: Shapes, target: TargetShape = _LLAMA3_8B) -> EagleFormat:
    files = Listed(config, shapes)
    assert recognises(config, files.names)
    return read_format(files, target)


def test_the_published_configurations_parse() -> None:
    fused, embedding = {"fc.weight": (4096, 8192)}, {"embed_tokens.weight": (128256, 4096)}
    found = _parsed(LLAMA3_EAGLE, {**layer_shapes("layers.0.", 4096), **fused, **embedding})
    assert found.kind == EAGLE and found.taps == () and found.config.rope_parameters["rope_theta"] == 5e5
    assert found.config.num_key_value_heads == 8 and found.config.head_dim == 128
    assert len(found.stored) == 10 and "fc.bias" not in found.stored

    found = _parsed(LLAMA3_EAGLE3, third_shapes("midlayer."))
    assert found.kind == EAGLE3 and found.taps == (2, 16, 29) and not found.norm_before_residual
    assert found.config.rope_parameters["rope_theta"] == 10000.0 and found.config.rms_norm_eps == 1e-5
    assert found.stored["self_attn.q_proj.weight"] == "midlayer.self_attn.q_proj.weight"

    # Its heads are together wider than its layer.
    found = _parsed(GPT_OSS_SPECULATORS, third_shapes("layers.0.", 2880, 2880, 512), _GPT_OSS_20B)
    assert found.kind == EAGLE3 and found.taps == (2, 12, 21) and found.norm_before_residual
    assert found.config.rope_parameters["rope_theta"] == 5e5 and found.config.head_dim == 64


def test_what_is_left_out_is_as_in_llama_and_positions_are_scaled_as_is_said() -> None:
    layer = {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    config = {"speculators_model_type": "eagle", "transformer_layer_config": layer, "fusion_bias": False}
    found = _parsed(config, {**layer_shapes("transformer.", 4096), "fusion_fc.weight": (4096, 8192)})
    assert found.kind == EAGLE and found.stored["fc.weight"] == "fusion_fc.weight"
    assert found.config.hidden_size == 4096 and found.config.num_attention_heads == 32
    scaling = {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    scaled = _parsed({**LLAMA3_EAGLE3, "rope_scaling": scaling}, third_shapes("midlayer."))
    assert scaled.config.rope_parameters["rope_type"] == "llama3"


def test_others_are_left_to_others() -> None:
    llama, layer = {"model_type": "llama"}, "layers.0.self_attn.q_proj.weight"
    assert not recognises(llama, [f"model.{layer}", "lm_head.weight"])
    assert not recognises(llama, ["fc.weight", "fc.bias"])
    for kind in ("dflash", [], {"a": 1}, 3):
        assert not recognises({"speculators_model_type": kind}, ["fc.weight", layer])
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


def _of_layer(**config: Any) -> Head:
    return make_head("eagle", config=config)


def _third(**outer: Any) -> Head:
    return make_head("eagle3", outer=outer)


REFUSED: dict[str, tuple[Head, str]] = {
    "hidden size": (make_head("eagle", width=24), "hidden size 24, and tiny has 32"),
    "hidden size of the target": (_third(target_hidden_size=64), "hidden size 64, and tiny has 32"),
    "vocabulary": (_of_layer(vocab_size=50), "vocabulary of 50 tokens .*, and tiny has 96"),
    "taps beyond": (
        _third(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 8, 2]}),
        r"inputs of layers \[2, 9, 3\]",
    ),
    "taps of no kind": (_third(eagle_aux_hidden_state_layer_ids="2,3"), "inputs of layers '2,3'"),
    "number of taps": (
        _third(eagle_aux_hidden_state_layer_ids=[2, 3]),
        r"'fc.weight' is \[32, 96\] and not \[32, 64\]",
    ),
    "no embedding": (
        make_head("eagle3", width=24, outer={"target_hidden_size": 32}),
        "lacks the tensor 'embed_tokens.weight'",
    ),
    "activation": (_of_layer(hidden_act="loud"), "no Llama layer"),
    "positions": (_of_layer(rope_scaling={"rope_type": "odd", "factor": 2.0}), "no Llama layer"),
    "endless positions": (_of_layer(rope_theta=float("nan")), "no finite numbers"),
    "an epsilon of no number": (_of_layer(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
    "no heads": (_of_layer(num_attention_heads=0), "no Llama layer"),
    "a negative size": (_of_layer(intermediate_size=-1), "intermediate_size is -1"),
    "heads that share unevenly": (_of_layer(num_key_value_heads=3), "4 heads do not share 3 evenly"),
    "an odd head": (_of_layer(head_dim=7), "head_dim.*7"),
    "a huge head": (replace(make_head("eagle"), config={"head_dim": 10**9}), r"'.*proj\.weight' is \["),
    "a size of no number": (
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


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "said"),
    [
        ("eagle", "midlayer.post_attention_layernorm.weight", torch.ones(32), "twice, as '.*layernorm"),
        ("eagle", "mlp.up_proj.weight", None, r"mlp\.up_proj\.weight"),
        ("eagle", "self_attn.q_norm.weight", torch.ones(8), "not supported"),
        ("eagle", "layers.1.mlp.gate.weight", torch.ones(8), "not supported"),
        ("eagle3", "d2t", torch.full((40,), 57), "'d2t'"),
        ("eagle3", "d2t", -torch.arange(40) // 2, "'d2t'"),
    ],
    ids=["twice", "missing", "another norm", "a second layer", "ids beyond", "ids twice"],
)
def test_tensors_that_would_be_misread_are_refused(
    kind: str, name: str, tensor: torch.Tensor | None, said: str, tmp_path: Path
) -> None:
    head = make_head(kind)
    if tensor is None:
        del head.tensors[name]
    else:
        head.tensors[name] = tensor
    with pytest.raises((DraftError, MissingTensorError), match=said):
        opened(_files(tmp_path, head), _TINY)


@pytest.mark.parametrize("absent", ["norm_before_residual", "all"])
def test_a_configuration_that_says_too_little(absent: str, tmp_path: Path) -> None:
    """Those who read speculators' format do not agree on what is meant where it says nothing of the norm."""
    folder = write_head(tmp_path / "head", make_head("eagle3", speculators=absent != "all"))
    config = json.loads((folder / "config.json").read_text())
    kept = {} if absent == "all" else {name: value for name, value in config.items() if name != absent}
    (folder / "config.json").write_text(json.dumps(kept))
    files = open_files(folder, "some/head")
    assert files is not None and recognises(files.config, files.names)
    said = "hidden size 4096" if absent == "all" else "norm_before_residual is true or false"
    with pytest.raises(DraftError, match=said):
        opened(files, _TINY)


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
