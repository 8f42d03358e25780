"""What the server costs over the Python API, and what a JSON schema costs in tokens per pass.

    python -m bench.serve [MODEL] [--tokens 128] [--rounds 5]

One engine with its own draft answers the same questions through `engine.generate` and, streamed, through
`offspec serve`'s Chat Completions, in turns; the server runs in this process, as it does for a user, and its
client in one of its own. The ceiling of the server is the API. Then persons are written as JSON after some
examples, with a schema and without: where both say the same text, a pass must not bring fewer tokens with it.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bench.lib.command import MODEL, Command, shared
from bench.lib.report import Report, ratio, read_prompts

if TYPE_CHECKING:
    from offspec import Engine

WANTED = 0.97  # of the API's throughput
_NAME = "bench"
_PERSONS = (
    *(("Anna Berg", 31, "Oslo"), ("Tom Hill", 45, "Leeds"), ("Mia Rossi", 27, "Turin")),
    *(("Paul Weber", 52, "Bonn"), ("Lena Novak", 38, "Brno"), ("Omar Diaz", 23, "Quito")),
    *(("Ruth Stein", 64, "Basel"), ("Jan Kowal", 41, "Lodz"), ("Eva Lund", 29, "Malmo")),
)
_BUDGET, _WIDTH = 64, 16  # of trees, with the schema and without
_EXAMPLES = 4  # of them, which a prompt shows
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


def client() -> None:
    """A client's process: bodies on stdin, on stdout the seconds that each took and the text that came."""
    for line in sys.stdin:
        url, body = json.loads(line)
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        began, text = time.perf_counter(), ""
        with urllib.request.urlopen(request) as response:
            for event in response:
                if event.startswith(b"data: {"):
                    for choice in json.loads(event[6:])["choices"]:
                        text += choice["delta"].get("content") or ""
        print(json.dumps([time.perf_counter() - began, text]), flush=True)


@contextmanager
def served(engine: Engine) -> Iterator[Callable[[str, int], tuple[float, str]]]:
    """What asks a server of this engine: a question and most tokens in, seconds and text out."""
    from offspec.server.run import Server, Settings

    program = "from bench.serve import client; client()"
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        subprocess.Popen(
            [sys.executable, "-c", program], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process,
    ):
        port = listener.getsockname()[1]
        server = Server(lambda notify: engine, Settings("127.0.0.1", port, (_NAME,)), listener)
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started or server.service.state == "loading":
            time.sleep(0.01)

        def ask(question: str, tokens: int) -> tuple[float, str]:
            messages = [{"role": "user", "content": question}]
            given = {"temperature": 0, "max_tokens": tokens, "stream": True}
            body = {"model": _NAME, "messages": messages, **given}
            assert process.stdin and process.stdout
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            print(json.dumps([url, body]), file=process.stdin, flush=True)
            seconds, text = json.loads(process.stdout.readline())
            return seconds, text

        try:
            yield ask
        finally:
            assert process.stdin
            process.stdin.close()
            server.should_exit = True
            thread.join()


def compare(engine: Engine, args: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    """Rounds of all questions through the API and through the server; the first is not counted."""
    from offspec import SamplingParams

    questions = [prompt.prompt for prompt in read_prompts(args.prompts)]
    params = SamplingParams(max_tokens=args.tokens)

    def api(question: str, tokens: int) -> tuple[float, str]:
        began = time.perf_counter()
        text = engine.generate([{"role": "user", "content": question}], params).text
        return time.perf_counter() - began, text

    rounds = list[dict[str, Any]]()
    with served(engine) as server:
        for number in range(-1, args.rounds):
            ways = {"api": api, "server": server}
            took, texts = dict[str, float](), dict[str, list[str]]()
            for name in sorted(ways, reverse=number % 2 == 1):
                answers = [ways[name](question, args.tokens) for question in questions]
                took[name] = sum(seconds for seconds, _ in answers)
                texts[name] = [text for _, text in answers]
            share = ratio(took["api"], took["server"])
            report.progress(
                f"round {number + 1}: {took['api']:.2f} s, server {took['server']:.2f} s, {share:.3f}"
            )
            if number >= 0:
                rounds.append({**took, "ratio": share, "same": texts["api"] == texts["server"]})
    return rounds


def write_persons(args: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    """Each person as JSON with the schema and without: the text, its tokens and its passes.

    Each way has an engine of its own, which has not seen what the other wrote. Both have trees of one size:
    each engine would plan by its own measurements, and the trees differ more than a schema brings.
    """
    import offspec
    from offspec import Constraint, SamplingParams

    def line(name: str, age: int, city: str) -> str:
        return f"{name} is {age} years old and lives in {city}. JSON:"

    shown = "".join(
        f'{line(*p)} {{"name": "{p[0]}", "age": {p[1]}, "city": "{p[2]}"}}\n' for p in _PERSONS[:_EXAMPLES]
    )
    ways = {
        "without": SamplingParams(max_tokens=60, stop=("\n",)),
        "with": SamplingParams(max_tokens=60, format=Constraint("json_schema", json.dumps(_SCHEMA))),
    }
    found = [dict[str, Any](name=person[0]) for person in _PERSONS[_EXAMPLES:]]
    for way, params in ways.items():
        with offspec.load(args.model, device="cpu", learn=False, budget=_BUDGET, width=_WIDTH) as engine:
            for person, run in zip(_PERSONS[_EXAMPLES:], found, strict=True):
                result = engine.generate(f"{shown}{line(*person)}", params)
                run[way] = {"text": result.text.strip(), "tokens": result.tokens, "passes": result.passes}
    for run in found:
        run["same"] = run["with"]["text"] == run["without"]["text"]
        report.progress(f"{run}")
    return found


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", **MODEL)
    shared(p, prompts=6, tokens=128)
    p.add_argument("--rounds", type=int, default=5, help="of all questions, each way (default 5)")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Both figures; short of its aim where the server is slower than it may be, or a schema costs tokens."""
    import offspec

    persons = write_persons(args, report)
    with offspec.load(args.model, device="cpu", learn=False) as engine:
        rounds = compare(engine, args, report)
    api, server = (statistics.median(run[name] for run in rounds) for name in ("api", "server"))
    share = statistics.median(run["ratio"] for run in rounds)
    report.ceiling(f"{api:.2f} s for {args.prompts} answers of {args.tokens} tokens through the Python API")
    report.reached(f"{server:.2f} s through the server: {share:.3f} of the API's throughput")
    same = [run for run in persons if run["same"]]
    rates = {
        name: ratio(sum(run[name]["tokens"] for run in same), sum(run[name]["passes"] for run in same))
        for name in ("without", "with")
    }
    report.reached(
        f"{rates['with']:.2f} tokens a pass with a schema, {rates['without']:.2f} without, in the same "
        f"{len(same)} texts of {len(persons)}"
    )
    summary = {
        **report.head(args, "model", "prompts", "tokens", "rounds"),
        "ratio": share,
        "same_texts": all(run["same"] for run in rounds),
        "tokens_per_pass": rates,
    }
    report.record(summary, rounds=rounds, persons=persons)
    if share < WANTED:
        report.missed(f"the server has {share:.3f} of the API's throughput, less than {WANTED}")
    if not summary["same_texts"] or not same:
        report.missed("the server did not say what the API says, or no text was the same with a schema")
    if rates["with"] < rates["without"]:
        report.missed(
            f"a pass brings {rates['with']:.2f} tokens with a schema, {rates['without']:.2f} without"
        )
    return summary


main = Command("serve", "The server beside the Python API.", options, bench)

if __name__ == "__main__":
    sys.exit(main())
