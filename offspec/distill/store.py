"""Passages on disk, a file for each batch, written whole or not at all.

Letters: n tokens of a passage, N of all in a file, H hidden size.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError

from offspec.checkpoint.safetensors import read_header
from offspec.checkpoint.write import save_tensors
from offspec.core.errors import CheckpointError
from offspec.core.events import Event, Notice, unheard
from offspec.core.files import disk_full, private_folder, require_space
from offspec.core.private import DISTILL, PRIVATE
from offspec.distill.generate_batch import Passage

_TAP = "tap."
_ROOM = 16 << 20  # bytes for headers, the state of a training and the head itself
_HELD_OUT = 20  # one passage in this many is held out for measuring


def text_folder(root: Path, target: str, questions: str, length: int, dtype: str) -> Path:
    """The folder below the cache of a text: passages of another source are another text.

    Args:
        root: Of the cache.
        target: The target's fingerprint.
        questions: Fingerprint of the prompts.
        length: Most tokens of an answer.
        dtype: Of the target's arithmetic.
    """
    origin = {"target": target, "questions": questions, "length": length, "dtype": dtype}
    name = sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()[:16]
    return root / DISTILL / name


@dataclass(frozen=True, slots=True)
class PassageExtent:
    """Where a passage lies: its file, its first row there, its length, and that of its prompt."""

    file: int
    start: int
    length: int
    prompt: int


class Store:
    """The passages of one source in a folder of their own; what is there already is taken up.

    bytes_per_token: what a token takes on disk with its states.
    """

    def __init__(
        self, folder: Path, hidden: int, item: int, notify: Callable[[Event], None] = unheard
    ) -> None:
        """hidden: size of a state; item: bytes of each of its numbers; notify: hears of damaged files."""
        self.folder = folder
        self._hidden, self._notify = hidden, notify
        self.bytes_per_token = hidden * item + 4
        self._places: list[PassageExtent] = []
        self._files: list[dict[str, torch.Tensor]] = []
        with disk_full(folder):
            private_folder(folder)
        for kind in ("text", "taps"):  # and not the state of a training, which may go on
            for left in folder.glob(f".{kind}-*.partial"):
                left.unlink(missing_ok=True)
        while self._take(self._name(self.batches)):
            pass

    @property
    def batches(self) -> int:
        """How many batches are there."""
        return len(self._files)

    @property
    def passages(self) -> int:
        """How many answers are there."""
        return len(self._places)

    @property
    def tokens(self) -> int:
        """Tokens that the target wrote, without the questions."""
        return sum(place.length - place.prompt for place in self._places)

    @property
    def rows(self) -> int:
        """Tokens in all."""
        return sum(place.length for place in self._places)

    def require(self, tokens: int) -> None:
        """Raise DiskFullError unless there is room for that many more tokens."""
        needed = tokens * self.bytes_per_token + _ROOM
        require_space(self.folder, needed, "the text and the states of the target")

    def add(self, passages: Sequence[Passage]) -> None:
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
        """Files whose taps of these layers were not made; those of the others are used from now on."""
        return [file for file in range(self.batches) if not self._take_taps(file, layers)]

    def require_taps(self, files: Sequence[int], count: int) -> int:
        """Bytes that `count` taps of some files take. Raises DiskFullError where there is no room."""
        needed = sum(self._files[file]["states"].nbytes for file in files) * count
        require_space(self.folder, needed + _ROOM, "what enters some of the target's layers")
        return needed

    def passages_of(self, file: int) -> list[int]:
        """Numbers of the passages of one file."""
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
        """Numbers of the passages to learn from."""
        return [number for number in range(len(self._places)) if number % _HELD_OUT != _HELD_OUT - 1]

    def held_out(self) -> list[int]:
        """Numbers of the passages to measure with."""
        return [number for number in range(len(self._places)) if number % _HELD_OUT == _HELD_OUT - 1]

    def length(self, number: int) -> int:
        return self._places[number].length

    def read(self, number: int) -> Passage:
        """One passage; its states are views of the file."""
        place = self._places[number]
        tensors, rows = self._files[place.file], slice(place.start, place.start + place.length)
        taps = tuple(tensors[name][rows] for name in tensors if name.startswith(_TAP))
        return Passage(tensors["tokens"][rows].long(), place.prompt, tensors["states"][rows], taps)

    def answers(self, numbers: Sequence[int]) -> Iterator[torch.Tensor]:
        """The tokens [n] of the answers of some passages."""
        for number in numbers:
            place = self._places[number]
            yield self._files[place.file]["tokens"][place.start + place.prompt : place.start + place.length]

    def _name(self, batch: int) -> Path:
        return self.folder / f"text-{batch:05d}.safetensors"

    def _take(self, path: Path) -> bool:
        """Use a file; one that is damaged is removed, to be made again with those behind it."""
        tensors = self._read(path, self._is_batch)
        if tensors is None:
            return False
        start = 0
        for length, prompt in zip(tensors["length"].tolist(), tensors["prompt"].tolist(), strict=True):
            self._places.append(PassageExtent(len(self._files), start, length, prompt))
            start += length
        self._files.append(tensors)
        return True

    def _is_batch(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are passages whose lengths add up."""
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
        """The tensors of a file, as views of it; None where there is none. A damaged one is removed."""
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
        self._notify(Notice(f"{path} is damaged and is made again"))
        return None


def _tap_names(layers: Sequence[int]) -> list[str]:
    return [f"{_TAP}{layer}" for layer in layers]
