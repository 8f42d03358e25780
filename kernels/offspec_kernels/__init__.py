"""Kernels for tree-shaped decoding, each with one entry point and several backends.

Each operation is a package. Its `__init__` is the entry point: it checks the arguments, names an invalid one
and picks a backend. The reference backend defines the result, slowly and simply, in float64. The eager
backend uses torch operations, or loops compiled by numba (`native`); it runs on CPUs, and on GPUs without
triton. Short backends are part of `__init__`. `triton` is the GPU kernel; with TRITON_INTERPRET=1 it also
runs on a CPU, slowly, for tests.

    tree_attention   queries of a token tree over a long prefix and over each other
    tree_scan        a state passed from row to row along the tree's paths: linear attention
    tree_conv        a short causal convolution along the tree's paths
    kv_compact       moving an accepted path's keys and values to the end of the prefix, all layers at once
    gumbel_argmax    temperature, filters, noise and the maximum of each row, in one read of the logits
    row_linear       rows times a weight, in tiles of one size: a GPU's products in a pass
    topk_children    log-softmax, noise and the top k of each row: the children of a draft's node

**Bits of a row.** In every operation of a pass over a target, the bits of a row depend only on that row's own
path and on the weights. They do not depend on the number, order or values of the other rows, nor on how a
tree or prompt was split into chunks. In bfloat16 the last bit decides between near-equal tokens, so this
property makes an answer the same with any draft and without one. Operations guarantee it with fixed tiles,
sums in an order that no size changes, decisions made for each row, and states computed from the parent's
state and never combined from parts. Library products
do not guarantee it: a pass runs them at row counts for which it holds (`offspec.model.row_counts`), or uses
`row_linear`. `dequant` processes no rows. Operations used only by drafts need not guarantee it.

The environment variable OFFSPEC_KERNELS (reference, eager or triton) selects one backend for all operations.
"""
