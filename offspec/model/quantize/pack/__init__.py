"""Packs: folders with a model's matrices quantized once, which are streamed in place of the model."""

from offspec.model.quantize.pack.make import PackResult, pack_model, packed_model, verify_pack

__all__ = ["PackResult", "pack_model", "packed_model", "verify_pack"]
