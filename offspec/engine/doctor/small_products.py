"""Check of oneDNN's brgemm, a private function of torch: whether this torch has it and it runs here."""

import platform
from collections.abc import Iterator

from offspec.engine.doctor.finding import DoctorOptions, Figure, Finding

_PART = "small products"
_SLOWER = "products of a few rows in bfloat16 or with quantized weights, and attention, are slower on the CPU"
_EARLIER = "install an earlier torch, and please report this with the output of `offspec doctor --json`"


def check(options: DoctorOptions) -> Iterator[Finding]:
    """Yield one finding: the private names that this torch lacks, or whether brgemm is used."""
    import torch

    from offspec_kernels.row_linear import brgemm

    if platform.machine() != "x86_64":
        yield Finding(_PART, "absent", "not used on this CPU architecture")
        return
    missing = brgemm.missing_symbols()
    figures: dict[str, Figure] = {"torch": torch.__version__, "missing": " ".join(missing)}
    if missing:
        found = f"torch {torch.__version__} does not have {', '.join(missing)}: {_SLOWER}"
        yield Finding(_PART, "limited", found, _EARLIER, figures)
    elif not brgemm.processor_multiplies():
        yield Finding(_PART, "absent", "not used: this CPU has neither AMX nor AVX512-BF16", figures=figures)
    elif brgemm.find_brgemm() is None:
        found = f"oneDNN in torch {torch.__version__} does not run brgemm for bfloat16: {_SLOWER}"
        yield Finding(_PART, "limited", found, "unset ONEDNN_MAX_CPU_ISA and DNNL_MAX_CPU_ISA", figures)
    else:
        yield Finding(
            _PART, "ok", f"torch {torch.__version__} has at::native::cpublas::brgemm", figures=figures
        )
