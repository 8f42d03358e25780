"""A model's matrices rounded to fewer bits, once, into a folder that is streamed in place of the model's."""

from offspec.model.quantize.pack.make import Pack, pack_model, packed_model, verify_pack

__all__ = ["Pack", "pack_model", "packed_model", "verify_pack"]
