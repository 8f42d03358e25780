"""Figures of docs/figures.md that compare predicted with measured speed."""

from docs.figure_records.block import Block
from docs.figure_records.record import Record
from docs.figure_records.results import PLAN, SPEED_ERRORS

SWEEP = Record("plan_sweep.json")
CALIBRATION = Record("calibration.json")
PUBLISHED = Record("published.json")
_RATIOS_OFF = tuple(sorted(abs(100 * row["ratio"] - 100) for row in PUBLISHED["rows"] if row["given"]))


def _case(name: str) -> Record:
    found: Record = next(case for case in PLAN if case["case"] == name)
    return found


def _plan_row(start: str, name: str, speeds: str, errors: str) -> Block:
    """A row of predicted and measured speed."""
    case = _case(name)
    predicted, measured = speeds.split()
    off, off_pass = errors.split()
    found = {predicted: case["tok_per_s", "predicted"], measured: case["tok_per_s", "measured"]}
    for printed, value in (
        (off, 100 * case["tok_per_s", "error"]),
        (off_pass, 100 * case["seconds_per_pass", "error"]),
    ):
        found[printed] = (*found[printed], value) if printed in found else (value,)
    return Block(start, case, found)


def _what_if(change: str) -> Record:
    found: Record = next(each for each in _case("x4:1.5GB:0")["what_ifs"] if each["change"] == change)
    return found


PLANS = (
    _plan_row("| x1, 0.64 GB, 0", "x1:least:0", "9.2 8.7", "6 5"),
    _plan_row("| x1, 1 GB, 0", "x1:1GB:0", "22.5 21.9", "3 1"),
    _plan_row("| x1, 2 GB, 0", "x1:2GB:0", "26.7 27.2", "2 5"),
    _plan_row("| x1, 1 GB, 1", "x1:1GB:1", "23.4 21.3", "10 1"),
    _plan_row("| x2, 1.5 GB, 0", "x2:1.5GB:0", "16.4 15.8", "4 12"),
    _plan_row("| x2, 3 GB, 0", "x2:3GB:0", "20.6 19.5", "6 0"),
    _plan_row("| x4, 1.5 GB, 0", "x4:1.5GB:0", "5.4 3.9", "37 12"),
    _plan_row("| x4, 6 GB, 0", "x4:6GB:0", "9.3 10.0", "8 0"),
    Block(
        "So tokens per second were within",
        PLAN,
        {
            "7": len(SPEED_ERRORS[:-1]),
            "8": len(PLAN),
            "37": SPEED_ERRORS[-1],
            "6.1": (
                _what_if("the target packed to nf4")["predicted"],
                _what_if("the target packed to int8")["predicted"],
            ),
            "4.2": _what_if("the target packed to nf4")["measured"],
            "7.3": _what_if("the target packed to int8")["measured"],
        },
        {"10": SPEED_ERRORS[:-1]},
    ),
    Block("- The chosen tree size and width", SWEEP, {"1.07": SWEEP["cases", 0, "of_best"]}),
    Block(
        "- The tokens per pass that trees predict",
        CALIBRATION,
        {
            "1.00": CALIBRATION["runs", 0, "ratio"],
            "1.05": CALIBRATION["runs", 1, "ratio"],
            "0.96": CALIBRATION["runs", 2, "ratio"],
            "0.6": CALIBRATION["runs", 1, "temperature"],
        },
    ),
    Block(
        "- With the published hardware",
        PUBLISHED,
        {"10": len([off for off in _RATIOS_OFF if off <= 30]), "11": len(_RATIOS_OFF)},
        {"30": _RATIOS_OFF[:-1]},
    ),
)
