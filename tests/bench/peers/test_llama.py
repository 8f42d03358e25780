"""llama.cpp in the peers bench: its log, its command lines, its model file, and scripted programs for it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.lib.cgroup import BenchError
from bench.lib.report import Prompt
from bench.peers import __main__ as peers
from bench.peers import jobs as peers_jobs
from bench.peers import llama as peers_llama
from bench.peers import llama_models
from bench.peers import quantised as peers_quantised
from bench.peers import tally as peers_tally
from bench.peers.jobs import OFFSPEC, Scene, Variant
from bench.peers.llama import ALONE, DRAFTED, LlamaFiles
from bench.peers.quantised import LLAMA, LLAMA_DRAFTED, PACKED, STORED, Quantised
from tests.support.peer_runs import RECIPE, answer, run

LOG_ALONE = """0.00.489.405 I
0.00.762.438 I common_perf_print:        load time =     169.40 ms
0.00.762.452 I common_perf_print: prompt eval time =    1500.00 ms /    16 tokens (    9.59 ms per token)
0.00.762.466 I common_perf_print:        eval time =    1050.00 ms /     7 runs   (   15.42 ms per token)
0.00.762.479 I common_perf_print:       total time =     278.48 ms /    23 tokens
"""
LOG_DRAFTED = """0.01.319.362 I encoded   16 tokens in    0.500 seconds, speed:   68.175 t/s
0.01.319.382 I decoded    8 tokens in    3.000 seconds, speed:   20.929 t/s
0.01.319.434 I n_drafted = 8
0.01.319.447 I n_accept  = 5
0.01.319.578 I common_perf_print:        load time =     156.92 ms
0.01.319.591 I common_perf_print:        eval time =       0.00 ms /     1 runs   (    0.00 ms per token)
"""


def test_a_run_without_a_draft() -> None:
    found = peers_llama.read_alone(LOG_ALONE)
    assert (found["tokens"], found["passes"], found["prompt_tokens"]) == (8, 8, 16)
    assert (found["ttft_s"], found["seconds"]) == (1.5, pytest.approx(2.55))
    assert peers_tally.project(found, 48) == pytest.approx(1.5 + 47 * 0.15)
    assert peers_llama.read_load(LOG_ALONE) == pytest.approx(0.1694)
    one = LOG_ALONE.replace("1050.00 ms /     7 runs", "0.00 ms /     1 runs")
    assert peers_llama.read_alone(one)["tokens"] == 1


def test_a_speculative_run() -> None:
    found = peers_llama.read_drafted(LOG_DRAFTED)
    assert (found["tokens"], found["passes"], found["seconds"]) == (8, 3, pytest.approx(3.5))
    assert [one["emitted"] for one in found["per_pass"]] == [3, 3, 2]
    assert found["ttft_s"] == pytest.approx(1.5)
    assert peers_tally.project(found, 8) == pytest.approx(3.5)


@pytest.mark.parametrize("read", [peers_llama.read_alone, peers_llama.read_drafted])
def test_a_log_without_figures_is_no_run(read: Any) -> None:
    with pytest.raises(BenchError, match="no figures"):
        read("error: failed to load model")


@pytest.fixture
def files(tmp_path: Path) -> LlamaFiles:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, log in ((ALONE, LOG_ALONE), (DRAFTED, LOG_DRAFTED)):
        text = f"#!/bin/sh\nprintf 'hello\\377'\necho \"$@\" >{tmp_path}/args\ncat >&2 <<'END'\n{log}END\n"
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    for name in ("target", "draft"):
        (tmp_path / name).write_bytes(b"1234")
    made = {"target": str(tmp_path / "target"), "draft": str(tmp_path / "draft"), "layer_bytes": 3}
    return LlamaFiles.of(programs, json.dumps({**made, "texts": {"chat-1": "hi\n"}}))


GROUP = [(3, Prompt("chat-1", "chat", "hi"))]


def scene_of(files: LlamaFiles, folder: Path) -> Scene:
    return Scene(folder, RECIPE, folder, None, {}, {}, Quantised(folder / "pack", files))


@pytest.mark.parametrize(
    ("contender", "words", "tokens"),
    [
        (LLAMA, ["--predict 5", "--no-conversation", "--seed 4", "--temp 0.0", "--no-repack"], 8),
        (LLAMA_DRAFTED, ["--predict 9", "--spec-draft-n-max 4", "--spec-type draft-simple"], 8),
    ],
)
def test_llama_s_process_and_its_figures(
    contender: str, words: list[str], tokens: int, files: LlamaFiles, tmp_path: Path
) -> None:
    args = peers.main.parser().parse_args(
        ["--no-cgroup", "--keep-caches", "--off-tokens", "5", "--tokens", "9", "--context", "77"]
    )
    scene = scene_of(files, tmp_path)
    variant = peers_jobs.variants(args, scene, contender)[0]
    found = peers_jobs.run(args, scene, variant, GROUP, 0.0)
    assert "error" not in found
    assert found["answers"][0]["tokens"] == tokens
    assert found["answers"][0]["text"].startswith("hello")
    asked = (tmp_path / "args").read_text()
    assert all(word in asked for word in [*words, "--ctx-size 77", "--prompt hi"])


def test_a_program_that_fails_is_told(files: LlamaFiles, tmp_path: Path) -> None:
    (files.programs / ALONE).write_text("#!/bin/sh\nexit 3\n")
    args = peers.main.parser().parse_args(["--no-cgroup", "--keep-caches"])
    variant = Variant(LLAMA, "mapped", {"threads": 1, "repack": False})
    found = peers_jobs.run(args, scene_of(files, tmp_path), variant, GROUP, 0.0)
    assert (found["error"]["kind"], "exit code 3" in found["error"]["message"]) == ("failed", True)


def test_offspec_gets_the_draft_that_llama_cpp_has(
    files: LlamaFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def worker(args: Any, folder: Path, group: Any, temperature: float, on: bool) -> dict[str, Any]:
        seen.append((folder.name, args.draft, args.draft_bits, args.budget, on))
        return {"answers": []}

    monkeypatch.setattr(peers_quantised, "ask", worker)
    args = peers.main.parser().parse_args(["--budget", "32"])
    args.draft = "elsewhere"
    scene = scene_of(files, tmp_path)
    for contender in (PACKED, STORED):
        for variant in peers_jobs.variants(args, scene, contender):
            peers_jobs.run(args, scene, variant, GROUP, 0.0)
    rest = [("demo", 16, 32, True), ("demo", 16, None, True), ("demo", 4, None, True)]
    assert seen == [(name, *others) for name in ("pack", "target") for others in rest]


def test_quantised_contenders_are_compared_among_themselves() -> None:
    runs = [
        run(OFFSPEC, answer([4, 4], [8.0, 8.0])),
        run(PACKED, answer([4, 4], [2.0, 2.0]), "slow"),
        run(PACKED, answer([4, 4], [1.0, 1.0]), "fast"),
        run(LLAMA_DRAFTED, answer([2, 2, 2, 2], [1.0] * 4), "4"),
    ]
    row = peers_tally.summarise(runs, 0.0)
    found = row["contenders"]
    assert found[PACKED]["settings"] == "fast"
    assert found[LLAMA_DRAFTED]["offspec_is_faster_by"] == 2.0
    assert found[LLAMA_DRAFTED]["same_tokens"] is None
    (told,) = peers_tally.shortfalls([row], [OFFSPEC, PACKED, LLAMA_DRAFTED])
    assert (
        told == "offspec, its own pack is 2.00x llama.cpp, speculative at temperature 0, where 3x was the aim"
    )
    assert peers_tally.shortfalls([row], [OFFSPEC, LLAMA_DRAFTED]) == []


def test_a_target_with_the_same_file_is_what_llama_cpp_is_compared_with() -> None:
    drafted = {**answer([2, 2, 2, 2], [4.0, 1.0, 1.0, 1.0]), "decode_seconds": 4.0}
    runs = [
        run(PACKED, answer([4, 4], [1.0, 1.0])),
        run(STORED, answer([4, 4], [4.0, 1.0])),
        run(LLAMA, answer([1, 1, 1], [3.0, 2.0, 2.0])),
        run(LLAMA_DRAFTED, drafted),
    ]
    found = peers_tally.summarise(runs, 0.0)["contenders"]
    assert [found[name]["decode_tokens_per_s"] for name in (STORED, LLAMA, LLAMA_DRAFTED)] == [4.0, 0.5, 2.0]
    assert found[LLAMA]["offspec_decodes_faster_by"] == 8.0
    assert found[LLAMA_DRAFTED]["offspec_decodes_faster_by"] == 2.0
    assert found[LLAMA_DRAFTED]["offspec_is_faster_by"] == 7.0 / 5.0


def test_llama_is_not_asked_to_copy_what_does_not_fit(files: LlamaFiles, tmp_path: Path) -> None:
    def names(contender: str, *words: str) -> list[str]:
        args = peers.main.parser().parse_args(["--draft-lengths", "2", "6", *words])
        return [variant.name for variant in peers_jobs.variants(args, scene_of(files, tmp_path), contender)]

    assert names(LLAMA_DRAFTED) == ["mapped, draft of 2", "mapped, draft of 6", "repacked, draft of 6"]
    assert names(LLAMA_DRAFTED, "--memory", "3B") == ["mapped, draft of 2", "mapped, draft of 6"]
    assert names(LLAMA, "--memory", "3B") == ["mapped"]


def test_quantised_contenders_need_llama_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_quantised, "pack_of", lambda target, to: str(tmp_path))
    args = peers.main.parser().parse_args(["--only", OFFSPEC, LLAMA])
    with pytest.raises(BenchError, match="llama_cpp needs --llama-cpp"):
        peers_quantised.prepare(args, tmp_path)
    assert peers_quantised.prepare(peers.main.parser().parse_args(["--only", OFFSPEC]), tmp_path) is None
    alone = peers_quantised.prepare(peers.main.parser().parse_args(["--only", PACKED]), tmp_path)
    assert alone is not None
    assert alone.to_json() == {"quantised_layer_bytes": 0, "pack_bytes": 0}
    assert alone == Quantised(tmp_path, None)


def test_a_gguf_file_has_the_values_of_the_checkpoint(tmp_path: Path) -> None:
    """The file is opened by offspec's own reader, and its weights are those of the model, rounded to Q4_0."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize

    from bench.lib import widen
    from offspec.checkpoint import open_checkpoint
    from tests.support.tiny_models import write_model

    small = write_model(
        tmp_path / "small", hidden_size=64, intermediate_size=64, head_dim=16, num_hidden_layers=1
    )
    wide, _ = widen.ensure(str(small), tmp_path / "wide", 2)
    description = GGUFWriter(tmp_path / "small.gguf", "llama")
    description.add_embedding_length(64)
    description.add_context_length(96)
    description.write_header_to_file()
    description.write_kv_data_to_file()
    description.close()
    llama_models.write(wide, tmp_path / "small.gguf", tmp_path / "out.gguf")
    out = GGUFReader(tmp_path / "out.gguf")
    kept = [out.fields[f"llama.{key}_length"].contents() for key in ("embedding", "context")]
    assert kept == [128, 96]  # as it is wide, and as the small one has it
    stored = {tensor.name: tensor for tensor in out.tensors}
    kind = GGMLQuantizationType.Q4_0
    source = open_checkpoint(str(wide)).tensors
    weight: Any = source["model.layers.0.mlp.down_proj.weight"]
    assert weight.dtype == "F32"
    data = np.fromfile(weight.file, "<f4", int(np.prod(weight.shape)), offset=weight.offset)
    values = data.reshape(weight.shape)
    found = stored["blk.0.ffn_down.weight"]
    assert found.tensor_type == kind
    assert np.array_equal(dequantize(found.data, kind), dequantize(quantize(values, kind), kind))
    outer = {"output.weight", "token_embd.weight", "output_norm.weight"}
    assert outer | {"blk.0.attn_q.weight"} <= stored.keys()
    layers = [tensor.n_bytes for name, tensor in stored.items() if name.startswith("blk.0.")]
    assert llama_models.layer_bytes(tmp_path / "out.gguf") == sum(layers)


def test_rows_are_rotated_as_llama_cpp_has_them() -> None:
    rows = torch.arange(8).view(8, 1).numpy()
    assert llama_models.rotated(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_sizes_follow_the_configuration() -> None:
    config = SimpleNamespace(hidden_size=1, intermediate_size=2, num_attention_heads=3, num_key_value_heads=4)
    assert llama_models.sizes_of(vars(config))["llama.attention.head_count_kv"] == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_s_gguf_file_has_its_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """Experts are fused in their order, and queries are rotated; nothing is rounded."""
    from gguf import GGUFReader, GGUFWriter
    from safetensors.torch import load_file

    from bench.lib.upcycle import upcycle
    from bench.lib.upcycling import Mixture
    from bench.peers import llama_mixture
    from offspec.checkpoint import open_checkpoint
    from tests.support.bench_models import make_model

    make_model(tmp_path / "small", dtype=dtype)
    mixture, texts = Mixture(11, 3), [[i % 61 for i in range(90)]]  # 11: two digits, which sort otherwise
    upcycle(open_checkpoint(str(tmp_path / "small")), tmp_path / "mixture", mixture, texts)
    description = GGUFWriter(tmp_path / "small.gguf", "llama")
    description.add_context_length(96)
    description.write_header_to_file()
    description.write_kv_data_to_file()
    description.close()
    llama_mixture.write(tmp_path / "mixture", tmp_path / "small.gguf", tmp_path / "out.gguf")
    out = GGUFReader(tmp_path / "out.gguf")
    keys = ("expert_count", "expert_used_count", "context_length", "embedding_length")
    assert [out.fields[f"llama.{key}"].contents() for key in keys] == [11, 3, 96, 24]
    stored = {tensor.name: tensor for tensor in out.tensors}
    weights: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "mixture").glob("*.safetensors"):
        weights |= load_file(file)

    def found(name: str, kind: torch.dtype) -> torch.Tensor:
        data = torch.from_numpy(np.array(stored[name].data)).view(torch.uint8)
        return data.view(kind).view(*reversed(stored[name].shape.tolist()))

    for matrix, name in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
        prefix = "model.layers.1.block_sparse_moe.experts"
        experts = [weights[f"{prefix}.{expert}.{matrix}.weight"] for expert in range(11)]
        assert torch.equal(found(f"blk.1.ffn_{name}_exps.weight", dtype), torch.stack(experts))
    router = weights["model.layers.0.block_sparse_moe.gate.weight"].float()
    assert torch.equal(found("blk.0.ffn_gate_inp.weight", torch.float32), router)
    query = weights["model.layers.0.self_attn.q_proj.weight"].float().numpy()
    rotated = torch.from_numpy(llama_models.rotated(query, 6)).to(dtype)
    assert torch.equal(found("blk.0.attn_q.weight", dtype), rotated)
    assert len(stored) == 2 * 10 + 3  # in a layer four projections, two norms, the router, three of experts
