"""A forward for small, plain decoders whose weights are all in memory: what drafting spends its time in.

transformers runs a layer in some forty operations, each of them a microsecond's work and ten of overhead
when there are 16 rows. Here it is fifteen, over fused and prearranged weights (`weights`, `products`), with
the keys and values of all layers in one block. On a CUDA device a step is one graph (`cuda_graph`).

Letters: T rows of a pass, S rows they can look at, H hidden size, Q query heads, KV key heads,
D head size, R numbers of it that are rotated, N kinds of rotations, I inner size, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from offspec.core.events import Event, unheard
from offspec.model.attention import TreeContext
from offspec.model.fused.cache import LeanCache, LeanRows
from offspec.model.fused.cuda_graph import PADDING, GraphedSteps
from offspec.model.fused.joined_attention import JoinedAttention
from offspec.model.fused.shape import PlainShape, plain_shape
from offspec.model.fused.weights import FusedLayer, fuse_layers, layer_weights, norm_gain
from offspec.model.pass_parts import SequenceRows, chunks_of, joined
from offspec.model.positions import original_length
from offspec.model.quantize.resident_layers import RoundedLayers
from offspec.model.skeleton import Skeleton
from offspec_kernels.backend import choose_backend
from offspec_kernels.tree_attention import tree_attention

_CHUNK = 256  # rows of long prompts that go through the layers together


def lean_model(
    skeleton: Skeleton,
    capacity: int,
    device: torch.device,
    release: Callable[[int], None],
    packed: RoundedLayers | None = None,
    notify: Callable[[Event], None] = unheard,
) -> "LeanModel | None":
    """A lean model of a skeleton's weights; None if its shape is not plain or some are missing.

    Takes the layers over, after which the skeleton's own forward has none to run. Embedding, final norm and
    head are used where they are, and left as they are.

    Args:
        skeleton: With its weights bound.
        capacity: Rows of the cache.
        device: Where the weights are.
        release: Called with the index of each layer whose weights can go.
        packed: What is not bound, being rounded.
        notify: Takes a Notice where CUDA graphs cannot be made.
    """
    shape = plain_shape(skeleton)
    if shape is None:
        return None
    for index in range(len(skeleton.layers)):
        weights = layer_weights(skeleton, index, packed).values()
        if any(isinstance(weight, torch.Tensor) and weight.is_meta for weight in weights):
            return None
    with torch.no_grad():
        layers = fuse_layers(skeleton, shape, release, packed)
        return LeanModel(skeleton, shape, layers, capacity, device, notify=notify)


class LeanModel:
    """Hidden states and logits of token trees, with a cache; used as `TreeModel` is.

    between: called before each layer on a CPU, else before each chunk of a long prompt; it may raise to break
    the forward off. static: run steps at fixed shapes, as a CUDA graph needs; by default where there are
    graphs and kernels made for them. notify: takes a Notice where graphs cannot be made.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        shape: PlainShape,
        layers: list[FusedLayer],
        capacity: int,
        device: torch.device,
        static: bool | None = None,
        notify: Callable[[Event], None] = unheard,
    ) -> None:
        self.skeleton = skeleton
        self._shape, self._layers, self._device = shape, layers, device
        self._dtype: torch.dtype = skeleton.model.dtype
        last: torch.Tensor = skeleton.decoder.norm.weight
        self._last = norm_gain(last, shape)
        self._least = torch.tensor((len(last) * shape.eps) ** 0.5, device=device)
        # The kernels read from the device what changes between replays; torch's attention would not.
        use_static = (
            device.type == "cuda" and choose_backend(device) == "triton" if static is None else static
        )
        self._steps = GraphedSteps(self.layers_over, device, notify) if use_static else None
        room = capacity + (PADDING if use_static else 0)
        self._gathers = hasattr(skeleton.model.get_input_embeddings(), "takes_ids_of_the_host")
        self.between: Callable[[], None] | None = None
        self.cache = LeanCache(len(layers), shape.kv_heads, room, shape.size, self._dtype, device)
        self._cos, self._sin = self._rotations(room)

    def _rotations(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [count, N, R] of every position, as the family makes them.

        The sine's first half is negated: x turned is then x cos + (x rolled by R / 2) sin.
        """
        like = torch.empty(0, dtype=self._dtype, device=self._device)
        positions = torch.arange(count, device=self._device)[None]
        embedding, kinds = self.skeleton.decoder.rotary_emb, self._shape.rotation_kinds
        # Where frequencies go by the longest position of a call, no position within the original length is
        # to have those of positions beyond it.
        parts = positions.split(original_length(embedding) or count, dim=1)
        cos, sin = list[torch.Tensor](), list[torch.Tensor]()
        for kind in kinds:
            found = [embedding(like, part, *([] if kind is None else [kind])) for part in parts]
            for kept, of_parts in zip((cos, sin), zip(*found, strict=True), strict=True):
                kept.append(torch.cat(of_parts, dim=1)[0])
        turn = torch.stack(cos, dim=1), torch.stack(sin, dim=1)
        turn[1][..., : self._shape.rotated // 2].neg_()
        return turn

    @torch.no_grad()
    def hidden(self, tokens: torch.Tensor, context: TreeContext) -> torch.Tensor:
        """Final hidden states [T, H] of tokens [T]; their keys and values are appended to the cache."""
        return self.hidden_of([SequenceRows(tokens, context, self.cache)])

    @torch.no_grad()
    def hidden_of(self, sequences: Sequence[SequenceRows]) -> torch.Tensor:
        """Final hidden states [T, H] of several sequences, T in all, one behind the other.

        Keys and values are appended to each sequence's own cache, a `LeanCache`.
        """
        for rows in sequences:
            self._make_room(rows.cache, len(rows.tokens))
        together = chunks_of([len(rows.tokens) for rows in sequences], _CHUNK, alone=self._steps is not None)
        chunks = [self._chunk([(sequences[index], part) for index, part in pieces]) for pieces in together]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    def _make_room(self, cache: LeanCache, count: int) -> None:
        if cache.reserve(cache.filled + count + (PADDING if self._steps else 0)) and self._steps is not None:
            self._steps.forget(cache)
        if cache.capacity > len(self._cos):
            self._cos, self._sin = self._rotations(cache.capacity)

    def _chunk(self, pieces: Sequence[tuple[SequenceRows, slice]]) -> torch.Tensor:
        """Final hidden states of some rows of each of these sequences."""
        if self.between is not None and self._device.type != "cpu":
            self.between()
        tokens, positions, rows, before = list[torch.Tensor](), list[torch.Tensor](), list[LeanRows](), 0
        for sequence, part in pieces:
            cache, context, count = sequence.cache, sequence.context, part.stop - part.start
            start, end = cache.filled, cache.filled + count
            first, last = start - context.prefix, end - context.prefix
            of_host = context.tokens if self._gathers else None
            tokens.append((sequence.tokens if of_host is None else of_host)[part])
            positions.append(context.position[first:last])
            mask = context.tree_mask(first, last)
            rows.append(LeanRows(slice(before, before + count), cache, mask, slice(start, end), end))
            before += count
        position = joined(positions)
        # Summed up in float32: no slower, since norms want it so, and nearer to the truth in bfloat16.
        hidden = self.skeleton.model.get_input_embeddings()(joined(tokens)).to(torch.float32, copy=True)
        turn = self._cos[position], self._sin[position]
        if self._steps is not None and self._steps.takes(before):
            out = self._steps.run(hidden, turn, rows[0].tree_mask, rows[0].end - before, rows[0].cache)
        else:
            out = self.layers_over(hidden, turn, rows)
        for some in rows:
            some.cache.filled = some.end
        return out

    def layers_over(
        self, hidden: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], rows: Sequence[LeanRows]
    ) -> torch.Tensor:
        """Embeddings [T, H] float32, overwritten, to final hidden states [T, H].

        turn: cos and sin [T, N, R]; rows: the T rows by the sequences that they are of.
        """
        shape, count = self._shape, len(hidden)
        queries, turning = shape.heads, shape.heads + shape.kv_heads
        turns = list(zip(*(table.split(1, dim=1) for table in turn), strict=True))
        together = JoinedAttention(rows, shape) if JoinedAttention.pays(rows, shape, self._device) else None
        for index, layer in enumerate(self._layers):
            if self.between is not None and self._device.type == "cpu":
                self.between()
            heads = layer.qkv(self._normed(hidden, layer.before)).view(count, -1, shape.size)
            turned = heads[:, :turning]  # [T, Q + KV, D]; the values behind them do not turn
            if layer.q_norm is not None and layer.k_norm is not None:
                for part, norm in ((turned[:, :queries], layer.q_norm), (turned[:, queries:], layer.k_norm)):
                    part.copy_(F.rms_norm(part, norm.shape, norm, shape.eps))
            part, (cos, sin) = turned[..., : shape.rotated], turns[shape.rotations[index]]
            torch.addcmul(part * cos, part.roll(shape.rotated // 2, -1), sin, out=part)
            out = layer.out(self._attended(index, heads, rows, together))
            hidden += out if layer.after is None else self._scaled(out.float(), layer.after)
            gate, up = layer.gate_up(self._normed(hidden, layer.between)).chunk(2, dim=1)
            out = layer.down(shape.activation(gate).mul_(up))
            hidden += out if layer.last is None else self._scaled(out.float(), layer.last)
        return self._normed(hidden, self._last)

    def _normed(self, hidden: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        """The RMS norm of hidden [T, H] float32, in the model's dtype."""
        return self._scaled(hidden, gain).to(self._dtype)

    def _scaled(self, hidden: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        """The same in float32."""
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True).hypot_(self._least)
        return torch.div(hidden, length).mul_(gain)

    def _attended(
        self,
        index: int,
        heads: torch.Tensor,
        rows: Sequence[LeanRows],
        together: JoinedAttention | None,
    ) -> torch.Tensor:
        """Heads [T, Q + 2 KV, D] of a layer to [T, Q D]; keys and values join the caches."""
        shape, queries, pairs = self._shape, self._shape.heads, self._shape.kv_heads
        owns = [heads if len(rows) == 1 else heads[some.which] for some in rows]
        for own, some in zip(owns, rows, strict=True):
            some.cache.layers[index][:, some.to] = own[:, queries:].transpose(0, 1)
        if together is not None:
            return together.of(index, heads)
        found = list[torch.Tensor]()
        for own, some in zip(owns, rows, strict=True):
            seen = some.cache.layers[index][:, : some.end]
            query = own[:, :queries]
            out = torch.empty_like(query)
            tree_attention(
                query.transpose(0, 1)[None],
                seen[None, :pairs],
                seen[None, pairs:],
                some.tree_mask,
                scale=shape.scale,
                window=shape.windows[index],
                softcap=shape.score_cap,
                out=out.transpose(0, 1)[None],
                exact=False,
            )
            found.append(out.flatten(1))
        return joined(found)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] to [n, V]."""
        out: torch.Tensor = self.skeleton.model.get_output_embeddings()(hidden)
        cap = self._shape.logit_cap
        return out if cap is None else out.div_(cap).tanh_().mul_(cap)

    def close(self) -> None:
        """Drop the weights and the cache."""
        self._layers = []
        if self._steps is not None:
            self._steps.forget(self.cache)
        self.cache = LeanCache(0, 0, 0, 0, self._dtype, self._device)
