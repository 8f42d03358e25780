"""Tool calls under their grammar: share of valid calls, and effect of the grammar on tokens per pass.

    python -m bench.tool_calls [MODEL] [--prompts N] [--calls 200]

Two kinds of answers are measured at each temperature. Forced calls must call a tool, and are parsed as by the
server. Text answers the same prompts with tools available, with and without the grammar of calls.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.lib.command import MODEL, Command, shared
from bench.lib.drafting import always_drafting
from bench.lib.report import Prompt, Report, model_name, ratio, read_prompts
from offspec.chat.answer_parser import ToolCall
from offspec.core.config import SamplingParams

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "description": "Write a text file.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "maxLength": 40},
                    "content": {"type": "string", "maxLength": 200},
                    "mode": {"enum": ["create", "append"]},
                },
                "required": ["path", "content"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the files of the project.",
            "parameters": {
                "type": "object",
                "properties": {
                    "words": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
                    "limit": {"type": "integer", "minimum": 1, "maximum": 50},
                },
                "required": ["words"],
            },
        },
    },
]


def run(engine: Any, ids: Sequence[int], params: SamplingParams) -> dict[str, Any]:
    """Generate one answer; return its text, tokens and passes."""
    result = engine.generate(ids, params)
    return {
        "text": result.text,
        "ids": list(result.token_ids),
        "tokens": result.tokens,
        "passes": result.passes,
        "cut": result.finish_reason == "length",
    }


def is_valid(engine: Any, ids: Sequence[int], answer: dict[str, Any]) -> bool:
    """Return whether an answer is exactly one call, with arguments that are valid for its schema."""
    reader = engine.parts(ids, TOOLS)
    parts = [*reader.feed(engine.decode_with_special(answer["ids"])), *reader.finish()]
    return any(isinstance(part, ToolCall) for part in parts)


def measure(args: argparse.Namespace, prompts: Sequence[Prompt], report: Report) -> list[dict[str, Any]]:
    """Return a row for each temperature."""
    import offspec

    names = ("draft", "draft_bits", "memory", "device", "dtype", "budget", "width")
    load = {name: getattr(args, name) for name in names}
    rows = []
    with always_drafting(offspec.load(args.model, verify="coupled", **load)) as engine:
        encoded = [
            engine.encode([{"role": "user", "content": prompt.prompt}], chat_template_kwargs={"tools": TOOLS})
            for prompt in prompts
        ]
        for temperature in args.temperatures:
            plain = SamplingParams(temperature, max_tokens=args.tokens)
            calls = list[tuple[dict[str, Any], bool]]()
            free, held = list[dict[str, Any]](), list[dict[str, Any]]()
            for number in range(args.calls if temperature else len(encoded)):
                ids = encoded[number % len(encoded)]
                format = engine.answer_format(ids, TOOLS, None, required=True)
                asked = replace(plain, seed=args.seed + number, format=format, max_tokens=400)
                answer = run(engine, ids, asked)
                calls.append((answer, is_valid(engine, ids, answer)))
                if number % 20 == 19:
                    found = sum(valid for _, valid in calls)
                    report.progress(f"T {temperature:g}: {found} of {number + 1} calls valid")
            for number, ids in enumerate(encoded):
                asked = replace(plain, seed=args.seed + number)
                free.append(run(engine, ids, asked))
                held.append(run(engine, ids, replace(asked, format=engine.answer_format(ids, TOOLS))))
            row = {
                "temperature": temperature,
                "calls": len(calls),
                "valid": sum(valid for _, valid in calls),
                "cut": sum(answer["cut"] for answer, _ in calls),
                "forced": _yield([answer for answer, _ in calls]),
                "without_grammar": _yield(free),
                "with_grammar": _yield(held),
                "same_answers": sum(a["ids"] == b["ids"] for a, b in zip(free, held, strict=True)),
                "answers": len(free),
                "invalid": [answer["text"] for answer, valid in calls if not valid][:3],
            }
            report.progress(json.dumps(row))
            rows.append(row)
    return rows


def _yield(answers: Sequence[dict[str, Any]]) -> float:
    """Return tokens per pass."""
    return ratio(sum(a["tokens"] for a in answers), sum(a["passes"] for a in answers))


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", **MODEL)
    shared(p, "prompts", "tokens", "budget", "width", "temperatures", "draft_bits", "dtype", "memory")
    shared(p, "device", "seed")
    p.add_argument("--draft", default="self", help="as in `offspec generate` (default self)")
    p.add_argument("--calls", type=int, default=200, help="forced calls above temperature 0 (default 200)")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Measure and report."""
    most = min(args.budget, args.tokens)
    report.ceiling(f"{most} tokens per pass: the smaller of the tree's nodes and the answer's tokens")
    rows = measure(args, read_prompts(args.prompts), report)
    summary = {**report.head(args, "dtype", "tokens", "budget", "width", "seed"), "runs": rows}
    summary["model"] = model_name(args.model)
    least = min(ratio(row["with_grammar"], row["without_grammar"]) for row in rows)
    report.reached(
        f"{sum(row['valid'] for row in rows)} of {sum(row['calls'] for row in rows)} calls valid, "
        f"{least:.2f} of the tokens per pass without a grammar",
        least,
    )
    report.table(
        f"tool calls, {summary['model']}",
        ("temperature", "valid calls", "call tok/pass", "text tok/pass", "without grammar", "same answers"),
        [
            [
                f"{row['temperature']:g}",
                f"{row['valid']} of {row['calls']}",
                *(f"{row[name]:.2f}" for name in ("forced", "with_grammar", "without_grammar")),
                f"{row['same_answers']} of {row['answers']}",
            ]
            for row in rows
        ],
    )
    report.record(summary, device=args.device)
    passed = all(row["valid"] == row["calls"] for row in rows) and least >= 0.95
    return {**summary, "passed": passed}


main = Command("tool_calls", "Tool calls under their grammar.", options, bench)

if __name__ == "__main__":
    sys.exit(main())
