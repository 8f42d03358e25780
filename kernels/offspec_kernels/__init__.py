"""Kernels for tree-shaped decoding, each with one door and several ways through it.

An operation is a package. Its `__init__` is the door: it checks the arguments, names the one that is wrong,
and picks a path. `reference` is the truth, slow and plain, in float64. `eager` is made of torch's own
operations: what a CPU runs, and a GPU where triton is not installed. `triton` is the kernel for a GPU; with
TRITON_INTERPRET=1 it runs on a CPU as well, slowly, which is how it is tested.

    tree_attention   queries of a token tree over a long prefix and over each other
    kv_compact       an accepted path's keys and values move behind the prefix, all layers at once
    gumbel_argmax    temperature, filters, noise and the largest of each row, in one read of the logits
    topk_children    log-softmax, noise and the largest few of each row: what a draft's node becomes

The environment variable OFFSPEC_KERNELS (reference, eager or triton) takes one path for all of them.
"""
