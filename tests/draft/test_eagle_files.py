"""Opening of EAGLE heads, and error messages for unsupported ones."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.core.errors import DraftError, MissingTensorError
from offspec.draft.base import RequiredStates
from offspec.draft.heads.base import TargetShape
from offspec.draft.heads.eagle import opened
from offspec.draft.heads.eagle_files import kind_of
from offspec.draft.heads.files import HeadFiles, open_files
from tests.support.eagle_files import HIDDEN, LAYERS, Head, make_head, write_head
from tests.support.tiny_models import VOCABULARY

_TINY = TargetShape("tiny", HIDDEN, VOCABULARY, LAYERS, torch.float32, torch.device("cpu"), None)


def test_other_formats_are_not_claimed() -> None:
    llama, layer = {"model_type": "llama"}, "layers.0.self_attn.q_proj.weight"
    assert not kind_of(llama, [f"model.{layer}", "lm_head.weight"])
    assert not kind_of(llama, ["fc.weight", "fc.bias"])
    kinds: tuple[Any, ...] = ("dflash", [], {"a": 1}, 3)
    for kind in kinds:
        assert not kind_of({"speculators_model_type": kind}, ["fc.weight", layer])
    assert kind_of({}, ["fc.weight", layer])


def _files(folder: Path, head: Head) -> HeadFiles:
    files = open_files(write_head(folder / "head", head), "some/head")
    assert files is not None
    return files


def test_required_states_of_the_target(tmp_path: Path) -> None:
    eagle, eagle3 = (opened(_files(tmp_path / kind, make_head(kind)), _TINY) for kind in ("eagle", "eagle3"))
    assert eagle.kind == "eagle" and eagle.shares_head and eagle.required_states == RequiredStates(last=True)
    assert (
        eagle3.kind == "eagle3"
        and not eagle3.shares_head
        and eagle3.required_states == RequiredStates(layers=(2, 4, 5))
    )
    assert eagle.name == "EAGLE" and eagle3.name == "EAGLE-3 (40 of 96 tokens)"
    assert eagle.fingerprint != eagle3.fingerprint


def _layer_tensors(**config: Any) -> Head:
    return make_head("eagle", config=config)


def _third(**outer: Any) -> Head:
    return make_head("eagle3", outer=outer)


REFUSED: dict[str, tuple[Head, str]] = {
    "hidden size": (make_head("eagle", width=24), "hidden size 24, and tiny has 32"),
    "hidden size of the target": (_third(target_hidden_size=64), "hidden size 64, and tiny has 32"),
    "vocabulary": (_layer_tensors(vocab_size=50), "vocabulary of 50 tokens .*, and tiny has 96"),
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
    "activation": (_layer_tensors(hidden_act="loud"), "does not have the configuration of a Llama layer"),
    "positions": (
        _layer_tensors(rope_scaling={"rope_type": "odd", "factor": 2.0}),
        "does not have the configuration of a Llama layer",
    ),
    "endless positions": (_layer_tensors(rope_theta=float("nan")), "no finite numbers"),
    "an epsilon of no number": (_layer_tensors(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
    "no heads": (_layer_tensors(num_attention_heads=0), "does not have the configuration of a Llama layer"),
    "a negative size": (_layer_tensors(intermediate_size=-1), "intermediate_size is -1"),
    "heads that share unevenly": (_layer_tensors(num_key_value_heads=3), "4 heads do not share 3 evenly"),
    "an odd head": (_layer_tensors(head_dim=7), "head_dim.*7"),
    "a huge head": (replace(make_head("eagle"), config={"head_dim": 10**9}), r"'.*proj\.weight' is \["),
    "a size of no number": (
        make_head("eagle3", speculators=True, outer={"target_hidden_size": "32"}),
        "target_hidden_size: '32'",
    ),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_mismatched_heads_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    head, message = REFUSED[name]
    with pytest.raises((DraftError, MissingTensorError), match=message) as caught:
        opened(_files(tmp_path, head), _TINY)
    assert "\n" not in str(caught.value) and "some/head" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "message"),
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
def test_ambiguous_tensors_are_refused(
    kind: str, name: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    head = make_head(kind)
    if tensor is None:
        del head.tensors[name]
    else:
        head.tensors[name] = tensor
    with pytest.raises((DraftError, MissingTensorError), match=message):
        opened(_files(tmp_path, head), _TINY)


@pytest.mark.parametrize("absent", ["norm_before_residual", "all"])
def test_incomplete_configuration(absent: str, tmp_path: Path) -> None:
    """Readers of the speculators format disagree on the default position of the norm."""
    folder = write_head(tmp_path / "head", make_head("eagle3", speculators=absent != "all"))
    config = json.loads((folder / "config.json").read_text())
    kept = {} if absent == "all" else {name: value for name, value in config.items() if name != absent}
    (folder / "config.json").write_text(json.dumps(kept))
    files = open_files(folder, "some/head")
    assert files is not None and kind_of(files.config, files.names)
    message = "hidden size 4096" if absent == "all" else "lacks norm_before_residual"
    with pytest.raises(DraftError, match=message):
        opened(files, _TINY)


def test_published_taps_need_a_deep_target(tmp_path: Path) -> None:
    with pytest.raises(DraftError, match="target of 4 layers"):
        opened(_files(tmp_path, make_head("eagle3")), replace(_TINY, layers=4))
