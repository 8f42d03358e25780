"""Published runs of models that do not fit in device memory, and assumptions about their systems."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """Shape of a Llama-like decoder; kv: width of its keys."""

    layers: int
    hidden: int
    inner: int
    kv: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class System:
    """ahead: whether the first layers of a pass are copied during drafting. assumed: other assumptions."""

    ahead: bool
    assumed: str


@dataclass(frozen=True, slots=True)
class Row:
    """One published run.

    Args:
        system, label, machine, target: The system, a description, a hardware preset, and the model.
        seconds: Seconds per token.
        source: Publication.
        tokens: Tokens per pass.
        bits, draft_bits: Bits of the layers' weights.
        draft: Draft model; "": none.
        steps, width, nodes: Shape of the tree.
        resident: Layers that stay on the device; None: as many as fit.
        vram: Bytes of the card's memory, if it differs from the preset's.
        why_not: Explanation of an inaccurate prediction.
    """

    system: str
    label: str
    machine: str
    target: str
    seconds: float
    source: str
    tokens: float = 1.0
    bits: int = 16
    draft: str = ""
    draft_bits: int = 16
    steps: int = 0
    width: int = 1
    nodes: int = 1
    resident: int | None = 0
    vram: int | None = None
    why_not: str = ""


MODELS = {
    "Llama-3-70B": Model(80, 8192, 28672, 1024, 128_256),
    "Llama-3-8B": Model(32, 4096, 14336, 1024, 128_256),
    "Llama-2-70B": Model(80, 8192, 28672, 1024, 32_000),
    "Llama-2-13B": Model(40, 5120, 13824, 5120, 32_000),
    "Llama-2-7B": Model(32, 4096, 11008, 4096, 32_000),
    "Vicuna-33B": Model(60, 6656, 17920, 6656, 32_000),
}

SYSTEMS = {
    "Sequoia": System(
        False,
        "16 bits; two buffers, copies overlap computing, nothing is copied before a pass, every layer is "
        "copied in every pass (Engine/offload_engine.py of its repository); 20 draft steps of 32, unstated",
    ),
    "Sequoia, page": System(
        False,
        "as Sequoia, but layers are kept in free VRAM: otherwise the page's 0.27 s for the 26 GB of a 13B "
        "would require a link of 96 GB/s (infini-ai-lab.github.io/Sequoia-Page; together.ai/blog/sequoia)",
    ),
    "DeepSpeed": System(False, "16 bits, every layer copied in every pass, copies overlap computing"),
    "SpecExec": System(
        True,
        "two buffers, filled with the first layers of the next pass at the end of a pass, every layer copied "
        "in every pass (offloading/offload_engine.py of its repository)",
    ),
}

_SEQUOIA = "Sequoia, arXiv 2402.12374"
_PAGE = "infini-ai-lab.github.io/Sequoia-Page, also in together.ai/blog/sequoia"
_SPECEXEC = "SpecExec, arXiv 2406.02532"
_LOG = "README of github.com/yandex-research/specexec, an example log"
_UNSTATED = "models and card unstated: a 70B by its seconds, a 7B by its 9.9 GB, both in 4 bits, on PCIe 4.0"
_NEARLY = (
    "a 24 GB card holds nearly all of these 26 GB: reserving 2 GB more for other uses would explain the gap"
)
_OLD = 11_530_000_000  # 0.98 of 11 GiB

# fmt: off
ROWS = (
    Row("Sequoia", "L40, Llama-3-70B, 8B draft, 768 nodes", "l40", "Llama-3-70B", 0.60, _SEQUOIA,
        tokens=11.7, draft="Llama-3-8B", steps=20, width=32, nodes=768),
    Row("DeepSpeed", "L40, Llama-3-70B, no draft", "l40", "Llama-3-70B", 5.7,
        f"{_SEQUOIA}: 9.5 times Sequoia's 0.60 s"),
    Row("SpecExec", "A100, Llama-2-70B, 7B draft, 2048 nodes", "a100-80gb", "Llama-2-70B", 1 / 2.5,
        f"{_SPECEXEC}: the middle of 2 to 3 tok/s with 16 bits; tokens per pass from memory, not verified",
        tokens=20.6, draft="Llama-2-7B", steps=32, width=128, nodes=2048),
    *(
        Row("SpecExec", f"70B in 4 bits, {nodes} nodes; card not stated", "a100-80gb", "Llama-2-70B", seconds,
            f"{_LOG}; {_UNSTATED}", tokens=tokens, bits=4, draft="Llama-2-7B", draft_bits=4,
            steps=round(height), width=128, nodes=nodes)
        for nodes, tokens, seconds, height in (
            (512, 7.99, 1 / 3.678, 20.2),
            (256, 7.65, 1 / 4.009, 17.8),
            (128, 6.68, 1 / 3.814, 15.2),
        )
    ),
    *(
        Row("Sequoia, page", f"{card}, {target}, no draft", machine, target, seconds, _PAGE,
            resident=None, vram=vram, why_not=why)
        for card, machine, vram, target, seconds, why in (
            ("4090", "rtx-4090-256gb", None, "Llama-2-70B", 4.54, ""),
            ("4090", "rtx-4090-256gb", None, "Vicuna-33B", 1.78, ""),
            ("4090", "rtx-4090-256gb", None, "Llama-2-13B", 0.27, _NEARLY),
            ("2080 Ti", "rtx-3090-pcie3", _OLD, "Vicuna-33B", 4.81, ""),
            ("2080 Ti", "rtx-3090-pcie3", _OLD, "Llama-2-13B", 1.53, ""),
        )
    ),
)
# fmt: on
