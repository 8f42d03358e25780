"""A transformers model that owns no weights, with the attention, caches and loading for token trees."""

from offspec.core.lazy_imports import import_without

# With any model, transformers imports modules for compilation, sharding and losses, which import triton and
# sympy: 180 MB that offspec does not use. Importing one model's module loads all that models share.
_UNUSED = (
    *("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("torch.distributed.tensor", "accelerate", "scipy"),
)
import_without(_UNUSED, "transformers.models.llama.modeling_llama")
