"""Comparison of a small model over token trees with transformers' own forward over each path alone.

It also tests whether layers can process rows of several sequences together. They can if a layer only passes
keys from its cache to its attention, or if a module of the layer takes the cache and can process one sequence
at a time.

Letters: N nodes, V vocabulary, T tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from offspec.checkpoint.gguf.stub import quiet
from offspec.core.errors import OffspecError, UnsupportedModelError
from offspec.model.attention import TreeContext
from offspec.model.attention_per_sequence import attend_per_sequence
from offspec.model.cache import TreeCache
from offspec.model.pass_parts import SequenceRows
from offspec.model.patches import implementation
from offspec.model.probe.cache_rows import measure_rows
from offspec.model.probe.small_config import special_tokens
from offspec.model.row_counts import RowCounts
from offspec.model.runner import CHUNK, TreeModel
from offspec.model.skeleton import Skeleton, skeleton_of
from offspec.sampling.token_tree import TokenTree

_PROMPT = 11  # tokens; the last is the root of the first tree
_CHUNK = 4  # rows that go through a layer together
_COUNTS = RowCounts(3)  # forces padding
_MOST_VALUES = 64_000_000  # of a small model
_GAIN = 1.5  # of random matrices: with smaller ones attention would hardly affect the output
_TABLE = 4.0  # standard deviation of tables other than the token embedding, so that positions matter
# Parents of two trees. The path kept of the first has rows that are not adjacent.
_TREES = ((-1, 0, 0, 1, 1, 2, 3, 4, 6, 6), (-1, 0, 0, 0, 2, 4, 4, 5))
_CHAINS = ((-1, 0, 1, 2, 3, 4, 5, 6, 7), (-1, 0, 1, 2))
_TOLERANCE = 2e-3  # of the logits' standard deviation; float32 rounding errors are some millionths
_NODES = 4  # of the tree after each text


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Result of a trial.

    Args:
        trees: Whether every node of a tree has the logits of its path alone.
        chains: Whether trees that are a single path do.
        reason: What fails with a tree; empty if nothing does.
        output_tuple_size: Length of the tuples that layers return; 0 if they return no tuples.
        runs: Whether transformers' own forward runs.
        merges: Whether rows of two sequences in one layer call have the same results as alone.
        attention_per_sequence: Whether this requires attention to run one sequence at a time.
    """

    trees: bool
    chains: bool
    reason: str
    output_tuple_size: int = 0
    runs: bool = True
    merges: bool = False
    attention_per_sequence: bool = False


def run_trial(config: Any) -> TrialResult:
    """Run a model of a small configuration over trees, and over chains if trees fail.

    Raises UnsupportedModelError or CheckpointError if the model cannot be built.
    """
    with _one_thread():
        trial = _Trial(config)
        reason = trial.differs(_TREES)
        if reason:
            trial = _Trial(config)
            if trial.differs(_CHAINS):
                return TrialResult(False, False, reason, runs=trial.runs)
        if measure_rows(skeleton_of(config, torch.float32), trial.wraps).kept != trial.kept:
            return TrialResult(False, False, "its cache size per token cannot be measured")
        merges, per_sequence = trial.merges()
    return TrialResult(
        not reason, True, reason, trial.wraps, merges=merges, attention_per_sequence=per_sequence
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use a single thread in the block: for small products a second one costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# (text, tree at its last token, accepted path)
_Step = tuple[list[int], TokenTree, list[int]]


class _UnrunnableError(Exception):
    """The model does not run as a language model with transformers' own forward."""


class _Trial:
    """Trial of one model with random weights."""

    def __init__(self, config: Any) -> None:
        self._special = special_tokens(config.to_dict())
        self._skeleton = skeleton_of(config, torch.float32)
        self._random = torch.Generator().manual_seed(0)
        self.wraps = 0
        self.runs = True
        self.kept: tuple[int, ...] = ()
        self._model: TreeModel | None = None
        values = sum(parameter.numel() for parameter in self._skeleton.model.parameters())
        if values > _MOST_VALUES:
            raise UnsupportedModelError(
                f"no small test model of {config.model_type} can be built: it would have {values} values"
            )
        draw_weights(self._skeleton, self._random)

    @torch.no_grad()
    def differs(self, shapes: Sequence[Sequence[int]]) -> str:
        """Run successive trees with these parents; return what fails, or "".

        Of each tree, the path to the deepest node is accepted, without its last node, and followed by a new
        token.
        """
        ids, steps = self._tokens(_PROMPT), list[_Step]()
        for parents in shapes:
            tree = TokenTree.build([ids[-1], *self._tokens(len(parents) - 1)], parents, [0.0] * len(parents))
            path = tree.path(int(tree.depth.argmax()))[:-1]
            steps.append((ids, tree, path))
            ids = ids + [int(tree.token[node]) for node in path] + self._tokens(1)
        try:
            expected = [self._path_logits(start, tree) for start, tree, _ in steps]
        except _UnrunnableError as error:
            self.runs = False
            return str(error)
        try:
            found = self._tree_logits(steps)
        except OffspecError as error:
            return str(error)
        except Exception as error:  # model code written for other caches and masks
            return f"it fails over a token tree ({_first_line(error)})"
        if not all(map(_equal, expected, found)):
            return "nodes of a token tree get different logits from their paths alone"
        return ""

    @torch.no_grad()
    def merges(self) -> tuple[bool, bool]:
        """Return whether two sequences in one pass have the same states as alone, and whether attention must
        run one sequence at a time for this. Must be called last, after `differs`."""
        assert self._model is not None
        model, tokens = self._model, self._tokens(_PROMPT + 1)
        if model.skeleton.masked:
            return False, False
        model.skeleton, model.chunk = replace(model.skeleton, supports_batching=True), CHUNK
        texts = [tokens[3:], tokens[:-1]]  # different positions and numbers of tokens
        alone = [model.hidden_of([_rows(text, model)]) for text in texts]
        for per_sequence in (False, True):
            if per_sequence:
                for layer in model.skeleton.layers:
                    attend_per_sequence(layer, model.row_counts)
            try:
                together = model.hidden_of([_rows(text, model) for text in texts])
            except Exception:  # model code written for the keys of one sequence
                continue
            if _equal(torch.cat(alone), together):
                return True, per_sequence
        return False, False

    def _tokens(self, count: int) -> list[int]:
        """Return `count` different random tokens that are ordinary text."""
        found: list[int] = torch.randperm(self._skeleton.vocab_size, generator=self._random).tolist()
        return [token for token in found if token not in self._special][:count]

    def _path_logits(self, ids: list[int], tree: TokenTree) -> torch.Tensor:
        """Return logits [N, V] of transformers' own forward over each path. Raises _UnrunnableError."""
        rows: dict[int, torch.Tensor] = {}
        leaves = [node for node in range(len(tree)) if node not in tree.parent]
        before = None
        for leaf in leaves:
            tokens = torch.tensor([[*ids, *tree.path_tokens(leaf)]])
            try:
                with quiet(), implementation(self._skeleton.model, attention="eager"):
                    logits = self._skeleton.model(input_ids=tokens, use_cache=False).logits[0]
            except Exception as error:
                reason = f"it does not run as a language model ({_first_line(error)})"
                raise _UnrunnableError(reason) from error
            if not logits.isfinite().all():
                raise _UnrunnableError("random weights give logits that are not finite")
            common = logits[: len(ids)]
            if before is not None and not _equal(before, common):
                raise _UnrunnableError("its logits depend on later tokens (it is not causal)")
            before = common
            rows[0] = common[-1]
            for depth, node in enumerate(tree.path(leaf)):
                rows[node] = logits[len(ids) + depth]
        return torch.stack([rows[node] for node in range(len(tree))])

    def _tree_logits(self, steps: Sequence[_Step]) -> list[torch.Tensor]:
        """Return logits [N, V] of each tree, computed in one pass after the cached positions."""
        layer = self._skeleton.layers[0]
        hook = layer.register_forward_hook(self._note_output)
        cache = TreeCache(len(self._skeleton.layers), 4)
        model = self._model = TreeModel(self._skeleton, cache, chunk=_CHUNK, row_counts=_COUNTS)
        found = list[torch.Tensor]()
        for ids, tree, path in steps:
            root, cached = len(ids) - 1, model.cache.length
            positions = torch.cat([torch.arange(cached, root), root + torch.from_numpy(tree.depth)])
            context = TreeContext(cached, positions, root - cached, torch.from_numpy(tree.ancestors()))
            hidden = model.hidden(torch.tensor([*ids[cached:-1], *tree.token.tolist()]), context)
            found.append(model.logits(hidden[root - cached :]))
            model.cache.commit(root - cached, [0, *path])
        hook.remove()
        self.kept = model.cache.row_sizes
        return found

    def _note_output(self, module: torch.nn.Module, args: object, out: object) -> None:
        self.wraps = len(out) if isinstance(out, tuple) else 0


def draw_weights(skeleton: Skeleton, random: torch.Generator) -> None:
    """Replace all parameters on the meta device with random weights; shared parameters stay shared."""
    made: dict[int, torch.nn.Parameter] = {}
    tokens = skeleton.model.get_input_embeddings()
    for module in skeleton.model.modules():
        is_table = isinstance(module, torch.nn.Embedding) and module is not tokens
        for name, meta in module._parameters.items():
            if meta is None:
                continue
            if id(meta) not in made:
                values = torch.empty(meta.shape, dtype=meta.dtype)
                if meta.dim() >= 2:
                    spread = _TABLE if is_table else _GAIN * meta.shape[-1] ** -0.5
                    values.normal_(0, spread, generator=random)
                else:
                    values.normal_(0.5, 0.2, generator=random)
                made[id(meta)] = torch.nn.Parameter(values, requires_grad=False)
            module._parameters[name] = made[id(meta)]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two results are equal up to rounding errors."""
    return bool((one - other).abs().max() <= _TOLERANCE * one.std())


def _rows(tokens: Sequence[int], model: TreeModel) -> SequenceRows:
    """Return a text followed by a chain of a few nodes, a tree that every supported model can run."""
    rows, text = len(tokens), len(tokens) - _NODES
    seen = torch.ones(_NODES, _NODES, dtype=torch.bool).tril()
    cache = TreeCache(len(model.skeleton.layers), 4)
    return SequenceRows(torch.tensor(tokens), TreeContext(0, torch.arange(rows), text, seen), cache)
