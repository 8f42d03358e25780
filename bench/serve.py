"""Overhead of the server over the Python API.

    python -m bench.serve [MODEL] [--tokens 128] [--rounds 5]

One engine with its own draft answers the same questions through `engine.generate` and, streamed, through
`offspec serve`'s Chat Completions, alternately. The server runs in this process, as it does for a user, and
its client in a separate process. The API's speed is the server's ceiling.
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

WANTED = 0.97  # minimum share of the API's throughput
_NAME = "bench"

Ask = Callable[[str], tuple[float, str]]  # question -> seconds, text


def client() -> None:
    """Client process: reads request bodies from stdin; writes the seconds and the text of each to stdout."""
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
def served(engine: Engine, tokens: int) -> Iterator[Ask]:
    """Run a server of this engine and a client process; yield a function that asks for answers."""
    from offspec.server.run import Server
    from offspec.server.settings import Settings

    argv = [sys.executable, "-c", "from bench.serve import client; client()"]
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        subprocess.Popen(argv, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdin and process.stdout
        requests, answers, port = process.stdin, process.stdout, listener.getsockname()[1]
        server = Server(lambda notify: engine, Settings("127.0.0.1", port, (_NAME,)), listener)
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started or server.service.state == "loading":
            time.sleep(0.01)

        def ask(question: str) -> tuple[float, str]:
            given = {"temperature": 0, "max_tokens": tokens, "stream": True}
            body = {"model": _NAME, "messages": [{"role": "user", "content": question}], **given}
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            print(json.dumps([url, body]), file=requests, flush=True)
            seconds, text = json.loads(answers.readline())
            return seconds, text

        try:
            yield ask
        finally:
            requests.close()
            server.should_exit = True
            thread.join()


def compare(engine: Engine, args: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    """Run rounds of all questions through the API and through the server; the first is not counted."""
    from offspec import SamplingParams

    questions = [prompt.prompt for prompt in read_prompts(args.prompts)]
    params = SamplingParams(max_tokens=args.tokens)

    def api(question: str) -> tuple[float, str]:
        began = time.perf_counter()
        text = engine.generate([{"role": "user", "content": question}], params).text
        return time.perf_counter() - began, text

    rounds = list[dict[str, Any]]()
    with served(engine, args.tokens) as server:
        for number in range(-1, args.rounds):
            ways = {"api": api, "server": server}
            took, texts = dict[str, float](), dict[str, list[str]]()
            for name in sorted(ways, reverse=number % 2 == 1):
                answers = [ways[name](question) for question in questions]
                took[name] = sum(seconds for seconds, _ in answers)
                texts[name] = [text for _, text in answers]
            share = ratio(took["api"], took["server"])
            if number < 0:
                report.ceiling(f"{took['api']:.2f} s for {len(questions)} answers through the Python API")
                continue
            report.progress(
                f"round {number + 1}: {took['api']:.2f} s, server {took['server']:.2f} s, {share:.3f}"
            )
            rounds.append({**took, "ratio": share, "same": texts["api"] == texts["server"]})
    return rounds


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", **MODEL)
    shared(p, prompts=6, tokens=128)
    p.add_argument("--rounds", type=int, default=5, help="rounds of all questions each way (default 5)")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Compare; the target is missed if the server is too slow or its text differs."""
    import offspec

    with offspec.load(args.model, device="cpu", learn=False) as engine:
        rounds = compare(engine, args, report)
    server, share = (statistics.median(run[name] for run in rounds) for name in ("server", "ratio"))
    report.reached(f"{server:.2f} s through the server; share of the API's throughput", share)
    same = all(run["same"] for run in rounds)
    known = report.head(args, "model", "prompts", "tokens", "rounds")
    summary = {**known, "ratio": share, "same_texts": same}
    report.record(summary, rounds=rounds)
    if share < WANTED:
        report.missed(f"the server reaches {share:.3f} of the API's throughput, less than {WANTED}")
    if not same:
        report.missed("the server's text differs from the API's")
    return summary


main = Command("serve", "Overhead of the server over the Python API.", options, bench)

if __name__ == "__main__":
    sys.exit(main())
