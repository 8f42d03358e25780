"""accelerate's offload of the widened model to RAM, within 8 GB of device memory."""

from __future__ import annotations

import time
from typing import Any

from bench.gpu_day.answers import PROMPTS
from bench.gpu_day.models import install_demo, widened_model
from bench.gpu_day.step_context import StepContext


def measure(context: StepContext) -> None:
    install_demo(context)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = widened_model(context, 2 if context.dry else 8)
    where: dict[str, Any] = {"device_map": "cpu"}
    if not context.dry:
        where = {"device_map": "auto", "max_memory": {0: "6.5GiB", "cpu": "100GiB"}}
    began, found = time.perf_counter(), context.found
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **where).eval()
    found["load_seconds"] = time.perf_counter() - began
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids.to("cpu" if context.dry else "cuda")
    seconds = {}
    few, many = (1, 2) if context.dry else (1, 6)
    for tokens in (few, few, many):  # the first pass initializes libraries; the second replaces its time
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        seconds[tokens] = time.perf_counter() - began
        found["seconds_of_tokens"] = seconds
        context.save()
    found["tok_per_s"] = (many - few) / max(seconds[many] - seconds[few], 1e-9)
    found["short"] = f"{found['tok_per_s']:.2f} tok/s"
