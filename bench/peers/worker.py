"""The measured process of one peer: it runs inside the memory cgroup and prints JSON.

It is run by path in the peers' own environment, where offspec is not, so nothing of the project is
imported here. The job is one JSON argument; the last line of stdout is an object of figures, or
{"error": ...} when the peer cannot do what it was asked.
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
    """Run a job given as JSON. Exit code 0 also where the peer failed: its error is the result."""
    task = json.loads(job)
    # The default action: the kernel ends the process, even one that is stuck in page faults.
    signal.alarm(int(task.get("seconds", 0)))
    try:
        figures = work(task)
    except Exception as error:  # whatever a peer raises is what is to be told
        figures = {"error": {"kind": type(error).__name__, "message": one_line(str(error))}}
    print(json.dumps(figures), flush=True)
    return 0


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Load the peer, answer the job's prompts, and return the figures of each and of the process.

    job: `target` and perhaps `draft` (folders), `placement` (see `load_accelerate`), `assistant` (fields of
    the draft's generation config), `temperature`, `max_tokens`, `seed`, `prompts` (number, id, text).
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
        told = f"{found['tokens']} tokens, {found['passes']} passes, {found['seconds']:.1f} s"
        print(f"  {prompt['id']:<12} {told}", file=sys.stderr, flush=True)
    return {
        "load_seconds": load_seconds,
        "load_read_bytes": load_reads,
        "process_peak_bytes": process_peak(),
        "threads": torch.get_num_threads(),
        "answers": answers,
    }


def load_accelerate(job: dict[str, Any]) -> Any:
    """transformers with accelerate's disk offload: weights stay in the checkpoint's own safetensors files.

    placement: {"device_map": ...} names a place for each module; {"max_memory": bytes} lets accelerate fill
    so much RAM from the first module on. transformers leaves what is to be in RAM as views of the mapped
    files, which the kernel may evict; with "copy" these weights are copied, so that they do stay.
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
    """Give the weights that are in RAM memory of their own. but: the embedding, whose few rows are read."""
    left = {id(parameter) for parameter in but.parameters()} if but is not None else set()
    for parameter in model.parameters():
        if parameter.device.type != "meta" and id(parameter) not in left:
            parameter.data = parameter.data.clone()


def load_draft(job: dict[str, Any]) -> Any:
    """The assistant, whole in RAM, with the settings that transformers reads from its generation config."""
    import torch
    from transformers import AutoModelForCausalLM

    draft = AutoModelForCausalLM.from_pretrained(job["draft"], dtype=torch.bfloat16).eval()
    for name, value in job.get("assistant", {}).items():
        setattr(draft.generation_config, name, value)
    if job["placement"].get("copy"):
        copy_weights(draft)
    return draft


class Clock:
    """A streamer for `generate`: when each pass gave its tokens, and which. The first put is the prompt."""

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
        """Part of the interface; there is nothing to do."""


def answer(model: Any, draft: Any, tokenizer: Any, text: str, job: dict[str, Any]) -> dict[str, Any]:
    """One prompt, through the model's chat template as offspec does it, and the figures of its passes."""
    import torch

    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(chat, add_special_tokens=False, return_tensors="pt")["input_ids"]
    passes = []
    counting = model.register_forward_pre_hook(lambda module, args: passes.append(1))
    reads, clock = read_bytes(), Clock()
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
        "finish_reason": "eos" if ends_text(model, tokens[-1]) else "length",
        "per_pass": [
            {"emitted": len(emitted), "seconds": end - before}
            for emitted, before, end in zip(clock.tokens, ends, clock.times, strict=False)
        ],
    }


def generation_settings(job: dict[str, Any], draft: Any) -> dict[str, Any]:
    """Greedy, or plain sampling from the whole distribution: no top-k, which transformers has by default."""
    settings: dict[str, Any] = {"max_new_tokens": job["max_tokens"], "do_sample": job["temperature"] > 0}
    if job["temperature"] > 0:
        settings |= {"temperature": job["temperature"], "top_k": 0, "top_p": 1.0}
    if draft is not None:
        settings["assistant_model"] = draft
    return settings


def ends_text(model: Any, token: int) -> bool:
    """Whether a token is among those that end an answer, as the model's generation config has them."""
    found = model.generation_config.eos_token_id
    return token in (found if isinstance(found, list) else [found])


def process_peak() -> int:
    """The most resident memory this process has had, in bytes; file pages it maps are counted."""
    return 1024 * _proc_number("status", r"VmHWM:\s*(\d+)")


def read_bytes() -> int:
    """What this process had storage read for it so far: reads, mapped pages and O_DIRECT alike; 0 where
    the system does not tell."""
    return _proc_number("io", r"^read_bytes:\s*(\d+)")


def _proc_number(name: str, pattern: str) -> int:
    with suppress(OSError):
        found = re.search(pattern, Path("/proc/self", name).read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def one_line(text: str, most: int = 300) -> str:
    """An error's text without its line breaks and without anybody's folders, cut where it is long."""
    words = (re.sub(r"(?<![\w.])/(?:[^\s/'\":]+/)+", "", word) for word in text.split())
    return " ".join(words)[:most] or "no message"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
