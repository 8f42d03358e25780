"""Figures of README.md."""

from docs.figure_records.block import Block, in_order
from docs.figure_records.record import Record
from docs.figure_records.results import (
    FITS,
    GB,
    PEERS,
    PLAN,
    PREDICTED,
    SECOND,
    SPEED_ERRORS,
    TWO_CORES,
    WIDE,
    WIDE_OFF,
    WIDE_ON,
    contender,
    speed,
    times_faster,
)

DEMO = Record("demo.json")


def _predicted(start: str, words: str, speed: str, alone: str) -> Block:
    plan = PREDICTED["plans", words]
    return Block(start, plan, {speed: plan["tok_per_s"], alone: plan["without_draft_tok_per_s"]})


README = (
    Block(
        "offspec streams a model's weights", PEERS, {"9.6": contender(PEERS, "offspec")["tokens_per_pass"]}
    ),
    Block(
        "**Measured** on 2 cores",
        PEERS,
        {
            "2": PEERS["environment", "cores"],
            "1.5": PEERS["memory_bytes"] / GB,
            "1.13": PEERS["ceiling", "raw_bytes_per_s"] / GB,
            "48": PEERS["tokens"],
            "5": (PEERS["off_tokens"], contender(PEERS, "accelerate")["tokens_made"]),
        },
    ),
    Block("| 1.9B model in 1.5 GB of memory", PEERS, {"1.5": PEERS["memory_bytes"] / GB}),
    Block("| **offspec, with a draft**, 9.6 tokens per pass", PEERS, {"4.25": speed(PEERS, "offspec")}),
    *(
        in_order(start, PEERS, printed, (speed(PEERS, name), times_faster(PEERS, name)))
        for start, name, printed in (
            ("| transformers, assisted generation", "assisted", "1.31 3.2"),
            ("| offspec, without a draft *", "offspec_off", "0.71 6.0"),
            ("| accelerate, disk offload *", "accelerate", "0.34 12.4"),
        )
    ),
    Block(
        "**On a GPU**: an H200",
        WIDE,
        {
            "8": (WIDE_ON["placement", "vram"] / GB, len(WIDE_OFF["answers", 0, "ids"])),
            "13.8": WIDE_ON["answers", 0, "tok_per_s"],
            "14.1": WIDE_ON["answers", 1, "tok_per_s"],
            "1.6": WIDE_OFF["answers", 0, "tok_per_s"],
        },
    ),
    Block(
        "**Next to llama.cpp** at about 4.5 bits",
        SECOND,
        {"4.5": 16 * SECOND["ceiling", "quantised_layer_bytes"] / SECOND["ceiling", "layer_bytes"]},
    ),
    Block(
        "| 4.1 GB in 2.2 GB of memory",
        SECOND,
        {
            "4.1": SECOND["ceiling", "target_bytes"] / GB,
            "2.2": SECOND["memory_bytes"] / GB,
            "2.31": speed(SECOND, "offspec_pack"),
            "0.95": speed(SECOND, "llama_cpp_drafted"),
        },
    ),
    Block(
        "| 1.1 GB in 1.5 GB of memory",
        FITS,
        {
            "1.1": FITS["ceiling", "target_bytes"] / GB,
            "1.5": FITS["memory_bytes"] / GB,
            "1.9": speed(FITS, "offspec_nf4"),
            "15.2": speed(FITS, "llama_cpp"),
        },
    ),
    Block(
        "**Predicted** by `offspec plan`",
        PLAN,
        {"8": len(PLAN), "7": len(SPEED_ERRORS[:-1]), "37": SPEED_ERRORS[-1]},
        {"10": SPEED_ERRORS[:-1]},
    ),
    _predicted("| Qwen3-32B |", "Qwen/Qwen3-32B --hardware rtx-4090", "4.6", "0.55"),
    _predicted(
        "| Qwen3-32B in NF4 (4 bits) |", "Qwen/Qwen3-32B --hardware rtx-4090 --quantize nf4", "24", "5.8"
    ),
    _predicted(
        "| Llama-3.3-70B in NF4 (4 bits) |",
        "meta-llama/Llama-3.3-70B-Instruct --hardware rtx-4090 --quantize nf4",
        "7.7",
        "1.3",
    ),
    _predicted("| Qwen3-8B | RTX 4060 laptop", "Qwen/Qwen3-8B --hardware laptop-8gb", "8.4", "1.2"),
    _predicted("| Qwen3-8B | no GPU", f"Qwen/Qwen3-8B --hardware {TWO_CORES}", "2.6", "0.47"),
    Block(
        "**Just looking?**",
        (PEERS, DEMO),
        {
            "1.5": DEMO["memory_bytes"] / GB,
            "7.0": min(run["ratio"] for run in DEMO["runs"]),
            "8.5": max(run["ratio"] for run in DEMO["runs"]),
            "3.9": (PEERS["ceiling", "layer_bytes"] + 2 * PEERS["ceiling", "head_bytes"]) / GB,
        },
    ),
    Block(
        "The first line of every run",
        PREDICTED["models"],
        {
            "16": PREDICTED["models", "Qwen/Qwen3-8B", "disk_bytes"] / GB,
            "66": PREDICTED["models", "Qwen/Qwen3-32B", "disk_bytes"] / GB,
            "141": PREDICTED["models", "meta-llama/Llama-3.3-70B-Instruct", "disk_bytes"] / GB,
        },
    ),
)
