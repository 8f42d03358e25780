"""Calculations of the peers bench: fastest settings, results of each contender, and speed-ups."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from bench.lib.report import ratio
from bench.peers.jobs import (
    ACCELERATE,
    ASSISTED,
    LLAMA_DRAFTED,
    OFF,
    OFFSPEC,
    PACKED,
    QUANTIZED,
    STORED,
    TITLES,
)

GOALS = {ACCELERATE: 20.0, ASSISTED: 5.0, LLAMA_DRAFTED: 3.0}
FASTER, DECODING = "offspec_is_faster_by", "offspec_decodes_faster_by"
_PEAKS = ("cgroup_peak_bytes", "cgroup_anon_peak_bytes", "process_peak_bytes")
Answer = Mapping[str, Any]  # figures from a measured process
Answers = dict[str, Answer]  # by prompt
Runs = Sequence[Mapping[str, Any]]


def project(answer: Answer, tokens: int) -> float:
    """Return the seconds an answer would take for `tokens`. If it has fewer tokens, this is its first pass,
    then its median pass (one token per pass) or its mean rate (several tokens per pass)."""
    passes, made = answer["per_pass"], answer["tokens"]
    if made == tokens or len(passes) < 2:
        return float(answer["seconds"]) * (1.0 if made == tokens else tokens / made)
    seconds = [_seconds(p) for p in passes[1:]]
    rate = ratio(sum(seconds), sum(p["emitted"] for p in passes[1:]))
    if all(p["emitted"] == 1 for p in passes):
        rate = statistics.median(seconds)
    return float(answer["ttft_s"]) + max(tokens - int(passes[0]["emitted"]), 0) * rate


def _seconds(one: Mapping[str, Any]) -> float:
    return float(one["seconds"] if "seconds" in one else one["draft_seconds"] + one["target_seconds"])


def decoding(answers: Iterable[Answer]) -> float:
    """Return tokens per second after the prompts' passes; 0 if no answer has such tokens."""
    tokens, seconds = 0, 0.0
    for answer in answers:
        if "decode_seconds" in answer:  # from a program whose prompt pass yields no token
            tokens, seconds = tokens + int(answer["tokens"]), seconds + float(answer["decode_seconds"])
            continue
        rest = answer["per_pass"][1:]
        tokens, seconds = tokens + sum(p["emitted"] for p in rest), seconds + sum(map(_seconds, rest))
    return ratio(tokens, seconds)


def answers_of(runs: Iterable[Mapping[str, Any]]) -> Answers:
    """Return answers by prompt, of the runs that did not fail."""
    return {answer["id"]: answer for run in runs for answer in run.get("answers", ())}


def ours(contender: str, among: Collection[str]) -> str:
    """Return the offspec contender to compare a contender with: the one with the same file if it is in
    `among`, the contenders that run; otherwise the one whose target has a similar size."""
    if contender not in QUANTIZED:
        return OFFSPEC
    return STORED if STORED in among else PACKED


def our_answers(runs: Runs, contender: str) -> Answers:
    """Return the answers of `ours`, with its fastest settings."""
    mine = ours(contender, {run["contender"] for run in runs})
    own = [run for run in runs if run["contender"] == mine]
    best = fastest(own, {})
    return answers_of(run for run in own if run["variant"] == best)


def fastest(runs: Runs, lengths: Mapping[str, int]) -> str | None:
    """Return the variant with the least projected seconds over the prompts that all variants answered; None
    if none ran. lengths: tokens to project each prompt to."""
    by_name: dict[str, Answers] = {}
    for run in runs:
        if "error" not in run:
            by_name.setdefault(run["variant"], {}).update(answers_of([run]))
    if not by_name:
        return None
    common = set.intersection(*(set(answers) for answers in by_name.values()))
    longest = {p: max(answers[p]["tokens"] for answers in by_name.values()) for p in common}
    tokens = {**longest, **{p: count for p, count in lengths.items() if p in common}}
    return min(by_name, key=lambda name: sum(project(by_name[name][p], tokens[p]) for p in common))


def summarize(runs: Runs, temperature: float) -> dict[str, Any]:
    """Return all contenders at one temperature: figures or error, and offspec's speed-ups."""
    here = [run for run in runs if run["temperature"] == temperature]
    off = answers_of(run for run in here if run["contender"] == OFF)
    found: dict[str, dict[str, Any]] = {}
    for contender in dict.fromkeys(run["contender"] for run in here):
        own = [run for run in here if run["contender"] == contender]
        on = our_answers(here, contender)
        lengths = {name: answer["tokens"] for name, answer in on.items()}
        # At temperature 1 the peers draw different numbers, so only offspec's two texts are the same.
        alike = contender not in (OFF, *QUANTIZED) and (temperature == 0 or contender == OFFSPEC)
        figures = contender_figures(own, lengths, off if alike else {})
        if on and "error" not in figures:
            figures[FASTER] = speed_up(figures, on)
            figures[DECODING] = ratio(decoding(on.values()), figures["decode_tokens_per_s"])
        found[contender] = figures
    return {"temperature": temperature, "contenders": found}


def contender_figures(runs: Runs, lengths: Mapping[str, int], plain: Answers) -> dict[str, Any]:
    """Return the figures of one contender with its fastest settings, and its failures.

    plain: answers of offspec without speculation, whose tokens should be the same.
    """
    failed = [{"settings": run["variant"], **run["error"]} for run in runs if "error" in run]
    name = fastest(runs, lengths)
    if name is None:
        return {"error": {key: failed[0][key] for key in ("kind", "message")}, "failures": failed}
    chosen = [run for run in runs if run["variant"] == name and "error" not in run]
    answers = answers_of(chosen)
    tokens = {prompt: lengths.get(prompt, answer["tokens"]) for prompt, answer in answers.items()}
    seconds = {prompt: project(answer, tokens[prompt]) for prompt, answer in answers.items()}
    made, passes = (sum(answer[key] for answer in answers.values()) for key in ("tokens", "passes"))
    reads = sum(answer["read_bytes"] for answer in answers.values())
    parted = differences(plain, answers)
    return {
        "settings": name,
        "settings_tried": tried(runs, lengths),
        "failures": failed,
        "tokens_per_s": ratio(sum(tokens.values()), sum(seconds.values())),
        "decode_tokens_per_s": decoding(answers.values()),
        "ttft_s": statistics.mean(answer["ttft_s"] for answer in answers.values()),
        "tokens_per_pass": ratio(made, passes),
        "seconds_per_pass": ratio(sum(answer["seconds"] for answer in answers.values()), passes),
        "read_bytes": reads,
        "read_bytes_per_token": ratio(reads, made),
        "load_seconds": statistics.mean(run["load_seconds"] for run in chosen),
        "load_read_bytes": statistics.mean(run["load_read_bytes"] for run in chosen),
        **{key: max((run[key] for run in chosen if key in run), default=None) for key in _PEAKS},
        "tokens_made": made,
        "tokens_projected_to": sum(tokens.values()),
        "seconds_by_prompt": seconds,
        "same_tokens": not parted if plain.keys() & answers.keys() else None,  # None: not compared
        "first_differences": parted,
    }


def tried(runs: Runs, lengths: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Return by setting the speed and tokens per pass on the first prompt, with which all are tried."""
    first = next((run["prompt"] for run in runs), None)
    found = {}
    for run in runs:
        for answer in run.get("answers", ()) if run["variant"] and run["prompt"] == first else ():
            tokens = lengths.get(answer["id"], answer["tokens"])
            found[run["variant"]] = {
                "tokens_per_s": ratio(tokens, project(answer, tokens)),
                "tokens_per_pass": ratio(answer["tokens"], answer["passes"]),
            }
    return found


def differences(plain: Answers, answers: Answers) -> dict[str, int]:
    """Return the position of the first difference from the plain answers, by prompt, if there is one."""
    places = {name: _parting(plain[name], answer) for name, answer in answers.items() if name in plain}
    return {name: place for name, place in places.items() if place is not None}


def _parting(plain: Answer, answer: Answer) -> int | None:
    """Return the first difference of two answers, or None. An answer cut by its limit may be shorter."""
    shorter, longer = sorted((plain, answer), key=lambda one: len(one["token_ids"]))
    ids, others = shorter["token_ids"], longer["token_ids"]
    for index, (left, right) in enumerate(zip(ids, others, strict=False)):
        if left != right:
            return index
    # An answer with an end of its own must be as long as the other one.
    ended = shorter["finish_reason"] != "length" and len(others) > len(ids)
    return len(ids) if ended else None


def speed_up(figures: Mapping[str, Any], on: Answers) -> float:
    """Return a contender's seconds over offspec's for equally many tokens, on prompts that both answered."""
    common = {name: spent for name, spent in figures["seconds_by_prompt"].items() if name in on}
    return ratio(sum(common.values()), sum(on[name]["seconds"] for name in common))


def speed_ups(rows: Runs, peer: str, which: str = FASTER) -> dict[str, float | None]:
    """Return offspec's speed-up over a peer by temperature, of answers or decoding; None if either failed."""
    found = {f"{row['temperature']:g}": row["contenders"].get(peer, {}) for row in rows}
    return {key: figures.get(which) for key, figures in found.items()}


def shortfalls(rows: Runs, only: Sequence[str]) -> list[str]:
    """Return one sentence for each missed target, and for answers that speculation changed.

    The target for llama.cpp is decoding speed: with few tokens of a model that does not fit, the prompt takes
    most of the time.
    """
    sentences = []
    for row in rows:
        at, contenders = f"at temperature {row['temperature']:g}", row["contenders"]
        for peer, goal in GOALS.items():
            mine = ours(peer, only)
            if mine not in only or peer not in only:
                continue
            reached = contenders.get(peer, {}).get(DECODING if peer in QUANTIZED else FASTER)
            if reached is None:
                who = mine if "error" in contenders.get(mine, {}) else peer
                sentences.append(
                    f"{TITLES[who]} did not run {at}, so no speed-up over {TITLES[peer]} is claimed"
                )
            elif reached < goal:
                sentences.append(
                    f"{TITLES[mine]} is {reached:.2f}x {TITLES[peer]} {at}; the target is {goal:g}x"
                )
        if contenders.get(OFFSPEC, {}).get("same_tokens") is False:
            places = contenders[OFFSPEC]["first_differences"]
            sentences.append(f"speculation changed {len(places)} answers {at}: {places}")
    return sentences
