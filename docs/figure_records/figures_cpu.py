"""Figures of docs/figures.md measured on CPUs: tokens per pass, speed next to other systems, bandwidth."""

from docs.figure_records.block import Block, in_order
from docs.figure_records.record import Record
from docs.figure_records.results import FITS, GB, PEERS, SECOND, contender, speed, times_faster

ACCEPTANCE = Record("acceptance.json")
SOURCES = Record("sources.json")
PEERS_INTEL = Record("peers-x4.json", ("cases", 2))
FIRST = Record("peers-x8.json", ("cases", 3))
PACKED = Record("packed.json")
STREAM = Record("stream.json", ("of_bound_with_attention",))
PREFILL = Record("prefill.json")
PREFILL_PACKED = Record("prefill-packed.json")


def _both(get: str, name: str, scale: float = 1.0) -> tuple[float, ...]:
    """Figure of one system in both cases of the widened model."""
    return tuple(contender(case, name)[get] / scale for case in (PEERS, PEERS_INTEL))


def _packed_row(rows: int, printed: str) -> Block:
    of_rows = [run["ratio"] for run in PACKED["runs"] if run["rows"] == rows]
    return in_order(
        f"| {rows} | 0" if rows < 100 else f"| {rows} | 1", PACKED, printed, (min(of_rows), max(of_rows))
    )


CPU = (
    Block(
        "SmolLM2-135M-Instruct in bfloat16 with its 4-bit",
        ACCEPTANCE,
        {"256": ACCEPTANCE["budget"], "28": ACCEPTANCE["prompts"], "64": ACCEPTANCE["tokens"]},
    ),
    in_order(
        "| coupled sampling, shared noise",
        ACCEPTANCE,
        "11.29 10.68",
        (ACCEPTANCE["runs", 0, "pooled"], ACCEPTANCE["runs", 1, "pooled"]),
    ),
    Block("| without shared noise", ACCEPTANCE, {"3.57": ACCEPTANCE["runs", 2, "pooled"]}),
    Block("Trees of 64 nodes", SOURCES, {"64": SOURCES["budget"], "13": SOURCES["prompts"]}),
    *(
        in_order(
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
            ("| `self` (4 bits) |", 0, "22.2 10.5 13.3"),
            ("| both in one tree |", 2, "23.0 10.5 18.1"),
        )
    ),
    Block(
        "The target is the small model, widened",
        PEERS,
        {
            "1.9": (PEERS["ceiling", "layer_bytes"] + 2 * PEERS["ceiling", "head_bytes"]) / 2 / GB,
            "3.4": PEERS["ceiling", "layer_bytes"] / GB,
            "1.5": PEERS["memory_bytes"] / GB,
            "48": PEERS["tokens"],
        },
    ),
    Block(
        "| tokens per second | AMD EPYC",
        (PEERS, PEERS_INTEL),
        {
            "1.13": PEERS["ceiling", "raw_bytes_per_s"] / GB,
            "1.81": PEERS_INTEL["ceiling", "raw_bytes_per_s"] / GB,
        },
    ),
    *(
        in_order(start, (PEERS, PEERS_INTEL), printed, values)
        for start, printed, values in (
            ("| offspec | 4", "4.25 4.55", _both("tokens_per_s", "offspec")),
            ("| offspec without speculation", "0.71 0.44", _both("tokens_per_s", "offspec_off")),
            ("| transformers, assisted generation", "1.31 1.36", _both("tokens_per_s", "assisted")),
            ("| accelerate, disk offload", "0.34 0.37", _both("tokens_per_s", "accelerate")),
            (
                "| offspec over assisted",
                "3.2 3.4",
                tuple(times_faster(case, "assisted") for case in (PEERS, PEERS_INTEL)),
            ),
            (
                "| offspec over accelerate",
                "12.4 12.1",
                tuple(times_faster(case, "accelerate") for case in (PEERS, PEERS_INTEL)),
            ),
            ("| tokens per pass of offspec", "9.6 12.0", _both("tokens_per_pass", "offspec")),
            ("| peak memory of offspec", "1.08 1.13", _both("process_peak_bytes", "offspec", GB)),
        )
    ),
    Block(
        "The model fits: 1.1 GB",
        FITS,
        {"1.1": FITS["ceiling", "target_bytes"] / GB, "1.5": FITS["memory_bytes"] / GB, "32": FITS["tokens"]},
    ),
    Block("| llama.cpp | 15", FITS, {"15.2": speed(FITS, "llama_cpp")}),
    Block("| llama.cpp with its own speculation | 8", FITS, {"8.8": speed(FITS, "llama_cpp_drafted")}),
    Block("| offspec in NF4", FITS, {"1.9": speed(FITS, "offspec_nf4")}),
    Block(
        "The model does not fit: 4.08 GB",
        (FIRST, SECOND),
        {
            "4.08": FIRST["ceiling", "target_bytes"] / GB,
            "2.2": (FIRST["memory_bytes"] / GB, SECOND["memory_bytes"] / GB),
            "48": (FIRST["tokens"], SECOND["tokens"]),
        },
    ),
    *(
        in_order(
            start,
            (FIRST, SECOND),
            printed,
            tuple(contender(case, name, run)[figure] for case, run in ((FIRST, 0), (FIRST, 1), (SECOND, 0))),
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
    in_order(
        "| offspec, the same GGUF file",
        FIRST,
        "1.43 1.32",
        tuple(speed(FIRST, "offspec_gguf", run) for run in (0, 1)),
    ),
    in_order(
        "| raw rate of the disk",
        (FIRST, SECOND),
        "1.04 1.24",
        tuple(case["ceiling", "raw_bytes_per_s"] / GB for case in (FIRST, SECOND)),
    ),
    Block("Time of a pass over quantized weights", PACKED, {"1.3": float(PACKED["link"].removesuffix("GB"))}),
    _packed_row(1, "0.37 0.49"),
    _packed_row(64, "0.75 1.41"),
    _packed_row(256, "1.08 1.18"),
    _packed_row(512, "1.02 1.09"),
    Block(
        "Passes over the widened model",
        Record("stream.json"),
        {"1.5": Record("stream.json")["memory_bytes"] / GB},
    ),
    *(
        Block(f"| {rows:,} | {share}", STREAM, {share: STREAM[str(rows)]})
        for rows, share in ((1, "1.36"), (64, "1.47"), (256, "0.90"), (1024, "0.92"))
    ),
    Block(
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
