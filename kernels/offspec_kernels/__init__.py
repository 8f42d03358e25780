"""Kernels for tree-shaped decoding, each with one door and several ways through it.

An operation is a package. Its `__init__` is the door: it checks the arguments, names the one that is wrong,
and picks a path. The reference is the truth, slow and plain, in float64. The eager path is made of torch's
own operations, or of loops that numba compiles (`native`): what a CPU runs, and a GPU where triton is not
installed. Both are in `__init__` where they are short. `triton` is the kernel for a GPU; with
TRITON_INTERPRET=1 it runs on a CPU as well, slowly, which is how it is tested.

    tree_attention   queries of a token tree over a long prefix and over each other
    tree_scan        a state that goes from row to row along the tree's paths: linear attention
    tree_conv        a short causal convolution along the tree's paths
    kv_compact       an accepted path's keys and values move behind the prefix, all layers at once
    gumbel_argmax    temperature, filters, noise and the largest of each row, in one read of the logits
    row_linear       rows times a weight, in tiles of one size: a GPU's products in a pass
    topk_children    log-softmax, noise and the largest few of each row: what a draft's node becomes

**Rows' bits.** Of every operation in a pass over a target, the bits of a row depend on that row's own path
and on the weights, and on nothing else: not on how many rows there are, in which order, what values they
have, or where a tree or a chunk of the prompt was cut. In bfloat16, where the last bit decides between
near-equal tokens, that is what makes an answer the same with any draft and without one. Operations hold it by
themselves: fixed tiles, sums in an order that no size changes, decisions taken for each row, states that are
made of the parent's and never put together of parts. A library's
products do not: a pass runs them at row counts at which they do (`offspec.model.row_counts`), or takes
`row_linear`. `dequant` sees no rows. What only drafts use need not hold it.

The environment variable OFFSPEC_KERNELS (reference, eager or triton) takes one path for all of them.
"""
