"""Fast forward for small decoders of a common shape with all weights in memory, used for drafting.

transformers runs a layer in some forty operations, each of which, with 16 rows, takes a microsecond of work
and ten of overhead. Here a layer takes fifteen operations on fused and prearranged weights (`weights`,
`linear`), with the KV cache of all layers in one block. On a CUDA device a step is one graph (`cuda_graph`).

Letters: T rows of a pass, S rows that they can attend to, H hidden size, Q query heads, KV key heads,
D head size, R numbers of it that are rotated, N kinds of rotations, I inner size, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from offspec.core.events import Event, ignore_event
from offspec.model.attention import TreeContext
from offspec.model.fused.batched_attention import BatchedAttention
from offspec.model.fused.cache import FusedCache, FusedRows
from offspec.model.fused.cuda_graph import PADDING, CudaGraphRunner
from offspec.model.fused.shape import DecoderShape, decoder_shape
from offspec.model.fused.weights import FusedLayer, fuse_layers, layer_weights, norm_gain
from offspec.model.pass_parts import SequenceRows, joined, split_chunks
from offspec.model.positions import original_length
from offspec.model.quantize.quantized_layers import QuantizedLayers
from offspec.model.skeleton import Skeleton
from offspec_kernels.backend import choose_backend
from offspec_kernels.tree_attention import tree_attention

_CHUNK = 256  # rows of long prompts that go through the layers together


def build_fused_model(
    skeleton: Skeleton,
    capacity: int,
    device: torch.device,
    release: Callable[[int], None],
    packed: QuantizedLayers | None = None,
    notify: Callable[[Event], None] = ignore_event,
) -> "FusedModel | None":
    """Build a fused model from a skeleton's weights, or return None.

    The result is None if the model's shape is not supported or weights are missing. The fused model takes
    over the layers, so that the skeleton's own forward no longer runs. Embedding, final norm and head are
    shared and not changed.

    Args:
        skeleton: Skeleton with bound weights.
        capacity: Rows of the cache.
        device: Device of the weights.
        release: Called with the index of each layer whose weights can be freed.
        packed: Quantized weights, which are not bound.
        notify: Receives a Notice if CUDA graphs cannot be captured.
    """
    shape = decoder_shape(skeleton)
    if shape is None:
        return None
    for index in range(len(skeleton.layers)):
        weights = layer_weights(skeleton, index, packed).values()
        if any(isinstance(weight, torch.Tensor) and weight.is_meta for weight in weights):
            return None
    with torch.no_grad():
        layers = fuse_layers(skeleton, shape, release, packed)
        return FusedModel(skeleton, shape, layers, capacity, device, notify=notify)


class FusedModel:
    """Model for hidden states and logits of token trees, with a cache and the interface of `TreeModel`.

    `check_cancelled` is called before each layer on a CPU, and before each chunk of a long prompt on a GPU.
    It may raise to cancel the forward.

    Args:
        skeleton: Skeleton of the model.
        shape: Shape of the model.
        layers: Fused layers.
        capacity: Rows of the cache.
        device: Device of the weights.
        static: Whether steps run at fixed shapes, as CUDA graphs need. Default: on GPUs with Triton kernels.
        notify: Receives a Notice if CUDA graphs cannot be captured.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        shape: DecoderShape,
        layers: list[FusedLayer],
        capacity: int,
        device: torch.device,
        static: bool | None = None,
        notify: Callable[[Event], None] = ignore_event,
    ) -> None:
        self.skeleton = skeleton
        self._shape, self._layers, self._device = shape, layers, device
        self._dtype: torch.dtype = skeleton.model.dtype
        last: torch.Tensor = skeleton.decoder.norm.weight
        self._last = norm_gain(last, shape)
        self._least = torch.tensor((len(last) * shape.eps) ** 0.5, device=device)
        # The Triton kernels read values that change between replays from the device; torch's attention
        # cannot.
        use_static = (
            device.type == "cuda" and choose_backend(device) == "triton" if static is None else static
        )
        self._steps = CudaGraphRunner(self.layers_over, device, notify) if use_static else None
        room = capacity + (PADDING if use_static else 0)
        self._gathers = hasattr(skeleton.model.get_input_embeddings(), "accepts_cpu_ids")
        self.check_cancelled: Callable[[], None] | None = None
        self.cache = FusedCache(len(layers), shape.kv_heads, room, shape.head_dim, self._dtype, device)
        self._cos, self._sin = self._rotations(room)

    def _rotations(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [count, N, R] of every position from the model's own rotary embedding.

        The first half of sin is negated, so that the rotation of x is x cos + (x rolled by R / 2) sin.
        """
        like = torch.empty(0, dtype=self._dtype, device=self._device)
        positions = torch.arange(count, device=self._device)[None]
        embedding, kinds = self.skeleton.decoder.rotary_emb, self._shape.rotation_kinds
        # If the frequencies depend on the longest position of a call, positions within the original length
        # are computed separately from those beyond it.
        parts = positions.split(original_length(embedding) or count, dim=1)
        cos, sin = list[torch.Tensor](), list[torch.Tensor]()
        for kind in kinds:
            found = [embedding(like, part, *([] if kind is None else [kind])) for part in parts]
            for kept, of_parts in zip((cos, sin), zip(*found, strict=True), strict=True):
                kept.append(torch.cat(of_parts, dim=1)[0])
        rotation = torch.stack(cos, dim=1), torch.stack(sin, dim=1)
        rotation[1][..., : self._shape.rotary_dim // 2].neg_()
        return rotation

    @torch.no_grad()
    def hidden(self, tokens: torch.Tensor, context: TreeContext) -> torch.Tensor:
        """Return final hidden states [T, H] of tokens [T], appending keys and values to the cache."""
        return self.hidden_of([SequenceRows(tokens, context, self.cache)])

    @torch.no_grad()
    def hidden_of(self, sequences: Sequence[SequenceRows]) -> torch.Tensor:
        """Return final hidden states [T, H] of several consecutive sequences with T total rows.

        Keys and values are appended to each sequence's own cache, a `FusedCache`.
        """
        for rows in sequences:
            self._make_room(rows.cache, len(rows.tokens))
        together = split_chunks(
            [len(rows.tokens) for rows in sequences], _CHUNK, alone=self._steps is not None
        )
        chunks = [self._chunk([(sequences[index], part) for index, part in pieces]) for pieces in together]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    def _make_room(self, cache: FusedCache, count: int) -> None:
        if cache.reserve(cache.filled + count + (PADDING if self._steps else 0)) and self._steps is not None:
            self._steps.forget(cache)
        if cache.capacity > len(self._cos):
            self._cos, self._sin = self._rotations(cache.capacity)

    def _chunk(self, pieces: Sequence[tuple[SequenceRows, slice]]) -> torch.Tensor:
        """Return final hidden states of some rows of each sequence."""
        if self.check_cancelled is not None and self._device.type != "cpu":
            self.check_cancelled()
        tokens, positions, rows, before = list[torch.Tensor](), list[torch.Tensor](), list[FusedRows](), 0
        for sequence, part in pieces:
            cache, context, count = sequence.cache, sequence.context, part.stop - part.start
            start, end = cache.filled, cache.filled + count
            first, last = start - context.prefix, end - context.prefix
            of_host = context.tokens if self._gathers else None
            tokens.append((sequence.tokens if of_host is None else of_host)[part])
            positions.append(context.position[first:last])
            mask = context.tree_mask(first, last)
            rows.append(FusedRows(slice(before, before + count), cache, mask, slice(start, end), end))
            before += count
        position = joined(positions)
        # The residual stream is float32, which norms need anyway, and more accurate than bfloat16.
        hidden = self.skeleton.model.get_input_embeddings()(joined(tokens)).to(torch.float32, copy=True)
        rotation = self._cos[position], self._sin[position]
        if self._steps is not None and self._steps.can_run(before):
            out = self._steps.run(hidden, rotation, rows[0].tree_mask, rows[0].end - before, rows[0].cache)
        else:
            out = self.layers_over(hidden, rotation, rows)
        for some in rows:
            some.cache.filled = some.end
        return out

    def layers_over(
        self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], rows: Sequence[FusedRows]
    ) -> torch.Tensor:
        """Return the final hidden states [T, H] of embeddings.

        Args:
            hidden: [T, H] float32, embeddings, which are overwritten.
            rotation: cos and sin, [T, N, R] each.
            rows: The T rows by sequence.
        """
        shape, count = self._shape, len(hidden)
        queries, rotating = shape.heads, shape.heads + shape.kv_heads
        rotations = list(zip(*(table.split(1, dim=1) for table in rotation), strict=True))
        together = (
            BatchedAttention(rows, shape) if BatchedAttention.is_faster(rows, shape, self._device) else None
        )
        for index, layer in enumerate(self._layers):
            if self.check_cancelled is not None and self._device.type == "cpu":
                self.check_cancelled()
            heads = layer.qkv(self._normed(hidden, layer.input_norm)).view(count, -1, shape.head_dim)
            rotated = heads[:, :rotating]  # [T, Q + KV, D]; the values after them are not rotated
            if layer.q_norm is not None and layer.k_norm is not None:
                queries_and_keys = rotated[:, :queries], rotated[:, queries:]
                for part, norm in zip(queries_and_keys, (layer.q_norm, layer.k_norm), strict=True):
                    part.copy_(F.rms_norm(part, norm.shape, norm, shape.eps))
            part, (cos, sin) = rotated[..., : shape.rotary_dim], rotations[shape.rotations[index]]
            torch.addcmul(part * cos, part.roll(shape.rotary_dim // 2, -1), sin, out=part)
            out = layer.out(self._attended(index, heads, rows, together))
            hidden += (
                out
                if layer.post_attention_norm is None
                else self._scaled(out.float(), layer.post_attention_norm)
            )
            gate, up = layer.gate_up(self._normed(hidden, layer.mlp_norm)).chunk(2, dim=1)
            out = layer.down(shape.activation(gate).mul_(up))
            hidden += out if layer.post_mlp_norm is None else self._scaled(out.float(), layer.post_mlp_norm)
        return self._normed(hidden, self._last)

    def _normed(self, hidden: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        """Return the RMS norm of hidden states [T, H] float32, in the model's dtype."""
        return self._scaled(hidden, gain).to(self._dtype)

    def _scaled(self, hidden: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        """Return the RMS norm of hidden states [T, H] in float32."""
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True).hypot_(self._least)
        return torch.div(hidden, length).mul_(gain)

    def _attended(
        self,
        index: int,
        heads: torch.Tensor,
        rows: Sequence[FusedRows],
        together: BatchedAttention | None,
    ) -> torch.Tensor:
        """Append keys and values of heads [T, Q + 2 KV, D] to the caches and attend; return [T, Q D]."""
        shape, queries, pairs = self._shape, self._shape.heads, self._shape.kv_heads
        owns = [heads if len(rows) == 1 else heads[some.which] for some in rows]
        for own, some in zip(owns, rows, strict=True):
            some.cache.layers[index][:, some.to] = own[:, queries:].transpose(0, 1)
        if together is not None:
            return together.attend(index, heads)
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
                softcap=shape.attn_softcap,
                out=out.transpose(0, 1)[None],
                exact=False,
            )
            found.append(out.flatten(1))
        return joined(found)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, V] of hidden states [n, H]."""
        out: torch.Tensor = self.skeleton.model.get_output_embeddings()(hidden)
        cap = self._shape.logit_softcap
        return out if cap is None else out.div_(cap).tanh_().mul_(cap)

    def close(self) -> None:
        """Drop the weights and the cache."""
        self._layers = []
        if self._steps is not None:
            self._steps.forget(self.cache)
        self.cache = FusedCache(0, 0, 0, 0, self._dtype, self._device)
