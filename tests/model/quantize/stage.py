"""A tiny model to pack, a target folder, and the events of packing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file

from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.tensors import PackedInfo
from offspec.core.config import PackFormat
from offspec.core.events import Event, LoadProgress, Notice
from offspec.model.quantize.pack import PackResult, pack_model

FORMATS: tuple[PackFormat, ...] = get_args(PackFormat)
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
LAYERS = 3


class Bench:
    """Packs a model, by default into `out`."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.out = model, folder / "pack"
        self.events: list[Event] = []

    def pack(self, to: PackFormat = "nf4", **settings: Any) -> PackResult:
        self.events.clear()
        return pack_model(str(self.model), to, **{"out": self.out, "notify": self.events.append, **settings})

    def stopping(self, layer: int, error: BaseException) -> Callable[[Event], None]:
        """Return a listener that raises when a layer is being packed."""

        def notify(event: Event) -> None:
            self.events.append(event)
            if isinstance(event, LoadProgress) and event.detail.startswith(f"layer {layer} "):
                raise error

        return notify

    @property
    def messages(self) -> str:
        return "\n".join(event.text for event in self.events if isinstance(event, Notice))

    def left(self) -> list[str]:
        return sorted(path.name for path in self.out.parent.iterdir())

    def content(self, folder: Path | None = None) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in (folder or self.out).iterdir()}


def values(folder: Path, name: str) -> torch.Tensor:
    """Return a weight of a pack, dequantized by its format's reference."""
    weight = open_checkpoint(str(folder)).tensors[name]
    assert isinstance(weight, PackedInfo)
    tensors = load_file(weight.file)
    return weight.format.reference({part: tensors[info.name] for part, info in weight.parts}, weight.shape)


def flip(file: Path, place: int = -1) -> None:
    """Change one bit of a file."""
    data = bytearray(file.read_bytes())
    data[place] ^= 4
    file.write_bytes(data)
