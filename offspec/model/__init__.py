"""A transformers model that owns no weights, and what it needs to run over a token tree."""

from offspec.core.lazy_imports import import_without

# With any model transformers imports what compiles models, shards them and computes losses, and with that
# triton and sympy: 180 MB, and of no use here. One model's module brings what all of them share.
_UNUSED = (
    *("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("torch.distributed.tensor", "accelerate", "scipy"),
)
import_without(_UNUSED, "transformers.models.llama.modeling_llama")
