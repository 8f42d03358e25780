"""How attention is cut, and what memory that takes; nothing of this compiles a loop or a kernel."""

import torch

NEAR, STEP = 32, 64  # least keys that are met one by one, and positions by which the others are cut
FEW = 256  # keys that are all met one by one: fewer are not worth a product
AT_ONCE = 16  # keys: a list has a multiple of it, with keys of no weight at its end
BLOCK, WIDE_KEYS = 1024, 512  # keys of a block, and of a part of it that is done in float32
TILE_KEYS, TILE_ROWS = 256, 32  # of a tile of small products; a block is whole tiles of keys
LEAST_ROWS = 16  # of a product: with fewer, a row's bits depend on how many there are
_ROWS, _ALL_ROWS = 2048, 8192  # most folded rows that are done together, of a key head and of all
# Pairs of folded row and key up to which torch's attention with a dense mask is quicker, and bytes of masks
# that are kept from layer to layer.
SMALL, KEPT = 1 << 20, 16 << 20
MOST_NUMBERS = 256  # of a head's query, key or value
# On a GPU: positions whose sums are one part of a row's, cut at multiples of it wherever keys are; and bytes
# of such sums that wait to be merged, unless one query alone has more.
PART, SCRATCH = 1024, 64 << 20


def scratch_bytes(
    rows: int,
    keys: int,
    heads: int,
    groups: int,
    dtype: torch.dtype,
    quantised: bool = False,
    *,
    size: int = MOST_NUMBERS,
) -> int:
    """Most bytes beside the result: up to `rows` queries of `heads` heads over `keys` keys, G = `groups`.

    quantised: whether keys and values are in 8 bits. Default False. size: numbers of a query or a value.
    """
    item = dtype.itemsize
    together = min(rows, most_rows(heads, groups))
    folded = together * groups + LEAST_ROWS
    queries = (heads * together + heads // groups * LEAST_ROWS) * size * (3 * item + 12)
    block, key_heads = min(keys, BLOCK), heads // groups
    products = folded * (min(keys, WIDE_KEYS) * 4 + 12 * size)
    if dtype == torch.bfloat16:
        products += folded * min(keys, WIDE_KEYS) * item
        laid = 2 * key_heads * -(-block // TILE_KEYS) * TILE_KEYS * size * item
        gathered = 2 * key_heads * block * size * item
        products = max(products, laid + max(gathered, torch.get_num_threads() * own_bytes(size)))
    converted = 0 if dtype == torch.float32 else 2 * min(keys, WIDE_KEYS) * size * 4
    if quantised:  # the values of a block, or of all keys that some lists name
        named = min(keys, 2 * (together + FEW))
        converted += 2 * key_heads * max(block, named) * size * (item + 4)
    pairs = min(rows * keys, max(SMALL // groups, keys))
    dense = (
        min(groups * pairs * item, KEPT) + pairs * (2 * groups * item + 3) + 3 * heads * rows * size * item
    )
    at_once = max(queries + products + converted, dense if groups * rows * keys <= SMALL else 0)
    return list_bytes(rows, keys) + at_once


def gpu_scratch_bytes(rows: int, keys: int, heads: int) -> int:
    """The same on a GPU: sums of parts, and the lists of keys that each row meets one by one."""
    query = -(-keys // PART) * heads * (256 + 2) * 4  # sums of one
    sums = max(query, min(rows * query, SCRATCH))
    return sums + list_bytes(rows, keys)


def own_bytes(size: int) -> int:
    """Of a thread with small products: scores, weights and sums of a tile."""
    return TILE_ROWS * (6 * TILE_KEYS + 4 * size)


def list_bytes(rows: int, keys: int) -> int:
    """Bytes of lists of keys that each row meets one by one, with a window and without; a pass keeps them."""
    return 2 * rows * 4 * (min(keys, FEW) + AT_ONCE)


def most_rows(heads: int, groups: int) -> int:
    """Most queries that are done together."""
    return max(1, min(_ROWS // groups, _ALL_ROWS // heads))
