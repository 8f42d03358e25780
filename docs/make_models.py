"""Write the table of models and machines in docs/models.md, from what `offspec plan` predicts.

python docs/make_models.py    takes some minutes; needs neither the models nor the machines
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
MODELS = (
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.3-70B-Instruct",
    "meta-llama/Llama-3.1-405B-Instruct",
)
MACHINES = {
    "no GPU: 2 cores, 16 GB": ("--hardware", "docs/hardware/two-cores.json", "--memory", "14GB"),
    "8 GB laptop GPU, 16 GB": ("--hardware", "laptop-8gb"),
    "RTX 3060 12 GB, 32 GB": ("--hardware", "rtx-3060-12gb"),
    "RTX 4090 24 GB, 64 GB": ("--hardware", "rtx-4090"),
}
_CPU, *_, _GPU = MACHINES.values()
_MARKS = ("<!-- written by docs/make_models.py -->\n", "<!-- end -->\n")


def plan(model: str, options: Sequence[str]) -> dict[str, Any] | None:
    """The plan as JSON; None where the machine has too little memory for the model."""
    command = [sys.executable, "-m", "offspec", "plan", model, *options, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 1 and "too little" in done.stderr:
        return None
    done.check_returncode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def speeds(found: dict[str, Any] | None) -> str:
    """Tokens per second in 16 bits and packed to NF4; "fits" where no layer streams."""
    if found is None:
        return "-"
    if not re.search("host|disk", found["placement"]["tiers"]):
        return "fits"
    plain = found["forecast"]["tok_per_s"]
    packed = next(item["tok_per_s"] for item in found["what_ifs"] if item["change"].endswith("nf4"))
    return f"{plain:.2g} · {packed:.2g}"


def row(model: str) -> list[str]:
    """Model, bytes on disk, least RAM without a GPU, least GPU memory, and the speed on each machine."""
    alone = [plan(model, (*options[:2], "--draft", "none")) for options in (_CPU, _GPU)]
    assert alone[0] and alone[1]
    least = (alone[0]["least_memory"], alone[1]["least_vram"])
    sizes = [f"{_disk_bytes(model) / 1e9:.0f} GB", *(f"{size / 1e9:.1f} GB" for size in least)]
    return [f"`{model}`", *sizes, *(speeds(plan(model, options)) for options in MACHINES.values())]


def _disk_bytes(model: str) -> int:
    import torch

    from offspec.plan.model_sizes import imagine

    opened, _ = imagine(model, torch.bfloat16, torch.device("cpu"))
    return sum(weight.numel() * 2 for weight in opened.skeleton.model.parameters())


def table() -> str:
    heads = ["model", "disk, 16 bits", "least RAM", "least GPU memory", *MACHINES]
    lines = [heads, ["---"] * len(heads), *(row(model) for model in MODELS)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    before, _, rest = PAGE.read_text("utf-8").partition(_MARKS[0])
    _, _, after = rest.partition(_MARKS[1])
    PAGE.write_text(before + _MARKS[0] + table() + _MARKS[1] + after, "utf-8")


if __name__ == "__main__":
    main()
