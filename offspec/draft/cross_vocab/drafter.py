"""A draft with a tokenizer of its own: it reads in its own tokens and guesses in the target's."""

import codecs
import copy
from collections.abc import Callable, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from offspec.draft.base import Children, Scorer, score
from offspec.draft.cross_vocab.vocab_map import UNKNOWN, VocabMap
from offspec.draft.forward import Expansion, Joinable
from offspec.draft.growing_tree import GrowingTree
from offspec.draft.lm import LMDrafter
from offspec.model.cache import TreeCache
from offspec.sampling.token_tree import ROOT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAID = 64  # more new tokens than these are no answer's, but a prompt's
_INSIDE = -1  # in place of a border, where a token ends in the midst of a piece of text


class TranslatedDrafter(Joinable):
    """Drafts with a causal LM of another vocabulary, by the tokens that both have (`VocabMap`).

    Nothing can be said below a token that the draft does not have, nor while the committed text ends in the
    midst of what the draft would read as one token.
    """

    def __init__(
        self, inner: LMDrafter, vocab: VocabMap, reading: "Retokenizer", device: torch.device
    ) -> None:
        """device: of the draft's logits."""
        self.name = inner.name
        self._inner = inner
        self._vocab, self._device = vocab.on(device), device
        self._reading = reading
        self._root = 0  # the position of the root, as the target counts
        self._candidates: GrowingTree | None = None  # of the tree that grows
        self._lost: set[int] = set()  # nodes of it that the draft cannot stand at
        self._wide = torch.empty(0, 0)

    def watch(self, look: Callable[[], None] | None) -> None:
        self._inner.watch(look)

    def fork(self, target: TreeCache) -> "TranslatedDrafter":
        return TranslatedDrafter(self._inner.fork(target), self._vocab, self._reading.fork(), self._device)

    def start(self, ids: Sequence[int]) -> None:
        self._inner.rewind(self._reading.follow(ids))
        if self._reading.told:
            self._inner.start(self._reading.ids)
        self._root = len(ids) - 1
        self._candidates = None
        self._lost.clear()

    def expanding(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Expansion:
        self._candidates = candidates
        rows = self._rows(candidates, nodes) if self._reading.told else []
        if not rows or not self._inner.reaches(candidates, nodes):
            return Children.none(len(nodes))
        logits, _ = yield from self._inner.logits(self._translated(candidates), [nodes[row] for row in rows])
        found = score(scorer, self._widened(logits, rows, len(nodes)), candidates, nodes, self._root)
        found.log_prob[[row for row in range(len(nodes)) if row not in rows]] = -np.inf
        return found

    def _rows(self, candidates: GrowingTree, nodes: Sequence[int]) -> list[int]:
        """Which of the nodes the draft can stand at, with all that is above them."""
        same = self._vocab.translate(candidates.token[nodes])
        rows = list[int]()
        for row, (node, parent) in enumerate(zip(nodes, candidates.parent[nodes].tolist(), strict=True)):
            if node != ROOT and (same[row] == UNKNOWN or parent in self._lost):
                self._lost.add(node)
            else:
                rows.append(row)
        return rows

    def _translated(self, candidates: GrowingTree) -> GrowingTree:
        view = copy.copy(candidates)
        view.token = self._vocab.translate(candidates.token)
        view.token[ROOT] = self._reading.ids[-1]
        return view

    def _widened(self, logits: torch.Tensor, rows: Sequence[int], count: int) -> torch.Tensor:
        """The draft's logits of some of W rows, [n, D], as those of the target, [W, T].

        In a buffer, in which what the draft lacks is -inf from the beginning. So are rows that are not named.
        """
        if len(rows) < count:
            some, logits = logits, logits.new_full((count, logits.shape[1]), -torch.inf)
            logits[rows] = some
        if len(self._wide) < count:
            self._wide = logits.new_full((count, len(self._vocab.draft_of)), -torch.inf)
        return self._vocab.scatter(logits, self._wide[:count])

    def commit(self, nodes: Sequence[int]) -> None:
        if self._candidates is None:
            return  # it was not asked, and will read what was said
        if self._reading.told:
            self._inner.commit(nodes)
        self._reading.say(self._candidates.token[nodes[1:]].tolist())

    def rewind(self, length: int) -> None:
        pass  # `start` compares, and can keep more: a prompt that is asked again need not be read again

    def close(self) -> None:
        self._inner.close()


class Retokenizer:
    """A draft's ids for a target's committed ids.

    A prompt becomes text, which the draft's own tokenizer encodes, so that the draft reads it in the words
    that it was trained on. What the target says is added token by token, since the draft's cache holds its
    guesses by then: by the map, or as the longest pieces that spell the token. A character that is cut in
    two is held back until it is whole, where the draft has no tokens for single bytes.

    ids: the draft's. They may be more or fewer than the target's.
    """

    def __init__(
        self, vocab: VocabMap, target: "PreTrainedTokenizerBase", draft: "PreTrainedTokenizerBase"
    ) -> None:
        self.ids: list[int] = []
        self._vocab, self._target, self._draft = vocab, target, draft
        self._pieces = vocab.draft.pieces()
        self._read: list[int] = []  # the target's ids
        self._ends = [0]  # by the number of these: how many ids the draft has, or `_INSIDE`
        self._open = b""  # the beginning of a character

    def fork(self) -> "Retokenizer":
        """One that has read nothing yet, with the same tokenizers."""
        twin = copy.copy(self)
        twin.ids, twin._read, twin._ends, twin._open = [], [], [0], b""
        return twin

    @property
    def told(self) -> bool:
        """Return whether the draft has read the last token, and so can draft what follows it."""
        before = next((end for end in islice(reversed(self._ends), 1, None) if end != _INSIDE), None)
        return before is not None and self._ends[-1] not in (_INSIDE, before)

    def follow(self, ids: Sequence[int]) -> int:
        """Read the committed ids; returns how many of the draft's are as they were."""
        shared, limit = 0, min(len(ids), len(self._read))
        while shared < limit and ids[shared] == self._read[shared]:
            shared += 1
        self._cut(shared)
        kept, fresh = len(self.ids), ids[len(self._read) :]
        if not self._read:
            self._begin(fresh[0])
        if self._read and len(fresh) <= _SAID:
            self.say(fresh)
        else:
            self._prompt(fresh)
        return kept

    def _cut(self, length: int) -> None:
        """Go back to `length` of the target's ids, or fewer: to where a token of the draft ends as well."""
        if length >= len(self._read):
            return
        while self._ends[length] == _INSIDE:
            length -= 1
        del self.ids[self._ends[length] :], self._read[length:], self._ends[length + 1 :]
        self._open = b""

    def say(self, tokens: Sequence[int]) -> None:
        """Add tokens of the target, one by one."""
        for token, same in zip(tokens, self._translated(tokens), strict=True):
            if same != UNKNOWN and (not self._open or token in self._vocab.target.special):
                self.ids.append(same)
                self._open = b""
            else:
                self._spell(self._open + self._vocab.target.written(token))
            self._read.append(token)
            self._ends.append(_INSIDE if self._open else len(self.ids))

    def _translated(self, tokens: Sequence[int]) -> list[int]:
        found: list[int] = self._vocab.translate(np.array(tokens, dtype=np.int64)).tolist()
        return found

    def _begin(self, first: int) -> None:
        """The token that the draft's texts begin with, where there is one and the target's do not."""
        begin: list[int] = self._draft("")["input_ids"]
        if begin == [self._draft.bos_token_id] and self._translated([first]) != begin:
            self.ids = begin

    def _prompt(self, tokens: Sequence[int]) -> None:
        """Add a text; special tokens that the draft knows stay what they are."""
        special = self._vocab.target.special
        pairs = zip(tokens, self._translated(tokens), strict=True)
        for known, group in groupby(pairs, lambda pair: pair[0] in special and pair[1] != UNKNOWN):
            run = list(group)
            if known:
                self.say([token for token, _ in run])
            else:
                self._text([token for token, _ in run])

    def _text(self, run: list[int]) -> None:
        text = self._target.decode(run, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self.ids += self._draft(text, add_special_tokens=False, verbose=False)["input_ids"]
        self._read += run
        self._ends += [*[_INSIDE] * (len(run) - 1), len(self.ids)]
        self._open = b""

    def _spell(self, data: bytes) -> None:
        """Add the longest pieces that make up the data; what begins a character may stay open."""
        while data:
            for length in range(len(data), 0, -1):
                piece = self._pieces.get(data[:length])
                if piece is not None:
                    self.ids.append(piece)
                    break
            else:
                if _is_half(data):
                    break
                length = 1  # the draft has nothing for it
            data = data[length:]
        self._open = data


def _is_half(data: bytes) -> bool:
    """Whether these bytes begin a character, and do not end it."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data) == ""
    except UnicodeDecodeError:
        return False
