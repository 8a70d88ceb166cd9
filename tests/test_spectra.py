"""Spectra: every identity against the dense float64 computation."""

import copy
import itertools
import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import helpers

EPS = torch.finfo(torch.float64).eps


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def conditioned(tokens, head_dim, condition, seed):
    """[tokens, head_dim] with singular values from 1 down to 1/condition, in random bases."""
    left, right = (torch.linalg.qr(gaussian(n, head_dim, seed=seed)).Q for n in (tokens, head_dim))
    return left * torch.logspace(0, -math.log10(condition), head_dim) @ right.mT


def assert_same_spectrum(found, dense, rounding=None):
    """To 1e-10 of the largest value, and with the same r90 and r99.

    A spectrum that is rounding and nothing else has no such digits: then it is at most `rounding`.
    """
    count = found.shape[-1]
    allowed = 1e-10 * dense[..., :1] if rounding is None else rounding
    assert found.dtype == torch.float64
    assert (found.diff(dim=-1) <= 0).all()
    assert ((found - dense[..., :count]).abs() <= allowed).all()
    assert (dense[..., count:] <= allowed).all()  # no more components than head dimensions
    if rounding is None:
        for share in (0.9, 0.99):
            ranks = [helpers.threshold_rank(sigma, share) for sigma in (found, dense)]
            assert torch.equal(*ranks)


def assert_dense(left, right):
    dense = torch.linalg.svdvals(left.double() @ right.double().mT)
    found = helpers.product_singular_values(left, right)
    assert found.shape[-1] == min(left.shape[-2], right.shape[-2], left.shape[-1])
    assert_same_spectrum(found, dense)


@pytest.fixture
def qr_heads(monkeypatch):
    """One entry per call of the QR fallback: how many heads it was given."""
    heads, by_qr = [], helpers._qr_singular_values

    def counting(left, right):
        heads.append(math.prod(torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])))
        return by_qr(left, right)

    monkeypatch.setattr(helpers, "_qr_singular_values", counting)
    return heads


SHAPES = {
    "no batch": ((40, 8), (30, 8)),
    "one head": ((1, 40, 8), (1, 40, 8)),
    "batch of two dimensions": ((2, 3, 40, 8), (2, 3, 30, 8)),
    "right broadcast": ((2, 3, 40, 8), (3, 40, 8)),
    "both broadcast": ((2, 1, 40, 8), (1, 3, 40, 8)),
    "groups of 1": ((2, 1, 40, 8), (2, 1, 40, 8)),
    "groups of 3": ((2, 3, 40, 8), (2, 1, 40, 8)),
    "groups of 7": ((2, 7, 40, 8), (2, 1, 40, 8)),
    "T = d": ((3, 8, 8), (3, 8, 8)),
    "T < d": ((3, 5, 8), (3, 5, 8)),
    "T < d on the left": ((3, 5, 8), (3, 40, 8)),
    "T < d on the right": ((7, 40, 8), (1, 5, 8)),
    "T = 1": ((3, 1, 8), (3, 1, 8)),
    "d = 1": ((3, 40, 1), (3, 40, 1)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_product_of_any_shape(shapes):
    left, right = (gaussian(*shape, seed=seed) for seed, shape in enumerate(shapes))
    assert_dense(left, right)


def rank_deficient():
    return gaussian(40, 5) @ gaussian(5, 8, seed=1), gaussian(40, 8, seed=2)


def orthogonal():
    """Two factors of full rank that share one direction only: a product of rank one."""
    left, right = gaussian(40, 8), gaussian(40, 8, seed=1)
    return left * torch.arange(8).ge(3), right * torch.arange(8).le(3)


HARD = {
    "condition 1e6": (conditioned(40, 8, 1e6, 1), conditioned(30, 8, 1e6, 2)),
    "condition 1e12": (conditioned(40, 8, 1e12, 1), conditioned(30, 8, 1e12, 2)),
    "left of condition 1e9": (conditioned(40, 8, 1e9, 1), gaussian(30, 8)),
    "right of condition 1e9": (gaussian(40, 8), conditioned(30, 8, 1e9, 1)),
    "left of rank 5": rank_deficient(),
    "right of rank 5": rank_deficient()[::-1],
    "nearly orthogonal": orthogonal(),
    "duplicated rows": (gaussian(40, 8), gaussian(4, 8, seed=1).repeat(10, 1)),
    "constant rows": (gaussian(40, 8), gaussian(1, 8, seed=1).repeat(40, 1)),
    "left zero": (torch.zeros(40, 8), gaussian(40, 8)),
    "constant column": (gaussian(40, 8), gaussian(40, 8, seed=1) * torch.arange(8).gt(0)),
}


@pytest.mark.parametrize("factors", HARD.values(), ids=HARD)
def test_product_of_singular_factors_goes_by_qr(factors, qr_heads):
    assert_dense(*factors)
    assert qr_heads == [1]


def test_product_of_ordinary_factors_needs_no_qr(qr_heads):
    assert_dense(gaussian(2, 3, 200, 64), gaussian(2, 1, 200, 64, seed=1))
    assert_dense(conditioned(40, 8, 30, 1), conditioned(30, 8, 30, 2))
    assert qr_heads == []


def test_only_the_singular_head_goes_by_qr(qr_heads):
    left, right = gaussian(2, 3, 40, 8), gaussian(2, 1, 40, 8, seed=1)
    left[1, 2] = conditioned(40, 8, 1e8, 3)
    assert_dense(left, right)
    assert qr_heads == [1]


def test_a_zero_head_or_a_huge_one_sends_no_other_by_qr(qr_heads):
    left, right = gaussian(4, 40, 8), gaussian(4, 40, 8, seed=1)
    left[1], right[3] = 0, 1e160 * right[3]
    found = helpers.product_singular_values(left, right)
    assert qr_heads == [2]
    right[3] /= 1e160
    found[3] /= 1e160
    assert_same_spectrum(found[::2], torch.linalg.svdvals(left @ right.mT)[::2])
    assert_same_spectrum(found[3], torch.linalg.svdvals(left[3] @ right[3].mT))
    assert torch.equal(found[1], torch.zeros(8).double())


@given(
    st.floats(0, 13), st.floats(0, 13), st.integers(1, 60), st.integers(1, 60), st.integers(1, 12)
)
def test_product_at_any_condition(left, right, tokens, others, head_dim):
    factors = []
    for seed, (count, log) in enumerate([(tokens, left), (others, right)]):
        factor = conditioned(max(count, head_dim), head_dim, 10**log, seed)[:count]
        factors.append(factor)
    assert_dense(*factors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_product_of_any_dtype_is_done_in_float64(dtype):
    assert_dense(gaussian(3, 40, 8).to(dtype), gaussian(3, 40, 8, seed=1).to(dtype))


def test_product_of_non_contiguous_factors():
    left, right = gaussian(40, 3, 16).transpose(0, 1)[..., ::2], gaussian(8, 30, seed=1).mT
    before = left.clone()
    assert not left.is_contiguous()
    assert_dense(left, right)
    assert torch.equal(left, before)


@pytest.mark.parametrize("is_cpu", [True, False])
def test_product_and_accumulator_on_any_device(monkeypatch, is_cpu):
    """Numpy multiplies on the CPU, torch elsewhere; parameters carry no gradient into either."""
    queries, keys = (torch.nn.Parameter(1e3 + gaussian(3, 40, 8, seed=seed)) for seed in (0, 1))
    dense = torch.linalg.svdvals(dense_fields(queries, keys, 0.3, True).detach())
    monkeypatch.setattr(torch.Tensor, "is_cpu", is_cpu)
    found = [
        helpers.logit_singular_values(queries.detach(), keys.detach(), 0.3),
        helpers.logit_singular_values(queries, keys, 0.3),
        accumulated(queries, keys, [13], random.Random(0)),
    ]
    for sigma in found:
        assert not sigma.requires_grad
        assert_same_spectrum(sigma, dense)


def test_product_with_a_zero_factor_is_zero():
    for factors in ((torch.zeros(40, 8), gaussian(40, 8)), (gaussian(40, 8), torch.zeros(40, 8))):
        assert torch.equal(helpers.product_singular_values(*factors), torch.zeros(8).double())


@pytest.mark.parametrize("size", [1e-150, 1e-90, 1e-30, 1e30, 1e90, 1e150])
def test_product_of_any_size(size):
    left, right = gaussian(2, 40, 8), gaussian(2, 40, 8, seed=1)
    expected = torch.linalg.svdvals(left @ right.mT)[..., :8]
    assert_close(helpers.product_singular_values(size * left, right) / size, expected)
    assert_close(helpers.product_singular_values(size * left, size * right) / size / size, expected)


@pytest.mark.parametrize("size", [1e-200, 1e-160, 1e-158, 1e160])
def test_product_whose_gram_matrix_leaves_the_range_of_float64(size):
    left, right = gaussian(2, 40, 8), gaussian(2, 40, 8, seed=1)
    expected = torch.linalg.svdvals(left @ right.mT)[..., :8]
    for factors in ((size * left, right), (right, size * left)):
        assert_close(helpers.product_singular_values(*factors) / size, expected)


def test_product_refuses_nan_beside_a_huge_factor():
    left, right = 1e160 * gaussian(2, 40, 8), gaussian(2, 40, 8)
    right[1, 3, 3] = math.nan
    with pytest.raises(ValueError, match=r"right factor of head \(1,\) has NaN or infinite"):
        helpers.product_singular_values(left, right)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["left", "right"])
def test_product_refuses_what_is_not_finite(side, value):
    factors = {"left": gaussian(2, 3, 40, 8), "right": gaussian(2, 3, 40, 8)}
    factors[side][1, 2, 5, 3] = value
    with pytest.raises(ValueError, match=rf"{side} factor of head \(1, 2\) has NaN or infinite"):
        helpers.product_singular_values(**factors)


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ((40, 8), (40, 6), r"same d, found \(40, 8\) and \(40, 6\)"),
        ((8,), (40, 8), "same d"),
        ((40, 8), (8,), "same d"),
        ((0, 8), (40, 8), "empty"),
        ((40, 8), (3, 0, 8), "empty"),
    ],
)
def test_product_refuses_factors_that_do_not_fit(left, right, message):
    with pytest.raises(ValueError, match=message):
        helpers.product_singular_values(torch.ones(left), torch.ones(right))


def test_centred_keys_keep_every_digit_under_a_large_mean():
    spread = gaussian(40, 8).float()
    keys = spread + 4096  # float32: a mean in float32, or K^T K - T k k^T, would lose the spread
    exact = keys.double() - keys.double().mean(0)
    assert_close(helpers.centred(keys), exact, rtol=0, atol=1e-10)
    assert helpers.centred(keys).dtype == torch.float64


def dense_fields(queries, keys, scale, row_centred):
    """Every query head's T×T field, written out."""
    group = len(queries) // len(keys)
    fields = []
    for head, query in enumerate(queries.double()):
        logits = scale * query @ keys[head // group].double().mT
        fields.append(logits - logits.mean(-1, keepdim=True) if row_centred else logits)
    return torch.stack(fields)


@pytest.mark.parametrize("per_key_head", [True, False])
@pytest.mark.parametrize("row_centred", [True, False])
@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_logit_field_against_dense(tokens, group, row_centred, per_key_head):
    queries, keys = gaussian(2 * group, tokens, 8), 2 + gaussian(2, tokens, 8, seed=1)
    reading = {"row_centred": row_centred, "per_key_head": per_key_head}
    found = helpers.logit_singular_values(queries, keys, 0.3, **reading)
    fields = dense_fields(queries, keys, 0.3, row_centred)
    if per_key_head:  # the fields of a group, one below the other
        fields = fields.reshape(2, group * tokens, tokens)
    assert found.shape == (len(fields), min(tokens, 8))
    assert_same_spectrum(found, torch.linalg.svdvals(fields))


def test_logit_field_is_row_centred_unless_told():
    queries, keys = gaussian(2, 40, 8), gaussian(2, 40, 8, seed=1)
    found = helpers.logit_singular_values(queries, keys, 1)
    assert torch.equal(found, helpers.logit_singular_values(queries, keys, 1, row_centred=True))


def duplicated(keys):
    return keys[:, :4].repeat(1, 10, 1)


def constant(keys):
    return keys[:, :1].expand(-1, 40, -1)


def low_rank(keys):
    return keys * torch.arange(8).lt(5)


def zero(keys):
    return torch.zeros_like(keys)


@pytest.mark.parametrize(
    ("change", "rank"), [(duplicated, 3), (constant, 0), (low_rank, 5), (zero, 0)]
)
def test_logit_field_of_degenerate_keys(change, rank):
    queries, keys = gaussian(6, 40, 8), change(2 + gaussian(2, 40, 8, seed=1))
    found = helpers.logit_singular_values(queries, keys, 0.3)
    dense = torch.linalg.svdvals(dense_fields(queries, keys, 0.3, True))
    # Centred equal keys are rounding, and differently so on each route: neither r90 nor a
    # relative error means anything there. It is small beside the factors.
    size = queries.norm(dim=(-2, -1)) * keys.norm(dim=(-2, -1)).repeat_interleave(3)
    rounding = 100 * EPS * size[:, None]
    assert_same_spectrum(found, dense, rounding if rank == 0 else None)
    assert ((found > rounding).sum(-1) == rank).all()


# The same from Gram matrices that are added up chunk by chunk


def accumulated(queries, keys, cuts, order):
    """Spectra of the field from chunks cut at `cuts`, merged pairwise as `order` draws them."""
    edges = [0, *sorted(cuts), queries.shape[-2]]
    chunks = [
        helpers.field_grams(queries[:, start:stop], keys[:, start:stop])
        for start, stop in itertools.pairwise(edges)
        if start < stop
    ]
    while len(chunks) > 1:
        order.shuffle(chunks)
        chunks.append(helpers.merge_grams(chunks.pop(), chunks.pop()))
    return helpers.grams_singular_values(chunks[0], 0.3)


CHUNKS = st.lists(st.integers(1, 39), max_size=8)
ORDER = st.randoms(use_true_random=False)


@given(CHUNKS, ORDER, st.sampled_from([1, 3, 7]), st.sampled_from([0.0, 2.0, 1e4, 1e8]))
def test_accumulated_field_in_any_chunks_and_order(cuts, order, group, mean):
    """Keys far from 0, too, where K^T K - T k k^T and even the means of float64 lose digits."""
    queries, keys = gaussian(2 * group, 40, 8), mean + gaussian(2, 40, 8, seed=1)
    shifted = keys - keys[:, :1]  # exact, and the same field once the rows are centred
    found = accumulated(queries, keys, cuts, order)
    assert found.shape == (2 * group, 8)
    assert_same_spectrum(found, torch.linalg.svdvals(dense_fields(queries, shifted, 0.3, True)))


@given(CHUNKS, ORDER, st.floats(0, 12), st.floats(0, 12))
def test_accumulated_field_at_any_condition(cuts, order, of_queries, of_keys):
    queries = conditioned(40, 8, 10**of_queries, 1)[None]
    keys = 1 + conditioned(40, 8, 10**of_keys, 2)[None]
    dense = torch.linalg.svdvals(dense_fields(queries, keys, 0.3, True))
    assert_same_energies(accumulated(queries, keys, cuts, order), dense, queries, keys)


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9])
def test_accumulated_field_of_few_tokens(tokens):
    queries, keys = gaussian(6, tokens, 8), 2 + gaussian(2, tokens, 8, seed=1)
    dense = torch.linalg.svdvals(dense_fields(queries, keys, 0.3, True))
    found = accumulated(queries, keys, [1, tokens // 2], random.Random(0))
    assert found.shape == (6, min(tokens, 8))
    assert_same_energies(found, dense, queries, keys)


@pytest.mark.parametrize("change", [duplicated, constant, low_rank, zero])
def test_accumulated_field_of_degenerate_keys(change):
    queries, keys = gaussian(6, 40, 8), change(2 + gaussian(2, 40, 8, seed=1))
    dense = torch.linalg.svdvals(dense_fields(queries, keys, 0.3, True))
    found = accumulated(queries, keys, [3, 17, 18], random.Random(0))
    assert_same_energies(found, dense, queries, keys)


def assert_same_energies(found, dense, queries, keys):
    """Squares to rounding of the squared factors, and then r90 and r99 where there is a field."""
    size = queries.norm(dim=(-2, -1)) * keys.norm(dim=(-2, -1)).repeat_interleave(3)[: len(queries)]
    rounding = 100 * EPS * (0.3 * size[:, None]) ** 2
    count = found.shape[-1]
    assert ((found.square() - dense[:, :count].square()).abs() <= rounding).all()
    for share in (0.9, 0.99):
        ranks = [helpers.threshold_rank(s, share) for s in (found, dense)]
        field = dense[:, 0].square() > 100 * rounding[:, 0]
        assert torch.equal(ranks[0][field], ranks[1][field])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_accumulated_field_of_any_dtype_is_done_in_float64(dtype):
    queries, keys = (gaussian(2, 40, 8, seed=s).to(dtype) for s in (0, 1))
    dense = torch.linalg.svdvals(dense_fields(queries, keys, 0.3, True))
    assert_same_spectrum(accumulated(queries, keys, [13], random.Random(0)), dense)


def test_merged_grams_are_those_of_all_tokens_and_leave_their_parts_alone():
    queries, keys = gaussian(6, 40, 8), 1e4 + gaussian(2, 40, 8, seed=1)
    parts = [helpers.field_grams(queries[:, s], keys[:, s]) for s in (slice(9), slice(9, 40))]
    before = copy.deepcopy(parts)
    merged = helpers.merge_grams(*parts)
    whole = helpers.field_grams(queries, keys)
    for part in ("tokens", "mean_key", "queries", "keys"):
        assert_close(getattr(merged, part), getattr(whole, part))
    for part, kept in zip(itertools.chain(*parts), itertools.chain(*before), strict=True):
        assert_close(part, kept, rtol=0, atol=0)


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, r"{side} factor of head \(1,\) has NaN or infinite"),
        (math.inf, r"{side} factor of head \(1,\) has NaN or infinite"),
        (1e200, "{side} factor is too large or too small to square"),
    ],
)
def test_accumulator_refuses_what_it_cannot_square(side, value, message):
    factors = {"query": gaussian(2, 40, 8), "key": gaussian(2, 40, 8)}
    factors[side][1, 5, 3] = value
    with pytest.raises(ValueError, match=message.format(side=side)):
        helpers.field_grams(factors["query"], factors["key"])


def test_accumulator_takes_small_factors_and_refuses_those_it_would_lose():
    queries, keys = 1e-130 * gaussian(2, 40, 8), gaussian(2, 40, 8, seed=1)
    dense = torch.linalg.svdvals(dense_fields(queries, keys, 0.3, True))
    assert_same_spectrum(accumulated(queries, keys, [13], random.Random(0)), dense)
    with pytest.raises(ValueError, match="query factor is too large or too small to square"):
        helpers.field_grams(1e-20 * queries, keys)


def test_accumulator_refuses_a_sum_beyond_float64():
    queries, keys = gaussian(2, 40, 8), torch.ones(2, 40, 8).double()
    near, far = helpers.field_grams(queries, keys), helpers.field_grams(queries, 1e160 * keys)
    with pytest.raises(ValueError, match="merged Gram matrices overflow float64"):
        helpers.merge_grams(near, far)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ((2, 0, 8), (2, 0, 8)),
        ((2, 40, 8), (2, 0, 8)),
        ((2, 40, 8), (2, 30, 8)),
        ((2, 40, 8), (2, 40, 6)),
        ((2, 40, 0), (2, 40, 0)),
    ],
)
def test_accumulator_refuses_shapes_that_do_not_fit(queries, keys):
    with pytest.raises(ValueError, match="the same T and d, none of them 0, found") as raised:
        helpers.field_grams(torch.ones(queries), torch.ones(keys))
    assert str(raised.value).endswith(f"{queries} and {keys}")


def test_accumulator_refuses_to_merge_other_heads():
    one, three = (helpers.field_grams(gaussian(3, 40, 8), gaussian(n, 40, 8)) for n in (1, 3))
    with pytest.raises(ValueError, match=r"different heads .* \(1, 8, 8\)\] and .* \(3, 8, 8\)\]"):
        helpers.merge_grams(one, three)


@pytest.mark.parametrize(("queries", "keys"), [((3, 40, 8), (2, 40, 8)), ((3, 40, 8), (0, 40, 8))])
def test_logit_field_names_both_shapes_when_heads_do_not_divide(queries, keys):
    with pytest.raises(ValueError, match="multiple of H_kv, found") as raised:
        helpers.logit_singular_values(gaussian(*queries), gaussian(*keys), 1)
    assert str(raised.value).endswith(f"{queries} and {keys}")


@pytest.mark.parametrize(("tokens", "group"), [(1, 1), (5, 3), (30, 1), (30, 3)])
def test_causal_field_against_a_row_by_row_construction(tokens, group):
    queries, keys = gaussian(2 * group, tokens, 8).float(), 2 + gaussian(2, tokens, 8, seed=1)
    expected = []
    for head in range(2 * group):
        field = torch.zeros(tokens, tokens, dtype=torch.float64)
        for i in range(tokens):
            row = 0.3 * keys[head // group, : i + 1] @ queries[head, i].double()
            field[i, : i + 1] = row - row.mean()
        expected.append(torch.linalg.svdvals(field))
    found = helpers.causal_singular_values(queries, keys.float(), 0.3)
    assert found.dtype == torch.float64
    assert_close(found, torch.stack(expected), rtol=0, atol=1e-5)
    exact = helpers.causal_singular_values(queries, keys, 0.3)
    assert_close(exact, torch.stack(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("per_key_head", [True, False])
@pytest.mark.parametrize("row_centred", [True, False])
def test_causal_field_under_the_other_readings(row_centred, per_key_head):
    queries, keys = gaussian(6, 30, 8), 2 + gaussian(2, 30, 8, seed=1)
    logits = dense_fields(queries, keys, 0.3, False)
    visible = torch.ones(30, 30).tril().bool()
    means = logits.tril().sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
    fields = (logits - means if row_centred else logits).where(visible, 0)
    fields = fields.reshape(2, 90, 30) if per_key_head else fields
    reading = {"row_centred": row_centred, "per_key_head": per_key_head}
    found = helpers.causal_singular_values(queries, keys, 0.3, **reading)
    assert_close(found, torch.linalg.svdvals(fields), rtol=0, atol=1e-12)


@pytest.mark.parametrize("per_key_head", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("group", "width"), [(1, 40), (3, 40), (3, 5)])
def test_weight_spectra_against_dense(group, width, biased, with_bias, per_key_head):
    W_Q, W_K = gaussian(2 * group, 8, width), gaussian(2, 8, width, seed=1)
    b_Q, b_K = (gaussian(n, 8, seed=2) if biased else None for n in (2 * group, 2))
    weights = helpers.HeadWeights(0, W_Q, W_K, b_Q, b_K)
    reading = {"with_bias": with_bias, "per_key_head": per_key_head}
    found = helpers.weight_singular_values(weights, **reading)
    if biased and with_bias:
        W_Q, W_K = torch.cat([W_Q, b_Q[..., None]], -1), torch.cat([W_K, b_K[..., None]], -1)
    M = [W_Q[head].mT @ W_K[head // group] for head in range(2 * group)]
    if per_key_head:
        M = [torch.cat(M[:group]), torch.cat(M[group:])]
    assert len(found) == len(M)
    assert_same_spectrum(found, torch.linalg.svdvals(torch.stack(M)))


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("tokens", "rank"), [(40, 1), (40, 5), (40, 8), (5, 2), (5, 5)])
def test_low_rank_factors_give_the_best_field_of_that_rank(tokens, rank, group):
    queries, keys = gaussian(2 * group, tokens, 8), 2 + gaussian(2, tokens, 8, seed=1)
    low_queries, low_keys = helpers.low_rank_factors(queries, keys, rank)
    assert low_queries.shape == low_keys.shape == (2 * group, tokens, rank)
    field = dense_fields(queries, keys, 0.3, True)
    U, sigma, Vh = torch.linalg.svd(field)
    best = U[..., :rank] * sigma[:, None, :rank] @ Vh[:, :rank]
    assert_close(0.3 * low_queries @ low_keys.mT, best, rtol=0, atol=1e-11)
    assert_close(low_keys.mT @ low_keys, torch.eye(rank).double().expand(2 * group, -1, -1))


def diagonal_means(field):
    """Every entry replaced by the mean of its diagonal."""
    tokens = len(field)
    means = torch.zeros_like(field)
    for distance in range(1 - tokens, tokens):
        diagonal = means.diagonal(distance)
        diagonal.fill_(field.diagonal(distance).mean())
    return means


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("tokens", [2, 5, 30])
def test_component_parts_against_dense_matrices(tokens, group):
    one, other = (
        (gaussian(2 * group, tokens, 8, seed=seed) + 1, gaussian(2, tokens, 8, seed=seed + 1) + 1)
        for seed in (3, 5)
    )
    found = helpers.component_parts(*one, other)
    for head in range(2 * group):
        field, compared = (
            q[head] @ (k[head // group] - k[head // group].mean(0)).mT for q, k in (one, other)
        )
        u, sigma, vh = torch.linalg.svd(field)
        by_key = compared.mean(0).expand_as(compared)
        by_distance = diagonal_means(compared - by_key)
        count = min(tokens - 1, 8)  # the components that are not rounding
        components = sigma[:count, None, None] * u.mT[:count, :, None] * vh[:count, None, :]
        expected = [(components * part).sum((-2, -1)) for part in (compared, by_key, by_distance)]
        for part, dense in zip(found, [sigma[:count] ** 2, *expected], strict=True):
            assert_close(part[head, :count], dense, atol=1e-9, rtol=1e-9)


def test_component_parts_of_a_field_with_itself_and_of_known_fields():
    queries, keys = gaussian(4, 40, 8), gaussian(2, 40, 8, seed=1)
    itself = helpers.component_parts(queries, keys, (queries, keys))
    assert_close(itself.common, itself.energy)
    # The same query everywhere: a function of the key alone.
    same = queries[:, :1].expand(-1, 40, -1)
    parts = helpers.component_parts(same, keys, (same, keys))
    assert_close(parts.by_key[:, 0], parts.energy[:, 0])
    assert parts.by_distance.abs().max() < 1e-9 * parts.energy.max()
    # Turning vectors: a function of the distance, but for what centring the rows takes off.
    angle = torch.arange(40.0, dtype=torch.float64) * 2 * math.pi * 3 / 40  # whole turns
    turned = torch.stack([angle.cos(), angle.sin()], -1)[None]
    parts = helpers.component_parts(turned, turned, (turned, turned))
    assert_close(parts.by_distance, parts.energy)
    assert parts.by_key.abs().max() < 1e-9 * parts.energy.max()


@pytest.mark.parametrize(("queries", "keys", "other_keys"), [(40, 40, 39), (40, 39, 39), (0, 0, 0)])
def test_component_parts_refuse_fields_of_other_shapes(queries, keys, other_keys):
    queries, keys, other_keys = (gaussian(2, tokens, 8) for tokens in (queries, keys, other_keys))
    with pytest.raises(ValueError, match=r"both fields need queries .* found \[\(2, \d+, 8\)"):
        helpers.component_parts(queries, keys, (queries, other_keys))


@pytest.mark.parametrize("rank", [0, -1, 9])
def test_low_rank_factors_refuse_an_impossible_rank(rank):
    with pytest.raises(ValueError, match=f"rank must be 1 to 8 .* found {rank}"):
        helpers.low_rank_factors(gaussian(2, 40, 8), gaussian(2, 40, 8), rank)


def best_of_rank(field, ranks):
    """Every field cut to its rank by a dense singular value decomposition."""
    U, sigma, Vh = torch.linalg.svd(field, full_matrices=False)
    kept = torch.arange(sigma.shape[-1]) < torch.as_tensor(ranks).unsqueeze(-1)
    return U * (sigma * kept).unsqueeze(-2) @ Vh


def projected(down, up, rank):
    """P, for which the logits z^T P x stand in the place of z^T x."""
    return up[..., :rank] @ down[..., :rank].mT


@pytest.mark.parametrize("rank", range(1, 9))
def test_best_projection_is_the_truncated_field(rank):
    queries, keys = gaussian(2, 40, 8), gaussian(2, 40, 8, seed=1) @ gaussian(8, 8, seed=2)
    down, up, sigma = helpers.best_projection(queries.mT @ queries, keys.mT @ keys)
    field = queries @ keys.mT
    assert_close(queries @ projected(down, up, rank) @ keys.mT, best_of_rank(field, [rank] * 2))
    assert_close(sigma, torch.linalg.svdvals(field)[:, :8])
    # The r numbers of the key that r numbers stand for are these numbers.
    assert_close(down.mT @ up, torch.eye(8).double().expand(2, -1, -1))


def test_no_other_projection_changes_the_logits_less():
    queries, keys = gaussian(40, 8) @ gaussian(8, 8, seed=3), gaussian(40, 8, seed=1)

    def error(P):
        return (queries @ (P - torch.eye(8)) @ keys.mT).square().sum()

    down, up, sigma = helpers.best_projection(queries.mT @ queries, keys.mT @ keys)
    best = projected(down, up, 3)
    assert_close(error(best), sigma[3:].square().sum())
    for seed in range(20):
        near = (1e-3 * gaussian(8, 8, seed=seed)).matrix_exp()
        assert error(near @ best) > error(best)
        assert error(best @ near) > error(best)
    for moments in (keys.mT @ keys, queries.mT @ queries, keys.mT @ keys + queries.mT @ queries):
        basis = torch.linalg.eigh(moments).eigenvectors.flip(-1)
        assert error(projected(basis, basis, 3)) > 1.01 * error(best)


@pytest.mark.parametrize("empty", ["queries", "keys", "both"])
def test_best_projection_of_empty_directions(empty):
    """A direction that no query or key has costs nothing, and with all d nothing is lost."""
    factors = {"queries": gaussian(40, 8), "keys": gaussian(40, 8, seed=1)}
    for name in ("queries", "keys"):
        if empty in (name, "both"):
            factors[name][:, 5:] = 0
    queries, keys = factors.values()
    down, up, _ = helpers.best_projection(queries.mT @ queries, keys.mT @ keys)
    assert_close(queries @ projected(down, up, 5) @ keys.mT, queries @ keys.mT, atol=1e-5, rtol=0)
    assert_close(projected(down, up, 8), torch.eye(8).double(), atol=1e-5, rtol=0)
    zero = torch.zeros(8, 8)
    assert_close(projected(*helpers.best_projection(zero, zero)[:2], 8), torch.eye(8).double())


def test_best_projection_refuses_what_is_not_finite():
    moments = torch.eye(8).repeat(3, 1, 1)
    broken = moments.clone()
    broken[2, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"query moments .* head \(2,\) has NaN"):
        helpers.best_projection(broken, moments)
    with pytest.raises(ValueError, match=r"key moments .* head \(2,\) has NaN"):
        helpers.best_projection(moments, broken)


# Ranks of a spectrum ---------------------------------------------------------------------------

RANKS = [
    helpers.threshold_rank,
    helpers.entropy_rank,
    helpers.participation_ratio,
    helpers.stable_rank,
]
SPECTRA = st.lists(st.integers(0, 1000), min_size=1, max_size=20)


def least_rank(sigma, share):
    """The definition, in exact arithmetic."""
    squares = sorted((value**2 for value in sigma), reverse=True)
    held = [sum(squares[:rank]) for rank in range(len(squares) + 1)]
    return next(rank for rank, energy in enumerate(held) if energy >= share * held[-1])


@given(SPECTRA, st.integers(1, 100))
def test_threshold_rank_is_its_definition(sigma, percent):
    expected = least_rank(sigma, Fraction(percent, 100))
    found = helpers.threshold_rank(torch.tensor(sigma), percent / 100)
    assert (found.dtype, found.item()) == (torch.int64, expected)


@pytest.mark.parametrize(
    ("sigma", "share", "rank"),
    [
        ([3.0, 1.0], 0.9, 1),  # exactly 9 of 10: enough
        ([3.0, 1.0], 0.91, 2),
        ([1.0] * 10, 0.9, 9),
        ([1.0] * 64, 0.9, 58),
        ([1.0] * 10, 1.0, 10),
        ([1.0, 1.0, 0.0], 1.0, 2),
        ([0.1] * 10, 0.3, 3),  # 0.1 + 0.1 + 0.1 != 0.3
        ([0.0, 0.0], 1.0, 0),
        ([1.0, 5.0, 1.0], 0.9, 1),  # in any order
    ],
)
def test_threshold_rank_of_known_spectra(sigma, share, rank):
    assert helpers.threshold_rank(torch.tensor(sigma), share) == rank


def test_threshold_rank_is_r90_by_default_and_keeps_the_batch():
    sigma = torch.tensor([[[1.0] * 10, [1.0] + [0.0] * 9]])
    assert helpers.threshold_rank(sigma).tolist() == [[9, 1]]


@pytest.mark.parametrize("share", [0, -0.1, 1.1, 90, math.nan, math.inf])
def test_threshold_rank_refuses_a_share_that_is_none(share):
    with pytest.raises(ValueError, match="share must be a number above 0 and at most 1"):
        helpers.threshold_rank(torch.ones(3), share)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("sigma", [[1.0, math.nan], [1.0, math.inf], [1.0, -0.5], [], 1.0])
def test_ranks_refuse_what_is_no_spectrum(rank, sigma):
    with pytest.raises(ValueError, match="spectrum"):
        rank(torch.tensor(sigma))


@pytest.mark.parametrize("rank", RANKS[1:])
def test_ranks_of_flat_single_and_zero_spectra(rank):
    sigma = torch.zeros(3, 7)
    sigma[0], sigma[1, 4] = 0.3, 1e-3
    assert_close(rank(sigma), torch.tensor([7.0, 1.0, 0.0]).double())


def test_ranks_of_a_spectrum_worked_by_hand():
    sigma = torch.tensor([2.0, 1.0, 1.0])
    assert_close(helpers.entropy_rank(sigma).item(), 2**1.5)  # p = 1/2, 1/4, 1/4
    assert_close(helpers.participation_ratio(sigma).item(), 6**2 / (16 + 1 + 1))
    assert_close(helpers.stable_rank(sigma).item(), 6 / 4)


@given(SPECTRA.filter(any), st.integers(-200, 200), st.randoms(use_true_random=False))
def test_ranks_are_bounded_and_know_neither_size_nor_order(sigma, exponent, random):
    shuffled = random.sample(sigma, len(sigma))
    spectra = torch.tensor(sigma).double(), torch.tensor(shuffled).double() * 10.0**exponent
    for rank in RANKS:
        found, other = (rank(spectrum).double().item() for spectrum in spectra)
        assert math.isclose(found, other, rel_tol=1e-12)
        assert 1 - 1e-12 <= found <= len(sigma) * (1 + 1e-12)
    entropy, participation, stable = (rank(spectra[0]).item() for rank in RANKS[1:])
    assert stable <= participation * (1 + 1e-12)
    assert participation <= entropy * (1 + 1e-12)


# Leverage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "rank"),
    [
        (3 + gaussian(2, 40, 8), 8),
        (3 + gaussian(2, 5, 8), 4),
        (low_rank(gaussian(2, 40, 8)), 5),
        (duplicated(gaussian(2, 40, 8)), 3),
        (1e-9 * gaussian(2, 40, 8).float(), 8),
    ],
    ids=["full", "T < d", "rank 5", "duplicated", "small"],
)
def test_leverage_is_the_diagonal_of_the_projector(keys, rank):
    centred = keys.double() - keys.double().mean(-2, keepdim=True)
    projector = centred @ torch.linalg.pinv(centred, rtol=1e-9)
    found = helpers.leverage(keys)
    assert found.dtype == torch.float64
    assert_close(found, projector.diagonal(dim1=-2, dim2=-1), rtol=0, atol=1e-10)
    assert_close(found.sum(-1), torch.full((2,), float(rank)).double())
    expected = keys.shape[-2] / 8 * found.amax(-1)
    assert_close(helpers.key_incoherence(keys), expected)


@pytest.mark.parametrize("value", [0.0, 0.5, 0.1, 1e6 / 3])
def test_leverage_of_equal_keys_is_zero(value):
    """Their centred keys have rank 0, though the mean of 0.1 is not 0.1 in floating point."""
    for tokens in (3, 10, 40):
        keys = torch.full((tokens, 4), value, dtype=torch.float64)
        assert torch.equal(helpers.leverage(keys), torch.zeros(tokens).double())


def test_key_incoherence_is_one_for_delocalised_keys():
    hadamard = torch.ones(1, 1)
    for _ in range(4):
        hadamard = torch.kron(hadamard, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    assert_close(helpers.key_incoherence(hadamard[:, 1:5]).item(), 1.0)


def test_key_incoherence_of_a_single_key_apart():
    keys = torch.zeros(40, 1)
    keys[7] = 5.0
    assert_close(helpers.leverage(keys)[7].item(), 1 - 1 / 40)
    assert_close(helpers.key_incoherence(keys).item(), 39.0)
