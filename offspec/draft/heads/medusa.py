"""Medusa heads (Cai et al. 2024, arXiv 2401.10774) as published: one head per future position.

From h, the target's final hidden state at position t, whose token t + 1 is the root of the tree, head i goes
through its layers, h <- h + SiLU(W h + b), and predicts token t + 2 + i: a child of the nodes at depth i,
whatever the path to them.

Tensor names, where i counts heads and j layers, optionally prefixed by "medusa_head." or "medusa_heads.":
`{i}.{j}.linear.weight` and `.bias`, and `{i}.{layers}.weight`, the output, in the first version only; or, in
vLLM's format, `blocks.{i}.layers.{j}.weight` and `.bias`, `lm_heads.{i}.weight` (or one for all),
`token_map`.

Letters: H hidden size, V vocabulary.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear, silu

from offspec.core.errors import DraftError, MissingTensorError
from offspec.draft.base import Children, Scorer
from offspec.draft.growing_tree import GrowingTree
from offspec.draft.heads.base import OpenedHead, TargetShape
from offspec.draft.heads.files import HeadFiles
from offspec.draft.heads.last_state import LastStateDrafter, gather_children
from offspec.model.parts import TargetParts

_PREFIX = r"(?:medusa_heads?\.)?"
_NUMBER = r"([0-9]{1,4})"
_LAYER = re.compile(
    rf"{_PREFIX}(?:{_NUMBER}\.{_NUMBER}\.linear|blocks\.{_NUMBER}\.layers\.{_NUMBER})\.(weight|bias)"
)
_OUTPUT = re.compile(rf"{_PREFIX}(?:{_NUMBER}\.[0-9]+|lm_heads\.{_NUMBER})\.weight")
_TOKENS = re.compile(rf"{_PREFIX}token_map")


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """One head: weight [H, H] and bias [H] of its layers, output [V, H] or None for the target's."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor | None], ...]
    output: torch.Tensor | None

    def state(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the layers, [H] to [H]: the input of the output matrix."""
        for weight, bias in self.layers:
            hidden = hidden + silu(linear(hidden, weight, bias))
        return hidden


@dataclass(frozen=True, slots=True)
class HeadNames:
    """Tensor names of one head: weight and bias ("" for none) of its layers, output ("" for the target's)."""

    layers: tuple[tuple[str, str], ...]
    output: str

    @property
    def all(self) -> set[str]:
        return ({name for layer in self.layers for name in layer} | {self.output}) - {""}

    def ready(self, weights: Mapping[str, torch.Tensor]) -> MedusaHead:
        layers = tuple((weights[weight], weights.get(bias)) for weight, bias in self.layers)
        return MedusaHead(layers, weights.get(self.output))


def recognizes(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether a checkpoint is, or contains, Medusa heads."""
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return True
    return any(_LAYER.fullmatch(name) for name in names)


def opened(files: HeadFiles, target: TargetShape) -> OpenedHead:
    """Open and check the heads. The number of heads in config.json is often wrong and is ignored.

    Raises MissingTensorError if a head lacks a part, DraftError if the heads are for another target.
    """
    heads = _heads(files)
    first = heads[0].layers[0][0]
    size = files.matrix(first)[1]
    files.check_hidden(first, size, target)
    outputs = [head.output for head in heads if head.output]
    rows = files.matrix(outputs[0])[0] if outputs else 0
    tokens = _tokens(files, rows, target) if outputs else None
    if outputs and tokens is None:
        files.check_vocabulary(outputs[0], rows, target)
    for output in outputs:
        files.expect(output, rows, size)
    for head in heads:
        for weight, bias in head.layers:
            files.expect(weight, size, size)
            if bias:
                files.expect(bias, size)
    names = {name for head in heads for name in head.all}
    name, nbytes = f"medusa ({len(heads)} heads)", files.elements(names) * target.dtype.itemsize

    def load(parts: TargetParts, rows: int) -> MedusaDrafter:
        weights = {name: files.weight(name, parts.dtype, parts.device) for name in names}
        ready = [head.ready(weights) for head in heads]
        return MedusaDrafter(name, ready, parts, None if tokens is None else tokens.to(parts.device))

    shares_head = not all(head.output for head in heads)
    return OpenedHead("medusa", name, files.fingerprint, lambda rows: nbytes, load, shares_head)


def _tokens(files: HeadFiles, rows: int, target: TargetShape) -> torch.Tensor | None:
    """Return the token of each output row, if the files map them.

    A map of another length only marks useful rows of a whole vocabulary: then all rows are kept.
    """
    name = next(filter(_TOKENS.fullmatch, files.names), "")
    if not name or files.shape(name) != (rows,):
        return None
    tokens = files.integers(name)
    if int(tokens.min()) < 0 or int(tokens.max()) >= target.vocab_size:
        raise DraftError(
            f"{files.place} maps its tokens ({name}) to ids that {target.name} does not have: "
            "use a head that was trained for this target"
        )
    return tokens


def _heads(files: HeadFiles) -> tuple[HeadNames, ...]:
    found: dict[tuple[int, int, str], str] = {}  # by head, layer, and weight or bias
    outputs: dict[int, str] = {}
    for name in files.names:
        if match := _LAYER.fullmatch(name):
            place = int(match[1] or match[3]), int(match[2] or match[4]), match[5]
            _once(files, found.setdefault(place, name), name)
        elif match := _OUTPUT.fullmatch(name):
            _once(files, outputs.setdefault(int(match[1] or match[2]), name), name)
    if not found:
        raise MissingTensorError(
            f"{files.place} claims to have Medusa heads, but holds no tensor of one: name the file that does"
        )
    count = 1 + max(head for head, _, _ in found)
    layers = 1 + max(layer for _, layer, _ in found)
    if list(outputs) == [0] and files.config.get("original_lm_head"):
        outputs = dict.fromkeys(range(count), outputs[0])
    for head in range(count):
        for layer in range(layers):
            if (head, layer, "weight") not in found:
                raise _lacks(files, f"layer {layer} of its head {head}")
        if outputs and head not in outputs:
            raise _lacks(files, f"the output matrix of its head {head}")
    return tuple(
        HeadNames(
            tuple(
                (found[head, layer, "weight"], found.get((head, layer, "bias"), ""))
                for layer in range(layers)
            ),
            outputs.get(head, ""),
        )
        for head in range(count)
    )


def _once(files: HeadFiles, first: str, name: str) -> None:
    if first != name:
        raise DraftError(
            f"{files.place} has a part of its heads twice, as {first[:60]!r} and {name[:60]!r}: "
            "name a file of one set of heads"
        )


def _lacks(files: HeadFiles, part: str) -> MissingTensorError:
    return MissingTensorError(f"{files.place} lacks {part}; download it again")


class MedusaDrafter(LastStateDrafter):
    """Drafts with Medusa heads. tokens: token of each output row [rows], None if rows are in token order."""

    def __init__(
        self,
        name: str,
        heads: Sequence[MedusaHead],
        parts: TargetParts,
        tokens: torch.Tensor | None = None,
    ) -> None:
        super().__init__(name)
        self._heads = tuple(heads)
        self._parts = parts
        self._tokens = tokens

    def expand(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Children:
        state = self._before_root()
        depths: list[int] = candidates.depth[nodes].tolist()
        # All nodes of a depth have the same children, unless penalties depend on their paths.
        keys = list(range(len(nodes))) if scorer.needs_paths else depths
        asked = {key: i for i, key in enumerate(keys) if depths[i] < len(self._heads)}
        if state is None or not asked:
            return Children.none(len(nodes))
        levels = [depths[i] for i in asked.values()]
        found = scorer.children(
            torch.stack([self._level(depth, state) for depth in levels]),
            [candidates.path_tokens(nodes[i]) for i in asked.values()] if scorer.needs_paths else [],
            [self._root + 1 + depth for depth in levels],
            levels,
        )
        place = {key: row for row, key in enumerate(asked)}
        return gather_children(found, [place.get(key, -1) for key in keys])

    def _level(self, depth: int, state: torch.Tensor) -> torch.Tensor:
        """Return the logits [V] of the children of all nodes at a depth."""
        known = self._of_tree
        if depth not in known:
            output = self._heads[depth].output
            if output is not None:
                known[depth] = self._spread(linear(self._heads[depth].state(state), output))
            else:  # the target's head is large: it is read once for all heads that share it
                shared = [i for i, head in enumerate(self._heads) if head.output is None]
                rows = self._parts.project(torch.stack([self._heads[i].state(state) for i in shared]))
                known |= zip(shared, rows, strict=True)
        return known[depth]

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        if self._tokens is None:
            return logits
        spread = logits.new_full((self._parts.vocab_size,), -torch.inf)
        return spread.index_copy_(0, self._tokens, logits)

    def close(self) -> None:
        super().close()
        self._heads = ()
