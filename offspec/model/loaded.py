"""A model from a checkpoint: opened and measured first, loaded once it is known where everything goes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offspec.checkpoint import TensorInfo
from offspec.model.attention import TreeContext
from offspec.model.binding import Binder
from offspec.model.cache import TreeCache
from offspec.model.embedding import RowGather
from offspec.model.feeder import LayerFeeder, PackedLayers
from offspec.model.runner import CHUNK, TreeModel
from offspec.model.skeleton import build_skeleton
from offspec.model.weights import Recipe, map_weights
from offspec.store.arena import Arena
from offspec.store.reader import DirectReader
from offspec.stream import read_unit

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


class LoadedModel:
    """The skeleton of a checkpoint with its weights in three parts: layers, embedding, and the rest.

    Opening reads only headers, so the sizes below are known before a byte of weights is. An embedding that
    is not tied to the head stays on disk, and only the rows in use are read.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, TensorInfo], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.skeleton = build_skeleton(folder, dtype)
        self.device, self.dtype = device, dtype
        model = self.skeleton.model
        layers: list[list[Recipe]] = [[] for _ in self.skeleton.layers]
        rest: list[Recipe] = []
        self._rows: TensorInfo | None = None
        for recipe in map_weights(model, tensors):
            index = self.skeleton.layer_of(recipe.names[0])
            if index is not None:
                layers[index].append(recipe)
            elif self._on_disk(recipe):
                self._rows = recipe.sources[0][0]
            elif not (self.skeleton.tied and recipe.names[0] == self._head_alias()):
                rest.append(recipe)
        prefix = self.skeleton.layers_prefix
        self.layers = [
            Binder(model, f"layer {i}", recipes, device, f"{prefix}.{i}.") for i, recipes in enumerate(layers)
        ]
        self._rest = Binder(model, "the rest", rest, device)
        self._reader = DirectReader()
        self._feeder: LayerFeeder | PackedLayers | None = None
        self._gather: RowGather | None = None
        self._memory: Arena | None = None
        self._tree_model: TreeModel | None = None
        self.rest_tensors: dict[str, torch.Tensor] = {}

    def _on_disk(self, recipe: Recipe) -> bool:
        return (
            not self.skeleton.tied and recipe.converter is None and recipe.names == (self.skeleton.embedding,)
        )

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
    def rest_bytes(self) -> int:
        """Bytes of everything that is always resident: head, final norm, positions."""
        return self._rest.layout.nbytes + self._rest.copied_bytes

    def cache_bytes(self, capacity: int) -> int:
        return capacity * self.skeleton.kv_bytes_per_token()

    def scratch_bytes(self, rows: int, length: int) -> int:
        """Most bytes of activations in a pass of `rows` rows over a cache of `length` positions."""
        config, item = self.skeleton.config, self.dtype.itemsize
        hidden: int = config.hidden_size
        inner = max((max(shape) for shape in self._matrix_shapes()), default=hidden)
        chunk = min(rows, CHUNK)
        heads: int = config.num_attention_heads
        groups = heads // (getattr(config, "num_key_value_heads", None) or heads)
        attention = chunk * (length + rows) * (item * (1 + groups) + 1)
        if getattr(config, "attn_logit_softcapping", None) or self._has_sinks():
            attention += 4 * heads * chunk * (length + rows) * 4  # written out, in float32
        largest = max((a * b for a, b in self._matrix_shapes()), default=0)  # reordered by the GEMM
        return (
            rows * hidden * item * 4
            + chunk * (3 * inner * item + 4 * hidden * 4)
            + attention
            + largest * item
        )

    def _has_sinks(self) -> bool:
        return any("sink" in name for name, _ in self.skeleton.layers[0].named_parameters())

    def _matrix_shapes(self) -> list[tuple[int, int]]:
        parameters = self.skeleton.layers[0].parameters()
        return [(p.shape[-2], p.shape[-1]) for p in parameters if p.dim() >= 2]

    @property
    def tree_model(self) -> TreeModel:
        assert self._tree_model is not None, "load the model first"
        return self._tree_model

    @property
    def bytes_streamed(self) -> int:
        return self._feeder.bytes_streamed if self._feeder else 0

    @property
    def buffered_files(self) -> set[Path]:
        """Files whose file system refuses O_DIRECT."""
        return self._reader.buffered

    def load(self, resident: Sequence[int], slots: int, capacity: int, progress: Progress) -> None:
        """Read the rest and the resident layers, and start streaming the others."""
        feeder = LayerFeeder(self.layers, resident, slots, self._reader, self.device)
        self._assemble(feeder, capacity, None)
        feeder.load(progress)

    def load_packed(
        self,
        expand: bool,
        capacity: int,
        progress: Progress,
        calibration: Sequence[int],
        rest: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Read all layers and round their matrices to 4 bits; see `PackedLayers`. Progress is in layers.

        calibration: token ids to measure the layers' inputs on. rest: the rest of the same model, already
        loaded by another, to be shared.
        """
        layers = list(self.skeleton.layers)
        self._assemble(PackedLayers(self.layers, layers, self._reader, expand, progress), capacity, rest)
        context = TreeContext.chain(len(calibration), self.device)
        with torch.inference_mode():
            self.tree_model.hidden(torch.tensor(list(calibration), device=self.device), context)
        self.tree_model.cache.rewind(0)

    def _assemble(
        self, feeder: LayerFeeder | PackedLayers, capacity: int, rest: dict[str, torch.Tensor] | None
    ) -> None:
        self._feeder = feeder
        model: Any = self.skeleton.model
        if rest is None:
            memory = read_unit(self._rest.layout, self._reader)
            rest = self._rest.realise(memory.tensor)
            self._memory = memory if self.device.type == "cpu" else None
        self.rest_tensors = rest
        self._rest.bind(rest)
        if self.skeleton.tied:
            model.get_output_embeddings().weight = model.get_input_embeddings().weight
        if self._rows is not None:
            self._gather = RowGather(model.get_input_embeddings(), self._rows, self.dtype, self.device)
        if self.device.type != "cpu":
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = buffer.to(self.device)
        cache = TreeCache(len(self.layers), capacity)
        self._tree_model = TreeModel(self.skeleton, cache, enter=feeder.enter, leave=feeder.leave)

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
        self._rest.unbind()
        self._reader.close()
        self.rest_tensors = {}
        self._memory = self._feeder = self._gather = self._tree_model = None
