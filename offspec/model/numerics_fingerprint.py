"""Fingerprint of a pass's arithmetic: KV caches computed under another may differ in their last bits."""

import hashlib
import os
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

import offspec_kernels
from offspec_kernels.backend import VARIABLE
from offspec_kernels.row_linear.brgemm import find_brgemm

# All code that computes, or determines the order of computation.
_SOURCES = (
    Path(offspec_kernels.__file__).parent,
    Path(__file__).parent,
    Path(__file__).parents[1] / "checkpoint",
)
_PACKAGES = ("offspec", "transformers", "numba", "llvmlite", "triton")
# Settings of instructions and precision in libraries; torch's own description has all others.
_SETTINGS = (
    VARIABLE,
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    *("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"),
)


def numerics_fingerprint() -> str:
    """Return 16 hex digits that change with code, libraries, or the instructions that they use."""
    settings = [os.environ.get(name) for name in _SETTINGS]
    precision = torch.get_float32_matmul_precision()
    # torch's description has the versions of torch, oneDNN, MKL and CUDA, and the instruction set in use.
    parts = (
        digest_of(_SOURCES),
        torch.__config__.show(),
        [_version(package) for package in _PACKAGES],
        find_brgemm() is not None,
        settings,
        precision,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@cache
def digest_of(folders: Iterable[Path]) -> str:
    """Return the digest of all Python files in some folders, with their names."""
    found = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            content = file.read_bytes()
            found.update(f"{file.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
