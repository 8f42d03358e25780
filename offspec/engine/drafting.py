"""What is asked of an engine, and how it drafts for it: sources, the policy of trees, what was learnt."""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from offspec.core.config import AUTO, LOOKUPS, NONE, EngineConfig, SamplingParams, check_draws, read_drafts
from offspec.core.errors import RequestError
from offspec.core.events import Event, Notice, unheard
from offspec.draft.base import Scorer
from offspec.draft.grow.best_first import GrowthPolicy
from offspec.draft.grow.self_rollout import self_rollout
from offspec.draft.mix.mixture import Mixture
from offspec.draft.sampled_scorer import DrawingScorer
from offspec.engine.decode import Decoding
from offspec.plan.load import Assembly
from offspec.plan.policy import DraftPolicy
from offspec.plan.records import Case, DraftRecord, case_of
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise, endless, request_key
from offspec_planners.acceptance import Calibration
from offspec_planners.best_first import Grown

_PREVIEWED = 256  # nodes at least of a previewed tree, where there is room
_STRIDE = 10  # tokens from one previewed tree to the next: about a pass


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as token ids, and how to continue it.

    Args:
        ids: The prompt.
        params: How tokens are chosen, with a seed.
        sources: Names of the draft sources; none to decode one token per pass.
        halt: May be set from any thread, to end the answer with what there is.
        trees: Whether to send TreeSeen events.
    """

    ids: Sequence[int]
    params: SamplingParams
    sources: tuple[str, ...] = ()
    halt: threading.Event | None = None
    trees: bool = False

    @property
    def key(self) -> int:
        """Of everything random in it."""
        assert self.params.seed is not None
        return request_key(self.params.seed, self.ids)


class Drafting:
    """Sources of an engine, of which each request uses some.

    policy: how trees are grown; may be replaced. names: what a request uses that does not choose; record:
    where learning about the main drafter is kept.
    """

    def __init__(
        self, config: EngineConfig, assembly: Assembly, policy: DraftPolicy, record: DraftRecord | None
    ) -> None:
        self.policy, self.record = policy, record
        self._config, self._assembly, self._sources = config, assembly, assembly.sources
        drafters = tuple(self._sources.drafters)
        wanted = (*drafters, LOOKUPS[0]) if config.drafts == (AUTO,) else config.drafts
        self._all = tuple(name for name in wanted if name in self._sources.names)
        self.names = self._all
        self._main = drafters[0] if drafters else NONE
        self._calibrations: defaultdict[tuple[str, Case], Calibration] = defaultdict(Calibration)

    @property
    def budget(self) -> int:
        """Most nodes verified in a pass of a request that does not name its draft; 1 without a draft."""
        names = self._company(self.names, None)
        return self._with_room(self.policy.growth, names).budget if names else 1

    def use(self, draft: str | Sequence[str]) -> None:
        """Set the draft sources of requests that do not name any. Raises RequestError."""
        self.names = self._all if draft == AUTO else self.chosen(draft)

    def chosen(self, draft: str | Sequence[str] | None) -> tuple[str, ...]:
        """The sources that a request asks for, of those that there are. Raises RequestError."""
        names = (AUTO,) if draft is None else read_drafts(draft)
        if names == (AUTO,):
            return self.names
        if names == (NONE,):
            return ()
        for name in names:
            if name not in self._sources.names:
                held = ", ".join((*self._sources.names, NONE))
                raise RequestError(
                    f"there is no draft {name!r} in this engine, which was loaded with {held}; "
                    "choose among these, or load it as well with --draft"
                )
        if self._config.verify == "sequoia":
            check_draws(names)
        return names

    def described(self, names: Sequence[str]) -> str:
        """These sources, for display; "none" where there are none."""
        held = self._sources.drafters | self._sources.lookups
        return " + ".join(held[name].name for name in names) or NONE

    def calibration(self, name: str, temperature: float, coupled: bool) -> Calibration:
        """What is known of a drafter for such requests, to learn into."""
        if self.record is not None and name == self._main:
            return self.record.entry(temperature, coupled)
        return self._calibrations[name, case_of(temperature, coupled)]

    def decoding(
        self,
        request: Request,
        *,
        stop: Callable[[int], bool],
        ends: frozenset[int] = frozenset(),
        notify: Callable[[Event], None] = unheard,
        between: Callable[[], None] | None = None,
        on_grown: Callable[[int], None] | None = None,
    ) -> Decoding:
        """What stays the same for all passes of a request.

        ends: tokens that end it; notify: hears of a source that fails; the others: see `Decoding`.
        """
        dice = self._dice(request)
        names = self._company(request.sources, dice)
        processor, noise = self._choice(request)
        mixture = None
        if names:
            mixture = self._mixture(names, request.params, dice, processor, noise, ends, notify)
        main = mixture.main if mixture is not None else None
        growth = self.policy.growth
        if main is not None and main.name == self._main:
            growth = self.policy.recording(main.scorer.calibration)
        return Decoding(
            processor=processor,
            noise=noise,
            mixture=mixture,
            growth=self._with_room(growth, names),
            shape=self.policy.shape if main is not None else None,
            stop=stop,
            between=between,
            on_grown=on_grown,
            numbers=None if mixture is None or dice is None else partial(endless, dice, "test"),
        )

    def _dice(self, request: Request) -> int | None:
        """The key that guesses are drawn with, None where they are ranked: greedily all rules are one."""
        return request.key if self._config.verify == "sequoia" and not request.params.greedy else None

    def _company(self, names: tuple[str, ...], dice: int | None) -> tuple[str, ...]:
        """Which of these sources take part. A shape that was chosen beforehand is filled by one alone."""
        policy = self.policy
        if dice is not None and policy.shape is None:
            return ()  # only trees of one shape may be drawn
        drafters = tuple(name for name in names if name in self._sources.drafters)
        if dice is not None or (policy.shape is not None and drafters):
            return drafters[:1]
        if policy.plan is not None and policy.growth.budget == 1:
            return tuple(name for name in names if name != self._main)  # by the plan it does not pay
        return names

    def _with_room(self, growth: GrowthPolicy, names: Sequence[str]) -> GrowthPolicy:
        """The same, where lookups take part with room for what they find."""
        return self.policy.with_lookups(growth) if set(names) & set(self._sources.lookups) else growth

    def _choice(self, request: Request) -> tuple[LogitsProcessor, GumbelNoise | None]:
        """How the target chooses a request's tokens, and the noise that it adds, if it does."""
        target, params = self._assembly.target, request.params
        vocabulary, device = target.skeleton.vocab_size, target.device
        codec = self._assembly.codec
        forms = [form for word in params.bad_words for form in (word, f" {word}")]
        processor = LogitsProcessor(
            params,
            vocabulary,
            request.ids,
            device,
            ends=codec.eos_ids,
            bad_words=[codec.tokenize(form) for form in forms],
        )
        return processor, GumbelNoise(request.key, vocabulary, device) if processor.uses_noise else None

    def _mixture(
        self,
        names: Sequence[str],
        params: SamplingParams,
        dice: int | None,
        processor: LogitsProcessor,
        noise: GumbelNoise | None,
        ends: frozenset[int] = frozenset(),
        notify: Callable[[Event], None] = unheard,
    ) -> Mixture:
        """These sources, each with what reads its scores."""
        known = noise if self._config.verify == "coupled" else None
        case = case_of(params.temperature, known is not None)

        def scorer(name: str) -> Scorer:
            calibration = self.calibration(name, *case)
            if dice is not None:
                return DrawingScorer(processor, dice, calibration)
            return Scorer(processor, known, calibration)

        return self._sources.mixture(
            names, scorer, known, case, ends=ends, tell=lambda text: notify(Notice(text))
        )

    def preview(self, ids: Sequence[int], params: SamplingParams, trees: int, context: int) -> list[Grown]:
        """Trees that the main drafter grows along an answer of its own; see `draft.grow.self_rollout`.

        Empty without a drafter, for one that needs hidden states of the target, and where draft tokens are
        sampled: plans then go by their ranks.

        Args:
            ids: The prompt.
            params: How tokens are chosen, with a seed.
            trees: How many.
            context: Most tokens of prompt and answer.
        """
        room = self._config.budget or 1
        nodes = min(room, max(_PREVIEWED, 2 * self.policy.growth.budget))
        drafter = self._sources.drafters.get(self._main)
        request = Request(ids, params)
        if drafter is None or drafter.wants or nodes < 2 or self._dice(request) is not None:
            return []
        mixture = self._mixture((self._main,), params, None, *self._choice(request))
        growth = replace(self.policy.growth, budget=nodes // 2, record=nodes, costs=None)
        return self_rollout(mixture, ids, growth, _STRIDE, trees, context)

    def save(self) -> None:
        """Save what was learnt for later runs, if the configuration says so."""
        if self.record is not None:
            self.record.save()
