"""`offspec generate`: from options to a question, from a question to an answer."""

import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from offspec.core.config import EngineConfig, SamplingParams, check_comparable, parse_bytes
from offspec.core.errors import RequestError
from offspec.core.trace import check_writable
from offspec.ui.cli import options as opt
from offspec.ui.cli.render import Screen
from offspec.ui.cli.tracing import traced

EPILOG = """[bold]Examples[/]

The small model that comes with the project, in one gigabyte:

  offspec generate demo "Why is the sky blue?" --memory 1.2GB

A large model with a small one drafting for it, sampled, from a pipe:

  cat question.txt | offspec generate ./Qwen3-32B --draft ./Qwen3-0.6B --temperature 0.7 --seed 1

Two sources at once: a trained head, and whatever can be copied from the text that is to be edited:

  cat letter.txt | offspec generate ./Qwen3-32B --draft AngelSlim/Qwen3-32B_eagle3,suffix
"""


@dataclass(frozen=True, slots=True)
class Question:
    """One request, complete and checked, before any model is opened."""

    config: EngineConfig
    params: SamplingParams
    prompt: str | list[dict[str, str]]
    raw: bool
    speculate: bool
    check: bool
    trace: Path | None
    plan: Path | None = None


def generate(
    model: opt.Model,
    prompt: opt.Prompt = None,
    memory: opt.Memory = None,
    vram: opt.Vram = None,
    device: opt.Device = "cpu",
    dtype: opt.Dtype = "bfloat16",
    context: opt.Context = None,
    quantize: opt.Quantize = None,
    draft: opt.Draft = "auto",
    draft_bits: opt.DraftBits = None,
    draft_corpus: opt.Corpus = None,
    budget: opt.Budget = "auto",
    width: opt.Width = "auto",
    tree: opt.TreeKind = "dynamic",
    plan: opt.PlanFile = None,
    verify: opt.VerifyRule = "coupled",
    no_speculation: opt.NoSpeculation = False,
    check: opt.Check = False,
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = 1.0,
    top_k: opt.TopK = 0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    seed: opt.Seed = None,
    system: opt.System = None,
    raw: opt.Raw = False,
    max_tokens: opt.MaxTokens = 256,
    stop: opt.Stop = None,
    ignore_eos: opt.IgnoreEos = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    trace: opt.Trace = None,
) -> None:
    """Answer one prompt. The text goes to stdout as it comes, everything else to stderr."""
    config = EngineConfig(
        model=model,
        draft="none" if no_speculation else draft,  # what would not be asked need not be loaded
        draft_bits=opt.checked_bits(draft_bits),
        memory=None if memory is None else parse_bytes(memory),
        vram=None if vram is None else parse_bytes(vram),
        device=device,
        dtype=dtype,
        budget=opt.number_or_auto(budget),
        width=opt.number_or_auto(width),
        context=context,
        verify=verify,
        tree=tree,
        temperature=temperature,
        quantize=quantize,
        corpus=tuple(draft_corpus or ()),
    )
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    question = Question(
        config=config,
        params=params,
        prompt=_messages(_prompt_text(prompt), system=system, raw=raw),
        raw=raw,
        speculate=not no_speculation,
        check=check,
        trace=trace,
        plan=plan,
    )
    if check and not no_speculation:
        check_comparable(verify, params)
    if trace is not None:
        check_writable(trace)  # now, not after minutes of work
    _answer(question, Screen(as_json=as_json, quiet=quiet, check=check))


def _answer(question: Question, screen: Screen) -> None:
    """Load, ask, and show every event. What was shown stays when the user interrupts."""
    with closing(screen), traced(question.trace, question.config, screen.note) as timeline:
        try:
            screen.waiting("starting")
            import offspec  # the first use of `load` imports torch: after every check of the options

            with (
                offspec.load(
                    question.config, plan=question.plan, notify=screen.show, timeline=timeline
                ) as engine,
                closing(  # a stream left before its end must be idle before the engine is closed
                    engine.stream(
                        question.prompt,
                        question.params,
                        raw=question.raw,
                        speculate=question.speculate,
                        check=question.check,
                    )
                ) as events,
            ):
                for event in events:
                    screen.show(event)
        except KeyboardInterrupt:
            screen.interrupted()
            raise


def _prompt_text(prompt: str | None) -> str:
    """The prompt from the command line or from standard input. Raises RequestError."""
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin is None or (prompt is None and sys.stdin.isatty()):
        raise RequestError("there is no prompt; give one after the model, or pipe it in")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"standard input is not UTF-8 text: byte {error.start} is not part of it"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def _messages(text: str, *, system: str | None, raw: bool) -> str | list[dict[str, str]]:
    """What the engine is asked: plain text, or a conversation when there is a system message."""
    if not text or not (raw or text.strip()):
        raise RequestError("the prompt is empty; write what the model should answer")
    if system is None:
        return text
    if raw:
        raise RequestError("--system needs the chat template that --raw switches off; leave out one of them")
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]
