"""What enters some of the layers as a text goes through the target, kept beside the text.

Only EAGLE-3 wants it, so it is made by a pass of its own over what was written before.

Letters: B passages, n tokens of one, H hidden size.
"""

from collections.abc import Callable, Sequence

import torch

from offspec.core.events import Event, LoadProgress, Notice
from offspec.distill.batched_forward import Batch
from offspec.distill.generate_batch import PIECE
from offspec.distill.store import Store
from offspec.model.loaded import LoadedModel
from offspec_planners.units import format_bytes


def published_taps(layers: int) -> tuple[int, ...]:
    """The layers whose inputs EAGLE-3 takes: near the beginning, in the middle, near the end."""
    usual = (2, layers // 2, layers - 3)
    return usual if 2 < usual[1] < usual[2] else tuple(sorted({0, layers // 2, layers - 1}))


def write_taps(
    store: Store,
    target: LoadedModel,
    layers: Sequence[int],
    batch: int,
    notify: Callable[[Event], None],
) -> None:
    """For each file of the store that lacks it. Raises DiskFullError."""
    missing = store.without_taps(layers)
    if not missing:
        return
    needed = store.require_taps(missing, len(layers))
    notify(
        Notice(f"what enters layers {', '.join(map(str, layers))} takes about {format_bytes(needed)} more")
    )
    total = store.batches
    for file in missing:
        passages = [store.read(number) for number in store.passages_of(file)]
        found: list[torch.Tensor] = []
        for start in range(0, len(passages), batch):
            found += _tapped(target, [p.tokens for p in passages[start : start + batch]], layers)
        store.add_taps(file, layers, torch.cat(found, 1))
        notify(LoadProgress("reading the text again", file + 1, total, "files"))


def _tapped(target: LoadedModel, texts: Sequence[torch.Tensor], layers: Sequence[int]) -> list[torch.Tensor]:
    """Of each text [n] its taps [taps, n, H]; texts are filled up, which what stands before does not see."""
    lengths = [len(text) for text in texts]
    tokens = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True).to(target.device)
    batch, parts = Batch(target, tokens.shape[1], layers), []
    with batch.running():
        for start in range(0, tokens.shape[1], PIECE):
            _, taps = batch.run(tokens[:, start : start + PIECE])
            parts.append(torch.stack(taps).cpu())
    whole = torch.cat(parts, 2)  # [taps, B, n, H]
    return [whole[:, row, :length] for row, length in enumerate(lengths)]
