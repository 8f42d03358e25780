"""Loading of a model according to a placement: in memory, or streamed through a ring buffer in each pass."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from offspec.checkpoint.quantized.packs import checksums
from offspec.checkpoint.tensors import Weight, stored_tensors
from offspec.core.trace import OFF, Timeline
from offspec.model.attention import TreeContext
from offspec.model.cache import TreeCache
from offspec.model.cache_block import CacheBlock, HostBlock
from offspec.model.cache_offload import CacheOffload
from offspec.model.device_transfers import DeviceTransfers, move_buffers
from offspec.model.embedding import StreamedEmbedding
from offspec.model.experts import ExpertDevice, set_row_counts
from offspec.model.feeder import LayerFeeder
from offspec.model.head import HeadBlock, StreamedHead
from offspec.model.positions import select_rope_factors
from offspec.model.quantize.draft_cache import QuantizedDraftCache
from offspec.model.quantize.quantized_layers import QuantizedLayers
from offspec.model.routed_experts import AnyExpertStore, attach_expert_store
from offspec.model.row_counts import RowCounts
from offspec.model.row_independence import has_row_blocks, make_activations_row_independent, use_row_products
from offspec.model.runner import TreeModel
from offspec.model.sized import SizedModel
from offspec.model.unpacking import Scratch
from offspec.stream.device_expert_store import DeviceExpertStore
from offspec.stream.direct_reader import DirectReader, ReadShape
from offspec.stream.disk_stream import read_unit
from offspec.stream.expert_store import ExpertStore
from offspec.stream.read_tuning import choose_read_shape
from offspec_planners.placement import Placement, Tier

Progress = Callable[[int, int], None]  # (bytes done, total bytes)
_CPU = torch.device("cpu")
_EXPERTS_AT_ONCE = 4  # queue depth: single experts are often too small to saturate the disk


class LoadableModel(SizedModel):
    """Model that can be loaded, with its weights in memory or streamed, and given a cache."""

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
        """`more`: additional GPUs that layers may be computed on; `int8_cache`: see `OpenedModel`."""
        super().__init__(folder, tensors, dtype, device, int8_cache=int8_cache)
        self.devices = (device, *more)
        self.timeline = timeline
        self._scratches: dict[torch.device, Scratch] = {}
        stored = [info for weight in tensors.values() for info in stored_tensors(weight)]
        stamps = {info.file: info.stamp for info in stored if info.stamp is not None}
        self._reader = DirectReader(*checksums(folder), stamps)
        self._feeder: LayerFeeder | QuantizedLayers | None = None
        self.store: AnyExpertStore | None = None  # of on-demand experts
        self._gather: StreamedEmbedding | None = None
        self._tree_model: TreeModel | None = None
        self.rest_tensors: dict[str, torch.Tensor] = {}
        self._caches = Tier.DEVICE
        self.long_factors = False  # whether RoPE is scaled for texts beyond the original length

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
        embedding_in_ram: bool = False,
    ) -> None:
        """Read the resident weights and start streaming the other layers.

        Args:
            placement: Tier of each layer and the head, and number of slots for on-demand experts.
            capacity: Positions of the cache.
            progress: Called with bytes done and total bytes.
            chunk: Rows that go through a layer together; None: all.
            unpacked: Unpack packed weights at load, if every layer is resident. Default False.
            row_counts: Row counts that passes run at; None: those of `find_row_counts`. A draft may have any.
            context: Maximum positions of prompt and answer; None: the capacity.
            embedding_in_ram: Keep the embedding in RAM instead of reading single rows. Default False.

        Raises:
            StreamError: A read failed.
            CapacityError: There is too little memory.
            CheckpointError: Weights are damaged. `close` the model after any of these errors.
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
            values = self._unpacked_in(self.dense if placement.on_demand_experts else self.layers)
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
            attach_expert_store(
                self.experts, store, ExpertDevice(_CPU, mode) if placement.cpu_experts else None
            )
        set_row_counts(self.skeleton.layers, row_counts)
        make_activations_row_independent(self.skeleton.layers)
        self._caches = placement.caches
        self._assemble(feeder, capacity, None, blocks, chunk, context, row_counts, embedding_in_ram)
        feeder.load(progress)

    def _expert_store(self, placement: Placement) -> AnyExpertStore | None:
        """Create the store of on-demand experts; return None if experts are loaded with their layers."""
        if not placement.on_demand_experts:
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

    def load_quantized(
        self,
        bits: int,
        expand: bool,
        capacity: int,
        progress: Progress,
        calibration: Sequence[int],
        rest: dict[str, torch.Tensor] | None = None,
        chunk: int | None = None,
        context: int | None = None,
        kept: QuantizedDraftCache | None = None,
    ) -> None:
        """Read all layers and quantize their matrices; see `QuantizedLayers`. The embedding stays in RAM.

        Args:
            bits: 2, 3 or 4.
            expand: Keep the quantized values in the model's dtype.
            capacity: Positions of the cache.
            progress: Called with layers done and total layers.
            calibration: Token ids on which to measure the layers' inputs.
            rest: Tensors outside the layers, loaded by another instance of the same model and shared; None:
                read them.
            chunk: Rows that go through a layer together; None: all.
            context: Maximum positions of prompt and answer; None: the capacity.
            kept: Cache from which quantized layers are read, or to which they are written; None: no cache.
        """
        layers = list(self.skeleton.layers)
        quantized = QuantizedLayers(self.layers, layers, self._reader, bits, expand, progress, kept)
        self._assemble(quantized, capacity, rest, [], chunk, context, embedding_in_ram=True)

        def quantize_all() -> None:
            chain = TreeContext.chain(len(calibration), self.device)
            with torch.no_grad():
                self.tree_model.hidden(torch.tensor(list(calibration), device=self.device), chain)
            self.tree_model.cache.rewind(0)

        if kept is None:
            quantize_all()
        elif kept.is_complete() or not kept.make(quantize_all):
            quantized.load_kept(kept)

    def new_cache(self, capacity: int) -> TreeCache:
        """Return an empty cache that has not allocated memory yet."""
        layers = len(self.skeleton.rows.kept)
        if self._caches is Tier.DEVICE:
            return TreeCache(layers, capacity, self._cache_block(capacity), int8=self.int8_cache)
        home = HostBlock(self.cache_bytes(capacity), 5 * layers, pin=self.device.type != "cpu")
        windows = CacheOffload(self.offload_buffer_bytes(capacity), self.device)
        return TreeCache(layers, capacity, home, int8=self.int8_cache, windows=windows)

    def _cache_block(self, capacity: int) -> CacheBlock:
        """Return memory for the rows of all layers, on each layer's compute device."""
        places = dict[torch.device, list[int]]()
        for layer, binder in enumerate(self.layers):
            places.setdefault(binder.device, []).append(layer)
        if len(places) == 1:  # also for a cache with more layers than the model
            every = self.cache_bytes(capacity), 5 * len(self.skeleton.rows.kept)
            return CacheBlock(dict.fromkeys(places, every))
        return CacheBlock(
            {place: (self.cache_bytes(capacity, of), 5 * len(of)) for place, of in places.items()}
        )

    def _assemble(
        self,
        feeder: LayerFeeder | QuantizedLayers,
        capacity: int,
        rest: dict[str, torch.Tensor] | None,
        blocks: list[HeadBlock],
        chunk: int | None,
        context: int | None,
        row_counts: RowCounts | None = None,
        embedding_in_ram: bool = False,
    ) -> None:
        self._feeder = feeder
        model: Any = self.skeleton.model
        self.long_factors = select_rope_factors(model, context or capacity)
        if rest is None:
            rest = {}
            for binder in self._rest[:1] if blocks else self._rest:
                rest |= binder.materialize(read_unit(binder.layout, self._reader).tensor)
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
            held = embedding_in_ram and rows is self._rows  # a tied head streams because it does not fit
            self._gather = StreamedEmbedding(
                model.get_input_embeddings(), rows, self.dtype, self.device, self._reader, in_ram=held
            )
        places, transfers = [binder.device for binder in self.layers], None
        if set(places) != {self.device}:
            transfers = DeviceTransfers(places, self.device, self.function_mode(row_counts, _CPU))
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
            device_transfers=transfers,
        )
        store = self.store
        if store is not None:
            self._tree_model.expert_wait_seconds = lambda: store.read_stats.wait_seconds

    def _lent(self, values: int) -> torch.Tensor:
        """Return temporary memory for values, valid until a module unpacks its weights."""
        scratch = self._scratches.get(self.device)
        if scratch is None:
            return torch.empty(values, dtype=self.dtype, device=self.device)
        return scratch.lend(values)
