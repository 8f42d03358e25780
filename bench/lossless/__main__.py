"""Check that no setting changes a token: answers with speculation compared with answers without.

    python -m bench.lossless [--models demo bf16 gemma3 x4] [--minutes 30] [--resume]

A question is a prompt at a temperature. Its reference answer is generated one token per pass, with all
weights in memory, the prompt in one piece, and no cache of another request. The question is then answered
again with trees of up to 1, 7, 64 and 256 nodes, each with other chunks and caches, with one of three memory
limits (`cases.py`). A second question follows each answer and either reuses the first one's cache or
recomputes everything. Every token must be the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.lib.cgroup import BenchError
from bench.lib.command import Command, shared
from bench.lib.process import ROOT
from bench.lib.report import Report
from bench.lossless.cases import BUDGETS, CHUNKS, MEMORIES, Case, Question, cases, questions
from bench.lossless.compare import AnswerStore, Compared, by_setting, compare, counts
from bench.lossless.inputs import MODELS, Model, open_model, read_prompts
from offspec.core.cache_dir import cache_root

_REFERENCES = 3  # parts of a model's time for its references; each memory limit has one part
_SHOWN = 40  # mismatches that are printed; the record has all
_LIMITS = "memories"  # key of a model's memory limits


class CaseRunner:
    """Runs a model's cases in separate processes, within shares of the remaining time."""

    def __init__(
        self, args: argparse.Namespace, prompts: Sequence[str], state: AnswerStore, report: Report
    ) -> None:
        self._args, self._prompts, self._state, self._report = args, prompts, state, report
        self._end = time.monotonic() + 60 * args.minutes
        self._parts = len(args.models) * (_REFERENCES + len(MEMORIES))

    def ask(self, model: Model, asked: Sequence[Question], planned: Sequence[Case]) -> None:
        """Answer references first, then the cases of answered references, by memory limit."""
        state, name = self._state, model.name
        if (name, _LIMITS) not in state.found:
            (limits,) = run({"load": self._load(model)})
            state.add(name, {"key": _LIMITS, **limits})
        alone = {"budget": 1, "chunk": max(CHUNKS), "kept": False}
        wanted = [
            {**self._asked(question), "text": self._prompts[question.prompt], **alone} for question in asked
        ]
        self._answer(model, "ample", wanted, "references", _REFERENCES)
        for memory in MEMORIES:
            ready = [
                {**self._asked(case.question), **case.to_json(), "turns": reference["turns"]}
                for case in planned
                if case.memory == memory and (reference := state.found.get((name, case.question.key)))
            ]
            self._answer(model, memory, ready, f"{memory} memory", 1)

    def _answer(self, model: Model, memory: str, wanted: list[dict[str, Any]], what: str, parts: int) -> None:
        state, name = self._state, model.name
        seconds = max(self._end - time.monotonic(), 0.0) * parts / self._parts
        self._parts -= parts
        pending = [case for case in wanted if (name, case["key"]) not in state.found]
        self._report.progress(f"{name}, {what}: {len(pending)} of {len(wanted)} remain, {seconds:.0f} s")
        if not pending or not seconds:
            return
        load = self._load(model) | {"memory": state.found[name, _LIMITS][memory]}
        if what == "references":
            load |= {"draft": "none", "draft_bits": None}
        job = {"load": load, "tokens": model.tokens, "seconds": seconds, "cases": pending}
        for found in run(job):
            state.add(name, found)

    def _asked(self, question: Question) -> dict[str, Any]:
        seed = self._args.seed + question.prompt
        return {"key": question.key, "temperature": question.temperature, "seed": seed}

    def _load(self, model: Model) -> dict[str, Any]:
        args = self._args
        room = {"budget": max(BUDGETS), "width": args.width, "context": args.context}
        return {**model.settings(), **room, "dtype": args.dtype, "device": args.device, "learn": False}


def run(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the results of a worker as they arrive. Raises BenchError if it fails."""
    words = [sys.executable, "-m", "bench.lossless.worker"]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(json.dumps(job))
        worker.stdin.close()
        yield from map(json.loads, worker.stdout)
    if worker.returncode:
        raise BenchError(f"a worker failed with exit code {worker.returncode}; see above")


def compared(model: Model, planned: Sequence[Case], state: AnswerStore) -> list[Compared]:
    """Return the comparison of every answered case."""
    return [
        compare(model.name, case, found, state.found[model.name, case.question.key])
        for case in planned
        if (found := state.found.get((model.name, case.key)))
    ]


def show(summary: dict[str, Any], report: Report) -> None:
    """Print a table. Rows: models, then values of settings."""
    heads = ("", "cases", "tokens", "cases that differ")
    rows = [
        (name, f"{row['cases']}", f"{row['tokens']:,}", f"{row['cases_with_mismatch']}")
        for name, row in (*summary["models"].items(), *summary["settings"].items())
    ]
    report.table("tokens compared with the reference", heads, rows)


def options(p: argparse.ArgumentParser) -> None:
    known = ", ".join(MODELS)
    p.add_argument("--models", nargs="+", default=list(MODELS), help=f"any of {known}, or your own models")
    shared(p, "dtype", "device", "seed", "width", "prompts", tokens=48, context=1024)
    shared(p, temperatures=[0.0, 0.6, 1.0])
    p.add_argument("--second-tokens", type=int, default=24, help="tokens of a second answer (default 24)")
    p.add_argument("--prompt-file", type=Path, help="JSON lines with a `prompt` each (default HumanEval)")
    p.add_argument("--rounds", type=int, default=1, help="number of temperatures per prompt (default 1)")
    p.add_argument("--each", type=int, choices=(1, 2, 4), default=4, help="settings per question (default 4)")
    p.add_argument("--minutes", type=float, default=60, help="start nothing after this time (default 60)")
    p.add_argument("--resume", action="store_true", help="continue from the state of an earlier run")
    p.add_argument("--state", type=Path, help="file of all answers (default: in the user's cache)")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Run, compare and report."""
    prompts = read_prompts(args.prompt_file, args.prompts)
    asked = list(questions(len(prompts), args.temperatures, args.rounds))
    planned = list(cases(asked, len(args.temperatures), args.each))
    names = ("dtype", "device", "seed", "tokens", "second_tokens", "context", "width", "temperatures")
    settings = {**{name: getattr(args, name) for name in names}, "prompts": len(prompts)}
    state = AnswerStore(args.state or cache_root() / "lossless" / "state.jsonl", settings, resume=args.resume)
    report.ceiling("no token differs")
    asking, everything = CaseRunner(args, prompts, state, report), list[Compared]()
    rows: dict[str, dict[str, int]] = {}
    for name in args.models:
        model = open_model(name, (args.tokens, args.second_tokens))
        asking.ask(model, asked, planned)
        found = compared(model, planned, state)
        rows[model.name] = {**counts(found), "of_cases": len(planned)}
        everything += found
    mismatches = [miss for one in everything for miss in one.mismatches]
    summary = {**report.head(args), **counts(everything), "asked": settings, "models": rows}
    summary["settings"] = by_setting(everything)
    for miss in mismatches[:_SHOWN]:
        report.note(f"{miss.model} {miss.case}: answer {miss.turn + 1}, token {miss.index} is {miss.token}, "
                    f"in the reference {miss.reference}")  # fmt: skip
    show(summary, report)
    line = f"{summary['tokens']:,} tokens compared in {summary['cases']} of {len(planned) * len(rows)} cases"
    report.reached(f"{line}, {len(mismatches)} mismatches")
    if mismatches:
        report.missed("a setting changed an answer: this is a bug")
    report.record(summary, device=args.device, found=[asdict(miss) for miss in mismatches])
    return summary


main = Command("lossless", "Check that no setting changes a token.", options, bench)

if __name__ == "__main__":
    sys.exit(main())
