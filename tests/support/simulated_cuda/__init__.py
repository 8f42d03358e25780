"""Simulated CUDA devices, to test the project's GPU code without a GPU.

Tensors report the device cuda:0 or cuda:1, and lie in memory of their own that only operations reach. Each
operation is a task in the queue of a stream. A policy determines when tasks run: at once, at random, or only
when the host waits for them. So a missing wait, a slot filled too early and memory reused too soon give wrong
numbers each time, not once in a thousand.

If memory is given back before a copy has used it, its next owner gets wrong numbers: often another test, and
only if it gets that memory. So the test that left the copy pending fails (`plugin`).

`memory` is a model of torch's caching allocator. `streams` and `machine` keep the queues, and count launches,
copied bytes and the lines where the host waits. `graphs` are captured and replayed. `tensors`, `operations`
and `transfers` implement torch's operations. `install` connects all of it to torch.cuda. `kernels` runs
Triton kernels through the paths for CPUs. `plugin` is for pytest.

The simulation does not model time, races inside a kernel, or a GPU library's rounding. It needs a torch built
for CPUs. A device named without an index is cuda:0 in `tensor.to`, whichever device is selected.
"""

import sys


def is_simulated() -> bool:
    """Return whether this process has simulated devices."""
    name = f"{__name__}.machine"
    return name in sys.modules and sys.modules[name].is_installed()
