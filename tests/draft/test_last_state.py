"""Medusa heads and MLPSpeculators: the same predictions as their published formulas, computed naively."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from offspec.core.config import SamplingParams
from offspec.core.errors import CheckpointError, DraftError, MissingTensorError
from offspec.core.events import ignore_event
from offspec.draft.base import Drafter, Features, RequiredStates, Scorer
from offspec.draft.growing_tree import GrowingTree, Subtree
from offspec.draft.heads import medusa, mlp_speculator
from offspec.draft.heads.base import OpenedHead
from offspec.draft.heads.files import open_files
from offspec.draft.heads.open import open_head
from offspec.model.loaded import LoadedModel
from offspec.model.parts import TargetParts
from offspec.sampling.logits_processor import LogitsProcessor
from offspec_planners.acceptance import Calibration
from tests.support.drafter_logits import CALLS, CHAINS, RecordingScorer, node_logits, paths, tree_below
from tests.support.heads_files import (
    HIDDEN,
    INNER,
    MEDUSA_CONFIG,
    MLP_CONFIG,
    Tensors,
    medusa_tensors,
    mlp_config,
    mlp_tensors,
    open_for_tiny,
    target_shape,
    vllm_names,
    write_head,
    write_hollow,
)
from tests.support.tiny_models import VOCABULARY, load_all, open_model, reference, tiny_engine, write_model

IDS = [5, 9, 17, 33, 64]
ROOT = len(IDS) - 1
# States that an MLPSpeculator requires of its target.
PARTS = cast(TargetParts, target_shape())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def parts(folder: Path) -> TargetParts:
    target = open_model(folder)
    load_all(target, 64)
    return TargetParts(target)


def states(count: int, start: int = 0) -> Features:
    torch.manual_seed(count)
    return Features(start, 2 * torch.randn(count, HIDDEN), {})


def open_medusa(folder: Path) -> OpenedHead:
    head = open_for_tiny(folder)
    assert head is not None and head.kind == "medusa"
    return head


def open_mlp(folder: Path) -> OpenedHead:
    head = open_for_tiny(folder)
    assert head is not None and head.kind == "mlp_speculator"
    return head


def naive_medusa(
    tensors: Tensors, hidden: torch.Tensor, head: int, layers: int, output: torch.Tensor
) -> torch.Tensor:
    """Return the published formula's logits for one head, [V]."""
    for layer in range(layers):
        z = tensors[f"{head}.{layer}.linear.weight"] @ hidden
        z = z + tensors.get(f"{head}.{layer}.linear.bias", torch.zeros(HIDDEN))
        hidden = hidden + z * torch.sigmoid(z)
    return output @ hidden


def norm(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x**2).mean() + 1e-6)


def naive_mlp(
    tensors: Tensors, config: dict[str, Any], hidden: torch.Tensor, tokens: list[int]
) -> torch.Tensor:
    """Return the published formula's logits [V] at the end of one path, root first."""
    stages, inner = config["n_predict"], config["inner_dim"] or config["emb_dim"]
    state_weight = 0.5 ** (0.5 / stages)
    token_weight = math.sqrt((1 - state_weight**2) * (inner / 2))
    state = norm(hidden) / 2**0.5 if config["scale_input"] else hidden
    for depth, token in enumerate(tokens):
        i, projection = (0, min(depth, 1)) if config["tie_weights"] else (depth, depth)
        z = tensors[f"speculator.proj.{projection}.weight"] @ state
        z = z + token_weight / state_weight * tensors[f"speculator.emb.{i}.weight"][token]
        z = norm(z) * tensors[f"speculator.ln.{i}.weight"] + tensors[f"speculator.ln.{i}.bias"]
        state = 0.5 * z * (1 + torch.erf(z / 2**0.5))
    return tensors[f"speculator.head.{i}.weight"] @ state


def logits_by_depth(drafter: Drafter, features: Features) -> dict[int, torch.Tensor]:
    """Return the logits of the first expanded node of each depth, by depth."""
    hearing, candidates = RecordingScorer(), tree_below(IDS[-1])
    drafter.observe(features)
    drafter.start(IDS)
    for nodes in CALLS:
        drafter.expand(candidates, nodes, hearing)
    return {
        position - len(IDS): row
        for position, row in zip(hearing.positions, hearing.recorded_logits, strict=True)
    }


LAYOUTS = {
    "first version": (medusa_tensors(), "medusa_lm_head.pt", 1),
    "first version, safetensors": (medusa_tensors(), "medusa_lm_head.safetensors", 1),
    "two layers": (medusa_tensors(2, 2), "medusa_lm_head.pt", 2),
    "second version": (medusa_tensors(own=False), "medusa_lm_head.safetensors", 1),
    "no biases": (medusa_tensors(bias=False), "model.safetensors", 1),
}
NAMINGS = [("first version", "medusa_head."), ("second version", "medusa_heads."), ("two layers", "vllm")]


@pytest.mark.parametrize(("layout", "naming"), [*((layout, "") for layout in LAYOUTS), *NAMINGS])
def test_medusa_layouts_follow_the_formula(
    tmp_path: Path, parts: TargetParts, layout: str, naming: str
) -> None:
    tensors, file, layers = LAYOUTS[layout]
    renamed = {naming + name: tensor for name, tensor in tensors.items()}
    stored = vllm_names(tensors) if naming == "vllm" else renamed
    head = open_medusa(write_head(tmp_path, MEDUSA_CONFIG, stored, file))
    count = 1 + max(int(name.split(".")[0]) for name in tensors)
    assert (head.kind, head.name, head.required_states) == (
        "medusa",
        f"medusa ({count} heads)",
        RequiredStates(last=True),
    )
    assert head.shares_head == (layout == "second version")
    assert head.nbytes(999) == 4 * sum(tensor.numel() for tensor in tensors.values())
    features = states(ROOT)
    guessed = logits_by_depth(head.load(parts, 64), features)
    assert sorted(guessed) == list(range(min(count, 4)))
    own = parts.project(torch.eye(HIDDEN)).T
    for depth, logits in guessed.items():
        output = tensors.get(f"{depth}.{layers}.weight", own)
        expected = naive_medusa(tensors, features.last[-1], depth, layers, output)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("tied", "scale_input", "prefix", "calls"),
    [
        (False, False, "speculator.", CALLS),
        (False, True, "", CHAINS),
        (True, False, "", CALLS),
        (True, True, "speculator.", CHAINS),
    ],
    ids=["plain", "scaled", "tied", "tied and scaled"],
)
def test_mlp_speculator_follows_the_formula(
    tmp_path: Path, tied: bool, scale_input: bool, prefix: str, calls: Sequence[Sequence[int]]
) -> None:
    tensors, config = mlp_tensors(tied), mlp_config(tied, scale_input)
    stored = {prefix + name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}
    head = open_mlp(write_head(tmp_path, config, stored))
    assert (head.kind, head.name) == ("mlp_speculator", "mlp_speculator (4 heads)")
    assert (head.required_states, head.shares_head) == (RequiredStates(last=True), False)
    assert head.nbytes(999) == 4 * sum(tensor.numel() for tensor in tensors.values())
    drafter, features = head.load(PARTS, 64), states(ROOT)
    drafter.observe(features)
    for logits, path in zip(node_logits(drafter, IDS, calls), paths(), strict=True):
        expected = naive_mlp(tensors, config, features.last[-1], [IDS[-1], *path])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_inner_size_zero_means_the_targets_size(tmp_path: Path) -> None:
    tensors, config = mlp_tensors(inner=HIDDEN), mlp_config(inner_dim=0)
    drafter, features = open_mlp(write_head(tmp_path, config, tensors)).load(PARTS, 8), states(ROOT)
    drafter.observe(features)
    expected = naive_mlp(tensors, config, features.last[-1], [IDS[-1]])
    torch.testing.assert_close(node_logits(drafter, IDS)[0], expected, rtol=1e-4, atol=1e-4)


def two_medusa_heads(folder: Path, parts: TargetParts) -> Drafter:
    drafter = open_medusa(write_head(folder, None, medusa_tensors(2), "medusa_lm_head.pt")).load(parts, 8)
    drafter.observe(states(ROOT))
    drafter.start(IDS)
    return drafter


def test_no_tokens_below_the_last_head(tmp_path: Path, parts: TargetParts) -> None:
    """With Medusa, all nodes of a depth have the same children."""
    drafter, hearing = two_medusa_heads(tmp_path / "medusa", parts), RecordingScorer()
    children = drafter.expand(tree_below(IDS[-1]), [1, 2, 3, 6], hearing)
    assert len(hearing.recorded_logits) == 1
    assert (children.token[0] == children.token[1]).all()
    assert (children.log_prob[0] == children.log_prob[1]).all() and children.log_prob[0, 0] > -20
    assert (children.log_prob[2:] == -torch.inf).all()

    drafter = open_mlp(write_head(tmp_path / "mlp", mlp_config(stages=2), mlp_tensors(stages=2))).load(
        PARTS, 8
    )
    drafter.observe(states(ROOT))
    drafter.start(IDS)
    hearing = RecordingScorer()
    children = drafter.expand(tree_below(IDS[-1]), [0, 1, 3], hearing)
    assert len(hearing.recorded_logits) == 2
    assert (children.log_prob[:2, 0] > -30).all() and (children.log_prob[2] == -torch.inf).all()
    assert drafter.expand(tree_below(IDS[-1]), [4], hearing).token.shape == (1, 0)


def test_penalties_distinguish_paths(tmp_path: Path, parts: TargetParts) -> None:
    drafter = two_medusa_heads(tmp_path, parts)
    best, other, third, _ = drafter.expand(tree_below(IDS[-1]), [1], RecordingScorer()).token[0].tolist()
    candidates = GrowingTree(IDS[-1])
    candidates.graft(0, Subtree([-1, -1], [best, other], [-1.0, -1.0]), source=0)
    processor = LogitsProcessor(SamplingParams(temperature=0, presence_penalty=0.5), VOCABULARY, [])
    children = drafter.expand(candidates, [1, 2], Scorer(processor, None, Calibration()))
    first, second = (
        dict(zip(tokens, scores, strict=True))
        for tokens, scores in zip(children.token.tolist(), children.x.tolist(), strict=True)
    )
    fallen = (second[best] - second[third]) - (first[best] - first[third])
    assert fallen == pytest.approx(0.5, abs=1e-4)


def test_no_tokens_without_the_state_before_the_root(tmp_path: Path, parts: TargetParts) -> None:
    medusa_file = write_head(tmp_path / "medusa", None, medusa_tensors(), "medusa_lm_head.pt")
    mlp_file = write_head(tmp_path / "mlp", mlp_config(), mlp_tensors())
    for drafter in (open_medusa(medusa_file).load(parts, 8), open_mlp(mlp_file).load(PARTS, 8)):

        def proposed(drafter: Drafter = drafter) -> int:
            drafter.start(IDS)
            return int(drafter.expand(tree_below(IDS[-1]), [0], RecordingScorer()).token.shape[1])

        assert proposed() == 0
        drafter.observe(states(ROOT - 1))
        assert proposed() == 0  # of an earlier position
        drafter.observe(states(1, ROOT - 1))
        assert proposed() == 4
        drafter.rewind(ROOT)
        assert proposed() == 4
        drafter.rewind(ROOT - 1)
        assert proposed() == 0


def test_each_tree_is_computed_anew(tmp_path: Path) -> None:
    """Results of an earlier tree at the same nodes are not reused."""
    drafter = open_mlp(write_head(tmp_path, mlp_config(), mlp_tensors())).load(PARTS, 8)
    drafter.observe(states(ROOT))
    first = node_logits(drafter, IDS)
    drafter.commit([0, 1])
    drafter.observe(states(2, ROOT))
    second = node_logits(drafter, [*IDS, 7, 30])
    assert not torch.isclose(first[0], second[0]).all()
    drafter.rewind(ROOT)
    drafter.observe(states(ROOT))
    assert torch.equal(node_logits(drafter, IDS), first)


def test_shared_output_matrix_and_token_map(tmp_path: Path, parts: TargetParts) -> None:
    tensors = vllm_names(medusa_tensors(rows=20))
    kept = torch.randperm(VOCABULARY)[:20]
    missing = ("lm_heads.1.weight", "lm_heads.2.weight")
    stored = {name: tensor for name, tensor in tensors.items() if name not in missing}
    config = {"model_type": "medusa", "original_lm_head": True, "truncated_vocab_size": 20}
    head, features = open_medusa(write_head(tmp_path, config, {**stored, "token_map": kept})), states(ROOT)
    output = tensors["lm_heads.0.weight"]
    for depth, logits in logits_by_depth(head.load(parts, 8), features).items():
        expected = naive_medusa(medusa_tensors(rows=20), features.last[-1], depth, 1, output)
        torch.testing.assert_close(logits[kept], expected, rtol=1e-4, atol=1e-4)
        assert int(torch.isfinite(logits).sum()) == 20


def test_token_map_out_of_range(tmp_path: Path, parts: TargetParts) -> None:
    tensors = vllm_names(medusa_tensors(rows=20))
    for tokens, words in (
        (torch.arange(20) + VOCABULARY - 19, "does not have"),
        (torch.zeros(20), "not of whole numbers"),
    ):
        with pytest.raises(DraftError, match=words):
            open_medusa(write_head(tmp_path, {"model_type": "medusa"}, {**tensors, "token_map": tokens}))
    # A map is useless without outputs.
    for index, tokens in enumerate((torch.empty(0), torch.zeros(2, 2), torch.tensor(1.5))):
        tensors = {**medusa_tensors(own=False), "token_map": tokens}
        head = open_medusa(write_head(tmp_path / str(index), MEDUSA_CONFIG, tensors))
        assert set(logits_by_depth(head.load(parts, 8), states(ROOT))) == {0, 1, 2}


def test_unknown_tokens_are_embedded_as_the_last(tmp_path: Path) -> None:
    config = mlp_config(tied=True, vocab_size=4000)
    files = write_head(tmp_path, config, mlp_tensors(True, rows=4000))
    head = open_head(str(files), target_shape(vocabulary=4032), ignore_event)
    assert head is not None
    drafter = head.load(cast(TargetParts, target_shape(vocabulary=4032)), 8)
    drafter.observe(states(1))
    candidates = GrowingTree(4031)
    candidates.graft(0, Subtree([-1], [4000], [-1.0]), source=0)
    drafter.start([4, 4031])
    hearing = RecordingScorer()
    drafter.expand(candidates, [0, 1], hearing)
    assert torch.stack(hearing.recorded_logits).shape == (2, 4000)


def test_published_heads_open(tmp_path: Path) -> None:
    """Inside a whole model, as in FasterDecoding/medusa-1.0-zephyr-7b-beta; by shapes; by tensors alone."""
    model = {"model.embed_tokens.weight": torch.zeros(4, 4), "model.norm.weight": torch.zeros(4)}
    heads = {f"medusa_head.{name}": tensor for name, tensor in medusa_tensors(5).items()}
    config = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "medusa_num_heads": 5}
    head = open_medusa(write_head(tmp_path / "zephyr", config, {**model, **heads}))
    assert head.name == "medusa (5 heads)"
    assert head.nbytes(0) == 4 * sum(tensor.numel() for tensor in heads.values())

    sizes = {"emb": (128256, 3072), "head": (128256, 3072), "ln": (3072,)}
    shapes = {
        name: sizes.get(name.split(".")[1], (3072, 4096 if ".0." in name else 3072)) for name in mlp_tensors()
    }
    folder = write_hollow(tmp_path / "hollow", MLP_CONFIG, shapes)
    hollow = open_head(str(folder), target_shape(4096, 128256), ignore_event)
    assert hollow is not None and hollow.name == "mlp_speculator (4 heads)"
    assert round(hollow.nbytes(0) / 4e9, 1) == 3.2, "its authors count 3.2 billion parameters"

    for tied, stages in ((False, 4), (True, 1)):
        folder = write_head(tmp_path / str(tied), None, mlp_tensors(tied), "head.bin")
        assert open_mlp(folder).name == f"mlp_speculator ({stages} heads)"
    for kind in (medusa, mlp_speculator):
        assert not kind.recognizes({"model_type": "llama"}, ["model.layers.0.mlp.up_proj.weight"])
    assert mlp_speculator.recognizes(MLP_CONFIG, [])


def test_weights_are_cast_to_the_targets_dtype(tmp_path: Path, parts: TargetParts) -> None:
    halves = {name: tensor.half() for name, tensor in medusa_tensors().items()}
    drafter = open_medusa(write_head(tmp_path, None, halves, "medusa_lm_head.pt")).load(parts, 8)
    assert set(logits_by_depth(drafter, states(ROOT))) == {0, 1, 2}


OF_MEDUSA = (MEDUSA_CONFIG, medusa_tensors())
OF_MLP = (mlp_config(), mlp_tensors())


@pytest.mark.parametrize(
    ("head", "name", "tensor", "error", "words"),
    [
        (OF_MEDUSA, "1.0.linear.weight", None, MissingTensorError, "layer 0 of its head 1"),
        (OF_MEDUSA, "1.1.weight", None, MissingTensorError, "output matrix of its head 1"),
        (OF_MEDUSA, "1.0.linear.weight", torch.zeros(8, 8), DraftError, r"\[8, 8\] and not"),
        (OF_MEDUSA, "1.0.linear.bias", torch.zeros(8), DraftError, r"\[8\] and not \[32\]"),
        (OF_MEDUSA, "1.1.weight", torch.zeros(95, 32), DraftError, r"\[95, 32\] and not"),
        (OF_MEDUSA, "1.1.weight", torch.zeros(96), DraftError, r"\[96\] and not \[96, 32\]"),
        (OF_MEDUSA, "medusa_head.0.0.linear.weight", torch.zeros(32, 32), DraftError, "twice, as '.*linear"),
        (OF_MLP, "speculator.head.2.weight", None, MissingTensorError, r"'speculator\.head\.2"),
        (OF_MLP, "speculator.ln.3.bias", None, MissingTensorError, r"speculator\.ln\.3\.bias"),
        (
            OF_MLP,
            "speculator.proj.1.weight",
            torch.zeros(INNER, 8),
            DraftError,
            r"\[24, 8\] and not \[24, 24\]",
        ),
        (OF_MLP, "speculator.proj.0.weight", torch.zeros(INNER, 48), DraftError, "states of 48 numbers"),
        (OF_MLP, "speculator.head.0.weight", torch.zeros(99, INNER), DraftError, "vocabulary of 99 tokens"),
        (OF_MLP, "speculator.proj.0.weight", torch.tensor(1.0), DraftError, "no matrix"),
    ],
)
def test_heads_with_missing_or_wrong_parts(
    tmp_path: Path,
    head: tuple[dict[str, Any], Tensors],
    name: str,
    tensor: torch.Tensor | None,
    error: type[Exception],
    words: str,
) -> None:
    config, whole = head
    changed = {key: value for key, value in {**whole, name: tensor}.items() if value is not None}
    with pytest.raises(error, match=words) as caught:
        open_for_tiny(write_head(tmp_path, config, changed))
    assert "\n" not in str(caught.value)


def test_invalid_number_of_heads(tmp_path: Path) -> None:
    for count in (0, 10**9, "4", True):
        with pytest.raises(DraftError, match="no number of heads"):
            open_mlp(write_head(tmp_path, mlp_config(n_predict=count), mlp_tensors()))
    folder = write_head(tmp_path / "bare", MEDUSA_CONFIG, {"model.norm.weight": torch.zeros(4)})
    with pytest.raises(MissingTensorError, match="no tensor of one"):
        open_for_tiny(folder)


def test_heads_of_another_target(tmp_path: Path) -> None:
    files = open_files(write_head(tmp_path, MEDUSA_CONFIG, medusa_tensors()), "org/heads")
    assert files is not None
    for shape in ({"hidden": 48}, {"vocabulary": 128}):
        with pytest.raises(DraftError, match=r"org/heads is for .* trained for this target") as caught:
            medusa.opened(files, target_shape(**shape))
        assert str(next(iter(shape.values()))) in str(caught.value)
    padded = write_head(tmp_path / "padded", None, medusa_tensors(hidden=4, rows=32_000), "heads.pt")
    files = open_files(padded, "heads")
    assert files is not None
    for vocabulary in (32_064, 31_990):
        assert medusa.opened(files, target_shape(hidden=4, vocabulary=vocabulary)).kind == "medusa"


@pytest.mark.parametrize(
    ("head", "name"), [(OF_MEDUSA, "1.0.linear.weight"), (OF_MLP, "speculator.ln.2.bias")]
)
def test_non_finite_weights(tmp_path: Path, head: tuple[dict[str, Any], Tensors], name: str) -> None:
    config, whole = head
    spoilt = whole[name].clone()
    spoilt[0] = torch.nan
    opened = open_for_tiny(write_head(tmp_path, config, {**whole, name: spoilt}))
    assert opened is not None
    with pytest.raises(CheckpointError, match=f"'{name}' has values that are not finite"):
        opened.load(PARTS, 8)


PROMPT, TOKENS, DEPTH = [5, 9, 17, 33, 64, 20], 17, 3


def write_oracle_heads(folder: Path, ids: list[int]) -> Tensors:
    """Return Medusa heads that reproduce these ids: their outputs are solved for.
    There must be at least as many distinct target states as ids.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        states = model.model(torch.tensor([ids])).last_hidden_state[0].double()  # [n, H]
    tensors: Tensors = {}
    for head in range(DEPTH):
        tokens = torch.tensor(ids[2 + head :])
        wanted = 20 * torch.nn.functional.one_hot(tokens, VOCABULARY).double()
        output = torch.linalg.lstsq(states[: len(tokens)], wanted, driver="gelsd").solution
        tensors[f"{head}.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN)
        tensors[f"{head}.1.weight"] = output.T.float().contiguous()
    return tensors


@pytest.mark.usefixtures("drafters_stay")
def test_heads_that_predict_the_answer_are_accepted(
    folder: Path, device: torch.device, tmp_path: Path
) -> None:
    """Nothing is drafted before the first pass, and each pass yields one more token."""
    answer = reference(folder, PROMPT, TOKENS)
    head = open_for_tiny(write_head(tmp_path, None, write_oracle_heads(folder, [*PROMPT, *answer])))
    assert head is not None
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

    def load(target: LoadedModel) -> dict[str, Drafter]:
        return {"medusa": head.load(TargetParts(target), 64)}

    with tiny_engine(folder, "none", budget=12, width=4, more=load, device=device) as engine:
        found = engine.generate(PROMPT, greedy)
        assert list(found.token_ids) == answer
        assert found.passes == 1 + (TOKENS - 1) // (DEPTH + 1)
        other = [*PROMPT[:3], 70, 71]  # begins like the last, and is unknown
        assert list(engine.generate(other, greedy).token_ids) == reference(folder, other, TOKENS)
