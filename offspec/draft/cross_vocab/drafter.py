"""Drafter with its own tokenizer, which reads retokenized text and drafts tokens of the target's
vocabulary.
"""

import codecs
import copy
from collections.abc import Callable, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from offspec.draft.base import Children, Scorer, score_children
from offspec.draft.cross_vocab.vocab_map import UNKNOWN, VocabMap
from offspec.draft.forward import BatchableDrafter, Expansion
from offspec.draft.growing_tree import GrowingTree
from offspec.draft.lm import LMDrafter
from offspec.model.cache import TreeCache
from offspec.sampling.token_tree import ROOT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAID = 64  # more new tokens than these must be a prompt, not an answer
_INSIDE = -1  # marks tokens that end inside a piece of text


class CrossVocabDrafter(BatchableDrafter):
    """Drafts with a causal LM of another vocabulary, by the tokens that both have (`VocabMap`).

    It cannot draft below a token that its vocabulary lacks, or while the committed text ends inside a single
    draft token.
    """

    def __init__(
        self, inner: LMDrafter, vocab: VocabMap, retokenizer: "Retokenizer", device: torch.device
    ) -> None:
        """device: device of the draft's logits."""
        self.name = inner.name
        self._inner = inner
        self._vocab, self._device = vocab.on(device), device
        self._retokenizer = retokenizer
        self._root = 0  # position of the root in the target's ids
        self._candidates: GrowingTree | None = None  # of the growing tree
        self._untranslatable: set[int] = set()  # nodes of it that the draft cannot expand
        self._wide = torch.empty(0, 0)

    def set_cancel_check(self, check_cancelled: Callable[[], None] | None) -> None:
        self._inner.set_cancel_check(check_cancelled)

    def fork(self, target: TreeCache) -> "CrossVocabDrafter":
        return CrossVocabDrafter(
            self._inner.fork(target), self._vocab, self._retokenizer.fork(), self._device
        )

    def start(self, ids: Sequence[int]) -> None:
        self._inner.rewind(self._retokenizer.update(ids))
        if self._retokenizer.can_draft:
            self._inner.start(self._retokenizer.ids)
        self._root = len(ids) - 1
        self._candidates = None
        self._untranslatable.clear()

    def expand_steps(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Expansion:
        self._candidates = candidates
        rows = self._rows(candidates, nodes) if self._retokenizer.can_draft else []
        if not rows or not self._inner.fits_context(candidates, nodes):
            return Children.none(len(nodes))
        logits, _ = yield from self._inner.logits(self._translated(candidates), [nodes[row] for row in rows])
        found = score_children(scorer, self._widened(logits, rows, len(nodes)), candidates, nodes, self._root)
        found.log_prob[[row for row in range(len(nodes)) if row not in rows]] = -np.inf
        return found

    def _rows(self, candidates: GrowingTree, nodes: Sequence[int]) -> list[int]:
        """Return the nodes that the draft can expand: its vocabulary has all tokens on their paths."""
        same = self._vocab.translate(candidates.token[nodes])
        rows = list[int]()
        for row, (node, parent) in enumerate(zip(nodes, candidates.parent[nodes].tolist(), strict=True)):
            if node != ROOT and (same[row] == UNKNOWN or parent in self._untranslatable):
                self._untranslatable.add(node)
            else:
                rows.append(row)
        return rows

    def _translated(self, candidates: GrowingTree) -> GrowingTree:
        view = copy.copy(candidates)
        view.token = self._vocab.translate(candidates.token)
        view.token[ROOT] = self._retokenizer.ids[-1]
        return view

    def _widened(self, logits: torch.Tensor, rows: Sequence[int], count: int) -> torch.Tensor:
        """Scatter the draft's logits of some of W rows, [n, D], to the target's vocabulary, [W, T].

        The result is in a reused buffer, with -inf for tokens that the draft lacks and for rows not in
        `rows`.
        """
        if len(rows) < count:
            some, logits = logits, logits.new_full((count, logits.shape[1]), -torch.inf)
            logits[rows] = some
        if len(self._wide) < count:
            self._wide = logits.new_full((count, len(self._vocab.draft_of)), -torch.inf)
        return self._vocab.scatter(logits, self._wide[:count])

    def commit(self, nodes: Sequence[int]) -> None:
        if self._candidates is None:
            return  # it was not active, and will read the tokens later
        if self._retokenizer.can_draft:
            self._inner.commit(nodes)
        self._retokenizer.append(self._candidates.token[nodes[1:]].tolist())

    def rewind(self, length: int) -> None:
        pass  # `start` compares ids and can keep more: a repeated prompt need not be read again

    def close(self) -> None:
        self._inner.close()


class Retokenizer:
    """Retokenizes the target's committed ids into a draft's ids.

    A prompt is decoded and encoded with the draft's own tokenizer, so that the draft reads the tokens it was
    trained on. Generated tokens are added one by one, since the draft's cache already holds rows for them: by
    the map, or as the longest pieces that spell the token. A partial character is held back until it is
    complete, if the draft has no tokens for single bytes.

    ids: the draft's ids. Their number may differ from the target's.
    """

    def __init__(
        self, vocab: VocabMap, target: "PreTrainedTokenizerBase", draft: "PreTrainedTokenizerBase"
    ) -> None:
        self.ids: list[int] = []
        self._vocab, self._target, self._draft = vocab, target, draft
        self._pieces = vocab.draft.pieces()
        self._read: list[int] = []  # the target's ids
        self._ends = [0]  # number of draft ids by number of these, or `_INSIDE`
        self._partial_character = b""  # beginning of a character

    def fork(self) -> "Retokenizer":
        """Return an empty retokenizer with the same tokenizers."""
        twin = copy.copy(self)
        twin.ids, twin._read, twin._ends, twin._partial_character = [], [], [0], b""
        return twin

    @property
    def can_draft(self) -> bool:
        """Return whether the draft has read the last token, and so can draft what follows it."""
        before = next((end for end in islice(reversed(self._ends), 1, None) if end != _INSIDE), None)
        return before is not None and self._ends[-1] not in (_INSIDE, before)

    def update(self, ids: Sequence[int]) -> int:
        """Read the committed ids and return the number of unchanged draft ids."""
        shared, limit = 0, min(len(ids), len(self._read))
        while shared < limit and ids[shared] == self._read[shared]:
            shared += 1
        self._cut(shared)
        kept, fresh = len(self.ids), ids[len(self._read) :]
        if not self._read:
            self._begin(fresh[0])
        if self._read and len(fresh) <= _SAID:
            self.append(fresh)
        else:
            self._prompt(fresh)
        return kept

    def _cut(self, length: int) -> None:
        """Truncate to `length` of the target's ids, or fewer, so that a draft token ends there too."""
        if length >= len(self._read):
            return
        while self._ends[length] == _INSIDE:
            length -= 1
        del self.ids[self._ends[length] :], self._read[length:], self._ends[length + 1 :]
        self._partial_character = b""

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens of the target, one by one."""
        for token, same in zip(tokens, self._translated(tokens), strict=True):
            if same != UNKNOWN and (not self._partial_character or token in self._vocab.target.special):
                self.ids.append(same)
                self._partial_character = b""
            else:
                self._append_bytes(self._partial_character + self._vocab.target.written(token))
            self._read.append(token)
            self._ends.append(_INSIDE if self._partial_character else len(self.ids))

    def _translated(self, tokens: Sequence[int]) -> list[int]:
        found: list[int] = self._vocab.translate(np.array(tokens, dtype=np.int64)).tolist()
        return found

    def _begin(self, first: int) -> None:
        """Add the draft's beginning-of-text token, if it has one and the target has not."""
        begin: list[int] = self._draft("")["input_ids"]
        if begin == [self._draft.bos_token_id] and self._translated([first]) != begin:
            self.ids = begin

    def _prompt(self, tokens: Sequence[int]) -> None:
        """Add a text; special tokens that the draft has are kept as special tokens."""
        special = self._vocab.target.special
        pairs = zip(tokens, self._translated(tokens), strict=True)
        for known, group in groupby(pairs, lambda pair: pair[0] in special and pair[1] != UNKNOWN):
            run = list(group)
            if known:
                self.append([token for token, _ in run])
            else:
                self._text([token for token, _ in run])

    def _text(self, run: list[int]) -> None:
        text = self._target.decode(run, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self.ids += self._draft(text, add_special_tokens=False, verbose=False)["input_ids"]
        self._read += run
        self._ends += [*[_INSIDE] * (len(run) - 1), len(self.ids)]
        self._partial_character = b""

    def _append_bytes(self, data: bytes) -> None:
        """Add the longest pieces that spell the data; a partial character at the end may remain pending."""
        while data:
            for length in range(len(data), 0, -1):
                piece = self._pieces.get(data[:length])
                if piece is not None:
                    self.ids.append(piece)
                    break
            else:
                if _is_partial_character(data):
                    break
                length = 1  # the draft has no token for it
            data = data[length:]
        self._partial_character = data


def _is_partial_character(data: bytes) -> bool:
    """Return whether these bytes begin a character without completing it."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data) == ""
    except UnicodeDecodeError:
        return False
