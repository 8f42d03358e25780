"""Loading a model to where a placement says: in memory, or streamed through a ring for each pass."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from offspec.checkpoint.quantised.packs import checksums
from offspec.checkpoint.tensors import Weight, on_disk
from offspec.core.trace import OFF, Timeline
from offspec.model.attention import TreeContext
from offspec.model.cache import TreeCache
from offspec.model.cache_block import CacheBlock, HostBlock
from offspec.model.cache_windows import CacheWindows
from offspec.model.embedding import RowGather
from offspec.model.expert_parts import AnyExpertStore, attach
from offspec.model.experts import ExpertsBeside, set_row_counts
from offspec.model.feeder import LayerFeeder
from offspec.model.head import HeadBlock, StreamedHead
from offspec.model.hops import Hops, move_buffers
from offspec.model.positions import fix_frequencies
from offspec.model.quantize.kept import KeptRounding
from offspec.model.quantize.resident_layers import RoundedLayers
from offspec.model.row_counts import RowCounts
from offspec.model.row_independence import has_row_blocks, make_even, use_row_products
from offspec.model.runner import TreeModel
from offspec.model.sized import SizedModel
from offspec.model.unpacking import Scratch
from offspec.stream.device_experts import DeviceExpertStore
from offspec.stream.direct_reader import DirectReader, ReadShape
from offspec.stream.disk_stream import read_unit
from offspec.stream.expert_store import ExpertStore
from offspec.stream.read_tuning import choose_read_shape
from offspec_planners.placement import Placement, Tier

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
_CPU = torch.device("cpu")
_EXPERTS_AT_ONCE = 4  # reads under way: an expert is often smaller than what a disk wants to have to do


class LoadableModel(SizedModel):
    """A model that can be loaded: its weights in memory or streamed, and a cache to run it with."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, Weight],
        dtype: torch.dtype,
        device: torch.device,
        timeline: Timeline = OFF,
        more: Sequence[torch.device] = (),
        *,
        int8_cache: bool = False,
    ) -> None:
        """more: further GPUs that layers may be computed on; int8_cache: see `OpenedModel`."""
        super().__init__(folder, tensors, dtype, device, int8_cache=int8_cache)
        self.devices = (device, *more)
        self.timeline = timeline
        self._scratches: dict[torch.device, Scratch] = {}
        stored = [info for weight in tensors.values() for info in on_disk(weight)]
        stamps = {info.file: info.stamp for info in stored if info.stamp is not None}
        self._reader = DirectReader(*checksums(folder), stamps)
        self._feeder: LayerFeeder | RoundedLayers | None = None
        self.store: AnyExpertStore | None = None  # of experts that are read when they are asked for
        self._gather: RowGather | None = None
        self._tree_model: TreeModel | None = None
        self.rest_tensors: dict[str, torch.Tensor] = {}
        self._caches = Tier.DEVICE
        self.long_factors = False  # whether positions are rotated for texts beyond the original length

    @property
    def tree_model(self) -> TreeModel:
        assert self._tree_model is not None, "load the model first"
        return self._tree_model

    def load(
        self,
        placement: Placement,
        capacity: int,
        progress: Progress,
        chunk: int | None = None,
        *,
        unpacked: bool = False,
        row_counts: RowCounts | None = None,
        context: int | None = None,
        holds_rows: bool = False,
    ) -> None:
        """Read the rest and the layers that stay in memory, and start streaming the others.

        Args:
            placement: Where each layer and the head lie, and how many experts are kept that are read when
                they are asked for.
            capacity: Positions of the cache.
            progress: Called with bytes done and bytes in all.
            chunk: Rows that go through a layer together; None: all.
            unpacked: Unpack packed weights as they are loaded, where every layer stays. Default False.
            row_counts: Row counts that passes run at; None: those of `find_row_counts`. A draft may have any.
            context: Most positions of prompt and answer; None: the capacity.
            holds_rows: Keep the embedding in RAM instead of reading its rows. Default False.

        Raises:
            StreamError: A read failed.
            CapacityError: There is too little memory.
            CheckpointError: Weights are damaged. `close` the model after any of these.
        """
        self._reader.check_files(except_for=self.weight_files)
        blocks = self._head_blocks() if placement.head is not Tier.DEVICE else []
        for layer, (binder, dense) in enumerate(zip(self.layers, self.dense, strict=True)):
            on_cpu = placement.tiers[layer] is Tier.CPU
            binder.device = dense.device = _CPU if on_cpu else self.devices[placement.gpu_of(layer)]
        places = {self.device, *(binder.device for binder in self.layers)}
        if row_counts is None and has_row_blocks(_CPU, self.dtype):
            for part in (self.skeleton.layers, self.skeleton.model.get_output_embeddings()):
                use_row_products(part)
        if self.is_packed and not unpacked:
            for binder in (*self.layers, *self.dense, *self._rest):
                binder.by_panels = binder.device.type == "cpu" and self.uses_panels
            values = self._unpacked_in(self.dense if placement.by_need else self.layers)
            self._scratches = {device: Scratch(values, self.dtype, device) for device in places}
        store = self._expert_store(placement)
        self._feeder = feeder = LayerFeeder(
            self.layers if store is None else self.dense,
            [block.layout for block in blocks],
            placement,
            self._reader,
            self.device,
            self.timeline,
            self._scratches,
            store,
            self.experts.layers if store is not None else (),
        )
        if row_counts is None:
            row_counts = RowCounts()
            for device in places | ({_CPU} if placement.cpu_experts else set()):
                row_counts = row_counts.common(self.find_row_counts(device))
        if store is not None:
            mode = self.function_mode(row_counts, _CPU) or nullcontext()
            attach(self.experts, store, ExpertsBeside(_CPU, mode) if placement.cpu_experts else None)
        set_row_counts(self.skeleton.layers, row_counts)
        make_even(self.skeleton.layers)
        self._caches = placement.caches
        self._assemble(feeder, capacity, None, blocks, chunk, context, row_counts, holds_rows)
        feeder.load(progress)

    def _expert_store(self, placement: Placement) -> AnyExpertStore | None:
        """Experts that are read when they are asked for; None where they are parts of their layers."""
        if not placement.by_need:
            return None
        apart, units = self.device.type != "cpu", self.experts.units
        tried = choose_read_shape([binder.layout for binder in self.layers], self._reader)
        store = ExpertStore(
            [unit.layout for unit in units],
            placement.host_expert_slots if apart else placement.expert_slots,
            self._reader,
            groups=self.experts.groups,
            arrange=lambda unit, memory: units[unit].arrange(memory),
            shape=ReadShape(max(tried.depth, _EXPERTS_AT_ONCE), tried.block),
            pin=apart and not placement.cpu_experts,
            timeline=self.timeline,
        )
        self.store = store
        if apart and not placement.cpu_experts:
            arranged = [unit.arranged for unit in units]
            slots = placement.expert_slots
            self.store = DeviceExpertStore(store, arranged, slots, self.device, self.timeline)
        return self.store

    def load_rounded(
        self,
        bits: int,
        expand: bool,
        capacity: int,
        progress: Progress,
        calibration: Sequence[int],
        rest: dict[str, torch.Tensor] | None = None,
        chunk: int | None = None,
        context: int | None = None,
        kept: KeptRounding | None = None,
    ) -> None:
        """Read all layers and round their matrices; see `RoundedLayers`. The embedding is kept in RAM.

        Args:
            bits: 2, 3 or 4.
            expand: Keep the rounded values in the model's dtype.
            capacity: Positions of the cache.
            progress: Called with layers done and layers in all.
            calibration: Token ids to measure the layers' inputs on.
            rest: The rest of the same model, already loaded by another, to be shared; None: read it.
            chunk: Rows that go through a layer together; None: all.
            context: Most positions of prompt and answer; None: the capacity.
            kept: Where what was rounded is read, or else kept; None: nowhere.
        """
        layers = list(self.skeleton.layers)
        rounded = RoundedLayers(self.layers, layers, self._reader, bits, expand, progress, kept)
        self._assemble(rounded, capacity, rest, [], chunk, context, holds_rows=True)

        def round_all() -> None:
            chain = TreeContext.chain(len(calibration), self.device)
            with torch.no_grad():
                self.tree_model.hidden(torch.tensor(list(calibration), device=self.device), chain)
            self.tree_model.cache.rewind(0)

        if kept is None:
            round_all()
        elif kept.is_there() or not kept.make(round_all):
            rounded.load_kept(kept)

    def new_cache(self, capacity: int) -> TreeCache:
        """An empty cache that takes no memory yet."""
        layers = len(self.skeleton.rows.kept)
        if self._caches is Tier.DEVICE:
            return TreeCache(layers, capacity, self._cache_block(capacity), int8=self.int8_cache)
        home = HostBlock(self.cache_bytes(capacity), 5 * layers, pin=self.device.type != "cpu")
        windows = CacheWindows(self.window_bytes(capacity), self.device)
        return TreeCache(layers, capacity, home, int8=self.int8_cache, windows=windows)

    def _cache_block(self, capacity: int) -> CacheBlock:
        """Memory for the rows of all layers, where each is computed."""
        places = dict[torch.device, list[int]]()
        for layer, binder in enumerate(self.layers):
            places.setdefault(binder.device, []).append(layer)
        if len(places) == 1:  # of a cache that has more layers than the model, too
            every = self.cache_bytes(capacity), 5 * len(self.skeleton.rows.kept)
            return CacheBlock(dict.fromkeys(places, every))
        return CacheBlock(
            {place: (self.cache_bytes(capacity, of), 5 * len(of)) for place, of in places.items()}
        )

    def _assemble(
        self,
        feeder: LayerFeeder | RoundedLayers,
        capacity: int,
        rest: dict[str, torch.Tensor] | None,
        blocks: list[HeadBlock],
        chunk: int | None,
        context: int | None,
        row_counts: RowCounts | None = None,
        holds_rows: bool = False,
    ) -> None:
        self._feeder = feeder
        model: Any = self.skeleton.model
        self.long_factors = fix_frequencies(model, context or capacity)
        if rest is None:
            rest = {}
            for binder in self._rest[:1] if blocks else self._rest:
                rest |= binder.realise(read_unit(binder.layout, self._reader).tensor)
        self.rest_tensors = rest
        for binder in self._rest:
            binder.bind({name: tensor for name, tensor in rest.items() if name in binder.parameters})
        head, rows = None, self._rows
        if blocks:
            assert self._head is not None and isinstance(feeder, LayerFeeder)
            if self.skeleton.tied:
                rows = self._head.sources[0][0]
            output = model.get_output_embeddings()
            head = StreamedHead(output, blocks, self.dtype, self.device, feeder.head_block, self._lent)
        elif self.skeleton.tied:
            model.get_output_embeddings().weight = model.get_input_embeddings().weight
        if rows is not None:
            held = holds_rows and rows is self._rows  # not a tied head, which streams for want of room
            self._gather = RowGather(
                model.get_input_embeddings(), rows, self.dtype, self.device, self._reader, held=held
            )
        places, hops = [binder.device for binder in self.layers], None
        if set(places) != {self.device}:
            hops = Hops(places, self.device, self.function_mode(row_counts, _CPU))
        if self.device.type != "cpu":
            move_buffers(model, self.skeleton.layers, places, self.device)
        self._tree_model = TreeModel(
            self.skeleton,
            self.new_cache(capacity),
            enter=feeder.enter,
            leave=feeder.leave,
            head=head,
            chunk=chunk,
            row_counts=row_counts,
            mode=self.function_mode(row_counts, self.device),
            hops=hops,
        )
        store = self.store
        if store is not None:
            self._tree_model.stalled = lambda: store.read_stats.wait_seconds

    def _lent(self, values: int) -> torch.Tensor:
        """Memory for values that are gone before a module runs that takes some."""
        scratch = self._scratches.get(self.device)
        if scratch is None:
            return torch.empty(values, dtype=self.dtype, device=self.device)
        return scratch.lend(values)
