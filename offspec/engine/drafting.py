"""Drafting for an engine's requests: draft sources, tree policy and acceptance records."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from offspec.core.config import (
    AUTO,
    LOOKUPS,
    NONE,
    EngineConfig,
    SamplingParams,
    check_sequoia_drafts,
    read_drafts,
)
from offspec.core.constraint import Regions
from offspec.core.errors import RequestError
from offspec.core.events import Event, Notice, ignore_event
from offspec.draft.base import ScoreBuffer, Scorer
from offspec.draft.grow.self_rollout import self_rollout
from offspec.draft.grow.tree_grower import GrowthPolicy
from offspec.draft.mix.mixture import Mixture
from offspec.draft.mix.sources import Sources
from offspec.draft.sampled_scorer import SamplingScorer
from offspec.engine.request import Draft, Request
from offspec.engine.sequence_pass import DecodingConfig
from offspec.model.vocabulary import token_bytes
from offspec.plan.build_plan import acceptance_for
from offspec.plan.load import Assembly
from offspec.plan.policy import DraftPolicy
from offspec.plan.records import CalibrationKey, DraftRecord, ExpertRecord, calibration_key
from offspec.sampling.format_rule import ConstraintRule, FormatRule
from offspec.sampling.grammar import matcher_of, tokens_extending
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise, request_key, uniform_stream
from offspec.sampling.regions import RegionRule
from offspec_planners.acceptance import Calibration
from offspec_planners.expert_costs import ExpertPass
from offspec_planners.tree_growth import RecordedTree

if TYPE_CHECKING:
    from llguidance import LLMatcher

_PRICED = 16  # passes between updates of expert costs
_PREVIEWED = 256  # minimum nodes of a previewed tree, if there is memory for them
_STRIDE = 10  # tokens between previewed trees: about one pass


class Drafting:
    """Draft sources of an engine; each request uses some of them.

    Args:
        config: Configuration of the engine.
        assembly: The loaded models.
        policy: Tree growth policy; may be replaced later.
        record: Acceptance record of the main drafter.
        experts: Usage record of the target's experts, with on-demand expert loading.

    Attributes:
        names: Sources of requests that do not choose any.
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
        self._priced = 0  # passes recorded when expert costs were last updated
        self._config, self._assembly, self._sources = config, assembly, assembly.sources
        drafters = tuple(self._sources.drafters)
        wanted = (*drafters, LOOKUPS[0]) if config.drafts == (AUTO,) else config.drafts
        self._all = tuple(name for name in wanted if name in self._sources.names)
        self.names = self._all
        self._main = drafters[0] if drafters else NONE
        self._score_buffer = ScoreBuffer()
        self._calibrations: defaultdict[tuple[str, CalibrationKey], Calibration] = defaultdict(Calibration)

    @property
    def budget(self) -> int:
        """Maximum nodes per pass of a request that does not choose a draft; 1 without a draft."""
        names = self._active_sources(self.names, None)
        return self._with_lookup_budget(self.policy.growth, names).budget if names else 1

    @property
    def max_nodes(self) -> int:
        """Maximum nodes per pass that fit in memory, all sequences together."""
        return self._config.budget or 1

    def use(self, draft: Draft) -> None:
        """Set the draft sources of requests that do not choose any. Raises RequestError."""
        self.names = self._all if draft == AUTO else self.select_sources(draft)

    def select_sources(self, draft: Draft | None) -> tuple[str, ...]:
        """Return the names of a request's draft sources. Raises RequestError for one that is not loaded."""
        names = (AUTO,) if draft is None else read_drafts(draft)
        if names == (AUTO,):
            return self.names
        if names == (NONE,):
            return ()
        for name in names:
            if name not in self._sources.names:
                held = ", ".join((*self._sources.names, NONE))
                raise RequestError(
                    f"draft {name!r} is not available: this engine was loaded with {held}; choose among "
                    "these, or load the model with it in `draft`"
                )
        if self._config.verify == "sequoia":
            check_sequoia_drafts(names)
        return names

    def describe_sources(self, names: Sequence[str]) -> str:
        """Return these sources for display; "none" if there are none."""
        held = self._sources.drafters | self._sources.lookups
        return " + ".join(held[name].name for name in names) or NONE

    def calibration(self, name: str, temperature: float, coupled: bool) -> Calibration:
        """Return a drafter's calibration for such requests; it is updated in place."""
        if self.record is not None and name == self._main:
            return self.record.entry(temperature, coupled)
        return self._calibrations[name, calibration_key(temperature, coupled)]

    def decoding(
        self,
        request: Request,
        sources: Sources,
        *,
        stop: Callable[[int], bool],
        ends: frozenset[int],
        notify: Callable[[Event], None],
    ) -> DecodingConfig:
        """Return the settings for all passes of a request.

        Args:
            request: The request.
            sources: Draft sources of its sequence.
            stop: See `DecodingConfig`.
            ends: Tokens that end the answer.
            notify: Receives a Notice if a source fails.
        """
        self._price_experts()
        draw_key = self._draw_key(request)
        names = self._active_sources(request.sources, draw_key)
        processor, noise = self._logits_processor(request)
        mixture = None
        # Tokens forced by a format justify a tree even without draft sources.
        forced = processor.format is not None and bool(request.sources)
        forced = forced and draw_key is None and self.policy.shape is None
        if names or forced:
            mixture = self._mixture(sources, names, request.params, draw_key, processor, noise, ends, notify)
        main = mixture.main if mixture is not None else None
        record = None
        if main is not None and main.name == self._main:
            record = partial(self.policy.recording_policy, main.scorer.calibration)
        return DecodingConfig(
            processor=processor,
            noise=noise,
            mixture=mixture,
            growth=self._with_lookup_budget(self.policy.growth, names, forced),
            record=record,
            shape=self.policy.shape if main is not None else None,
            stop=stop,
            # With sampled draft tokens the output depends on the tree, which must not depend on timing.
            may_pause=self.policy.may_pause and draw_key is None,
            acceptance_uniforms=None
            if mixture is None or draw_key is None
            else partial(uniform_stream, draw_key, "test"),
        )

    def learn_experts(self, rows: int, asked: int, missed: int, held: int) -> None:
        """Record the expert usage of a pass; see `ExpertPass`."""
        if (record := self.experts) is not None:
            record.use.observe(ExpertPass(rows, record.layers, asked, missed, held))

    def _price_experts(self) -> None:
        """Update the expert costs of the policy from the usage record."""
        costs, record = self.policy.growth.costs, self.experts
        if costs is None or costs.experts is None or record is None:
            return
        if record.use.passes >= self._priced + _PRICED:
            self._priced = record.use.passes
            known = None
            if self._main != NONE and self.record is not None:
                known = acceptance_for(self.record, self._config).calibration
            learnt = replace(costs, experts=record.use.applied(costs.experts))
            self.policy = self.policy.with_costs(learnt, known)

    def _draw_key(self, request: Request) -> int | None:
        """Return the random key for sampled draft tokens, or None if they are ranked.

        At temperature 0 all verification rules are the same.
        """
        return _key(request) if self._config.verify == "sequoia" and not request.params.greedy else None

    def _active_sources(self, names: tuple[str, ...], draw_key: int | None) -> tuple[str, ...]:
        """Return the sources that take part. A fixed tree shape uses one drafter only."""
        policy = self.policy
        if draw_key is not None and policy.shape is None:
            return ()  # sampled draft tokens need a fixed tree shape
        drafters = tuple(name for name in names if name in self._sources.drafters)
        if draw_key is not None or (policy.shape is not None and drafters):
            return drafters[:1]
        if policy.plan is not None and policy.growth.budget == 1:
            return tuple(name for name in names if name != self._main)  # not worthwhile, by the plan
        return names

    def _with_lookup_budget(
        self, growth: GrowthPolicy, names: Sequence[str], forced: bool = False
    ) -> GrowthPolicy:
        """Return the growth policy, with extra nodes for lookups or a format if they take part."""
        found = forced or set(names) & set(self._sources.lookups)
        return self.policy.with_lookups(growth) if found else growth

    def _logits_processor(self, request: Request) -> tuple[LogitsProcessor, GumbelNoise | None]:
        """Return the request's logits processor, and its noise if it uses any."""
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

    def _format(self, params: SamplingParams) -> ConstraintRule | None:
        """Return the rule of a request's output format in its initial state. Raises RequestError."""
        if (format := params.format) is None:
            return None
        target, codec = self._assembly.target, self._assembly.codec
        tokens, ends = codec.grammar_tokenizer, codec.eos_ids
        size = target.skeleton.vocab_size

        def rule(matcher: "LLMatcher") -> FormatRule:
            return FormatRule(matcher, size, tokens.vocab_size, ends, target.device)

        if format.kind != "regions":
            return rule(matcher_of(format, tokens))
        return RegionRule(
            Regions.read(format.text),
            lambda grammar: rule(codec.grammars.matcher(grammar)),
            lambda text: tokens_extending(text, tokens),
            lambda token: token_bytes(codec.tokenizer, token),
            ends,
        )

    def _mixture(
        self,
        sources: Sources,
        names: Sequence[str],
        params: SamplingParams,
        draw_key: int | None,
        processor: LogitsProcessor,
        noise: GumbelNoise | None,
        ends: frozenset[int] = frozenset(),
        notify: Callable[[Event], None] = ignore_event,
    ) -> Mixture:
        """Return a mixture of these sources, each with its scorer."""
        known = noise if self._config.verify == "coupled" else None
        case = calibration_key(params.temperature, known is not None)

        def scorer(name: str) -> Scorer:
            calibration = self.calibration(name, *case)
            if draw_key is not None:
                return SamplingScorer(processor, draw_key, calibration)
            return Scorer(processor, known, calibration, buffer=self._score_buffer)

        return sources.mixture(
            names,
            scorer,
            known,
            case,
            ends=ends,
            format=processor.format,
            notify=lambda text: notify(Notice(text)),
        )

    def preview(
        self, ids: Sequence[int], params: SamplingParams, trees: int, context: int
    ) -> list[RecordedTree]:
        """Return trees that the main drafter grows along its own answer; see `draft.grow.self_rollout`.

        Empty without a drafter, if the drafter needs hidden states of the target, and if draft tokens are
        sampled: plans use ranks then.

        Args:
            ids: Token ids of the prompt.
            params: Sampling parameters, with a seed.
            trees: Number of trees.
            context: Maximum tokens of prompt and answer.
        """
        nodes = min(self.max_nodes, max(_PREVIEWED, 2 * self.policy.growth.budget))
        drafter = self._sources.drafters.get(self._main)
        # A previewed answer is not committed token by token, so a format cannot follow it.
        request = Request(ids, replace(params, format=None))
        if drafter is None or drafter.required_states or nodes < 2 or self._draw_key(request) is not None:
            return []
        mixture = self._mixture(self._sources, (self._main,), params, None, *self._logits_processor(request))
        growth = replace(self.policy.growth, budget=nodes // 2, record=nodes, costs=None)
        return self_rollout(mixture, ids, growth, _STRIDE, trees, context)

    def save(self) -> None:
        """Save acceptance and expert records for later runs, if the configuration enables it."""
        for record in (self.record, self.experts):
            if record is not None:
                record.save()


def _key(request: Request) -> int:
    """Return the key of all random numbers of a request."""
    assert request.params.seed is not None
    return request_key(request.params.seed, request.ids)
