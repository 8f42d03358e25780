"""Block sizes of attention and the memory they need; importing this compiles no loop and no kernel."""

import torch

NEAR, STEP = 32, 64  # minimum number of keys attended one by one; alignment of the cuts between other keys
FEW = 256  # up to this many keys, all are attended one by one: too few for a product
AT_ONCE = 16  # a list's length is a multiple of this, padded with keys of weight zero
BLOCK, WIDE_KEYS = 1024, 512  # keys in a block, and in a part of it processed in float32
TILE_KEYS, TILE_ROWS = 256, 32  # tile of a small product; a block contains whole tiles of keys
LEAST_ROWS = 16  # minimum for a product: with fewer rows, a row's bits depend on the row count
_ROWS, _ALL_ROWS = 2048, 8192  # maximum folded rows processed together, per key head and total
# Maximum (folded row, key) pairs for which torch's attention with a dense mask is faster, and maximum bytes
# of masks kept from layer to layer.
SMALL, KEPT = 1 << 20, 16 << 20
MOST_NUMBERS = 256  # elements of a head's query, key or value
# On a GPU: positions whose sums form one part of a row's sums, cut at multiples of PART wherever the keys
# are; and bytes of such sums waiting to be merged, unless a single query has more.
PART, SCRATCH = 1024, 64 << 20


def scratch_bytes(
    rows: int,
    keys: int,
    heads: int,
    groups: int,
    dtype: torch.dtype,
    quantized: bool = False,
    *,
    size: int = MOST_NUMBERS,
) -> int:
    """Return the maximum workspace bytes for `rows` queries of `heads` heads over `keys` keys, G = `groups`.

    quantized: whether keys and values are in 8 bits. Default False. size: elements of a query or a value.
    """
    item = dtype.itemsize
    together = min(rows, max_rows(heads, groups))
    folded = together * groups + LEAST_ROWS
    queries = (heads * together + heads // groups * LEAST_ROWS) * size * (3 * item + 12)
    block, key_heads = min(keys, BLOCK), heads // groups
    products = folded * (min(keys, WIDE_KEYS) * 4 + 12 * size)
    if dtype == torch.bfloat16:
        products += folded * min(keys, WIDE_KEYS) * item
        laid = 2 * key_heads * -(-block // TILE_KEYS) * TILE_KEYS * size * item
        gathered = 2 * key_heads * block * size * item
        products = max(products, laid + max(gathered, torch.get_num_threads() * thread_bytes(size)))
    converted = 0 if dtype == torch.float32 else 2 * min(keys, WIDE_KEYS) * size * 4
    if quantized:  # the values of a block, or of all listed keys
        named = min(keys, 2 * (together + FEW))
        converted += 2 * key_heads * max(block, named) * size * (item + 4)
    pairs = min(rows * keys, max(SMALL // groups, keys))
    dense = (
        min(groups * pairs * item, KEPT) + pairs * (2 * groups * item + 3) + 3 * heads * rows * size * item
    )
    at_once = max(queries + products + converted, dense if groups * rows * keys <= SMALL else 0)
    return list_bytes(rows, keys) + at_once


def gpu_scratch_bytes(rows: int, keys: int, heads: int) -> int:
    """Return the maximum workspace bytes on a GPU: sums of parts, and the lists of keys near each row."""
    query = -(-keys // PART) * heads * (256 + 2) * 4  # sums of one query
    sums = max(query, min(rows * query, SCRATCH))
    return sums + list_bytes(rows, keys)


def thread_bytes(size: int) -> int:
    """Return the bytes per thread for small products: scores, weights and sums of a tile."""
    return TILE_ROWS * (6 * TILE_KEYS + 4 * size)


def list_bytes(rows: int, keys: int) -> int:
    """Return the bytes of the lists of near keys that a pass keeps, with a window and without."""
    return 2 * rows * 4 * (min(keys, FEW) + AT_ONCE)


def max_rows(heads: int, groups: int) -> int:
    """Return the maximum number of queries processed together."""
    return max(1, min(_ROWS // groups, _ALL_ROWS // heads))
