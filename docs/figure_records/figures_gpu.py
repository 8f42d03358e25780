"""Figures of docs/figures.md measured on a GPU."""

from docs.figure_records.block import Block, in_order
from docs.figure_records.record import Record
from docs.figure_records.results import GB, WIDE, WIDE_CASE, WIDE_OFF, WIDE_ON

EARLIER = Record("gpu/h200-b.json", ("steps", "wide", "x16 nf4 8GB 25 GB/s"))
LARGE = Record("gpu/h200-large.json", ("steps", "large", "70B nf4 24GB 25 GB/s"))
LINK = Record("gpu/h200-a.json", ("steps", "link"))
PRODUCTS = Record("gpu/h200-a.json", ("steps", "products", "layer"))
EXACT = Record("gpu/h200-a.json", ("steps", "exact"))
HOST = Record("gpu/h200-host.json", ("steps", "host"))
GPU_TESTS = Record("gpu/h200-tests.json", ("steps", "tests"))
GPU_TESTS_AGAIN = Record("gpu/h200-tests-again.json")


def _layer(way: str, *rows: int) -> tuple[float, ...]:
    """Milliseconds of the products of a layer."""
    return tuple(1e3 * PRODUCTS[str(count), way] for count in rows)


GPU = (
    Block(
        "Measured with `python -m bench.gpu_day`",
        (WIDE, LARGE),
        {
            "25": float(WIDE_CASE.split()[-2]),
            "21": WIDE_ON["answers", 0, "pass_bytes_streamed"]
            / WIDE_ON["answers", 0, "pass_target_seconds"]
            / GB,
        },
    ),
    Block(
        "SmolLM2 widened to 28 B in NF4",
        WIDE,
        {
            "8": WIDE_ON["placement", "vram"] / GB,
            "15.3": (WIDE_ON["placement", "resident_bytes"] + WIDE_ON["placement", "host_bytes"]) / GB,
            "12.2": WIDE_ON["answers", 0, "pass_bytes_streamed"] / GB,
        },
    ),
    Block(
        "| tokens per second | 13.8",
        WIDE,
        {
            "13.8": WIDE_ON["answers", 0, "tok_per_s"],
            "14.1": WIDE_ON["answers", 1, "tok_per_s"],
            "1.59": WIDE_OFF["answers", 0, "tok_per_s"],
        },
    ),
    Block(
        "| tokens per pass | 9.6",
        WIDE,
        {
            "9.6": tuple(answer["tokens_per_pass"] for answer in WIDE_ON["answers"]),
            "1.0": WIDE_OFF["answers", 0, "tokens_per_pass"],
        },
    ),
    Block(
        "| seconds per pass, draft included",
        WIDE,
        {
            printed: answer["pass_target_seconds"] + answer["pass_draft_seconds"]
            for printed, answer in zip(
                ("0.66", "0.68", "0.63"), (*WIDE_ON["answers"], *WIDE_OFF["answers"]), strict=True
            )
        },
    ),
    Block("| predicted seconds per pass", WIDE, {"0.68": WIDE_ON["forecast", "seconds_per_pass"]}),
    Block("| predicted tokens per second", WIDE, {"15.2": WIDE_ON["forecast", "tok_per_s"]}),
    in_order(
        "| peak of VRAM",
        WIDE,
        "7.64 7.28",
        (WIDE_ON["answers", 0, "peak_device_bytes"] / GB, WIDE_OFF["answers", 0, "peak_device_bytes"] / GB),
    ),
    Block(
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
    Block(
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
    in_order(
        "| RAM to GPU, pieces",
        LINK,
        "43 54 55",
        tuple(LINK["copies", f"{size} MiB", "bytes_per_s"] / GB for size in (1, 16, 512)),
    ),
    Block("| layers from RAM through", LINK, {"52": LINK["ring", "bytes_per_s"] / GB}),
    Block("| pinning 2.15 GB", LINK, {"0.99": LINK["arena", "seconds"], "2.15": LINK["arena", "bytes"] / GB}),
    Block("| NF4 of a 70B layer", PRODUCTS, {"0.78": _layer("dequant", 1)}),
    in_order(
        "| its seven products by `row_linear`",
        PRODUCTS,
        "0.71 0.72 1.3 2.6 5.4",
        _layer("row_linear", 1, 64, 256, 512, 1024),
    ),
    in_order(
        "| the same by cuBLAS", PRODUCTS, "0.49 0.51 0.67 1.1 2.2", _layer("library", 1, 64, 256, 512, 1024)
    ),
    Block("| the same with NF4 dequantized", PRODUCTS, {"8.0": _layer("nf4_inside", 64)}),
    Block("| Python's time for a layer", HOST, {"1.7": HOST["bfloat16", "1", "host_us_per_layer"] / 1e3}),
    Block(
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
)
