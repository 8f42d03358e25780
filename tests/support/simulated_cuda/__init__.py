"""CUDA devices in software: what a GPU would do with the project's code, where there is none.

Tensors say that they are on cuda:0 or cuda:1, and lie in memory of their own that only operations reach. Each
operation is a task in the queue of a stream, and a policy says when tasks run: at once, now and then, or not
before somebody waits for them. So a wait that was forgotten, a slot that is filled too early and memory that
is used again too soon give wrong numbers each time, not once in a thousand.

Where memory is given back before a copy came to use it, whoever has it next would get wrong numbers: often
another test, and only if it has that memory. So the test that left the copy behind fails (`plugin`).

`memory` is a model of torch's caching allocator; `streams` and `machine` keep the queues, and count
launches, copied bytes and the lines where the host waits; `graphs` are captured and replayed; `tensors`,
`operations` and `transfers` carry out what torch is asked for; `install` puts all of it beneath torch.cuda;
and `kernels` has Triton kernels carried out by the paths for CPUs. `plugin` is for pytest.

It says nothing about time, about races inside a kernel, or about how a GPU's libraries round. It needs a
torch built for CPUs. A device named without an index is cuda:0 in `tensor.to`, whichever is selected.
"""

import sys


def is_simulated() -> bool:
    """Whether this process has simulated devices."""
    name = f"{__name__}.machine"
    return name in sys.modules and sys.modules[name].is_installed()
