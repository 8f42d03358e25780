"""Figures of docs/quickstart.md: predictions of `offspec plan`."""

from docs.figure_records.block import Block
from docs.figure_records.results import PREDICTED, TWO_CORES

QUICKSTART = tuple(
    Block(start, PREDICTED["plans", words], {speed: PREDICTED["plans", words, "tok_per_s"]})
    for start, words, speed in (
        ("| 24 GB GPU, 64 GB RAM | `offspec plan", "Qwen/Qwen3-32B --hardware rtx-4090", "4.6"),
        ("| the same, in 4 bits | `offspec plan", "Qwen/Qwen3-32B --hardware rtx-4090 --quantize nf4", "24"),
        ("| the same, 70B", "meta-llama/Llama-3.3-70B-Instruct --hardware rtx-4090 --quantize nf4", "7.7"),
        ("| 12 GB GPU, 32 GB RAM | `offspec plan", "Qwen/Qwen3-14B --hardware rtx-3060-12gb", "8.1"),
        ("| 8 GB laptop GPU", "Qwen/Qwen3-8B --hardware laptop-8gb", "8.4"),
        ("| 2 CPU cores, 12 GB", f"Qwen/Qwen3-8B --hardware {TWO_CORES}", "2.6"),
    )
)
