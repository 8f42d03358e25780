"""Records that several pages or sections quote, and figures derived from them."""

from docs.figure_records.record import Record

GB = 1e9
TWO_CORES = "docs/hardware/two-cores.json --memory 12GB"  # words of `offspec plan`

PEERS = Record("peers-x4.json", ("cases", 3))
FITS = Record("peers-quantised.json")
SECOND = Record("peers-x8.json", ("cases", 4))
PLAN = Record("plan.json", ("cases",))
PREDICTED = Record("predicted.json")
WIDE = Record("gpu/h200-wide.json", ("steps", "wide"))
WIDE_CASE = "x16 nf4 8GB 25 GB/s"
WIDE_ON = WIDE[WIDE_CASE]
WIDE_OFF = WIDE[f"{WIDE_CASE} off"]


def contender(case: Record, name: str, run: int = 0) -> Record:
    """Record of one system in a comparison."""
    found: Record = case["runs", run, "contenders", name]
    return found


def speed(case: Record, name: str, run: int = 0) -> float:
    """Tokens per second of one system in a comparison."""
    found: float = contender(case, name, run)["tokens_per_s"]
    return found


def times_faster(case: Record, name: str) -> float:
    """Speed of offspec as a multiple of another system."""
    return speed(case, "offspec") / speed(case, name)


# Errors of predicted speed in percent, from the lowest to the highest.
SPEED_ERRORS = tuple(
    sorted(100 * case["tok_per_s", "predicted"] / case["tok_per_s", "measured"] - 100 for case in PLAN)
)
