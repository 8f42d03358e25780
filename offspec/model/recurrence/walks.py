"""Which recurrences the layer that runs has come to, and walks of its rows with them.

Letters: T rows of a part, C channels, K taps, G heads of keys, H of values, D numbers of a key, E of a value.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from offspec.model.attention import running_context
from offspec.model.recurrence.paths import PartPaths, part_paths
from offspec.model.recurrence.state import Recurrence, Rows, Update

_REACHED: ContextVar[tuple[Recurrence, ...]] = ContextVar("reached", default=())


class HoldsStates:
    """What families ask of a cache with states. They are ours; a family is told that there is none yet."""

    def reached(self, layer: int, place: int) -> tuple[Recurrence, ...]:
        """The recurrences at a place of a layer, of each sequence whose rows run."""
        raise NotImplementedError

    def _reach(self, layer: int, place: int) -> None:
        _REACHED.set(self.reached(layer, place))

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
class Walks:
    """Of the rows that run, one walk a sequence, with its own recurrence.

    Args:
        rows: How many rows are no copies.
        copies: How many copies of the last come behind them.
        walks: Of each sequence which rows are its own, its recurrence, and how its rows follow each other.
    """

    rows: int
    copies: int
    walks: Sequence[tuple[slice, Recurrence, PartPaths]]

    @classmethod
    def of(cls, padded: int) -> "Walks":
        """Of so many rows of the layer that runs, copies at their end included."""
        context = running_context()
        assert context is not None
        walks = list[tuple[slice, Recurrence, PartPaths]]()
        for (own, place), reached in zip(context.pieces(padded), _REACHED.get(), strict=True):
            assert own.end is not None
            walks.append((place, reached, part_paths(own, own.end - place.stop + place.start, own.end)))
        return cls(padded - context.padding, context.padding, walks)

    def with_copies(self, out: torch.Tensor) -> torch.Tensor:
        """What rows get, [rows, ...], with copies of the last behind them."""
        return torch.cat([out, out[-1:].expand(self.copies, *out.shape[1:])]) if self.copies else out

    def convolve(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """rows [T, C], weight [C, K] to [T, C] float32."""
        return _joined([own.convolve(rows[place], weight, bias, paths) for place, own, paths in self.walks])

    def scan(self, rows: Rows, query: torch.Tensor, update: Callable[[Rows], Update]) -> torch.Tensor:
        """What rows get, [T, H, E] float32; see `Recurrence.scan`."""
        return _joined(
            [
                own.scan({name: kept[place] for name, kept in rows.items()}, query[place], update, paths)
                for place, own, paths in self.walks
            ]
        )


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])
