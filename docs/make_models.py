"""Write the predictions of `offspec plan` for well-known models: a record, and the table in docs/models.md.

python docs/make_models.py    takes about ten minutes; needs neither the models nor the machines

README.md and docs/quickstart.md print figures of the same record, bench/results/predicted.json.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("models.md")
RECORD = ROOT / "bench" / "results" / "predicted.json"
MODELS = (
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.3-70B-Instruct",
    "meta-llama/Llama-3.1-405B-Instruct",
)
MACHINES = {
    "no GPU: 2 cores, 16 GB": ("--hardware", "docs/hardware/two-cores.json", "--memory", "12GB"),
    "8 GB laptop GPU, 16 GB": ("--hardware", "laptop-8gb"),
    "RTX 3060 12 GB, 32 GB": ("--hardware", "rtx-3060-12gb"),
    "RTX 4090 24 GB, 64 GB": ("--hardware", "rtx-4090"),
}
BITS: tuple[tuple[str, ...], ...] = ((), ("--quantize", "nf4"))
Prediction = dict[str, Any]
_CPU, *_, _GPU = MACHINES.values()
_MARKS = ("<!-- written by docs/make_models.py -->\n", "<!-- end -->\n")


def plan(*words: str) -> dict[str, Any] | None:
    """JSON output of `offspec plan`; None if the machine has too little memory for the model."""
    command = [sys.executable, "-m", "offspec", "plan", *words, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 1 and "too little" in done.stderr:
        return None
    done.check_returncode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def prediction(*words: str) -> Prediction | None:
    """The figures of a plan that the pages print, and the draft that it chose."""
    found = plan(*words)
    if found is None:
        return None
    forecast = found["forecast"]
    alone = [change["tok_per_s"] for change in found["what_ifs"] if change["change"] == "no draft"]
    return {
        "draft": found["draft"],
        "streams": bool(re.search("host|disk", found["placement"]["tiers"])),
        "tok_per_s": forecast["tok_per_s"],
        "without_draft_tok_per_s": alone[0] if alone else None,
        "tokens_per_pass": forecast["tokens_per_pass"],
        "seconds_per_pass": forecast["seconds_per_pass"],
    }


def measure() -> dict[str, Any]:
    """The record: sizes by model, and predictions by the words of their command."""
    models = {}
    for model in MODELS:
        alone = [plan(model, *options[:2], "--draft", "none") for options in (_CPU, _GPU)]
        assert alone[0] and alone[1]
        models[model] = {
            "disk_bytes": _disk_bytes(model),
            "least_memory_bytes": alone[0]["least_memory"],
            "least_vram_bytes": alone[1]["least_vram"],
        }
    asked = [
        words(model, options, *more) for model in MODELS for options in MACHINES.values() for more in BITS
    ]
    return {
        "bench": "predicted",
        "command": "python docs/make_models.py",
        "models": models,
        "plans": {" ".join(each): prediction(*each) for each in asked},
    }


def words(model: str, options: Sequence[str], *more: str) -> tuple[str, ...]:
    """Words of the command `offspec plan` for a model on one of the machines."""
    return (model, *options, *more)


def speeds(plain: Prediction | None, packed: Prediction | None) -> str:
    """Tokens per second at 16 bits and in NF4; "fits" if no layer streams at 16 bits."""
    if plain is None or packed is None:
        return "-" if packed is None else f"- · {packed['tok_per_s']:.2g}"
    return f"{plain['tok_per_s']:.2g} · {packed['tok_per_s']:.2g}" if plain["streams"] else "fits"


def row(model: str, record: dict[str, Any]) -> list[str]:
    """Model, bytes on disk, least RAM without a GPU, least GPU memory, and the speed on each machine."""
    size = record["models"][model]
    plans = record["plans"]
    return [
        f"`{model}`",
        f"{size['disk_bytes'] / 1e9:.0f} GB",
        f"{size['least_memory_bytes'] / 1e9:.1f} GB",
        f"{size['least_vram_bytes'] / 1e9:.1f} GB",
        *(
            speeds(*(plans[" ".join(words(model, options, *more))] for more in BITS))
            for options in MACHINES.values()
        ),
    ]


def _disk_bytes(model: str) -> int:
    import torch

    from offspec.plan.model_sizes import open_on_meta

    opened, _ = open_on_meta(model, torch.bfloat16, torch.device("cpu"))
    return sum(weight.numel() * 2 for weight in opened.skeleton.model.parameters())


def table(record: dict[str, Any]) -> str:
    heads = ["model", "disk, 16 bits", "least RAM", "least GPU memory", *MACHINES]
    lines = [heads, ["---"] * len(heads), *(row(model, record) for model in MODELS)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def renewed(page: str, record: dict[str, Any]) -> str:
    """The page with the table as the record has it."""
    before, _, rest = page.partition(_MARKS[0])
    _, _, after = rest.partition(_MARKS[1])
    return before + _MARKS[0] + table(record) + _MARKS[1] + after


def main() -> None:
    record = measure()
    RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    PAGE.write_text(renewed(PAGE.read_text("utf-8"), record), "utf-8")


if __name__ == "__main__":
    main()
