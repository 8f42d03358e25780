"""How an engine drafts for its requests: sources, the policy of trees, and records of acceptance."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from offspec.core.config import AUTO, LOOKUPS, NONE, EngineConfig, SamplingParams, check_draws, read_drafts
from offspec.core.constraint import Regions
from offspec.core.errors import RequestError
from offspec.core.events import Event, Notice, unheard
from offspec.draft.base import Room, Scorer
from offspec.draft.grow.growing import GrowthPolicy
from offspec.draft.grow.self_rollout import self_rollout
from offspec.draft.mix.mixture import Mixture
from offspec.draft.mix.sources import Sources
from offspec.draft.sampled_scorer import DrawingScorer
from offspec.engine.request import Draft, Request
from offspec.engine.sequence_pass import Decoding
from offspec.model.vocabulary import token_bytes
from offspec.plan.load import Assembly
from offspec.plan.make import acceptance_for
from offspec.plan.policy import DraftPolicy
from offspec.plan.records import Case, DraftRecord, ExpertRecord, case_of
from offspec.sampling.constraint import Format, FormatRule
from offspec.sampling.grammar import matcher_of, tokens_beyond
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise, endless, request_key
from offspec.sampling.regions import RegionRule
from offspec_planners.acceptance import Calibration
from offspec_planners.expert_costs import ExpertPass
from offspec_planners.tree_growth import Grown

if TYPE_CHECKING:
    from llguidance import LLMatcher

_PRICED = 16  # passes after which costs of experts are looked at again
_PREVIEWED = 256  # nodes at least of a previewed tree, where there is room
_STRIDE = 10  # tokens from one previewed tree to the next: about a pass


class Drafting:
    """Sources of an engine, of which each request uses some.

    policy: how trees are grown; may be replaced. names: what a request uses that does not choose; record:
    where learning about the main drafter is kept; experts: where that about the target's experts is, if those
    are read when they are asked for.
    """

    def __init__(
        self,
        config: EngineConfig,
        assembly: Assembly,
        policy: DraftPolicy,
        record: DraftRecord | None,
        experts: ExpertRecord | None = None,
    ) -> None:
        self.policy, self.record, self.experts = policy, record, experts
        self._priced = 0  # passes that the costs of experts know of
        self._config, self._assembly, self._sources = config, assembly, assembly.sources
        drafters = tuple(self._sources.drafters)
        wanted = (*drafters, LOOKUPS[0]) if config.drafts == (AUTO,) else config.drafts
        self._all = tuple(name for name in wanted if name in self._sources.names)
        self.names = self._all
        self._main = drafters[0] if drafters else NONE
        self._room = Room()
        self._calibrations: defaultdict[tuple[str, Case], Calibration] = defaultdict(Calibration)

    @property
    def budget(self) -> int:
        """Most nodes verified in a pass of a request that does not name its draft; 1 without a draft."""
        names = self._company(self.names, None)
        return self._with_room(self.policy.growth, names).budget if names else 1

    @property
    def room(self) -> int:
        """Most nodes of a pass that there is memory for, those of all sequences together."""
        return self._config.budget or 1

    def use(self, draft: Draft) -> None:
        """Set the draft sources of requests that do not name any. Raises RequestError."""
        self.names = self._all if draft == AUTO else self.chosen(draft)

    def chosen(self, draft: Draft | None) -> tuple[str, ...]:
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
                    "choose among these, or load it as well with `draft`"
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
        sources: Sources,
        *,
        stop: Callable[[int], bool],
        ends: frozenset[int],
        notify: Callable[[Event], None],
    ) -> Decoding:
        """What stays the same for all passes of a request.

        sources: of its sequence; ends: tokens that end it; notify: hears of a source that fails; stop: see
        `Decoding`.
        """
        self._price_experts()
        dice = self._dice(request)
        names = self._company(request.sources, dice)
        processor, noise = self._choice(request)
        mixture = None
        # What a format forces is worth a tree even where no source takes part.
        forced = processor.format is not None and bool(request.sources)
        forced = forced and dice is None and self.policy.shape is None
        if names or forced:
            mixture = self._mixture(sources, names, request.params, dice, processor, noise, ends, notify)
        main = mixture.main if mixture is not None else None
        record = None
        if main is not None and main.name == self._main:
            record = partial(self.policy.recording, main.scorer.calibration)
        return Decoding(
            processor=processor,
            noise=noise,
            mixture=mixture,
            growth=self._with_room(self.policy.growth, names, forced),
            record=record,
            shape=self.policy.shape if main is not None else None,
            stop=stop,
            # Where guesses are drawn, tokens depend on the tree, which then may not depend on clocks.
            rests=self.policy.rests and dice is None,
            numbers=None if mixture is None or dice is None else partial(endless, dice, "test"),
        )

    def learn_experts(self, rows: int, asked: int, missed: int, held: int) -> None:
        """Learn from a pass; see `ExpertPass`."""
        if (record := self.experts) is not None:
            record.use.observe(ExpertPass(rows, record.layers, asked, missed, held))

    def _price_experts(self) -> None:
        """Go by what was learnt of the target's experts by now."""
        costs, record = self.policy.growth.costs, self.experts
        if costs is None or costs.experts is None or record is None:
            return
        if record.use.passes >= self._priced + _PRICED:
            self._priced = record.use.passes
            known = None
            if self._main != NONE and self.record is not None:
                known = acceptance_for(self.record, self._config).calibration
            learnt = replace(costs, experts=record.use.applied(costs.experts))
            self.policy = self.policy.priced(learnt, known)

    def _dice(self, request: Request) -> int | None:
        """The key that guesses are drawn with, None where they are ranked: greedily all rules are one."""
        return _key(request) if self._config.verify == "sequoia" and not request.params.greedy else None

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

    def _with_room(self, growth: GrowthPolicy, names: Sequence[str], forced: bool = False) -> GrowthPolicy:
        """The same, where lookups or a format take part with room for what they find."""
        found = forced or set(names) & set(self._sources.lookups)
        return self.policy.with_lookups(growth) if found else growth

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
            format=self._format(params),
        )
        return processor, GumbelNoise(_key(request), vocabulary, device) if processor.uses_noise else None

    def _format(self, params: SamplingParams) -> Format | None:
        """The rule of a request's format, at the beginning of an answer. Raises RequestError."""
        if (format := params.format) is None:
            return None
        target, codec = self._assembly.target, self._assembly.codec
        tokens, ends = codec.grammar_tokens, codec.eos_ids
        size = target.skeleton.vocab_size

        def rule(matcher: "LLMatcher") -> FormatRule:
            return FormatRule(matcher, size, tokens.vocab_size, ends, target.device)

        if format.kind != "regions":
            return rule(matcher_of(format, tokens))
        return RegionRule(
            Regions.read(format.text),
            lambda grammar: rule(codec.grammars.matcher(grammar)),
            lambda text: tokens_beyond(text, tokens),
            lambda token: token_bytes(codec.tokenizer, token),
            ends,
        )

    def _mixture(
        self,
        sources: Sources,
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
            return Scorer(processor, known, calibration, room=self._room)

        return sources.mixture(
            names,
            scorer,
            known,
            case,
            ends=ends,
            format=processor.format,
            tell=lambda text: notify(Notice(text)),
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
        nodes = min(self.room, max(_PREVIEWED, 2 * self.policy.growth.budget))
        drafter = self._sources.drafters.get(self._main)
        # An answer that is not committed token by token has no place in a format.
        request = Request(ids, replace(params, format=None))
        if drafter is None or drafter.wants or nodes < 2 or self._dice(request) is not None:
            return []
        mixture = self._mixture(self._sources, (self._main,), params, None, *self._choice(request))
        growth = replace(self.policy.growth, budget=nodes // 2, record=nodes, costs=None)
        return self_rollout(mixture, ids, growth, _STRIDE, trees, context)

    def save(self) -> None:
        """Save what was learnt for later runs, if the configuration says so."""
        for record in (self.record, self.experts):
            if record is not None:
                record.save()


def _key(request: Request) -> int:
    """The key of everything random in a request."""
    assert request.params.seed is not None
    return request_key(request.params.seed, request.ids)
