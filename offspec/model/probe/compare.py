"""A small model of an architecture over token trees, against transformers' own forward over each path alone.

Also whether layers of the model can take the rows of several sequences together. They can if a layer does
nothing with keys but hand them from its cache to its attention, or if a module of it takes the cache, and
processes keys of one sequence after the other.

Letters: N nodes, V vocabulary, T tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from offspec.checkpoint.gguf.stub import quiet
from offspec.core.errors import OffspecError, UnsupportedModelError
from offspec.model.apart import take_apart
from offspec.model.attention import TreeContext
from offspec.model.cache import TreeCache
from offspec.model.pass_parts import SequenceRows
from offspec.model.patches import implementation
from offspec.model.probe.cache_rows import measure_rows
from offspec.model.probe.small_config import special_tokens
from offspec.model.row_counts import RowCounts
from offspec.model.runner import CHUNK, TreeModel
from offspec.model.skeleton import Skeleton, skeleton_of
from offspec.sampling.token_tree import TokenTree

_PROMPT = 11  # tokens, of which the last is the root of the first tree
_CHUNK = 4  # rows that go through a layer together
_COUNTS = RowCounts(3)  # with padding behind them
_MOST_VALUES = 64_000_000  # of a small model
_GAIN = 1.5  # of random matrices: weak ones would leave attention without a say
_TABLE = 4.0  # spread of other tables than that of tokens, which are often scaled: positions must tell
# Parents of two trees. A path of the first is kept, whose rows do not lie side by side.
_TREES = ((-1, 0, 0, 1, 1, 2, 3, 4, 6, 6), (-1, 0, 0, 0, 2, 4, 4, 5))
_CHAINS = ((-1, 0, 1, 2, 3, 4, 5, 6, 7), (-1, 0, 1, 2))
_TOLERANCE = 2e-3  # of the spread of what a model puts out, where float32 rounds to some millionths
_NODES = 4  # of a tree behind each text


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What a trial showed.

    Args:
        trees: Whether every node of a tree has the logits of its path alone.
        chains: Whether that holds where the tree is one path.
        reason: What goes wrong with a tree; empty where nothing does.
        wraps: Of how many values the tuples are that layers return; 0: they return no tuples.
        runs: Whether transformers' own forward runs.
        merges: Whether rows of two sequences that go through the layers together are as they are alone.
        apart: Whether that takes attention of one sequence after the other.
    """

    trees: bool
    chains: bool
    reason: str
    wraps: int = 0
    runs: bool = True
    merges: bool = False
    apart: bool = False


def try_out(config: Any) -> Behaviour:
    """Run a model of a configuration, which is small, over trees, and over chains where trees go wrong.

    Raises UnsupportedModelError, CheckpointError where there is no model of it to run.
    """
    with _one_thread():
        trial = _Trial(config)
        reason = trial.differs(_TREES)
        if reason:
            trial = _Trial(config)
            if trial.differs(_CHAINS):
                return Behaviour(False, False, reason, runs=trial.runs)
        if measure_rows(skeleton_of(config, torch.float32), trial.wraps).kept != trial.kept:
            return Behaviour(False, False, "what it keeps of a token cannot be measured")
        merges, apart = trial.merges()
    return Behaviour(not reason, True, reason, trial.wraps, merges=merges, apart=apart)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small products wait longer for a second thread than they take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_Turn = tuple[
    list[int], TokenTree, list[int]
]  # a text, the tree at its last token, and the path that is kept


class _UnrunnableError(Exception):
    """A model is no language model by transformers' own forward."""


class _Trial:
    """One model with random weights."""

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
                f"no small model of {config.model_type} can be made to try it: it would have {values} values"
            )
        draw_weights(self._skeleton, self._random)

    @torch.no_grad()
    def differs(self, shapes: Sequence[Sequence[int]]) -> str:
        """Run trees of these parents one behind the other; what goes wrong, or nothing.

        Of each tree the path to its deepest node is kept, but for its last node, and another token follows.
        """
        ids, turns = self._tokens(_PROMPT), list[_Turn]()
        for parents in shapes:
            tree = TokenTree.build([ids[-1], *self._tokens(len(parents) - 1)], parents, [0.0] * len(parents))
            path = tree.path(int(tree.depth.argmax()))[:-1]
            turns.append((ids, tree, path))
            ids = ids + [int(tree.token[node]) for node in path] + self._tokens(1)
        try:
            wanted = [self._alone(start, tree) for start, tree, _ in turns]
        except _UnrunnableError as error:
            self.runs = False
            return str(error)
        try:
            found = self._together(turns)
        except OffspecError as error:
            return str(error)
        except Exception as error:  # code of any family, which was made for other caches and masks
            return f"it fails over a token tree ({_first_line(error)})"
        if not all(map(_equal, wanted, found)):
            return "nodes of a token tree get other logits than their paths by themselves"
        return ""

    @torch.no_grad()
    def merges(self) -> tuple[bool, bool]:
        """Whether rows of two sequences have the states that they have in a pass by themselves, and whether
        attention has to take them apart for it. Asked for last, after `differs`."""
        assert self._model is not None
        model, tokens = self._model, self._tokens(_PROMPT + 1)
        if model.skeleton.masked:
            return False, False
        model.skeleton, model.chunk = replace(model.skeleton, merges=True), CHUNK
        texts = [tokens[3:], tokens[:-1]]  # the positions and the number of tokens are others
        alone = [model.hidden_of([_rows(text, model)]) for text in texts]
        for apart in (False, True):
            if apart:
                for layer in model.skeleton.layers:
                    take_apart(layer, model.row_counts)
            try:
                together = model.hidden_of([_rows(text, model) for text in texts])
            except Exception:  # code of any family, which was made for the keys of one sequence
                continue
            if _equal(torch.cat(alone), together):
                return True, apart
        return False, False

    def _tokens(self, count: int) -> list[int]:
        """Different ones, of those that are only text."""
        found: list[int] = torch.randperm(self._skeleton.vocab_size, generator=self._random).tolist()
        return [token for token in found if token not in self._special][:count]

    def _alone(self, ids: list[int], tree: TokenTree) -> torch.Tensor:
        """Logits [N, V] of each node by transformers' own forward over its path. Raises _UnrunnableError."""
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
                raise _UnrunnableError("random weights give no numbers")
            common = logits[: len(ids)]
            if before is not None and not _equal(before, common):
                raise _UnrunnableError("what it says of a token depends on those that follow")
            before = common
            rows[0] = common[-1]
            for depth, node in enumerate(tree.path(leaf)):
                rows[node] = logits[len(ids) + depth]
        return torch.stack([rows[node] for node in range(len(tree))])

    def _together(self, turns: Sequence[_Turn]) -> list[torch.Tensor]:
        """Logits [N, V] of each tree, all of its nodes at once, behind what is in the cache."""
        layer = self._skeleton.layers[0]
        hook = layer.register_forward_hook(self._note_output)
        cache = TreeCache(len(self._skeleton.layers), 4)
        model = self._model = TreeModel(self._skeleton, cache, chunk=_CHUNK, row_counts=_COUNTS)
        found = list[torch.Tensor]()
        for ids, tree, path in turns:
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
    """Random weights in the place of all parameters on the meta device; those that are one stay one."""
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
    """Whether two results are the same but for rounding."""
    return bool((one - other).abs().max() <= _TOLERANCE * one.std())


def _rows(tokens: Sequence[int], model: TreeModel) -> SequenceRows:
    """A text with a chain of a few nodes behind it, which even models run that know no other tree."""
    rows, text = len(tokens), len(tokens) - _NODES
    seen = torch.ones(_NODES, _NODES, dtype=torch.bool).tril()
    cache = TreeCache(len(model.skeleton.layers), 4)
    return SequenceRows(torch.tensor(tokens), TreeContext(0, torch.arange(rows), text, seen), cache)
