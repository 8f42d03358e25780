"""Facts of the machine: versions, memory, PCIe, clocks. Only queries; the card's settings are not changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.gpu_day.step_context import StepContext
from bench.lib.report import version_of

_QUERY = (
    "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.gen.current,pcie.link.width.current,"
    "clocks.sm,clocks.mem,power.limit,temperature.gpu"
)
_PACKAGES = (
    "torch", "triton", "transformers", "numpy", "numba", "llvmlite", "accelerate", "safetensors",
    "tokenizers", "huggingface_hub", "gguf", "llguidance", "msgspec", "textual", "bitsandbytes",
    "compressed-tensors", "pytest", "hypothesis", "scipy",
)  # fmt: skip


def facts(context: StepContext) -> None:
    found = context.found
    found["gpu"] = (
        ""
        if shutil.which("nvidia-smi") is None
        else output("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv")
    )
    found["kernel"] = output("uname", "-sr")
    found["memory"] = [
        line for line in _read("/proc/meminfo").splitlines() if line.startswith(("Mem", "Huge", "Anon"))
    ]
    found["huge_pages"] = _read("/sys/kernel/mm/transparent_hugepage/enabled").strip()
    found["disk"] = output("df", "-B1", "/", str(context.models)).splitlines()
    found["locked_memory"] = output("bash", "-c", "ulimit -l")
    found["cores"] = os.cpu_count()
    found["versions"] = {"python": sys.version.split()[0], **{name: version_of(name) for name in _PACKAGES}}
    context.save()
    import torch

    if torch.cuda.is_available():
        found["properties"] = str(torch.cuda.get_device_properties(0))
        found["free_bytes"] = torch.cuda.mem_get_info()[0]
    import numba  # fails if numpy is too new for it

    found["short"] = (
        f"{found['gpu'].splitlines()[-1] if found['gpu'] else 'no GPU'}; numba {numba.__version__}"
    )


def output(*words: str) -> str:
    """Return the output of a program, or the reason why it did not run."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)


def _read(file: str) -> str:
    try:
        return Path(file).read_text("utf-8")
    except OSError:
        return ""
