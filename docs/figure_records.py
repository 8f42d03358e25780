"""The record behind each figure of README.md, docs/figures.md and docs/quickstart.md.

tests/docs/test_figures.py compares them. A block is a row of a table, an item of a list or a paragraph, found
by the text that it begins with. Its figures are given as printed, each with the value of its record.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "bench" / "results"
# A figure of a record; several if the same figure is printed for each of them.
Value = float | tuple[float, ...]


@dataclass(frozen=True)
class Record:
    """A file in bench/results/, or a part of it.

    Args:
        file: Its name, below bench/results/.
        path: Keys and indexes of the part, from the outermost.
    """

    file: str
    path: tuple[str | int, ...] = ()

    def __getitem__(self, keys: str | int | tuple[str | int, ...]) -> Any:
        """The value at these keys; a Record if that is not a figure."""
        part = Record(self.file, self.path + (keys if isinstance(keys, tuple) else (keys,)))
        value = part.value
        return part if isinstance(value, dict | list) else value

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        return (self[key] for key in (self.value if isinstance(self.value, dict) else range(len(self))))

    @property
    def value(self) -> Any:
        """What the file has there."""
        found = _content(self.file)
        for key in self.path:
            found = found[key]
        return found


@dataclass(frozen=True)
class Block:
    """Figures of a row, an item or a paragraph.

    Args:
        start: What it begins with; the page has one such block.
        record: What the figures are of; it must not say that answers changed.
        figures: By the figure as printed.
        at_most: By a bound as printed, the values of which none is larger.
    """

    start: str
    record: Record | tuple[Record, ...]
    figures: Mapping[str, Value]
    at_most: Mapping[str, tuple[float, ...]]

    @property
    def records(self) -> tuple[Record, ...]:
        return self.record if isinstance(self.record, tuple) else (self.record,)


@cache
def _content(file: str) -> Any:
    return json.loads((RESULTS / file).read_text("utf-8"))


def block(
    start: str,
    record: Record | tuple[Record, ...],
    figures: Mapping[str, Value],
    at_most: Mapping[str, tuple[float, ...]] | None = None,
) -> Block:
    return Block(start, record, figures, at_most or {})


GB = 1e9

ACCEPTANCE = Record("acceptance.json")
SOURCES = Record("sources.json")
DEMO = Record("demo.json")
PEERS = Record("peers-x4.json", ("cases", 3))
PEERS_INTEL = Record("peers-x4.json", ("cases", 2))
FITS = Record("peers-quantised.json")
FIRST = Record("peers-x8.json", ("cases", 3))
SECOND = Record("peers-x8.json", ("cases", 4))
PACKED = Record("packed.json")
PLAN = Record("plan.json", ("cases",))
SWEEP = Record("plan_sweep.json")
CALIBRATION = Record("calibration.json")
PUBLISHED = Record("published.json")
PREDICTED = Record("predicted.json")
WIDE = Record("gpu/h200-wide.json", ("steps", "wide"))
_WIDE_CASE = "x16 nf4 8GB 25 GB/s"
WIDE_ON = WIDE[_WIDE_CASE]
WIDE_OFF = WIDE[f"{_WIDE_CASE} off"]
EARLIER = Record("gpu/h200-b.json", ("steps", "wide", "x16 nf4 8GB 25 GB/s"))
LARGE = Record("gpu/h200-large.json", ("steps", "large", "70B nf4 24GB 25 GB/s"))
LINK = Record("gpu/h200-a.json", ("steps", "link"))
PRODUCTS = Record("gpu/h200-a.json", ("steps", "products", "layer"))
EXACT = Record("gpu/h200-a.json", ("steps", "exact"))
HOST = Record("gpu/h200-host.json", ("steps", "host"))
GPU_TESTS = Record("gpu/h200-tests.json", ("steps", "tests"))
GPU_TESTS_AGAIN = Record("gpu/h200-tests-again.json")
CHAT = Record("chat.json")
STREAM = Record("stream.json", ("of_bound_with_attention",))
PREFILL = Record("prefill.json")
PREFILL_PACKED = Record("prefill-packed.json")


def _contender(case: Record, name: str, run: int = 0) -> Record:
    found: Record = case["runs", run, "contenders", name]
    return found


def _over(case: Record, name: str) -> float:
    """How many times offspec is as fast as another."""
    faster: float = _contender(case, "offspec")["tokens_per_s"] / _contender(case, name)["tokens_per_s"]
    return faster


def _both(get: str, name: str, scale: float = 1.0) -> tuple[float, ...]:
    """A figure of a contender in both cases of the widened model."""
    return tuple(_contender(case, name)[get] / scale for case in (PEERS, PEERS_INTEL))


def _in_order(
    start: str, record: Record | tuple[Record, ...], printed: str, values: tuple[float, ...]
) -> Block:
    """A block whose figures are printed in the order of the values."""
    return block(start, record, dict(zip(printed.split(), values, strict=True)))


def _predicted(start: str, words: str, speed: str, alone: str) -> Block:
    plan = PREDICTED["plans", words]
    return block(start, plan, {speed: plan["tok_per_s"], alone: plan["without_draft_tok_per_s"]})


def _case(name: str) -> Record:
    found: Record = next(case for case in PLAN if case["case"] == name)
    return found


def _plan_row(start: str, name: str, speeds: str, errors: str) -> Block:
    """A row of predicted and measured speed."""
    case = _case(name)
    predicted, measured = speeds.split()
    off, off_pass = errors.split()
    found = {
        predicted: case["tok_per_s", "predicted"],
        measured: case["tok_per_s", "measured"],
    }
    for printed, value in (
        (off, 100 * case["tok_per_s", "error"]),
        (off_pass, 100 * case["seconds_per_pass", "error"]),
    ):
        found[printed] = (*found[printed], value) if printed in found else (value,)
    return block(start, case, found)


def _packed_row(rows: int, printed: str) -> Block:
    of_rows = [run["ratio"] for run in PACKED["runs"] if run["rows"] == rows]
    return _in_order(
        f"| {rows} | 0" if rows < 100 else f"| {rows} | 1", PACKED, printed, (min(of_rows), max(of_rows))
    )


def _what_if(change: str) -> Record:
    found: Record = next(each for each in _case("x4:1.5GB:0")["what_ifs"] if each["change"] == change)
    return found


def _layer(way: str, *rows: int) -> tuple[float, ...]:
    """Milliseconds of the products of a layer."""
    return tuple(1e3 * PRODUCTS[str(count), way] for count in rows)


_WITHIN = tuple(
    sorted(100 * case["tok_per_s", "predicted"] / case["tok_per_s", "measured"] - 100 for case in PLAN)
)
_PUBLISHED = tuple(sorted(abs(100 * row["ratio"] - 100) for row in PUBLISHED["rows"] if row["given"]))
_CORES = "docs/hardware/two-cores.json --memory 12GB"

README = (
    block(
        "offspec streams a model's weights", PEERS, {"9.6": _contender(PEERS, "offspec")["tokens_per_pass"]}
    ),
    block(
        "**Measured** on 2 cores",
        PEERS,
        {
            "2": PEERS["environment", "cores"],
            "1.5": PEERS["memory_bytes"] / GB,
            "1.13": PEERS["ceiling", "raw_bytes_per_s"] / GB,
            "48": PEERS["tokens"],
            "5": (PEERS["off_tokens"], _contender(PEERS, "accelerate")["tokens_made"]),
        },
    ),
    block("| 1.9B model in 1.5 GB of memory", PEERS, {"1.5": PEERS["memory_bytes"] / GB}),
    block(
        "| **offspec, with a draft**, 9.6 tokens per pass",
        PEERS,
        {"4.25": _contender(PEERS, "offspec")["tokens_per_s"]},
    ),
    _in_order(
        "| transformers, assisted generation",
        PEERS,
        "1.31 3.2",
        (_contender(PEERS, "assisted")["tokens_per_s"], _over(PEERS, "assisted")),
    ),
    _in_order(
        "| offspec, without a draft *",
        PEERS,
        "0.71 6.0",
        (_contender(PEERS, "offspec_off")["tokens_per_s"], _over(PEERS, "offspec_off")),
    ),
    _in_order(
        "| accelerate, disk offload *",
        PEERS,
        "0.34 12.4",
        (_contender(PEERS, "accelerate")["tokens_per_s"], _over(PEERS, "accelerate")),
    ),
    block(
        "**On a GPU**: an H200",
        WIDE,
        {
            "8": (WIDE_ON["placement", "vram"] / GB, len(WIDE_OFF["answers", 0, "ids"])),
            "13.8": WIDE_ON["answers", 0, "tok_per_s"],
            "14.1": WIDE_ON["answers", 1, "tok_per_s"],
            "1.6": WIDE_OFF["answers", 0, "tok_per_s"],
        },
    ),
    block(
        "**Next to llama.cpp** at about 4.5 bits",
        SECOND,
        {"4.5": 16 * SECOND["ceiling", "quantised_layer_bytes"] / SECOND["ceiling", "layer_bytes"]},
    ),
    block(
        "| 4.1 GB in 2.2 GB of memory",
        SECOND,
        {
            "4.1": SECOND["ceiling", "target_bytes"] / GB,
            "2.2": SECOND["memory_bytes"] / GB,
            "2.31": _contender(SECOND, "offspec_pack")["tokens_per_s"],
            "0.95": _contender(SECOND, "llama_cpp_drafted")["tokens_per_s"],
        },
    ),
    block(
        "| 1.1 GB in 1.5 GB of memory",
        FITS,
        {
            "1.1": FITS["ceiling", "target_bytes"] / GB,
            "1.5": FITS["memory_bytes"] / GB,
            "1.9": _contender(FITS, "offspec_nf4")["tokens_per_s"],
            "15.2": _contender(FITS, "llama_cpp")["tokens_per_s"],
        },
    ),
    block(
        "**Predicted** by `offspec plan`",
        PLAN,
        {"8": len(PLAN), "7": len(_WITHIN[:-1]), "37": _WITHIN[-1]},
        {"10": _WITHIN[:-1]},
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
    _predicted("| Qwen3-8B | no GPU", f"Qwen/Qwen3-8B --hardware {_CORES}", "2.6", "0.47"),
    block(
        "**Just looking?**",
        (PEERS, DEMO),
        {
            "1.5": DEMO["memory_bytes"] / GB,
            "7.0": min(run["ratio"] for run in DEMO["runs"]),
            "8.5": max(run["ratio"] for run in DEMO["runs"]),
            "3.9": (PEERS["ceiling", "layer_bytes"] + 2 * PEERS["ceiling", "head_bytes"]) / GB,
        },
    ),
    block(
        "The first line of every run",
        PREDICTED["models"],
        {
            "16": PREDICTED["models", "Qwen/Qwen3-8B", "disk_bytes"] / GB,
            "66": PREDICTED["models", "Qwen/Qwen3-32B", "disk_bytes"] / GB,
            "141": PREDICTED["models", "meta-llama/Llama-3.3-70B-Instruct", "disk_bytes"] / GB,
        },
    ),
)

FIGURES = (
    block(
        "SmolLM2-135M-Instruct in bfloat16 with its 4-bit",
        ACCEPTANCE,
        {"256": ACCEPTANCE["budget"], "28": ACCEPTANCE["prompts"], "64": ACCEPTANCE["tokens"]},
    ),
    _in_order(
        "| coupled sampling, shared noise",
        ACCEPTANCE,
        "11.29 10.68",
        (ACCEPTANCE["runs", 0, "pooled"], ACCEPTANCE["runs", 1, "pooled"]),
    ),
    block("| without shared noise", ACCEPTANCE, {"3.57": ACCEPTANCE["runs", 2, "pooled"]}),
    block("Trees of 64 nodes", SOURCES, {"64": SOURCES["budget"], "13": SOURCES["prompts"]}),
    *(
        _in_order(
            start,
            SOURCES,
            printed,
            (
                SOURCES["runs", run, "kinds", "copy", "pooled"],
                SOURCES["runs", run, "others", "pooled"],
                SOURCES["runs", run, "tokens_per_s"],
            ),
        )
        for start, run, printed in (
            ("| `suffix` |", 1, "7.0 1.2 31.9"),
            ("| `substitute` (4 bits) |", 0, "22.2 10.5 13.3"),
            ("| both in one tree |", 2, "23.0 10.5 18.1"),
        )
    ),
    block(
        "The target is the small model, widened",
        PEERS,
        {
            "1.9": (PEERS["ceiling", "layer_bytes"] + 2 * PEERS["ceiling", "head_bytes"]) / 2 / GB,
            "3.4": PEERS["ceiling", "layer_bytes"] / GB,
            "1.5": PEERS["memory_bytes"] / GB,
            "48": PEERS["tokens"],
        },
    ),
    block(
        "| tokens per second | AMD EPYC",
        (PEERS, PEERS_INTEL),
        {
            "1.13": PEERS["ceiling", "raw_bytes_per_s"] / GB,
            "1.81": PEERS_INTEL["ceiling", "raw_bytes_per_s"] / GB,
        },
    ),
    *(
        _in_order(start, (PEERS, PEERS_INTEL), printed, values)
        for start, printed, values in (
            ("| offspec | 4", "4.25 4.55", _both("tokens_per_s", "offspec")),
            ("| offspec without speculation", "0.71 0.44", _both("tokens_per_s", "offspec_off")),
            ("| transformers, assisted generation", "1.31 1.36", _both("tokens_per_s", "assisted")),
            ("| accelerate, disk offload", "0.34 0.37", _both("tokens_per_s", "accelerate")),
            (
                "| offspec over assisted",
                "3.2 3.4",
                tuple(_over(case, "assisted") for case in (PEERS, PEERS_INTEL)),
            ),
            (
                "| offspec over accelerate",
                "12.4 12.1",
                tuple(_over(case, "accelerate") for case in (PEERS, PEERS_INTEL)),
            ),
            ("| tokens per pass of offspec", "9.6 12.0", _both("tokens_per_pass", "offspec")),
            ("| peak memory of offspec", "1.08 1.13", _both("process_peak_bytes", "offspec", GB)),
        )
    ),
    block(
        "The model fits: 1.1 GB",
        FITS,
        {
            "1.1": FITS["ceiling", "target_bytes"] / GB,
            "1.5": FITS["memory_bytes"] / GB,
            "32": FITS["tokens"],
        },
    ),
    block("| llama.cpp | 15", FITS, {"15.2": _contender(FITS, "llama_cpp")["tokens_per_s"]}),
    block(
        "| llama.cpp with its own speculation | 8",
        FITS,
        {"8.8": _contender(FITS, "llama_cpp_drafted")["tokens_per_s"]},
    ),
    block("| offspec in NF4", FITS, {"1.9": _contender(FITS, "offspec_nf4")["tokens_per_s"]}),
    block(
        "The model does not fit: 4.08 GB",
        (FIRST, SECOND),
        {
            "4.08": FIRST["ceiling", "target_bytes"] / GB,
            "2.2": (FIRST["memory_bytes"] / GB, SECOND["memory_bytes"] / GB),
            "48": (FIRST["tokens"], SECOND["tokens"]),
        },
    ),
    *(
        _in_order(
            start,
            (FIRST, SECOND),
            printed,
            tuple(_contender(case, name, run)[figure] for case, run in ((FIRST, 0), (FIRST, 1), (SECOND, 0))),
        )
        for start, name, figure, printed in (
            ("| offspec, its own checkpoint", "offspec_pack", "tokens_per_s", "1.68 1.75 2.31"),
            (
                "| llama.cpp with its own speculation | 0",
                "llama_cpp_drafted",
                "tokens_per_s",
                "0.75 0.40 0.95",
            ),
            ("| seconds to the first token: offspec", "offspec_pack", "ttft_s", "4.3 5.1 4.6"),
            ("| seconds to the first token: llama.cpp", "llama_cpp_drafted", "ttft_s", "11.3 11.8 9.5"),
        )
    ),
    _in_order(
        "| offspec, the same GGUF file",
        FIRST,
        "1.43 1.32",
        tuple(_contender(FIRST, "offspec_gguf", run)["tokens_per_s"] for run in (0, 1)),
    ),
    _in_order(
        "| raw rate of the disk",
        (FIRST, SECOND),
        "1.04 1.24",
        tuple(case["ceiling", "raw_bytes_per_s"] / GB for case in (FIRST, SECOND)),
    ),
    block("Time of a pass over quantized weights", PACKED, {"1.3": float(PACKED["link"].removesuffix("GB"))}),
    _packed_row(1, "0.37 0.49"),
    _packed_row(64, "0.75 1.41"),
    _packed_row(256, "1.08 1.18"),
    _packed_row(512, "1.02 1.09"),
    _plan_row("| x1, 0.64 GB, 0", "x1:least:0", "9.2 8.7", "6 5"),
    _plan_row("| x1, 1 GB, 0", "x1:1GB:0", "22.5 21.9", "3 1"),
    _plan_row("| x1, 2 GB, 0", "x1:2GB:0", "26.7 27.2", "2 5"),
    _plan_row("| x1, 1 GB, 1", "x1:1GB:1", "23.4 21.3", "10 1"),
    _plan_row("| x2, 1.5 GB, 0", "x2:1.5GB:0", "16.4 15.8", "4 12"),
    _plan_row("| x2, 3 GB, 0", "x2:3GB:0", "20.6 19.5", "6 0"),
    _plan_row("| x4, 1.5 GB, 0", "x4:1.5GB:0", "5.4 3.9", "37 12"),
    _plan_row("| x4, 6 GB, 0", "x4:6GB:0", "9.3 10.0", "8 0"),
    block(
        "So tokens per second were within",
        PLAN,
        {
            "7": len(_WITHIN[:-1]),
            "8": len(PLAN),
            "37": _WITHIN[-1],
            "6.1": (
                _what_if("the target packed to nf4")["predicted"],
                _what_if("the target packed to int8")["predicted"],
            ),
            "4.2": _what_if("the target packed to nf4")["measured"],
            "7.3": _what_if("the target packed to int8")["measured"],
        },
        {"10": _WITHIN[:-1]},
    ),
    block("- The chosen tree size and width", SWEEP, {"1.07": SWEEP["cases", 0, "of_best"]}),
    block(
        "- The tokens per pass that trees predict",
        CALIBRATION,
        {
            "1.00": CALIBRATION["runs", 0, "ratio"],
            "1.05": CALIBRATION["runs", 1, "ratio"],
            "0.96": CALIBRATION["runs", 2, "ratio"],
            "0.6": CALIBRATION["runs", 1, "temperature"],
        },
    ),
    block(
        "- With the published hardware",
        PUBLISHED,
        {"10": len([off for off in _PUBLISHED if off <= 30]), "11": len(_PUBLISHED)},
        {"30": _PUBLISHED[:-1]},
    ),
    block(
        "Measured with `python -m bench.gpu_day`",
        (WIDE, LARGE),
        {
            "25": float(_WIDE_CASE.split()[-2]),
            "21": WIDE_ON["answers", 0, "pass_bytes_streamed"]
            / WIDE_ON["answers", 0, "pass_target_seconds"]
            / GB,
        },
    ),
    block(
        "SmolLM2 widened to 28 B in NF4",
        WIDE,
        {
            "8": WIDE_ON["placement", "vram"] / GB,
            "15.3": (WIDE_ON["placement", "resident_bytes"] + WIDE_ON["placement", "host_bytes"]) / GB,
            "12.2": WIDE_ON["answers", 0, "pass_bytes_streamed"] / GB,
        },
    ),
    block(
        "| tokens per second | 13.8",
        WIDE,
        {
            "13.8": WIDE_ON["answers", 0, "tok_per_s"],
            "14.1": WIDE_ON["answers", 1, "tok_per_s"],
            "1.59": WIDE_OFF["answers", 0, "tok_per_s"],
        },
    ),
    block(
        "| tokens per pass | 9.6",
        WIDE,
        {
            "9.6": tuple(answer["tokens_per_pass"] for answer in WIDE_ON["answers"]),
            "1.0": WIDE_OFF["answers", 0, "tokens_per_pass"],
        },
    ),
    block(
        "| seconds per pass, draft included",
        WIDE,
        {
            printed: answer["pass_target_seconds"] + answer["pass_draft_seconds"]
            for printed, answer in zip(
                ("0.66", "0.68", "0.63"), (*WIDE_ON["answers"], *WIDE_OFF["answers"]), strict=True
            )
        },
    ),
    block("| predicted seconds per pass", WIDE, {"0.68": WIDE_ON["forecast", "seconds_per_pass"]}),
    block("| predicted tokens per second", WIDE, {"15.2": WIDE_ON["forecast", "tok_per_s"]}),
    _in_order(
        "| peak of VRAM",
        WIDE,
        "7.64 7.28",
        (WIDE_ON["answers", 0, "peak_device_bytes"] / GB, WIDE_OFF["answers", 0, "peak_device_bytes"] / GB),
    ),
    block(
        "An earlier run made 13.7 tokens per second",
        (WIDE, EARLIER),
        {
            "13.7": tuple(answer["tok_per_s"] for answer in EARLIER["answers"]),
            "0.68": WIDE_ON["profile", "seconds"],
            "0.21": WIDE_ON["profile", "kernels", "Memcpy HtoD (Pinned -> Device)", 1],
            "0.035": WIDE_ON["profile", "kernels", "_codebook", 1],
            "0.022": WIDE_ON["profile", "kernels", "_row_linear", 1],
        },
    ),
    block(
        "Llama 70B's shape in NF4",
        LARGE,
        {
            "1.15": LARGE["answers", 0, "pass_target_seconds"],
            "6": len(LARGE["answers", 0, "ids"]),
            "1.22": LARGE["forecast", "seconds_per_pass"],
            "1,024": LARGE["forecast", "budget"],
            "9.6": LARGE["forecast", "tok_per_s"],
        },
    ),
    _in_order(
        "| RAM to GPU, pieces",
        LINK,
        "43 54 55",
        tuple(LINK["copies", f"{size} MiB", "bytes_per_s"] / GB for size in (1, 16, 512)),
    ),
    block("| layers from RAM through", LINK, {"52": LINK["ring", "bytes_per_s"] / GB}),
    block("| pinning 2.15 GB", LINK, {"0.99": LINK["arena", "seconds"], "2.15": LINK["arena", "bytes"] / GB}),
    block("| NF4 of a 70B layer", PRODUCTS, {"0.78": _layer("dequant", 1)}),
    _in_order(
        "| its seven products by `row_linear`",
        PRODUCTS,
        "0.71 0.72 1.3 2.6 5.4",
        _layer("row_linear", 1, 64, 256, 512, 1024),
    ),
    _in_order(
        "| the same by cuBLAS", PRODUCTS, "0.49 0.51 0.67 1.1 2.2", _layer("library", 1, 64, 256, 512, 1024)
    ),
    block("| the same with NF4 dequantized", PRODUCTS, {"8.0": _layer("nf4_inside", 64)}),
    block("| Python's time for a layer", HOST, {"1.7": HOST["bfloat16", "1", "host_us_per_layer"] / 1e3}),
    block(
        "Kernels were compared with their references",
        (EXACT, GPU_TESTS, GPU_TESTS_AGAIN),
        {
            "6": len(EXACT["row_linear"]) / 3,
            "4": len(EXACT["attention"]) / 2,
            "35": len(EXACT["dequant"]),
            "37": len(GPU_TESTS["failures"]),
            "444": sum(int(part.split()[0]) for part in GPU_TESTS["short"].split(" in ")[0].split(", ")),
            "128": GPU_TESTS_AGAIN["passed"],
        },
    ),
    block("`python -m bench.chat` (`chat.json`)", CHAT, {"26": CHAT["ui_tokens_per_s"]}),
    block("| first frame of `offspec chat`", CHAT, {"0.49": CHAT["first_frame_seconds"]}),
    block("| a key is on the screen", CHAT, {"4.0": CHAT["keys_generating", "median_ms"]}),
    block("| the same: 95th percentile", CHAT, {"31": CHAT["keys_generating", "p95_ms"]}),
    block("| the same: maximum", CHAT, {"56": CHAT["keys_generating", "max_ms"]}),
    _in_order(
        "| the interface's share of a core",
        CHAT,
        "4.5 5.3",
        tuple(100 * each(run["ui_of_a_core"] for run in CHAT["streaming"]) for each in (min, max)),
    ),
    block("| its share when idle", CHAT, {"0.3": 100 * CHAT["idle_usage", "ui_of_a_core"]}),
    block(
        "Passes over the widened model",
        Record("stream.json"),
        {"1.5": Record("stream.json")["memory_bytes"] / GB},
    ),
    *(
        block(f"| {rows:,} | {share}", STREAM, {share: STREAM[str(rows)]})
        for rows, share in ((1, "1.36"), (64, "1.47"), (256, "0.90"), (1024, "0.92"))
    ),
    block(
        "A prompt of 4,096 tokens takes",
        (PREFILL, PREFILL_PACKED),
        {
            "4,096": PREFILL["tokens"],
            "1.04": PREFILL["ratio_with_attention"],
            "512": PREFILL_PACKED["tokens"],
            "1.14": PREFILL_PACKED["ratio_with_attention"],
        },
    ),
)

QUICKSTART = tuple(
    block(start, PREDICTED["plans", words], {speed: PREDICTED["plans", words, "tok_per_s"]})
    for start, words, speed in (
        ("| 24 GB GPU, 64 GB RAM | `offspec plan", "Qwen/Qwen3-32B --hardware rtx-4090", "4.6"),
        ("| the same, in 4 bits | `offspec plan", "Qwen/Qwen3-32B --hardware rtx-4090 --quantize nf4", "24"),
        ("| the same, 70B", "meta-llama/Llama-3.3-70B-Instruct --hardware rtx-4090 --quantize nf4", "7.7"),
        ("| 12 GB GPU, 32 GB RAM | `offspec plan", "Qwen/Qwen3-14B --hardware rtx-3060-12gb", "8.1"),
        ("| 8 GB laptop GPU", "Qwen/Qwen3-8B --hardware laptop-8gb", "8.4"),
        ("| 2 CPU cores, 12 GB", f"Qwen/Qwen3-8B --hardware {_CORES}", "2.6"),
    )
)

PAGES = {"README.md": README, "docs/figures.md": FIGURES, "docs/quickstart.md": QUICKSTART}
