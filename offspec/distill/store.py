"""Passages on disk: one file per batch, written atomically.

Notation: n tokens of a passage, N tokens of a file, H hidden size.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError

from offspec.checkpoint.safetensors import read_header
from offspec.checkpoint.safetensors_writer import save_tensors
from offspec.core.errors import CheckpointError
from offspec.core.events import Event, Notice, ignore_event
from offspec.core.files import as_disk_full_error, make_private_folder, require_space
from offspec.core.private_folders import DISTILL, PRIVATE
from offspec.distill.generate_batch import GeneratedText

_TAP = "tap."
_RESERVED_BYTES = 16 << 20  # bytes reserved for headers, the training state and the head itself
_HELD_OUT = 20  # one passage in this many is held out for measuring


def text_folder(root: Path, target: str, questions: str, length: int, dtype: str) -> Path:
    """Return the cache folder of a text; passages from another source have another folder.

    Args:
        root: Root of the cache.
        target: Fingerprint of the target.
        questions: Fingerprint of the prompts.
        length: Maximum tokens of an answer.
        dtype: Dtype of the target's arithmetic.
    """
    origin = {"target": target, "questions": questions, "length": length, "dtype": dtype}
    name = sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()[:16]
    return root / DISTILL / name


@dataclass(frozen=True, slots=True)
class TextExtent:
    """Location of a passage: its file, its first row there, its length, and the length of its prompt."""

    file: int
    start: int
    length: int
    prompt: int


class Store:
    """Passages of one source in a folder of their own; existing files are reused.

    bytes_per_token: bytes on disk of a token with its states.
    """

    def __init__(
        self, folder: Path, hidden: int, item: int, notify: Callable[[Event], None] = ignore_event
    ) -> None:
        """hidden: size of a state; item: bytes per number; notify: receives notices of damaged files."""
        self.folder = folder
        self._hidden, self._notify = hidden, notify
        self.bytes_per_token = hidden * item + 4
        self._places: list[TextExtent] = []
        self._files: list[dict[str, torch.Tensor]] = []
        with as_disk_full_error(folder):
            make_private_folder(folder)
        for kind in ("text", "taps"):  # a training state is kept, so that training can resume
            for left in folder.glob(f".{kind}-*.partial"):
                left.unlink(missing_ok=True)
        while self._take(self._name(self.batches)):
            pass

    @property
    def batches(self) -> int:
        """Number of batches."""
        return len(self._files)

    @property
    def passages(self) -> int:
        """Number of answers."""
        return len(self._places)

    @property
    def tokens(self) -> int:
        """Number of tokens that the target generated, without the questions."""
        return sum(place.length - place.prompt for place in self._places)

    @property
    def rows(self) -> int:
        """Total number of tokens."""
        return sum(place.length for place in self._places)

    def require(self, tokens: int) -> None:
        """Raise DiskFullError unless there is space for that many more tokens."""
        needed = tokens * self.bytes_per_token + _RESERVED_BYTES
        require_space(self.folder, needed, "the text and the states of the target")

    def add(self, passages: Sequence[GeneratedText]) -> None:
        """Write a batch. Raises DiskFullError."""
        tensors = {
            "tokens": torch.cat([passage.tokens for passage in passages]).to(torch.int32),
            "length": torch.tensor([len(passage) for passage in passages], dtype=torch.int32),
            "prompt": torch.tensor([passage.prompt for passage in passages], dtype=torch.int32),
            "states": torch.cat([passage.states for passage in passages]),
        }
        path = self._name(self.batches)
        save_tensors(path, tensors, PRIVATE)
        assert self._take(path)

    def without_taps(self, layers: Sequence[int]) -> list[int]:
        """Return files that lack taps of these layers; select existing taps of these layers for reading."""
        return [file for file in range(self.batches) if not self._take_taps(file, layers)]

    def require_taps(self, files: Sequence[int], count: int) -> int:
        """Return the bytes that `count` taps of some files take. Raises DiskFullError if they do not fit."""
        needed = sum(self._files[file]["states"].nbytes for file in files) * count
        require_space(self.folder, needed + _RESERVED_BYTES, "the inputs of some of the target's layers")
        return needed

    def passages_of(self, file: int) -> list[int]:
        """Return the numbers of the passages of one file."""
        return [number for number, place in enumerate(self._places) if place.file == file]

    def add_taps(self, file: int, layers: Sequence[int], taps: torch.Tensor) -> None:
        """Write the taps [taps, N, H] of one file. Raises DiskFullError."""
        tensors = dict(zip(_tap_names(layers), taps, strict=True))
        save_tensors(self._taps_name(file, layers), tensors, PRIVATE)
        assert self._take_taps(file, layers)

    def _taps_name(self, file: int, layers: Sequence[int]) -> Path:
        return self.folder / f"taps-{'-'.join(map(str, layers))}-{file:05d}.safetensors"

    def _take_taps(self, file: int, layers: Sequence[int]) -> bool:
        states = self._files[file]["states"]

        def fit(tensors: dict[str, torch.Tensor]) -> bool:
            return tensors.keys() == set(_tap_names(layers)) and all(
                (tensor.shape, tensor.dtype) == (states.shape, states.dtype) for tensor in tensors.values()
            )

        tensors = self._read(self._taps_name(file, layers), fit)
        if tensors is None:
            return False
        kept = {name: tensor for name, tensor in self._files[file].items() if not name.startswith(_TAP)}
        self._files[file] = {**kept, **tensors}
        return True

    def training(self) -> list[int]:
        """Return the numbers of the passages to train on."""
        return [number for number in range(len(self._places)) if number % _HELD_OUT != _HELD_OUT - 1]

    def held_out(self) -> list[int]:
        """Return the numbers of the held-out passages."""
        return [number for number in range(len(self._places)) if number % _HELD_OUT == _HELD_OUT - 1]

    def length(self, number: int) -> int:
        return self._places[number].length

    def read(self, number: int) -> GeneratedText:
        """Read one passage; its states are views of the file."""
        place = self._places[number]
        tensors, rows = self._files[place.file], slice(place.start, place.start + place.length)
        taps = tuple(tensors[name][rows] for name in tensors if name.startswith(_TAP))
        return GeneratedText(tensors["tokens"][rows].long(), place.prompt, tensors["states"][rows], taps)

    def answers(self, numbers: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yield the answer tokens [n] of some passages."""
        for number in numbers:
            place = self._places[number]
            yield self._files[place.file]["tokens"][place.start + place.prompt : place.start + place.length]

    def _name(self, batch: int) -> Path:
        return self.folder / f"text-{batch:05d}.safetensors"

    def _take(self, path: Path) -> bool:
        """Add a file; a damaged file is removed, to be generated again together with the files after it."""
        tensors = self._read(path, self._is_batch)
        if tensors is None:
            return False
        start = 0
        for length, prompt in zip(tensors["length"].tolist(), tensors["prompt"].tolist(), strict=True):
            self._places.append(TextExtent(len(self._files), start, length, prompt))
            start += length
        self._files.append(tensors)
        return True

    def _is_batch(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether these are passages with consistent lengths."""
        if tensors.keys() != {"tokens", "length", "prompt", "states"}:
            return False
        tokens, length, prompt, states = (tensors[n] for n in ("tokens", "length", "prompt", "states"))
        whole = all(t.ndim == 1 and t.dtype == torch.int32 for t in (tokens, length, prompt))
        if not whole or states.shape != (len(tokens), self._hidden) or length.shape != prompt.shape:
            return False
        ordered = bool(((prompt > 0) & (prompt <= length)).all())
        return ordered and int(length.sum()) == len(tokens) and not bool((tokens < 0).any())

    def _read(
        self, path: Path, fit: Callable[[dict[str, torch.Tensor]], bool]
    ) -> dict[str, torch.Tensor] | None:
        """Return the tensors of a file as views of it; None if it is absent. A damaged file is removed."""
        from safetensors.torch import load_file

        if not path.exists():
            return None
        try:
            read_header(path)
            tensors = load_file(path)
            if fit(tensors):
                return tensors
        except (CheckpointError, SafetensorError):
            pass
        path.unlink(missing_ok=True)
        self._notify(Notice(f"{path} is damaged and will be rebuilt"))
        return None


def _tap_names(layers: Sequence[int]) -> list[str]:
    return [f"{_TAP}{layer}" for layer in layers]
