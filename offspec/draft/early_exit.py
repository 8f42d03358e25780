"""Drafting with the target's own resident layers, skipping those that stream.

Self-speculation by skipping layers (Draft & Verify: Zhang et al. 2023, arXiv 2309.08168), and by early exit
if the resident layers are the first ones (LayerSkip: Elhoushi et al. 2024, arXiv 2404.16710). The output of
the last resident layer goes through the target's final norm and head. The drafter has no weights of its own.
Its acceptance rate is good only if few layers stream, or if the target was trained for early exit.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from offspec.core.config import EARLY_EXIT
from offspec.core.errors import DraftError
from offspec.draft.base import Drafter, RequiredStates
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
    """An `LMDrafter` over some layers of a loaded target. rows: initial number of cache positions.

    Keys and values that the target has committed replace the draft's own, as in `LMDrafter`. Close it before
    the target. Raises DraftError if no layer stays in memory or the head streams.
    """

    def __init__(self, target: LoadedModel, rows: int) -> None:
        total = len(target.layers)
        used = _usable(target.skeleton, target.resident_layers, target.tree_model.streams_head)
        model = _EarlyExitModel(target.tree_model, used, rows)
        name = f"early-exit ({len(used)} of {total} layers)"
        super().__init__(name, model, target.device, model.close, target.tree_model.cache)


def _usable(skeleton: Skeleton, resident: Sequence[int], streams_head: bool) -> tuple[int, ...]:
    """Return the target's layers to draft with: those that stay on the device, or half of them if all do.

    Layers that read the keys of other layers are left out unless those layers also draft. Raises DraftError
    if no layer can draft.
    """
    if streams_head:
        raise DraftError(
            "early-exit drafts with the target's head, which does not fit in memory: give more "
            "memory, or use another `draft`"
        )
    total, readers = len(skeleton.layers), _readers(skeleton)
    used = sorted(resident)[: max(total // 2, 1) if len(resident) == total else None]
    if not {*range(total)} - readers <= {*used}:
        used = [layer for layer in used if layer not in readers]
    if not used:
        raise DraftError(
            "early-exit drafts with the target's layers that stay in memory, but none fits: "
            "give more memory, or use another `draft`"
        )
    return tuple(used)


def _readers(skeleton: Skeleton) -> set[int]:
    """Return the layers that keep no keys and attend to keys of earlier layers."""
    kept = skeleton.rows.kept if skeleton.is_stateless else ()
    return {layer for layer, numbers in enumerate(kept) if not numbers}


class _EarlyExitModel(TreeModel):
    """A copy of the target in which all layers except the used ones pass their input through.

    It consists of shallow copies: modules that share every part with the target's, but not the wrapped
    forward that streams weights and records states. So neither model affects the other; the used layers have
    their weights at all times. All layers keep their indices, since model families choose mask and positions
    by layer index.
    """

    def __init__(self, target: TreeModel, used: Sequence[int], rows: int) -> None:
        cache = _EarlyExitCache(len(target.skeleton.rows.kept), rows, used)
        cache.snapshots.most = OF_DRAFT
        super().__init__(_skeleton_copy(target.skeleton, used), cache, chunk=target.chunk)

    def close(self) -> None:
        """Free the cache."""
        self.cache = TreeCache(0, 0)


class _EarlyExitCache(TreeCache):
    """A cache in which only the used layers hold rows."""

    def __init__(self, layers: int, capacity: int, used: Sequence[int]) -> None:
        super().__init__(layers, capacity)
        self._used = frozenset(used)

    def empty_copy(self) -> "_EarlyExitCache":
        cache = _EarlyExitCache(len(self.rows), self._capacity, sorted(self._used))
        cache.snapshots.most = self.snapshots.most
        return cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of rows; model families ask the first layer for it."""
        return int(super().get_seq_length(self._full(layer_idx)))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the sizes for which a model family makes its mask."""
        found: tuple[int, int] = super().get_mask_sizes(query_length, self._full(layer_idx))
        return found

    def _full(self, layer: int) -> int:
        """Return a layer with all rows: the requested one, unless it holds none."""
        return layer if layer in self._used else max(self._used, key=lambda used: self.rows[used].filled)

    def append_committed(self, start: int, layers: Sequence[KeysAndValues | None]) -> None:
        super().append_committed(
            start, [found if i in self._used else None for i, found in enumerate(layers)]
        )
        self.rewind(self.length)  # the empty layers count too


def _skeleton_copy(skeleton: Skeleton, used: Sequence[int]) -> Skeleton:
    """Return a copy of the skeleton with its own model, in which all layers except the used ones do
    nothing.
    """
    layers = torch.nn.ModuleList(unwrapped(layer) for layer in skeleton.layers)
    for index, layer in enumerate(layers):
        if index not in used:
            wrap(layer, _pass_through, skeleton.output_tuple_size)
    model = _copy_with(skeleton.model, skeleton.layers_prefix.split("."), layers)
    decoder = model.get_submodule(skeleton.layers_prefix.rpartition(".")[0])
    return replace(skeleton, model=model, decoder=decoder, layers=layers)


def _copy_with(module: Any, path: Sequence[str], part: torch.nn.Module) -> Any:
    """Return a shallow copy of a module with another part at `path`, copying the modules on the way there."""
    if not path:
        return part
    twin = unwrapped(module)
    twin._modules = {**module._modules, path[0]: _copy_with(module._modules[path[0]], path[1:], part)}
    return twin


def _pass_through(
    forward: Callable[..., Any], wraps: int, hidden: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Return the states unchanged, with the extra outputs of the layer before, in the form the family
    returns.

    wraps: see `Skeleton.output_tuple_size`.
    """
    if not wraps:
        return hidden
    before = [*args, *(value for name, value in kwargs.items() if name.startswith("prev_"))]
    return (hidden, *before, *[None] * wraps)[:wraps]


def open_early_exit(target: LoadedModel, fingerprint: str) -> OpenedHead:
    """Open the target's resident layers as a head without weights of its own.

    Loading it raises DraftError if no layer stays in memory. Which layers stay depends on the memory left
    over, so keys, values and states of all layers are counted. fingerprint: fingerprint of the target.
    """

    def nbytes(rows: int) -> int:
        return target.cache_bytes(rows) + target.state_bytes(rows, OF_DRAFT)

    def load(parts: TargetParts, rows: int) -> Drafter:
        return EarlyExitDrafter(target, rows)

    named = f"{fingerprint} {EARLY_EXIT}"
    return OpenedHead(EARLY_EXIT, EARLY_EXIT, named, nbytes, load, True, True, RequiredStates())
