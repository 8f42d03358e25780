"""Cache interface of recurrent layers, and scans of the current layer's rows with its recurrences.

Letters: T rows of a part, C channels, K taps, G heads of keys, H of values, D numbers of a key, E of a value.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from offspec.model.attention import current_context
from offspec.model.recurrence.paths import PartPaths, part_paths
from offspec.model.recurrence.state import Recurrence, Rows, StateUpdate

_REACHED: ContextVar[tuple[Recurrence, ...]] = ContextVar("reached", default=())


class RecurrentStateCache:
    """Cache methods that recurrent models call. States are managed by offspec; models see an empty cache."""

    def recurrences_at(self, layer: int, place: int) -> tuple[Recurrence, ...]:
        """Return the recurrence at a place of a layer for each sequence in the layer call."""
        raise NotImplementedError

    def _reach(self, layer: int, place: int) -> None:
        _REACHED.set(self.recurrences_at(layer, place))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._reach(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._reach(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self._reach(layer_idx, state_idx)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return recurrent_states

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class SequenceScans:
    """Scans of the rows in a layer call, one per sequence with its own recurrence.

    Args:
        rows: Number of rows without padding.
        copies: Number of padding rows, copies of the last row.
        scans: Range of rows, recurrence, and predecessors of the rows, for each sequence.
    """

    rows: int
    copies: int
    scans: Sequence[tuple[slice, Recurrence, PartPaths]]

    @classmethod
    def of(cls, padded: int) -> "SequenceScans":
        """Return the scans of the current layer call with `padded` rows, including padding."""
        context = current_context()
        assert context is not None
        scans = list[tuple[slice, Recurrence, PartPaths]]()
        for (own, place), reached in zip(context.pieces(padded), _REACHED.get(), strict=True):
            assert own.end is not None
            scans.append((place, reached, part_paths(own, own.end - place.stop + place.start, own.end)))
        return cls(padded - context.padding, context.padding, scans)

    def with_copies(self, out: torch.Tensor) -> torch.Tensor:
        """Append padding, copies of the last row, to output [rows, ...]."""
        return torch.cat([out, out[-1:].expand(self.copies, *out.shape[1:])]) if self.copies else out

    def convolve(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Convolve rows [T, C] with weight [C, K]; return [T, C] float32."""
        return _joined([own.convolve(rows[place], weight, bias, paths) for place, own, paths in self.scans])

    def scan(self, rows: Rows, query: torch.Tensor, update: Callable[[Rows], StateUpdate]) -> torch.Tensor:
        """Return the scans' output for rows, [T, H, E] float32; see `Recurrence.scan`."""
        return _joined(
            [
                own.scan({name: kept[place] for name, kept in rows.items()}, query[place], update, paths)
                for place, own, paths in self.scans
            ]
        )


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])
