"""From settings to an engine: what `offspec.load` does."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from offspec.core.config import DraftBits, EngineConfig, PackFormat, Tree, Verify, parse_bytes
from offspec.core.events import Event, Notice, unheard
from offspec.core.openmp import unlimited_spinning
from offspec.core.trace import OFF, Timeline
from offspec.draft.lookup.suffix import SuffixLookup
from offspec.engine.corpus import read_corpus
from offspec.engine.engine import Draft, Engine
from offspec.plan.prepare import prepare
from offspec.plan.records import read_plan
from offspec_planners.plan import Plan


def load(
    model: str,
    *,
    draft: Draft = "auto",
    draft_bits: DraftBits | None = None,
    memory: str | int | None = None,
    vram: str | int | None = None,
    device: str = "cpu",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    budget: int | None = None,
    width: int | None = None,
    context: int | None = None,
    verify: Verify = "coupled",
    tree: Tree = "dynamic",
    temperature: float = 0.0,
    quantize: PackFormat | None = None,
    corpus: Sequence[str | Path] = (),
    plan: str | Path | Plan | None = None,
    replan: bool = False,
    learn: bool = True,
    notify: Callable[[Event], None] | None = None,
    timeline: Timeline | None = None,
) -> Engine:
    """Open a model and everything it needs to answer.

    model: a hub id, a folder, a .gguf file, or "demo". draft: what guesses, one source or several: a model or
    a head by its id or path, "substitute" (the target itself in few bits), "early-exit" and "mtp" (layers of
    its own), "suffix" and "lookup" (which copy from the text); "auto", the best there is, or "none".
    draft_bits: 2, 3, 4, or 16, which leaves a named model as it is; by default that, and for a substitute
    the most that fit. corpus: text files and saved conversations, or folders of them, that "suffix" may copy
    from too. memory: a promise for the whole process, "1.5GB" or bytes; vram: the same for the memory of a
    CUDA device. budget: most nodes verified in a pass; width: nodes that a draft step expands; None for what
    a plan says is fastest, which is measured once and kept for later runs. verify: "plain" guesses without
    the target's dice; "sequoia", for trees of one shape, draws the guesses: what is sampled is then as likely
    as by the target alone, but depends on the draft. tree: "sequoia" fills one optimised shape instead of
    growing each tree anew. temperature: what is planned for. quantize: round the target's matrices, once,
    into a pack in the cache, and run that. plan: one to follow instead, or its file; replan: make one anew.
    learn: keep for later runs what answers teach about the draft. notify: takes LoadProgress and Notice
    events now, and Prefill ones as layers of a first pass complete. timeline: records what runs when, for its
    `write`. Raises OffspecError.
    """
    config = EngineConfig(
        model=model,
        draft=draft if isinstance(draft, str) else ",".join(draft),
        draft_bits=draft_bits,
        memory=None if memory is None else parse_bytes(memory),
        vram=None if vram is None else parse_bytes(vram),
        device=device,
        dtype=dtype,
        budget=budget,
        width=width,
        context=context,
        verify=verify,
        tree=tree,
        temperature=temperature,
        learn=learn,
        quantize=quantize,
        corpus=tuple(map(Path, corpus)),
    )
    return open_engine(config, plan=plan, replan=replan, notify=notify, timeline=timeline)


def open_engine(
    config: EngineConfig,
    *,
    plan: str | Path | Plan | None = None,
    replan: bool = False,
    notify: Callable[[Event], None] | None = None,
    timeline: Timeline | None = None,
) -> Engine:
    """What `load` does, with its settings in one piece. Raises OffspecError."""
    named = read_plan(Path(plan)) if isinstance(plan, str | Path) else plan
    notify, timeline = notify or unheard, timeline or OFF
    if (told := unlimited_spinning()) is not None:
        notify(Notice(told))
    texts = read_corpus(config.corpus)
    with timeline.span("engine", "load"):
        ready = prepare(config, notify, timeline, named=named, replan=replan)
    suffix, codec = ready.assembly.sources.lookups["suffix"], ready.assembly.codec
    assert isinstance(suffix, SuffixLookup)
    for text in texts:
        suffix.add_text(codec.tokenize(text))
    return Engine(ready.config, ready.assembly, notify, timeline, way=ready.way, record=ready.record)
