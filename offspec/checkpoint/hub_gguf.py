"""GGUF models of a hub repository: grouping files into models, and selecting one by name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from offspec.core.errors import ModelNotFoundError
from offspec_planners.units import format_bytes

_PART = re.compile(r"-(\d{5})-of-(\d{5})$", re.ASCII)
_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|FP?16|FP?32|MXFP4\w*|NVFP4\w*))$", re.IGNORECASE | re.ASCII
)
_OTHERS = ("mmproj", "imatrix")  # GGUF files that are not language models, by a word of their names
_SHOWN = 24  # choices that a message lists


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A GGUF model of a repository.

    Args:
        stem: Path of its file without the ending and the part number.
        files: Path of the file, or paths of all its parts in order.
        nbytes: Total bytes of the files.
    """

    stem: str
    files: tuple[str, ...]
    nbytes: int

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(self.stem).name

    @property
    def quantization(self) -> str:
        """Quantization by the file's name, such as "Q4_K_M"; "" if the name has none."""
        found = _QUANTIZATION.search(self.name)
        return found[1] if found else ""


def gguf_models(sizes: Mapping[str, int]) -> list[GgufModel]:
    """Return the GGUF models among files of these sizes in bytes, smallest first."""
    groups: dict[str, list[str]] = {}
    for path in sorted(sizes):
        if path.lower().endswith(".gguf") and not any(word in path.lower() for word in _OTHERS):
            groups.setdefault(_PART.sub("", path[: -len(".gguf")]), []).append(path)
    found = [
        GgufModel(stem, _all_parts(files), sum(sizes[path] for path in files))
        for stem, files in groups.items()
    ]
    return sorted(found, key=lambda model: (model.nbytes, model.stem))


def choose_gguf(models: Sequence[GgufModel], wanted: str, repository: str) -> GgufModel:
    """Return the GGUF model that `organization/name:wanted` selects.

    Args:
        models: All GGUF models of the repository.
        wanted: A quantization, a file name or a path; case-insensitive. "": the only model.
        repository: Name used in the error.

    Raises:
        ModelNotFoundError: No model matches, or several do; the message lists the choices with their sizes.
    """
    if not models:
        raise ModelNotFoundError(
            f"{repository} has no GGUF files: leave out :{wanted} to run its safetensors"
        )
    matching = _matching(models, wanted) if wanted else list(models)
    if len(matching) == 1:
        return matching[0]
    choices = _choices(matching or models)
    if wanted and not matching:
        raise ModelNotFoundError(f"{repository} has no GGUF model {wanted[:80]}: it has {choices}")
    example = _short(matching[0], matching)
    raise ModelNotFoundError(
        f"{repository} has {len(matching)} GGUF models: name one, as in {repository}:{example}, of {choices}"
    )


def _matching(models: Sequence[GgufModel], wanted: str) -> list[GgufModel]:
    """Return the models that a word selects: by path or name, then by quantization, then without UD-."""
    word = _PART.sub("", wanted.lower().removesuffix(".gguf"))
    rules = (
        [model for model in models if word in (model.stem.lower(), model.name.lower())],
        [model for model in models if word == model.quantization.lower()],
        [model for model in models if word == model.quantization.lower().removeprefix("ud-")],
    )
    return next((found for found in rules if found), [])


def _all_parts(files: Sequence[str]) -> tuple[str, ...]:
    """Return all parts of a split file, given some of them."""
    match = _PART.search(files[0][: -len(".gguf")])
    if match is None:
        return tuple(files)
    stem, count = files[0][: match.start()], int(match[2])
    return tuple(f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1))


def _choices(models: Sequence[GgufModel]) -> str:
    shown = [f"{_short(model, models)} ({format_bytes(model.nbytes)})" for model in models[:_SHOWN]]
    return ", ".join([*shown, *(["…"] if len(models) > _SHOWN else [])])


def _short(model: GgufModel, among: Sequence[GgufModel]) -> str:
    """Return the shortest word that selects a model."""
    for word in (model.quantization, model.name):
        if word and len(_matching(among, word)) == 1:
            return word
    return model.stem
