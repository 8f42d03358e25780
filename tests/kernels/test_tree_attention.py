"""Tree attention, every path against float64: any tree, prefix, batch, dtype and width; outputs poisoned."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from offspec_kernels.backend import Backend
from offspec_kernels.quantized_rows import QuantizedRows
from offspec_kernels.tree_attention import (
    AttentionChunk,
    TreeMask,
    Window,
    brgemm_tiles,
    reference_attention,
    scratch_bytes,
    tree_attention,
    warm_up,
)
from offspec_kernels.tree_attention.arguments import AttentionArguments
from offspec_kernels.tree_attention.native import attend_listed_keys
from offspec_kernels.tree_attention.triton import LaunchConfig
from offspec_kernels.tree_attention.triton import attend as attend_triton
from tests.support.attention_trees import Case, Shape, make_case, random_tree
from tests.support.kernel_device import device_of, examples, kernel_device, kernels_compile
from tests.support.pairwise import all_pairs
from tests.support.poison import poisoned

_WORST = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    prefix = draw(st.sampled_from([0, 1, 63, 64, 65, 130, 300]))
    causal = draw(st.sampled_from([0, 0, 1, 5, 66]))
    tree = draw(st.sampled_from([0, 1, 2, 17, 64, 65, 130]))
    tree += causal + tree == 0
    return Shape(prefix, causal, tree, draw(st.integers(0, causal + tree)))


def truth(case: Case, **options: Any) -> Tensor:
    """float64, never rounded to the dtype of the result."""
    out = torch.empty(*case.query.shape[:3], case.value.shape[3], dtype=torch.float64, device=case.key.device)
    scale = options.pop("scale", None) or case.query.shape[3] ** -0.5
    given_ = options.get("window"), options.get("softcap"), options.get("sinks")
    reference_attention(
        AttentionArguments(case.query, case.key, case.value, case.tree_mask, scale, *given_, out)
    )
    return out


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())


def check(case: Case, path: Backend, *, worst: float = 0.0, **options: Any) -> None:
    expected = truth(case, **options)
    out = torch.full_like(expected, torch.nan, dtype=case.query.dtype)
    tree_attention(case.query, case.key, case.value, case.tree_mask, out=out, path=path, **options)
    if expected.any():
        assert error(out, expected) < max(worst, _WORST[case.query.dtype])
    for tree, reach in enumerate(case.tree_mask.extents()):
        assert not out[tree, :, reach.count :].any(), "queries of padding bring nothing"


def check_quantized(case: Case, path: Backend, **options: Any) -> None:
    """Keys and values in 8 bits give the bits that their values give, unless kernels are compiled.

    A compiled kernel spreads numbers of 8 bits over other threads than wider ones, so it adds up the products
    of a row in another order. Each of the two keeps the bits of a row: see `test_attention_rows`.
    """
    key, value = QuantizedRows.of(case.key), QuantizedRows.of(case.value)
    wide = Case(case.query, key.values(), value.values(), case.tree_mask)
    with poisoned():
        found = tree_attention(case.query, key, value, case.tree_mask, path=path, **options)
        same = tree_attention(wide.query, wide.key, wide.value, case.tree_mask, path=path, **options)
    assert torch.equal(found, same) or (path == "triton" and kernels_compile())
    expected = truth(wide, **options)
    assert not expected.any() or error(found, expected) < _WORST[case.query.dtype]


CASES = given(
    trees=st.lists(shapes(), min_size=1, max_size=3),
    groups=st.sampled_from([1, 2, 3, 5]),
    key_heads=st.sampled_from([1, 2]),
    sizes=st.sampled_from([(64, 64), (16, 16), (80, 80), (24, 16), (128, 128), (256, 256)]),
    dtype=st.sampled_from(list(_WORST)),
    window=st.sampled_from(
        [
            None,
            None,
            1,
            7,
            64,
            100,
            AttentionChunk(1),
            AttentionChunk(7),
            AttentionChunk(64),
            AttentionChunk(100),
        ]
    ),
    softcap=st.sampled_from([None, None, 5.0]),
    sunk=st.booleans(),
    loud=st.sampled_from([1.0, 8.0]),
    quantized=st.booleans(),
    seed=st.integers(0, 1000),
)


def any_case(path: Backend, device: str, trees: list[Shape], *, exact: bool = True, **drawn: Any) -> None:
    groups, key_heads = drawn["groups"], drawn["key_heads"]
    case = make_case(
        trees,
        heads=(groups * key_heads, key_heads),
        sizes=drawn["sizes"],
        dtype=drawn["dtype"],
        loud=drawn["loud"],
        seed=drawn["seed"],
        device=device,
    )
    sinks = torch.randn(groups * key_heads, generator=torch.Generator().manual_seed(1)).to(device)
    options = {name: drawn[name] for name in ("window", "softcap")}
    # In Python those of 8 bits would take too long: kernels have a test of their own for them.
    test = check_quantized if drawn["quantized"] and path == "eager" else check
    test(case, path, sinks=sinks if drawn["sunk"] else None, exact=exact, **options)


@settings(deadline=None, max_examples=50)
@CASES
def test_eager_says_what_the_reference_says(trees: list[Shape], **drawn: Any) -> None:
    any_case("eager", "cpu", trees, **drawn)


# In Python a kernel takes its time, the most where keys are met one by one: a row has up to 256.
@pytest.mark.kernels
@settings(deadline=None, max_examples=examples(12, compiled=12))
@CASES
def test_the_kernel_says_what_the_reference_says(trees: list[Shape], **drawn: Any) -> None:
    any_case("triton", kernel_device(), trees, exact=False, **drawn)


@pytest.mark.exhaustive
@pytest.mark.kernels
@settings(deadline=None, max_examples=examples(2, compiled=12))
@CASES
def test_the_exact_kernels_say_what_the_reference_says(trees: list[Shape], **drawn: Any) -> None:
    any_case("triton", kernel_device(), trees, **drawn)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("window", "louder"),
    [(None, True), (None, False), (2301 - 1216, True), (2301 - 1216, False), (AttentionChunk(1200), True)],
    ids=["late maximum", "early maximum", "window, late", "window, early", "chunk"],
)
def test_parts_of_far_keys_are_merged(window: Window | None, louder: bool) -> None:
    """Far keys lie in two parts or more, which need not begin with the first.

    With this window the first row meets keys in blocks from position 1216 on, the others from 1280 on.
    """
    case = make_case([Shape(2300, 3, 0, 3)], heads=(2, 1), sizes=(16, 16), device=kernel_device())
    case.key[0, 0, 2150 if louder else 1300] = case.query[0, 0, 1] * 2
    check(case, "triton", window=window, exact=True)


@pytest.mark.exhaustive
@pytest.mark.kernels
@settings(deadline=None, max_examples=3)
@given(
    tree=shapes(),
    rows=st.sampled_from([16, 32, 64]),
    keys=st.sampled_from([32, 64, 128]),
    splits=st.sampled_from([1, 2, 4, 8]),
    window=st.sampled_from([None, 40, AttentionChunk(40)]),
    sunk=st.booleans(),
)
@example(tree=Shape(0, 0, 1, 1), rows=16, keys=32, splits=8, window=None, sunk=True)  # splits with no key
def test_however_the_work_is_cut(
    tree: Shape, rows: int, keys: int, splits: int, window: Window | None, sunk: bool
) -> None:
    case = make_case([tree, Shape(200, 3, 9, 12)], heads=(2, 1), device=kernel_device())
    sinks = torch.linspace(-1, 2, 2, device=kernel_device()) if sunk else None
    expected = truth(case, window=window, sinks=sinks)
    out = torch.full_like(expected, torch.nan, dtype=torch.float32)
    attend_triton(
        AttentionArguments(
            case.query, case.key, case.value, case.tree_mask, 32**-0.5, window, None, sinks, out
        ),
        blocks=LaunchConfig(rows, keys, warps=4, stages=2, splits=splits),
    )
    assert error(out, expected) < 1e-5


@pytest.mark.parametrize(
    ("window", "dtype", "softcap", "loud"),
    all_pairs([None, 700, 3000, AttentionChunk(4500)], list(_WORST), [None, 20.0], [1.0, 30.0]),
)
def test_blocks_of_a_long_prefix(
    window: Window | None, dtype: torch.dtype, softcap: float | None, loud: float
) -> None:
    """More rows and keys than a block of the eager path holds; with loud keys late maxima are everywhere."""
    case = make_case([Shape(4300, 40, 560, 580)], heads=(4, 1), sizes=(16, 16), dtype=dtype, loud=loud)
    check(case, "eager", window=window, softcap=softcap)
    if loud == 1.0:
        check_quantized(case, "eager", window=window, softcap=softcap)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        (Shape(10, 3, 9, 12), torch.float32, {}),
        (Shape(330, 0, 5, 3), torch.bfloat16, {"softcap": 5.0}),
        (Shape(330, 2, 3, 2), torch.float16, {"window": 300, "sinks": torch.tensor([0.5, -1.0])}),
    ],
    ids=["near", "far", "window"],
)
def test_keys_in_8_bits_in_exact_kernels(shape: Shape, dtype: torch.dtype, options: dict[str, Any]) -> None:
    place = kernel_device()
    there = {name: of.to(place) if isinstance(of, Tensor) else of for name, of in options.items()}
    case = make_case([shape], heads=(2, 1), sizes=(16, 24), dtype=dtype, device=place)
    check_quantized(case, "triton", **there)


def test_what_is_compiled_at_load_is_what_passes_need() -> None:
    """Compiling takes seconds: one version a dtype, however many heads there are."""
    for dtype in (torch.float32, torch.bfloat16):
        warm_up(dtype)
        for heads in ((1, 1), (4, 2)):
            check(make_case([Shape(70, 2, 9, 11)], heads=heads, dtype=dtype), "eager")
    assert len(attend_listed_keys.signatures) == 2  # type: ignore[attr-defined]


@pytest.fixture(params=[True, False], ids=["small products", "in float32"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How a CPU meets far keys in bfloat16."""
    if request.param and not brgemm_tiles.is_supported():
        pytest.skip("this processor has no small product")
    monkeypatch.setattr(brgemm_tiles, "is_supported", lambda: request.param)


@pytest.mark.usefixtures("products")
def test_a_late_key_that_beats_all_others() -> None:
    """Row by row: by little, by much, and not at all."""
    case = make_case([Shape(4200, 0, 300, 300)], heads=(4, 1), dtype=torch.bfloat16)
    case.key[0, 0, 3000] = case.query[0, 1, 40] * 20
    case.key[0, 0, 4100] = case.query[0, 2, 50] * 200
    check(case, "eager")


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        *((torch.bfloat16, size) for size in (300, 3000, 60_000)),
        (torch.float32, 60_000),
        (torch.float16, 3000),
    ],
)
def test_scores_that_are_far_from_nought(dtype: torch.dtype, size: float) -> None:
    """Where a bfloat16 is coarse, and where the powers of two end."""
    case = make_case([Shape(2600, 0, 300, 300)], heads=(4, 1), dtype=dtype)
    case.key[..., 0], case.query[..., 0] = size**0.5 * 2.4, size**0.5 * 2.4
    check(case, "eager", worst=size * 1e-6)  # a score itself is known to some 2^-23 of its size


def test_scores_beyond_any_power() -> None:
    """The largest has its weight, however large it is: all others have none."""
    case = make_case([Shape(999, 0, 1, 1)], heads=(1, 1), dtype=torch.bfloat16)
    case.query[:] *= 2e4
    case.key[0, 0, 300] = case.query[0, 0, 0]
    out = tree_attention(case.query, case.key, case.value, case.tree_mask, path="eager")
    assert torch.equal(out[0, 0, 0], case.value[0, 0, 300])


@pytest.mark.parametrize("path", ["eager", "triton"])
def test_sinks_of_any_size(path: Backend) -> None:
    """One a head; a window of 4 leaves few keys beside them."""
    case = make_case([Shape(70, 2, 9, 11)], device=device_of(path).type)
    sinks = torch.tensor([-torch.inf, -1e38, 0.0, 20.0], device=device_of(path))
    check(case, path, sinks=sinks, window=4)


@pytest.mark.parametrize("window", [None, 4])
def test_where_bits_may_differ_few_rows_are_a_product_of_torch(window: int | None) -> None:
    """Its mask stays with the tree, for the layers that follow."""
    case = make_case([Shape(70, 2, 20, 22), Shape(3, 0, 5, 5)])
    for _ in range(2):
        check(case, "eager", exact=False, window=window)
    kept: Any = case.tree_mask.kept
    assert [name[0] for name in kept] == ["bias"] * 2


@pytest.mark.usefixtures("products")
def test_a_whole_prompt_of_one_chain() -> None:
    """Rows at the beginning see nothing of the blocks that are done first."""
    check(make_case([Shape(0, 1400, 0, 1400)], heads=(2, 1)), "eager")
    check(make_case([Shape(0, 1400, 0, 1400)], heads=(2, 1), dtype=torch.bfloat16), "eager")


@pytest.mark.parametrize("path", ["eager", "triton"])
def test_strides_are_free(path: Backend) -> None:
    """Queries as a projection makes them, a cache at its capacity, an output as the next product wants it."""
    device = device_of(path)
    case = make_case([Shape(70, 2, 20, 22)], device=device.type)
    query = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    both = torch.full((1, 4, 200, 32), torch.nan, device=device)
    both[:, :2, :97], both[:, 2:, :97] = case.key, case.value
    out = torch.full((1, 22, 4, 32), torch.nan, device=device)
    tree_attention(query, both[:, :2], both[:, 2:], case.tree_mask, out=out.transpose(1, 2), path=path)
    assert error(out.transpose(1, 2), truth(case)) < 1e-5


@pytest.mark.parametrize("path", ["eager", "triton"])
def test_a_chunk_is_part_of_the_whole(path: Backend) -> None:
    """Rows asked for in pieces, each over the keys up to its own last row."""
    device = device_of(path)
    case = make_case([Shape(30, 40, 50, 90)], heads=(2, 1), device=device.type)
    whole = truth(case)
    sees, _ = random_tree(50, random.Random(0))
    rows = torch.cat([torch.zeros(40, 50, dtype=torch.bool), sees])
    for start, end in ((0, 25), (25, 41), (41, 90)):
        columns = max(end - 40, 0)
        tree_mask = TreeMask.of(rows[start:end, :columns], prefix=30, causal=40, first=start, device=device)
        out = tree_attention(
            case.query[:, :, start:end],
            case.key[:, :, : 30 + end],
            case.value[:, :, : 30 + end],
            tree_mask,
            path=path,
        )
        assert error(out, whole[:, :, start:end]) < 1e-5


@pytest.mark.parametrize("path", ["eager", "triton", "reference"])
def test_a_chunk_of_positions(path: Backend) -> None:
    """Siblings at the beginning of a chunk, whose parent is of the chunk before; by a mask written out."""
    position = torch.tensor([6, 7, 8, 8, 9, 9, 10])
    sees = torch.eye(7, dtype=torch.bool)
    for node, parent in ((1, 0), (2, 1), (3, 1), (4, 2), (5, 3), (6, 4)):
        sees[node] |= sees[parent]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, rows, 16, generator=generator) for rows in (7, 13, 13))
    device = device_of(path)
    tree_mask = TreeMask.of(sees, prefix=6, position=position.to(device), device=device)
    places = torch.cat([torch.arange(6), position])
    seen = torch.cat([torch.ones(7, 6, dtype=torch.bool), sees], dim=1)
    seen &= places // 4 == position[:, None] // 4
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    query, key, value = (of.to(device) for of in (query, key, value))
    out = tree_attention(query, key, value, tree_mask, window=AttentionChunk(4), path=path)
    torch.testing.assert_close(out.cpu(), expected)


@pytest.mark.parametrize(
    ("path", "count"),
    [("reference", 9), ("eager", 1), ("eager", 40), ("eager", 100), ("triton", 9), ("triton", 40)],
)
def test_chosen_keys(path: Backend, count: int) -> None:
    """Of those chosen a query meets what it sees; one that sees no more than are chosen meets all of them."""
    generator, heads = torch.Generator().manual_seed(0), 4
    sees = torch.eye(12, dtype=torch.bool)
    for node in range(1, 12):
        sees[node] |= sees[max(node - 1 - node % 3, 0)]
    causal = torch.ones(5, 35, dtype=torch.bool).tril(30)
    seen = torch.zeros(17, 47, dtype=torch.bool)
    seen[:5, :35], seen[5:, :35], seen[5:, 35:] = causal, True, sees
    query = torch.randn(1, heads, 17, 16, generator=generator)
    key, value = (torch.randn(1, 2, 47, size, generator=generator) for size in (16, 24))
    scores = torch.rand(17, 47, generator=generator).masked_fill(~seen, -1)
    chosen = scores.topk(min(count, 47)).indices[None].int()
    words = torch.cat([torch.zeros(5, 12, dtype=torch.bool), sees])
    device = device_of(path)
    tree_mask = TreeMask.of(words, prefix=30, causal=5, device=device)
    met = seen & torch.zeros_like(seen).scatter(1, chosen[0].long(), True)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=met, enable_gqa=True)
    query, key, value = (of.to(device) for of in (query, key, value))
    out = tree_attention(query, key, value, tree_mask, chosen=chosen.to(device), path=path)
    torch.testing.assert_close(out.cpu(), expected)


def test_words_hold_every_bit() -> None:
    sees = torch.rand(70, 200, generator=torch.Generator().manual_seed(0)) < 0.5
    tree_mask = TreeMask.of(sees, prefix=3, first=199)
    assert tree_mask.words.shape == (1, 70, 4)
    assert torch.equal(tree_mask.visible(0, (0, 70), (3, 203)) | ~sees, torch.ones_like(sees))
    assert torch.equal(tree_mask.visible(0, (0, 70), (3, 203)), sees)
    assert tree_mask.visible(0, (0, 70), (0, 3)).all(), "the prefix"


@pytest.mark.parametrize(
    ("shape", "heads", "dtype", "window"),
    [
        (Shape(3800, 0, 256, 256), (2, 2), torch.bfloat16, 900),
        (Shape(0, 1024, 0, 1024), (2, 2), torch.bfloat16, None),
        (Shape(2500, 0, 600, 600), (8, 1), torch.bfloat16, None),
        (Shape(5000, 0, 1, 1), (32, 16), torch.bfloat16, None),
        (Shape(5000, 0, 64, 64), (32, 16), torch.bfloat16, 900),
        (Shape(2500, 0, 600, 600), (8, 2), torch.float32, 900),
        (Shape(4000, 0, 1, 1), (32, 8), torch.float32, None),
        (Shape(100, 0, 60, 60), (9, 3), torch.float32, None),
    ],
)
def test_the_scratch_is_no_more_than_is_said(
    shape: Shape, heads: tuple[int, int], dtype: torch.dtype, window: int | None
) -> None:
    """Of a first call, which makes the masks."""
    case = make_case([shape], heads=heads, sizes=(64, 64), dtype=dtype)
    keys = case.tree_mask.extents()[0].keys
    stated = scratch_bytes(shape.queries, keys, heads[0], heads[0] // heads[1], dtype, size=64)

    def call() -> Tensor:
        return tree_attention(case.query, case.key, case.value, case.tree_mask, window=window, path="eager")

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        result = call()
    assert watched.profiler is not None and watched.profiler.kineto_results is not None
    held = most = 0
    for event in sorted(watched.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        held += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, held)
    assert stated / 20 < most - result.nbytes <= stated
    bounds = [scratch_bytes(2048, keys, 64, 8, torch.bfloat16) for keys in (4096, 131072)]
    assert bounds[0] == bounds[1] < 64 << 20, "it does not grow with the prefix"


def test_nothing_asked_is_nothing_answered() -> None:
    case = make_case([Shape(10, 2, 6, 8)])
    tree_mask = TreeMask.of(torch.zeros(0, 6, dtype=torch.bool), prefix=10, causal=2)
    assert tree_attention(case.query[:, :, :0], case.key, case.value, tree_mask).shape == (1, 4, 0, 32)
