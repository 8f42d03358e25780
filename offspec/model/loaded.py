"""A model from a checkpoint: opened and measured first, loaded once it is known where everything goes."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offspec.checkpoint.quantised.packs import checksums
from offspec.checkpoint.tensors import Weight
from offspec.core.errors import UnsupportedModelError
from offspec.core.trace import OFF, Timeline
from offspec.model.attention import TreeContext
from offspec.model.binding import Binder
from offspec.model.cache import TreeCache
from offspec.model.embedding import RowGather
from offspec.model.feeder import LayerFeeder
from offspec.model.fused.forward import LeanModel, lean_model
from offspec.model.head import HeadBlock, StreamedHead, can_be_cut, head_blocks
from offspec.model.quantize.resident_layers import RoundedLayers
from offspec.model.runner import TreeModel
from offspec.model.skeleton import build_skeleton
from offspec.model.unpacking import Scratch, warm_up
from offspec.model.weights import WeightRecipe, map_weights
from offspec.stream.direct_reader import DirectReader
from offspec.stream.disk_stream import read_unit
from offspec.stream.ring import RingStats
from offspec_kernels.tree_attention import scratch_bytes as tree_attention_scratch
from offspec_planners.placement import Placement, Tier

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
_HEAD_VALUES = 4 << 20  # of a packed head, in a block that streams, even where layers unpack fewer at once


class LoadedModel:
    """The skeleton of a checkpoint with its weights in four parts: layers, embedding, head, and the rest.

    Opening reads only headers, so the sizes below are known before a byte of weights is. An embedding stays
    on disk, and only the rows in use are read, unless it is the very matrix of a head that stays.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, Weight],
        dtype: torch.dtype,
        device: torch.device,
        timeline: Timeline = OFF,
    ) -> None:
        self.skeleton = build_skeleton(folder, dtype)
        self.device, self.dtype, self.timeline = device, dtype, timeline
        model = self.skeleton.model
        layers: list[list[WeightRecipe]] = [[] for _ in self.skeleton.layers]
        rest: list[WeightRecipe] = []
        self._rows: Weight | None = None
        self._head: WeightRecipe | None = None
        for recipe in map_weights(model, tensors):
            index = self.skeleton.layer_of(recipe.names[0])
            if index is not None:
                layers[index].append(recipe)
            elif recipe.converter is None and recipe.names == (self.skeleton.head,):
                self._head = recipe
            elif self._stays_on_disk(recipe):
                self._rows = recipe.sources[0][0]
            elif not (self.skeleton.tied and recipe.names[0] == self._head_alias()):
                rest.append(recipe)
            elif recipe.is_packed:
                raise UnsupportedModelError(
                    f"config.json ties the head to the embedding, and {recipe.sources[0][0].file.name} has a "
                    "quantised head of its own: set tie_word_embeddings to false in config.json"
                )
        prefix = self.skeleton.layers_prefix
        self.layers = [
            Binder(model, f"layer {i}", recipes, device, f"{prefix}.{i}.") for i, recipes in enumerate(layers)
        ]
        self._rest = [Binder(model, "the rest", rest, device)]
        if self._head is not None:
            self._rest.append(Binder(model, "the head", [self._head], device))
        self._scratch: Scratch | None = None
        self._reader = DirectReader(*checksums(folder))
        self._feeder: LayerFeeder | RoundedLayers | None = None
        self._gather: RowGather | None = None
        self._tree_model: TreeModel | None = None
        self.rest_tensors: dict[str, torch.Tensor] = {}

    def _stays_on_disk(self, recipe: WeightRecipe) -> bool:
        """Whether it is an embedding whose rows can be read alone."""
        if recipe.converter is not None or recipe.names != (self.skeleton.embedding,):
            return False
        return can_be_cut(recipe.sources[0][0])

    def _head_alias(self) -> str:
        """What the head is called in a checkpoint that stores it although it is tied."""
        names: dict[int, str] = {id(module): name for name, module in self.skeleton.model.named_modules()}
        return names[id(self.skeleton.model.get_output_embeddings())] + ".weight"

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes that each layer takes in a slot, which are also those read for it."""
        return [binder.layout.nbytes for binder in self.layers]

    @property
    def layer_elements(self) -> list[int]:
        """Weights in each layer."""
        return [sum(p.numel() for p in layer.parameters()) for layer in self.skeleton.layers]

    @property
    def layer_extra(self) -> list[int]:
        """Bytes that each layer takes besides, where its tensors must be converted."""
        return [binder.copied_bytes for binder in self.layers]

    @property
    def held_bytes(self) -> list[int]:
        """Bytes that each layer takes where all of it is values in the model's dtype."""
        return [binder.kept_bytes for binder in self.layers]

    @property
    def held_extra(self) -> list[int]:
        """Bytes that each layer takes besides while it is made into such values."""
        return [binder.layout.nbytes + binder.fused_elements * self.dtype.itemsize for binder in self.layers]

    @property
    def unpacked(self) -> tuple[int, int]:
        """Values of all layers that every pass unpacks, and the bytes that those are stored in."""
        values = sum(binder.unpacked_elements for binder in self.layers)
        return values, sum(binder.unpacked_bytes for binder in self.layers)

    @property
    def is_packed(self) -> bool:
        """Whether layers hold weights that are unpacked as they run."""
        return any(binder.is_packed for binder in self.layers)

    @property
    def rest_bytes(self) -> int:
        """Bytes of everything that is no layer and stays: head, final norm, positions."""
        return sum(binder.kept_bytes for binder in self._rest)

    @property
    def head_bytes(self) -> int:
        """Bytes of the head, and of `rest_bytes` therefore, that may stream instead; 0 where it cannot."""
        if self._head is None or not can_be_cut(self._head.sources[0][0]):
            return 0
        return self._rest[1].kept_bytes

    @property
    def head_stored_bytes(self) -> int:
        """Bytes that the head takes on disk, which are those of a pass in which it streams."""
        if self._head is None:  # it is the embedding
            weight: torch.Tensor = self.skeleton.model.get_output_embeddings().weight
            return weight.numel() * self.dtype.itemsize
        return self._head.sources[0][0].nbytes

    @property
    def head_block_bytes(self) -> int:
        """Bytes of the largest unit of a head that streams."""
        return max((block.layout.nbytes for block in self._head_blocks()), default=0)

    def _head_blocks(self) -> list[HeadBlock]:
        if self._head is None or not self.head_bytes:
            return []
        return head_blocks(self._head.sources[0][0], max(self.layer_bytes), self._unpacked_values)

    @property
    def _unpacked_values(self) -> int:
        """Most values of packed weights that are there at once while layers run, or a head's blocks."""
        most = max(binder.scratch_elements for binder in self.layers)
        if self._head is not None and self._head.is_packed:
            most = max(most, min(_HEAD_VALUES, math.prod(self._head.sources[0][0].shape)))
        return most

    @property
    def _fused_values(self) -> int:
        return max(binder.fused_elements for binder in self.layers)

    @property
    def weight_files(self) -> list[Path]:
        """Files that layers are read from."""
        return sorted({extent.file for binder in self.layers for extent in binder.layout.extents})

    def warm_up(self) -> None:
        """Have the code compiled that packed weights need; the first time it takes some seconds."""
        recipes = [recipe for binder in (*self.layers, *self._rest) for recipe in binder.recipes]
        weights = [weight for recipe in recipes for weight, _ in recipe.sources]
        warm_up(weights if self._rows is None else [*weights, self._rows], self.dtype, self.device)

    def cache_bytes(self, capacity: int) -> int:
        return capacity * self.skeleton.kv_bytes_per_token()

    def scratch_bytes(self, rows: int, length: int, chunk: int) -> int:
        """Most bytes of activations in a pass of `rows` rows over a cache of `length` positions."""
        config, item = self.skeleton.config, self.dtype.itemsize
        hidden: int = config.hidden_size
        inner = max((max(shape) for shape in self._matrix_shapes()), default=hidden)
        chunk = min(rows, chunk)
        heads: int = config.num_attention_heads
        groups = heads // (getattr(config, "num_key_value_heads", None) or heads)
        attention = tree_attention_scratch(rows, length + rows, heads, groups, self.dtype)
        largest = max((a * b for a, b in self._matrix_shapes()), default=0)  # reordered by the GEMM
        return (
            rows * hidden * item * 4
            + chunk * (3 * inner * item + 4 * hidden * 4)
            + attention
            + (largest + self._unpacked_values + self._fused_values) * item
        )

    def _matrix_shapes(self) -> list[tuple[int, int]]:
        parameters = self.skeleton.layers[0].parameters()
        return [(p.shape[-2], p.shape[-1]) for p in parameters if p.dim() >= 2]

    @property
    def tree_model(self) -> TreeModel:
        assert self._tree_model is not None, "load the model first"
        return self._tree_model

    @property
    def is_loaded(self) -> bool:
        """Whether it holds weights."""
        return self._feeder is not None

    @property
    def resident_layers(self) -> tuple[int, ...]:
        """Layers that have their weights between passes, too."""
        return self._feeder.resident if self._feeder else ()

    @property
    def bytes_streamed(self) -> int:
        return self._feeder.bytes_streamed if self._feeder else 0

    @property
    def ring_stats(self) -> RingStats:
        """Counters of the ring that feeds the layers."""
        return self._feeder.stats if self._feeder else RingStats()

    @property
    def buffered_files(self) -> set[Path]:
        """Files whose file system refuses O_DIRECT."""
        return self._reader.buffered

    def load(
        self,
        placement: Placement,
        capacity: int,
        progress: Progress,
        chunk: int | None = None,
        *,
        unpacked: bool = False,
    ) -> None:
        """Read the rest and the layers that stay in memory, and start streaming the others.

        capacity: positions of the cache; chunk: rows that go through a layer together; unpacked: packed
        weights are unpacked as they are loaded, where every layer stays. Raises StreamError, CapacityError,
        CheckpointError for damaged weights; `close` afterwards.
        """
        self._reader.check_files(except_for=self.weight_files)
        blocks = self._head_blocks() if placement.head is not Tier.DEVICE else []
        if self.is_packed and not unpacked:
            self._scratch = Scratch(self._unpacked_values, self.dtype, self.device)
        feeder = LayerFeeder(
            self.layers,
            [block.layout for block in blocks],
            placement,
            self._reader,
            self.device,
            self.timeline,
            self._scratch,
        )
        self._assemble(feeder, capacity, None, blocks, chunk)
        feeder.load(progress)

    def load_rounded(
        self,
        bits: int,
        expand: bool,
        capacity: int,
        progress: Progress,
        calibration: Sequence[int],
        rest: dict[str, torch.Tensor] | None = None,
        chunk: int | None = None,
    ) -> None:
        """Read all layers and round their matrices to `bits`; see `RoundedLayers`. Progress is in layers.

        calibration: token ids to measure the layers' inputs on. rest: the rest of the same model, already
        loaded by another, to be shared.
        """
        layers = list(self.skeleton.layers)
        self._assemble(
            RoundedLayers(self.layers, layers, self._reader, bits, expand, progress),
            capacity,
            rest,
            (),
            chunk,
        )
        context = TreeContext.chain(len(calibration), self.device)
        with torch.no_grad():
            self.tree_model.hidden(torch.tensor(list(calibration), device=self.device), context)
        self.tree_model.cache.rewind(0)

    def lean(self, capacity: int) -> LeanModel | None:
        """A faster model that takes the place of `tree_model`; None where there is none for this one.

        Only for a model whose layers are all in memory; they are taken over. capacity: of its cache.
        """
        model = lean_model(self.skeleton, capacity, self.device, lambda index: self.layers[index].unbind())
        if model is not None:
            self.tree_model.cache = TreeCache(
                1, 0
            )  # the old one's memory goes, whoever still holds the model
            self._tree_model = None
        return model

    def _assemble(
        self,
        feeder: LayerFeeder | RoundedLayers,
        capacity: int,
        rest: dict[str, torch.Tensor] | None,
        blocks: Sequence[HeadBlock],
        chunk: int | None = None,
    ) -> None:
        self._feeder = feeder
        model: Any = self.skeleton.model
        self.rest_tensors = self._read_rest(without_head=bool(blocks)) if rest is None else rest
        for binder in self._rest:
            binder.bind({name: tensor for name, tensor in self.rest_tensors.items() if binder.has(name)})
        head, rows = None, self._rows
        if blocks:
            assert self._head is not None and isinstance(feeder, LayerFeeder)
            if self.skeleton.tied:
                rows = self._head.sources[0][0]
            head = StreamedHead(
                model.get_output_embeddings(),
                list(blocks),
                self.dtype,
                self.device,
                feeder.head_block,
                self._lent,
            )
        elif self.skeleton.tied:
            model.get_output_embeddings().weight = model.get_input_embeddings().weight
        if rows is not None:
            self._gather = RowGather(
                model.get_input_embeddings(), rows, self.dtype, self.device, self._reader
            )
        if self.device.type != "cpu":
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = buffer.to(self.device)
        cache = TreeCache(len(self.layers), capacity)
        self._tree_model = TreeModel(
            self.skeleton, cache, enter=feeder.enter, leave=feeder.leave, head=head, chunk=chunk
        )

    def _lent(self, values: int) -> torch.Tensor:
        """Memory for values that are gone before a module runs that takes some."""
        if self._scratch is None:
            return torch.empty(values, dtype=self.dtype, device=self.device)
        mark = self._scratch.taken
        memory = self._scratch.take(values)
        self._scratch.taken = mark
        return memory

    def _read_rest(self, *, without_head: bool) -> dict[str, torch.Tensor]:
        """Everything that is no layer and stays, by parameter name."""
        tensors: dict[str, torch.Tensor] = {}
        for binder in self._rest[:1] if without_head else self._rest:
            tensors |= binder.realise(read_unit(binder.layout, self._reader).tensor)
        return tensors

    def recover(self) -> None:
        """Make the model usable again after a pass was broken off."""
        if self._feeder is not None:
            self._feeder.recover()
        if self._tree_model is not None:
            self._tree_model.cache.rewind(self._tree_model.cache.length)

    def close(self) -> None:
        """Stop reading, close files, drop the weights. May be called twice."""
        if self._feeder is not None:
            self._feeder.close()
        if self._gather is not None:
            self._gather.close()
        for binder in self._rest:
            binder.unbind()
        self._reader.close()
        self.rest_tensors = {}
        if self._tree_model is not None:
            self._tree_model.cache = TreeCache(0, 0)  # the skeleton's layers still refer to the model
        self._feeder = self._gather = self._tree_model = self._scratch = None
