"""Measured process of one peer; it runs inside the memory cgroup and prints JSON.

It is run by path in the peers' environment, which has no offspec, so nothing of the project is imported here.
The job is one JSON argument. The last line of stdout is an object of figures, or {"error": ...} if the peer
cannot do the job.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from contextlib import suppress
from logging import getLogger
from pathlib import Path
from typing import Any


def main(job: str) -> int:
    """Run a job given as JSON. The exit code is 0 even if the peer failed: its error is the result."""
    task = json.loads(job)
    # The default action: the kernel ends the process, even if it is stuck in page faults.
    signal.alarm(int(task.get("seconds", 0)))
    try:
        figures = work(task)
    except Exception as error:  # a peer may raise anything, and it is reported
        figures = {"error": {"kind": type(error).__name__, "message": one_line(str(error))}}
    print(json.dumps(figures), flush=True)
    return 0


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Load the peer, answer the job's prompts, and return the figures of each answer and of the process.

    job: `target` and optionally `draft` (folders), `placement` (see `load_accelerate`), `assistant` (fields
    of the draft's generation config), `temperature`, `max_tokens`, `seed`, `prompts` (number, id, text).
    """
    start = time.perf_counter()
    import torch
    from transformers import AutoTokenizer, logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    getLogger("accelerate").setLevel("ERROR")
    tokenizer = AutoTokenizer.from_pretrained(job["target"])
    model = load_accelerate(job)
    draft = load_draft(job) if job.get("draft") else None
    load_seconds, load_reads = time.perf_counter() - start, read_bytes()
    answers = []
    for prompt in job["prompts"]:
        torch.manual_seed(job["seed"] + prompt["number"])
        found = answer(model, draft, tokenizer, prompt["text"], job)
        answers.append({"id": prompt["id"], **found})
        line = f"{found['tokens']} tokens, {found['passes']} passes, {found['seconds']:.1f} s"
        print(f"  {prompt['id']:<12} {line}", file=sys.stderr, flush=True)
    return {
        "load_seconds": load_seconds,
        "load_read_bytes": load_reads,
        "process_peak_bytes": process_peak(),
        "threads": torch.get_num_threads(),
        "answers": answers,
    }


def load_accelerate(job: dict[str, Any]) -> Any:
    """Load a model with accelerate's disk offload: weights stay in the checkpoint's own safetensors files.

    placement: {"device_map": ...} names a place for each module; {"max_memory": bytes} lets accelerate fill
    that much RAM, starting with the first module. transformers keeps weights in RAM as views of mapped files,
    which the kernel may evict; with "copy" these weights are copied, so that they stay.
    """
    import torch
    from transformers import AutoModelForCausalLM

    place = job["placement"]
    if "max_memory" in place:
        where: dict[str, Any] = {"device_map": "auto", "max_memory": {"cpu": place["max_memory"]}}
    else:
        where = {"device_map": place["device_map"]}
    model = AutoModelForCausalLM.from_pretrained(
        job["target"], dtype=torch.bfloat16, offload_folder=job["scratch"], **where
    ).eval()
    if place.get("copy"):
        copy_weights(model, but=model.get_input_embeddings())
    return model


def copy_weights(model: Any, but: Any = None) -> None:
    """Copy the weights in RAM to memory of their own. but: the embedding, of which few rows are read."""
    left = {id(parameter) for parameter in but.parameters()} if but is not None else set()
    for parameter in model.parameters():
        if parameter.device.type != "meta" and id(parameter) not in left:
            parameter.data = parameter.data.clone()


def load_draft(job: dict[str, Any]) -> Any:
    """Load the assistant, all of it in RAM, with the settings that transformers reads from its config."""
    import torch
    from transformers import AutoModelForCausalLM

    draft = AutoModelForCausalLM.from_pretrained(job["draft"], dtype=torch.bfloat16).eval()
    for name, value in job.get("assistant", {}).items():
        setattr(draft.generation_config, name, value)
    if job["placement"].get("copy"):
        copy_weights(draft)
    return draft


class TimingStreamer:
    """Streamer for `generate` that records each pass's tokens and time. The first `put` is the prompt."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.times: list[float] = []
        self.tokens: list[list[int]] = []
        self._prompt_came = False

    def put(self, value: Any) -> None:
        if not self._prompt_came:
            self._prompt_came = True
            return
        self.times.append(time.perf_counter() - self.began)
        self.tokens.append([int(token) for token in value.reshape(-1).tolist()])

    def end(self) -> None:
        """Do nothing; part of the interface."""


def answer(model: Any, draft: Any, tokenizer: Any, text: str, job: dict[str, Any]) -> dict[str, Any]:
    """Answer one prompt through the chat template, as offspec does; return the figures of its passes."""
    import torch

    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(chat, add_special_tokens=False, return_tensors="pt")["input_ids"]
    passes = []
    counting = model.register_forward_pre_hook(lambda module, args: passes.append(1))
    reads, clock = read_bytes(), TimingStreamer()
    try:
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), streamer=clock, **generation_settings(job, draft)
            )
    finally:
        counting.remove()
    seconds = time.perf_counter() - clock.began
    tokens = [token for emitted in clock.tokens for token in emitted]
    ends = [0.0, *clock.times]
    return {
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "token_ids": tokens,
        "tokens": len(tokens),
        "prompt_tokens": ids.shape[1],
        "passes": len(passes),
        "seconds": seconds,
        "ttft_s": clock.times[0],
        "read_bytes": read_bytes() - reads,
        "finish_reason": "eos" if is_eos(model, tokens[-1]) else "length",
        "per_pass": [
            {"emitted": len(emitted), "seconds": end - before}
            for emitted, before, end in zip(clock.tokens, ends, clock.times, strict=False)
        ],
    }


def generation_settings(job: dict[str, Any], draft: Any) -> dict[str, Any]:
    """Return greedy settings, or plain sampling without top-k, which transformers uses by default."""
    settings: dict[str, Any] = {"max_new_tokens": job["max_tokens"], "do_sample": job["temperature"] > 0}
    if job["temperature"] > 0:
        settings |= {"temperature": job["temperature"], "top_k": 0, "top_p": 1.0}
    if draft is not None:
        settings["assistant_model"] = draft
    return settings


def is_eos(model: Any, token: int) -> bool:
    """Return whether a token ends an answer, by the model's generation config."""
    found = model.generation_config.eos_token_id
    return token in (found if isinstance(found, list) else [found])


def process_peak() -> int:
    """Return the peak resident memory of this process in bytes, including mapped file pages."""
    return 1024 * _proc_number("status", r"VmHWM:\s*(\d+)")


def read_bytes() -> int:
    """Return the bytes read from storage for this process (reads, mapped pages and O_DIRECT); 0 if
    unavailable."""
    return _proc_number("io", r"^read_bytes:\s*(\d+)")


def _proc_number(name: str, pattern: str) -> int:
    with suppress(OSError):
        found = re.search(pattern, Path("/proc/self", name).read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def one_line(text: str, most: int = 300) -> str:
    """Return an error's text on one line, without folders, shortened if long."""
    words = (re.sub(r"(?<![\w.])/(?:[^\s/'\":]+/)+", "", word) for word in text.split())
    return " ".join(words)[:most] or "no message"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
