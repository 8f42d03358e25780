"""Files of a published head: config.json, and tensors in safetensors or pickle files.

Heads are often published as pickles only, and a pickle can run code. Pickles are read with torch's restricted
loader alone (`weights_only=True`): it builds tensors and plain containers, and refuses anything else.
"""

import hashlib
import json
from collections.abc import Callable, Collection, KeysView, Mapping
from pathlib import Path
from typing import Any

import torch

from offspec.checkpoint.checksum import stamp
from offspec.checkpoint.folder import CONFIG, INDEX, choose_weights
from offspec.checkpoint.json_file import read_json
from offspec.checkpoint.rows import row_blocks
from offspec.checkpoint.safetensors import read_header
from offspec.checkpoint.tensors import TensorInfo, torch_dtype
from offspec.core.errors import CheckpointError, DraftError, MissingTensorError
from offspec.core.files import as_read_error
from offspec.draft.heads.base import TargetShape
from offspec.draft.heads.pickles import PICKLED, read_pickle

SAFE = ".safetensors"
BLOCK = 4_000_000  # bytes of a tensor that are read at once; checks take a multiple of that
_PICKLE_INDEX = "pytorch_model.bin.index.json"
# Files that training leaves next to a model's pickles, without weights of the model.
_OTHER_PICKLES = ("optimizer", "scheduler", "training_args", "rng_state", "scaler")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_PADDING = 100  # families pad a vocabulary by less than a hundredth of it


class HeadFiles:
    """A head on disk, of which only headers were read.

    place: the name given by the user, for messages; folder: folder of config.json; config: its contents, {}
    if there is none.
    """

    def __init__(self, place: str, folder: Path, weights: Collection[Path], config: dict[str, Any]) -> None:
        self.place = place
        self.folder = folder
        self.config = config
        self._weights = sorted(weights)
        self._tensors: dict[str, TensorInfo | torch.Tensor] = {}
        for file in self._weights:
            self._tensors |= read_header(file)[0] if file.suffix == SAFE else read_pickle(file)

    @property
    def names(self) -> KeysView[str]:
        """Names of all tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor. Raises MissingTensorError."""
        return tuple(self._find(name).shape)

    def integers(self, name: str) -> torch.Tensor:
        """Return one integer tensor, as int64 on the CPU.

        Raises MissingTensorError, TruncatedError, CheckpointError, DraftError for other dtypes.
        """
        dtype = self._dtype(name)
        if dtype not in _INTEGERS:
            raise DraftError(
                f"{self.place}: tensor {name[:60]!r} is of {dtype} and not of whole numbers; "
                "download it again"
            )
        numbers = torch.empty(self.shape(name), dtype=torch.int64)
        for rows, block in row_blocks(self._find(name), BLOCK):
            torch.atleast_1d(numbers)[rows] = block
        return numbers

    def expect(self, name: str, *shape: int) -> None:
        """Raise MissingTensorError if there is no such tensor, DraftError if its shape differs."""
        if self.shape(name) != shape:
            raise DraftError(
                f"{self.place} cannot be a head of its kind: tensor {name[:60]!r} is "
                f"{list(self.shape(name))} and not {list(shape)}; download it again, or check its {CONFIG}"
            )

    def weight(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return one tensor to compute with. Raises the errors of `fill`."""
        weight = torch.empty(self.shape(name), dtype=dtype, device=device)
        self.fill(name, weight)
        return weight

    def fill(self, name: str, weight: torch.Tensor) -> None:
        """Read a tensor into `weight`, in its dtype and on its device, block by block.

        weight: tensor of the same shape, or of fewer rows, which are the first. Raises CheckpointError if a
        value is not finite, MissingTensorError, TruncatedError, UnsupportedModelError for a dtype that torch
        lacks.
        """
        stored, weight = self._dtype(name), torch.atleast_1d(weight)
        if not stored.is_floating_point:
            raise CheckpointError(f"{self.place}: tensor {name[:60]!r} is of {stored}, which is no weight")
        for rows, block in row_blocks(self._find(name), BLOCK):
            part = weight[rows]
            part.copy_(block[: len(part)])
            if not bool(part.isfinite().all()):
                raise CheckpointError(
                    f"{self.place}: tensor {name[:60]!r} has values that are not finite in {weight.dtype}: "
                    "it is damaged, download it again, or run the target in bfloat16"
                )

    def matrix(self, name: str) -> tuple[int, int]:
        """Return rows and columns of a matrix. Raises MissingTensorError, DraftError."""
        shape = self.shape(name)
        if len(shape) != 2 or 0 in shape:
            raise DraftError(
                f"{self.place}: tensor {name[:60]!r} is {list(shape)} and no matrix; download it again"
            )
        return shape[0], shape[1]

    def check_vocabulary(self, name: str, rows: int, target: TargetShape) -> None:
        """Raise DraftError if `rows` and the target's vocabulary differ by more than padding."""
        if abs(rows - target.vocab_size) * _PADDING > target.vocab_size:
            raise DraftError(
                f"{self.place} is for a vocabulary of {rows} tokens ({name[:60]!r}), and {target.name} has "
                f"{target.vocab_size}: use a head that was trained for this target"
            )

    def check_hidden(self, name: str, size: int, target: TargetShape) -> None:
        """Raise DraftError if the head takes states of another size than the target's."""
        if size != target.hidden_size:
            raise DraftError(
                f"{self.place} is for hidden states of {size} numbers ({name[:60]!r}), and those of "
                f"{target.name} have {target.hidden_size}: use a head that was trained for this target"
            )

    def elements(self, names: Collection[str]) -> int:
        """Return the number of elements of these tensors."""
        return sum(torch.Size(self.shape(name)).numel() for name in names)

    @property
    def fingerprint(self) -> str:
        """Return a hash of the configuration, every tensor's name and shape, and the size and time of each
        file.

        Cheap: no weights are read. Raises MissingTensorError if a file no longer exists.
        """
        seen = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name in sorted(self.names):
            seen.update(repr((name, self.shape(name))).encode())
        for file in self._weights:
            seen.update(stamp(file))
        return seen.hexdigest()

    def _dtype(self, name: str) -> torch.dtype:
        found = self._find(name)
        return found.dtype if isinstance(found, torch.Tensor) else torch_dtype(found.dtype)

    def _find(self, name: str) -> TensorInfo | torch.Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise MissingTensorError(
                f"{self.place} lacks the tensor {name[:60]!r}, a part of the head; download it again"
            ) from None


def open_files(path: Path, place: str) -> HeadFiles | None:
    """Open the files at a path, a folder or one file of weights; return None for a folder without weights.

    Raises CheckpointError and its subclasses for damaged, absent or ambiguous files, and DraftError for
    pickles that hold more than tensors.
    """
    if path.is_file():
        folder, weights = path.parent, [path.name]
    else:
        folder = path
        with as_read_error(f"the folder {path}"):
            names = {entry.name for entry in path.iterdir()}
        weights = weight_files(names, lambda name: read_json(folder / name), place)
        for name in weights:
            if not (folder / name).is_file():  # a link may be broken, and a pipe may block
                raise MissingTensorError(f"{place} lacks {name}, a part of the head; download it again")
    if not weights:
        return None
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    return HeadFiles(place, folder, [folder / name for name in weights], config)


def weight_files(
    names: Collection[str], load_json: Callable[[str], Mapping[str, Any]], place: str
) -> list[str]:
    """Return the files of a folder that hold a head; an empty list if there are no weights.

    Safetensors are preferred to pickles. `load_json` reads a file of that folder; it is called for indices
    only. Raises CheckpointError if several files are possible, HeaderError for an invalid index.
    """
    if any(name.endswith(SAFE) for name in names) or INDEX in names:
        return choose_weights(names, lambda: dict(load_json(INDEX)), place)[0]
    if _PICKLE_INDEX in names:
        listed = load_json(_PICKLE_INDEX).get("weight_map")
        shards = set(listed.values()) if isinstance(listed, dict) else set()
        if not shards or not all(isinstance(shard, str) and shard in names for shard in shards):
            raise MissingTensorError(f"{place} lacks a file that {_PICKLE_INDEX} lists; download it again")
        return sorted(shards)
    found = sorted(name for name in names if name.endswith(PICKLED) and not name.startswith(_OTHER_PICKLES))
    if len(found) > 1:
        raise CheckpointError(
            f"{place} has {len(found)} files of weights ({found[0]}, {found[1]}, …): "
            "name the one that is the head"
        )
    return found
