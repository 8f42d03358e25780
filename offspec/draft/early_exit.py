"""Drafting with those of the target's own layers that stay in memory, past those that stream.

Self-speculation by skipping layers (Draft & Verify: Zhang et al. 2023, arXiv 2309.08168), and by leaving
early where the layers that stay are the first ones (LayerSkip: Elhoushi et al. 2024, arXiv 2404.16710). What
leaves the last of them goes through the target's final norm and head. It has no weights of its own, and
guesses well only where few layers stream, or where the target was trained for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from offspec.core.config import EARLY_EXIT
from offspec.core.errors import DraftError
from offspec.draft.base import Drafter, Wants
from offspec.draft.heads.base import OpenedHead
from offspec.draft.lm import LMDrafter
from offspec.model.cache import KeysAndValues, TreeCache
from offspec.model.loaded import LoadedModel
from offspec.model.parts import TargetParts
from offspec.model.patches import unwrapped, wrap
from offspec.model.recurrence.snapshots import OF_DRAFT
from offspec.model.runner import TreeModel
from offspec.model.skeleton import Skeleton


class EarlyExitDrafter(LMDrafter):
    """An `LMDrafter` over some layers of a loaded target. rows: positions that its cache begins with.

    Keys and values that the target has committed take the place of its own, as `LMDrafter` has it. It is
    closed before the target. Raises DraftError where no layer stays in memory, or where the head streams.
    """

    def __init__(self, target: LoadedModel, rows: int) -> None:
        total = len(target.layers)
        used = _usable(target.skeleton, target.resident_layers, target.tree_model.streams_head)
        model = _SomeLayers(target.tree_model, used, rows)
        name = f"early-exit ({len(used)} of {total} layers)"
        super().__init__(name, model, target.device, model.close, target.tree_model.cache)


def _usable(skeleton: Skeleton, resident: Sequence[int], streams_head: bool) -> tuple[int, ...]:
    """Layers of a target to draft with: those that stay on the device, or half of them if all do.

    Layers that read the keys of others are left out unless those others draft, too. Raises DraftError if no
    layer can draft.
    """
    if streams_head:
        raise DraftError(
            "early-exit drafts with the target's head, which has no room to stay in memory: give more "
            "memory, or use another `draft`"
        )
    total, readers = len(skeleton.layers), _readers(skeleton)
    used = sorted(resident)[: max(total // 2, 1) if len(resident) == total else None]
    if not {*range(total)} - readers <= {*used}:
        used = [layer for layer in used if layer not in readers]
    if not used:
        raise DraftError(
            "early-exit drafts with the layers of the target that stay in memory, and none has room to: "
            "give more memory, or use another `draft`"
        )
    return tuple(used)


def _readers(skeleton: Skeleton) -> set[int]:
    """Layers that attend to keys of layers before them, since they keep none."""
    kept = skeleton.rows.kept if skeleton.has_no_states else ()
    return {layer for layer, numbers in enumerate(kept) if not numbers}


class _SomeLayers(TreeModel):
    """A target whose layers hand on what they are given, but for the used ones.

    It is made of twins: modules that share every part with the target's, but not the forward that was put
    around those to feed and to watch them. So neither notices when the other runs; the layers that are used
    have their weights at all times. All layers keep their places, since families look up by number which
    mask and which positions a layer is to have.
    """

    def __init__(self, target: TreeModel, used: Sequence[int], rows: int) -> None:
        cache = _SomeRows(len(target.skeleton.rows.kept), rows, used)
        cache.snapshots.most = OF_DRAFT
        super().__init__(_twins(target.skeleton, used), cache, chunk=target.chunk)

    def close(self) -> None:
        """Let go of the cache."""
        self.cache = TreeCache(0, 0)


class _SomeRows(TreeCache):
    """A cache whose layers hold nothing but for the used ones."""

    def __init__(self, layers: int, capacity: int, used: Sequence[int]) -> None:
        super().__init__(layers, capacity)
        self._used = frozenset(used)

    def another(self) -> "_SomeRows":
        cache = _SomeRows(len(self.rows), self._capacity, sorted(self._used))
        cache.snapshots.most = self.snapshots.most
        return cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows that a family is told of, which asks the first layer."""
        return int(super().get_seq_length(self._full(layer_idx)))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Rows that a family makes its mask for."""
        found: tuple[int, int] = super().get_mask_sizes(query_length, self._full(layer_idx))
        return found

    def _full(self, layer: int) -> int:
        """A layer with all rows: the one that is asked for, unless it holds none."""
        return layer if layer in self._used else max(self._used, key=lambda used: self.rows[used].filled)

    def adopt(self, start: int, layers: Sequence[KeysAndValues | None]) -> None:
        super().adopt(start, [found if i in self._used else None for i, found in enumerate(layers)])
        self.rewind(self.length)  # the empty layers count along


def _twins(skeleton: Skeleton, used: Sequence[int]) -> Skeleton:
    """The skeleton with a model of its own, in which all layers but the used ones do nothing."""
    layers = torch.nn.ModuleList(unwrapped(layer) for layer in skeleton.layers)
    for index, layer in enumerate(layers):
        if index not in used:
            wrap(layer, _hand_on, skeleton.wraps)
    model = _twin_with(skeleton.model, skeleton.layers_prefix.split("."), layers)
    decoder = model.get_submodule(skeleton.layers_prefix.rpartition(".")[0])
    return replace(skeleton, model=model, decoder=decoder, layers=layers)


def _twin_with(module: Any, path: Sequence[str], part: torch.nn.Module) -> Any:
    """A twin of a module that has another part at this path, and twins on the way there."""
    if not path:
        return part
    twin = unwrapped(module)
    twin._modules = {**module._modules, path[0]: _twin_with(module._modules[path[0]], path[1:], part)}
    return twin


def _hand_on(forward: Callable[..., Any], wraps: int, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The states as they are, and what the layer before handed on besides, as layers of the family return it.

    wraps: see `Skeleton`.
    """
    if not wraps:
        return hidden
    before = [*args, *(value for name, value in kwargs.items() if name.startswith("prev_"))]
    return (hidden, *before, *[None] * wraps)[:wraps]


def open_early_exit(target: LoadedModel, fingerprint: str) -> OpenedHead:
    """Layers of the target that stay in memory, as a head: they have no weights of their own.

    Loading it raises DraftError where no layer stays. Which of them will is decided by what is left, so that
    keys, values and states of all are counted. fingerprint: of the target.
    """

    def nbytes(rows: int) -> int:
        return target.cache_bytes(rows) + target.state_bytes(rows, OF_DRAFT)

    def load(parts: TargetParts, rows: int) -> Drafter:
        return EarlyExitDrafter(target, rows)

    named = f"{fingerprint} {EARLY_EXIT}"
    return OpenedHead(EARLY_EXIT, EARLY_EXIT, named, nbytes, load, True, True, Wants())
