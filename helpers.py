"""What two or more notebooks share: spectra, attention, sources, results, figures.

Notation (as in notebook 01): T tokens, D model width, d head dimension,
H query heads, H_kv key heads (H_kv divides H), s the logit scale. The logits of a head are
E = s Q K^T; its row-centred field Ẽ = E (I - 11^T/T) = s Q (K - 1 k̄^T)^T.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import fcntl
import functools
import hashlib
import http.client
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import urllib.error
import urllib.request
import warnings
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import gguf
import huggingface_hub
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import torch

# tqdm, which transformers imports, asks every kernel without ipywidgets to install them.
warnings.filterwarnings("ignore", message="IProgress not found")

import transformers
from huggingface_hub.errors import (
    GatedRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from threadpoolctl import ThreadpoolController
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

ROOT = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("ATTENTION_SPECTRA_CACHE") or ROOT / "data" / "cache").expanduser()
_BLAS = ThreadpoolController().select(user_api="blas")
TEXT_LIMIT = 200 * 10**6  # bytes
GUTENBERG = "https://www.gutenberg.org/cache/epub/{id}/pg{id}.txt"

# ---------------------------------------------------------------------------------------------
# Spectra
# ---------------------------------------------------------------------------------------------


@torch.no_grad()
def product_singular_values(left: Tensor, right: Tensor) -> Tensor:
    """Singular values of ``left @ right.mT`` without forming the product.

    left [..., T, d] and right [..., S, d], whose leading dimensions broadcast; returns float64
    [..., min(T, S, d)], in descending order. With the Cholesky factor C of the Gram matrix
    left^T left, the squares are the eigenvalues of the d×d matrix C^T (right^T right) C. Gram
    matrices square the condition number, so a head whose smallest value could be off by more
    than 1e-11 of its largest, or whose Gram matrix is singular, is done by thin QR instead.
    Cost O((T + S) d²) a head, and right's Gram matrix is formed once however often it broadcasts;
    memory beyond the factors: one head's factor in float64, and d×d for every head. No gradient.

    Raises ValueError for mismatched d, an empty input, or a NaN or infinity (naming the head).
    """
    if left.ndim < 2 or right.ndim < 2 or left.shape[-1] != right.shape[-1]:
        raise ValueError(
            f"factors must be [..., T, d] and [..., S, d] with the same d, found "
            f"{tuple(left.shape)} and {tuple(right.shape)}: transpose or slice them"
        )
    if 0 in left.shape or 0 in right.shape:
        raise ValueError(f"factors are empty: {tuple(left.shape)} and {tuple(right.shape)}")
    if min(left.shape[-2], right.shape[-2]) < left.shape[-1]:
        _require_finite("left", left)
        _require_finite("right", right)
        return _qr_singular_values(left.double(), right.double())
    unit_left, left_size = _unit_gram(_gram(left))
    unit_right, right_size = _unit_gram(_gram(right))
    for name, factor, size in (("left", left, left_size), ("right", right, right_size)):
        if not size.isfinite().all():  # a NaN or an infinity in a factor, or an overflow
            _require_finite(name, factor)

    root, failed = torch.linalg.cholesky_ex(unit_left)
    sigma = _root_of_eigenvalues(root, unit_right)
    # First-order error of the smallest value: half the rounding of the product of Gram matrices
    # over that value. Written so that NaN counts as too large.
    rounding = torch.finfo(torch.float64).eps / 2
    exact = (failed == 0) & (rounding <= 1e-11 * sigma[..., 0] * sigma[..., -1])
    sigma = sigma * (left_size * right_size).unsqueeze(-1)
    redo = ~exact
    if redo.any():
        chosen = [f.expand(*redo.shape, *f.shape[-2:])[redo].double() for f in (left, right)]
        sigma[redo] = _qr_singular_values(*chosen)
    return sigma


def _gram(factor: Tensor) -> Tensor:
    """Gram matrices factor^T factor, float64 [..., d, d], by way of one float64 head at a time."""
    *batch, rows, columns = factor.shape
    gram = factor.new_empty(*batch, columns, columns, dtype=torch.float64)
    buffer = factor.new_empty(rows, columns, dtype=torch.float64)
    # numpy knows that X^T X is symmetric: half the work of torch.mm. It shares the CPU's memory.
    product, operands, grams = torch.mm, (buffer.mT, buffer), gram
    if factor.is_cpu:
        product, operands, grams = np.dot, (buffer.numpy().T, buffer.numpy()), gram.numpy()
    # One thread: numpy's would wait busily for work, and take the cores from those of torch.
    # Silent: the caller refuses what is not finite, by the head's name.
    with _BLAS.limit(limits=1), np.errstate(all="ignore"):
        for head in np.ndindex(*batch):
            buffer.copy_(factor[head])
            product(*operands, out=grams[head])
    return gram


def _unit_gram(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Gram matrices over their traces, and the Frobenius norms of their factors [...].

    Zero where the Gram matrix is, or overflows, or underflows so far that it loses digits.
    """
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    usable = (trace > 1e-280) & trace.isfinite()
    return (gram / trace[..., None, None]).where(usable[..., None, None], 0), trace.sqrt()


def _root_of_eigenvalues(factor: Tensor, gram: Tensor) -> Tensor:
    """Square roots of the eigenvalues of factor^T gram factor [..., d, d], descending."""
    squares = torch.linalg.eigvalsh(factor.mT @ gram @ factor)
    return squares.clamp(min=0).sqrt().flip(-1)


def _require_finite(name: str, factor: Tensor) -> None:
    finite = torch.isfinite(factor).all(dim=(-2, -1))
    if not finite.all():
        head = tuple((~finite).nonzero()[0].tolist())
        raise ValueError(f"{name} factor of head {head} has NaN or infinite entries")


def _qr_singular_values(left: Tensor, right: Tensor) -> Tensor:
    """Singular values of ``left @ right.mT`` by thin QR: those of R_left R_right^T."""
    r_left, r_right = (torch.linalg.qr(f, mode="r").R for f in (left, right))
    return torch.linalg.svdvals(r_left @ r_right.mT)


def centred(keys: Tensor) -> Tensor:
    """Keys [..., T, d] less their mean over tokens, in float64: this centres the logit rows."""
    keys = keys.double()
    return keys - keys.mean(dim=-2, keepdim=True)


def logit_singular_values(
    queries: Tensor,
    keys: Tensor,
    scale: float,
    *,
    row_centred: bool = True,
    per_key_head: bool = False,
) -> Tensor:
    """Singular values of the full field Ẽ (of E if not `row_centred`) of every query head.

    queries [H, T, d], keys [H_kv, T, d]; query head h uses key head ⌊h / (H/H_kv)⌋.
    Returns float64 [H, min(T, d)], descending. With `per_key_head` the fields of the query heads
    that share a key head are stacked, one below the other: [H_kv, min(T, d)].
    """
    keys = centred(keys) if row_centred else keys
    grouped = _grouped(queries, keys)
    if per_key_head:
        return scale * product_singular_values(grouped.flatten(1, 2), keys)
    return scale * product_singular_values(grouped, keys.unsqueeze(-3)).flatten(0, 1)


class FieldGrams(NamedTuple):
    """All that the spectra of a layer's fields need of some tokens, in float64, of a size that
    does not grow with their number.
    """

    tokens: int
    mean_key: Tensor  # k̄ [H_kv, d]
    mean_rest: Tensor  # k̄ less its rounding, mean_key [H_kv, d]
    queries: Tensor  # Q^T Q [H, d, d]
    keys: Tensor  # (K - 1k̄^T)^T (K - 1k̄^T) [H_kv, d, d]


@torch.no_grad()
def field_grams(queries: Tensor, keys: Tensor) -> FieldGrams:
    """The Gram matrices of one chunk of tokens: queries [H, T, d], keys [H_kv, T, d].

    For a context too long to hold: `merge_grams` of its chunks, then `grams_singular_values`.
    Raises ValueError for shapes that do not fit, an empty chunk, a NaN or infinity (naming the
    head), or a factor that float64 cannot square.
    """
    _grouped(queries, keys)
    if queries.shape[1:] != keys.shape[1:] or 0 in queries.shape:
        raise ValueError(
            f"a chunk needs queries [H, T, d] and keys [H_kv, T, d] with the same T and d, none of "
            f"them 0, found {tuple(queries.shape)} and {tuple(keys.shape)}"
        )
    mean_key = keys.mean(dim=-2, dtype=torch.float64)
    spread = keys - mean_key.unsqueeze(-2)
    grams = _gram(queries), _gram(spread)
    for name, factor, gram in zip(("query", "key"), (queries, spread), grams, strict=True):
        lost = (_unit_gram(gram)[0] == 0).all(-1).all(-1)
        if factor[lost].any():
            _require_finite(name, factor)
            raise ValueError(f"the {name} factor is too large or too small to square: rescale it")
    return FieldGrams(keys.shape[-2], mean_key, spread.mean(dim=-2), *grams)


def merge_grams(first: FieldGrams, second: FieldGrams) -> FieldGrams:
    """The Gram matrices of two sets of tokens together; merged in any order, the same to rounding.

    Centred keys merge by the pairwise update of Chan, Golub and LeVeque (1983): with n_1 and n_2
    tokens, and δ the difference of their mean keys, their Gram matrix is
    G_1 + G_2 + n_1 n_2 / (n_1 + n_2) δδ^T. The means are kept to twice the digits of float64, so
    that δ is exact even where they are large and close.
    """
    shapes = [(grams.queries.shape, grams.keys.shape) for grams in (first, second)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"Gram matrices of different heads cannot be merged, found queries and keys "
            f"{[tuple(s) for s in shapes[0]]} and {[tuple(s) for s in shapes[1]]}"
        )
    tokens = first.tokens + second.tokens
    delta = (second.mean_key - first.mean_key) + (second.mean_rest - first.mean_rest)
    step = second.tokens / tokens * delta
    mean_key = first.mean_key + step
    lost = step - (mean_key - first.mean_key)  # in the sum, to rounding
    weight = first.tokens * second.tokens / tokens
    queries = first.queries + second.queries
    keys = first.keys + second.keys + weight * delta.unsqueeze(-1) * delta.unsqueeze(-2)
    if not (queries.isfinite().all() and keys.isfinite().all()):
        raise ValueError("the merged Gram matrices overflow float64: scale the factors down")
    return FieldGrams(tokens, mean_key, first.mean_rest + lost, queries, keys)


def grams_singular_values(grams: FieldGrams, scale: float) -> Tensor:
    """Singular values of the full field Ẽ of every query head, float64 [H, min(T, d)], descending.

    As `logit_singular_values`, but with no factors left for QR: each σ_k² is exact to some 1e-15
    s² ‖Q‖² ‖K - 1k̄^T‖² (Frobenius norms), so that values below 1e-7 of the largest are rounding.
    """
    (queries, query_size), (keys, key_size) = map(_unit_gram, (grams.queries, grams.keys))
    values, vectors = torch.linalg.eigh(queries)
    root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)  # root root^T is the Gram matrix
    groups = (len(keys), -1)
    sigma = _root_of_eigenvalues(root.unflatten(0, groups), keys.unsqueeze(1))
    size = query_size.unflatten(0, groups) * key_size.unsqueeze(-1)
    rank_bound = min(grams.tokens, queries.shape[-1])
    return (scale * size.unsqueeze(-1) * sigma).flatten(0, 1)[..., :rank_bound]


def causal_singular_values(
    queries: Tensor,
    keys: Tensor,
    scale: float,
    *,
    row_centred: bool = True,
    per_key_head: bool = False,
) -> Tensor:
    """Singular values of the causal field: row i centred over keys j ≤ i, zero beyond.

    Shapes and alternatives as `logit_singular_values`, but with T values a head. The mask destroys
    the factored form, so this is dense: O(T³) a head, one head (or stack) at a time.
    """
    tokens = queries.shape[-2]
    visible = torch.ones(tokens, tokens, dtype=torch.bool, device=queries.device).tril()
    counts = visible.sum(-1, keepdim=True)

    def field(head: Tensor, key: Tensor) -> Tensor:
        logits = (scale * head.double() @ key.double().mT).where(visible, 0)
        if not row_centred:
            return logits
        return (logits - logits.sum(-1, keepdim=True) / counts).where(visible, 0)

    sigma = []
    for group, key in zip(_grouped(queries, keys), keys, strict=True):
        stacks = group.unsqueeze(0) if per_key_head else group.unsqueeze(1)
        for stack in stacks:
            fields = torch.cat([field(head, key) for head in stack])
            sigma.append(torch.linalg.svdvals(fields))
    return torch.stack(sigma)


def _grouped(queries: Tensor, keys: Tensor) -> Tensor:
    """Queries [H, T, d] as [H_kv, H/H_kv, T, d], one group for each key head."""
    shapes_fit = queries.ndim == keys.ndim == 3 and len(keys) > 0
    if not shapes_fit or len(queries) % len(keys):
        raise ValueError(
            f"queries [H, T, d] and keys [H_kv, T, d] need H a multiple of H_kv, found "
            f"{tuple(queries.shape)} and {tuple(keys.shape)}"
        )
    return queries.unflatten(0, (keys.shape[0], -1))


def low_rank_factors(queries: Tensor, keys: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Queries and keys of dimension `rank` whose product is the best rank-r field Ẽ_r.

    queries [H, T, d], keys [H_kv, T, d] → Q_r, K_r, both float64 [H, T, rank]:
    s Q_r K_r^T = Ẽ_r (Eckart-Young). K_r has orthonormal columns: the leading right singular
    vectors V_r of Ẽ, and Q_r = Q (K - 1k̄^T)^T V_r. With K - 1k̄^T = U_K R_K and Q = U_Q R_Q,
    V_r = U_K B_r where B_r are the right singular vectors of the d×d matrix R_Q R_K^T.
    """
    limit = min(queries.shape[-2:])
    if not 1 <= rank <= limit:
        raise ValueError(f"rank must be 1 to {limit} for fields of this shape, found {rank}")
    grouped = _grouped(queries, keys).double()
    basis, r_keys = torch.linalg.qr(centred(keys).unsqueeze(-3))
    r_queries = torch.linalg.qr(grouped, mode="r").R
    right = torch.linalg.svd(r_queries @ r_keys.mT, full_matrices=False).Vh.mT[..., :rank]
    low_queries = grouped @ (r_keys.mT @ right)
    return low_queries.flatten(0, 1), (basis @ right).flatten(0, 1)


class KeyProjection(NamedTuple):
    """How each key head of a layer is kept in r dimensions, for every r at once.

    Of a key k, the r numbers down[:, :r]^T (k - mean) are kept; the key that they stand for is
    mean + up[:, :r] down[:, :r]^T (k - mean), at r = d the key itself.
    """

    position: str  # "rotary": of keys as softmax sees them; "content": before their rotation
    mean: Tensor  # [H_kv, d], float64 as all
    down: Tensor  # [H_kv, d, d]
    up: Tensor  # [H_kv, d, d]
    sigma: Tensor  # [H_kv, d], descending: the squares are the energy that each dimension holds


def best_projection(query_moments: Tensor, key_moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The projections of keys to r dimensions that change the logits least: down, up and σ.

    Second moments [..., d, d] of queries z and keys x (sums of zz^T and of xx^T). Among matrices P
    of rank r, P = up[:, :r] down[:, :r]^T has the least mean (z^T x - z^T P x)² over all pairs of a
    query and a key: with R_z^T R_z and R_x^T R_x the moments and R_z R_x^T = A Σ B^T, it is
    P = R_x^T B_r B_r^T R_x^{-T} (Eckart-Young), and the sum is that of the squares of σ left out.
    Returns float64 [..., d, d] twice and [..., d]. Raises ValueError for shapes that do not fit, a
    NaN or infinity.
    """
    shapes = [tuple(moments.shape) for moments in (query_moments, key_moments)]
    if shapes[0] != shapes[1] or len(shapes[0]) < 2 or shapes[0][-1] != shapes[0][-2]:
        raise ValueError(f"moments must both be [..., d, d], found {shapes[0]} and {shapes[1]}")
    for name, moments in (("query", query_moments), ("key", key_moments)):
        _require_finite(f"{name} moments as", moments)
    r_queries, (r_keys, back) = _roots(query_moments)[0], _roots(key_moments)
    _, sigma, right = torch.linalg.svd(r_queries @ r_keys.mT)
    some = query_moments.any(-1).any(-1) & key_moments.any(-1).any(-1)
    return back @ right.mT, r_keys.mT @ right.mT, sigma * some.unsqueeze(-1)


def _roots(moments: Tensor) -> tuple[Tensor, Tensor]:
    """R with R^T R = moments, and R^-1; empty directions get a little, so that there is one."""
    values, vectors = torch.linalg.eigh(moments.double())
    largest = values[..., -1:]
    values = torch.maximum(values, 1e-12 * largest.where(largest > 0, 1)).sqrt()
    return (vectors * values.unsqueeze(-2)).mT, vectors / values.unsqueeze(-2)


class ComponentParts(NamedTuple):
    """Squares of singular values, and what their components share with another field: [H, n]."""

    energy: Tensor  # ‖C_k‖² = σ_k²
    common: Tensor  # ⟨C_k, Ẽ'⟩
    by_key: Tensor  # ⟨C_k, A⟩, A a function of the key's position alone
    by_distance: Tensor  # ⟨C_k, B⟩, B a function of j - i alone


@torch.no_grad()
def component_parts(queries: Tensor, keys: Tensor, others: tuple[Tensor, Tensor]) -> ComponentParts:
    """What each component of a field has in common with another field over the same positions.

    queries [H, T, d], keys [H_kv, T, d]; `others` are those of the other field Ẽ', in the same
    shapes. Component k is the matrix C_k = σ_k u_k v_k^T of the singular value decomposition of Ẽ.
    Ẽ' is split: A_ij is its mean over queries, B the means along the diagonals of Ẽ' - A, and a
    rest. Returns float64 [H, min(T, d)] of s = 1. No T×T array: ⟨C_k, Ẽ'⟩ = (σ_k Q'^T u_k)^T
    (K' - 1k̄'^T)^T v_k, and sums along diagonals are correlations, taken by Fourier transforms.
    Raises ValueError for shapes that do not fit.
    """
    shapes = [tuple(part.shape) for part in (queries, keys, *others)]
    if shapes[:2] != shapes[2:] or queries.shape[1:] != keys.shape[1:] or 0 in queries.shape:
        raise ValueError(
            f"both fields need queries [H, T, d] and keys [H_kv, T, d] in the same shapes, none of "
            f"them 0, found {shapes[:2]} and {shapes[2:]}"
        )
    left, right = low_rank_factors(queries, keys, min(queries.shape[-2:]))  # σ_k u_k and v_k
    heads, tokens, _ = queries.shape
    other_queries = others[0].double()
    other_keys = centred(others[1]).repeat_interleave(heads // len(keys), dim=0)
    common = ((left.mT @ other_queries) * (right.mT @ other_keys)).sum(-1)

    over_queries = (other_keys @ other_queries.mean(-2).unsqueeze(-1)).mT  # A has these rows
    by_key = left.sum(-2) * (over_queries @ right).squeeze(-2)

    correlation = functools.partial(_correlation, length=2 * tokens)
    diagonals = correlation(other_queries, other_keys).sum(-1)
    diagonals -= correlation(torch.ones_like(over_queries), over_queries, dim=-1).squeeze(-2)
    lags = torch.arange(2 * tokens, device=queries.device)
    counts = (tokens - torch.minimum(lags, 2 * tokens - lags)).clamp(min=1)
    by_distance = (correlation(left, right) * (diagonals / counts).unsqueeze(-1)).sum(-2)
    return ComponentParts(left.square().sum(-2), common, by_key, by_distance)


def _correlation(left: Tensor, right: Tensor, length: int, dim: int = -2) -> Tensor:
    """Σ_i left_i right_{i+δ} along `dim`, at δ modulo `length` (at least twice the tokens)."""
    left, right = (torch.fft.rfft(factor, n=length, dim=dim) for factor in (left, right))
    return torch.fft.irfft(left.conj() * right, n=length, dim=dim)


def _shares(sigma: Tensor, power: int) -> Tensor:
    """σ^power over its sum, descending, float64; zeros where the spectrum is zero."""
    sigma = torch.as_tensor(sigma).double()
    if sigma.ndim == 0 or sigma.shape[-1] == 0:
        raise ValueError(f"a spectrum needs at least one value, found shape {tuple(sigma.shape)}")
    if not torch.isfinite(sigma).all() or (sigma < 0).any():
        raise ValueError("a spectrum must be finite and non-negative")
    largest = sigma.amax(-1, keepdim=True)
    powers = (sigma / largest.where(largest > 0, 1)) ** power  # no overflow, no underflow of σ_1
    total = powers.sum(-1, keepdim=True)
    return (powers / total.where(total > 0, 1)).sort(-1, descending=True).values


def threshold_rank(sigma: Tensor, share: float = 0.9) -> Tensor:
    """Least r whose first r components hold `share` of Σσ²: r90 for share 0.9.

    sigma [..., n] → int64 [...]; 0 for a zero spectrum. Sums are compared to 1e-12, so that equal
    singular values count as equal.
    """
    require_share(share)
    held = _shares(sigma, 2).cumsum(-1)
    short = (held < share - 1e-12).sum(-1) + 1
    return torch.where(held[..., -1] > 0, short, 0)


def require_share(share: float) -> None:
    """ValueError unless `share` can be a share of the variance."""
    if not (isinstance(share, int | float) and 0 < share <= 1):
        raise ValueError(f"share must be a number above 0 and at most 1, found {share!r}")


def entropy_rank(sigma: Tensor) -> Tensor:
    """Effective rank exp(-Σ p ln p), p = σ/Σσ (Roy and Vetterli 2007); 0 for a zero spectrum."""
    p = _shares(sigma, 1)
    return torch.where(p[..., 0] > 0, torch.special.entr(p).sum(-1).exp(), 0.0)


def participation_ratio(sigma: Tensor) -> Tensor:
    """(Σσ²)² / Σσ⁴ of a spectrum [..., n]; 0 for a zero spectrum."""
    p = _shares(sigma, 2)
    return torch.where(p[..., 0] > 0, 1 / (p**2).sum(-1).clamp(min=1e-300), 0.0)


def stable_rank(sigma: Tensor) -> Tensor:
    """Σσ² / σ_1² of a spectrum [..., n]; 0 for a zero spectrum."""
    p = _shares(sigma, 2)
    return torch.where(p[..., 0] > 0, 1 / p[..., 0].clamp(min=1e-300), 0.0)


def leverage(keys: Tensor) -> Tensor:
    """Leverage h_j = ‖e_j^T U_K‖² of every key, U_K an orthonormal basis of the centred keys.

    keys [..., T, d] → float64 [..., T], each in [0, 1], summing to the rank of the centred keys.
    """
    basis, sigma, _ = torch.linalg.svd(centred(keys), full_matrices=False)
    # What centring leaves of equal keys is rounding of the keys, so their size sets the floor.
    size = torch.linalg.matrix_norm(keys.double()).unsqueeze(-1)
    floor = size * max(keys.shape[-2:]) * torch.finfo(torch.float64).eps
    return (basis * (sigma > floor).unsqueeze(-2)).square().sum(-1)


def key_incoherence(keys: Tensor) -> Tensor:
    """μ = (T/d) max_j h_j of keys [..., T, d] → [...]: 1 if perfectly delocalised, at most T/d.

    (Candès and Recht's coherence of the key space, which the paper calls key incoherence.)
    """
    tokens, head_dim = keys.shape[-2:]
    return tokens / head_dim * leverage(keys).amax(-1)


# ---------------------------------------------------------------------------------------------
# Attention: the weights of a head; queries and keys of a running model
# ---------------------------------------------------------------------------------------------


class HeadWeights(NamedTuple):
    """One layer: W_Q [H, d, D] and W_K [H_kv, d, D], biases [H, d] and [H_kv, d] or None."""

    layer: int
    W_Q: Tensor
    W_K: Tensor
    b_Q: Tensor | None
    b_K: Tensor | None


def _head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _head_counts(config) -> tuple[int, int]:
    """The query heads H and key heads H_kv of a layer."""
    heads = config.num_attention_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads


def _separate(read, config, gain: float = 0.0):
    """q_proj and k_proj, with the learned gain of a query/key norm (over a head, or over all)."""
    found = []
    for part in ("q", "k"):
        weight, bias = read(f"{part}_proj.weight"), read(f"{part}_proj.bias", required=False)
        norm = read(f"{part}_norm.weight", required=False)
        if norm is not None:
            factor = (gain + norm).repeat(len(weight) // len(norm))
            weight, bias = factor[:, None] * weight, None if bias is None else factor * bias
        found.append((weight, bias))
    return found


def _gemma3(read, config):
    """Gemma's norms multiply by 1 + gain."""
    return _separate(read, config, gain=1.0)


def _opt(read, config):
    """OPT divides its queries by √d itself, and then uses scale 1."""
    query, key = _separate(read, config)
    return [(None if x is None else x * _head_dim(config) ** -0.5 for x in query), key]


def _gpt2(read, config):
    """The fused c_attn, stored [D, 3D]: all queries, all keys, all values."""
    weights, biases = read("c_attn.weight").T.chunk(3), read("c_attn.bias").chunk(3)
    return list(zip(weights[:2], biases[:2], strict=True))


def _gpt_neox(read, config):
    """The fused query_key_value [3D, D]: query, key and value of one head after another."""
    parts = read("query_key_value.weight"), read("query_key_value.bias", required=False)
    by_head = [x if x is None else x.unflatten(0, (-1, 3, _head_dim(config))) for x in parts]
    return [[x if x is None else x[:, i].flatten(0, 1) for x in by_head] for i in (0, 1)]


def _phi3(read, config):
    """The fused qkv_proj [(H + 2 H_kv) d, D]: all queries, all keys, all values."""
    H, H_kv = _head_counts(config)
    rows = [heads * _head_dim(config) for heads in (H, H_kv, H_kv)]
    return [(weight, None) for weight in read("qkv_proj.weight").split(rows)[:2]]


# model_type → (the attention of layer {} among the model's modules, how it stores its projections)
FAMILIES = {
    "gemma": ("layers.{}.self_attn", _separate),
    "gemma2": ("layers.{}.self_attn", _separate),
    "gemma3_text": ("layers.{}.self_attn", _gemma3),
    "gpt2": ("h.{}.attn", _gpt2),
    "gpt_neox": ("layers.{}.attention", _gpt_neox),
    "gpt_oss": ("layers.{}.self_attn", _separate),
    "granite": ("layers.{}.self_attn", _separate),
    "llama": ("layers.{}.self_attn", _separate),
    "mistral": ("layers.{}.self_attn", _separate),
    "mixtral": ("layers.{}.self_attn", _separate),
    "olmo2": ("layers.{}.self_attn", _separate),
    "olmo3": ("layers.{}.self_attn", _separate),
    "opt": ("decoder.layers.{}.self_attn", _opt),
    "phi3": ("layers.{}.self_attn", _phi3),
    "qwen2": ("layers.{}.self_attn", _separate),
    "qwen3": ("layers.{}.self_attn", _separate),
    "qwen3_moe": ("layers.{}.self_attn", _separate),
    "smollm3": ("layers.{}.self_attn", _separate),
    "starcoder2": ("layers.{}.self_attn", _separate),
}
# What a layer's attention may hold. Anything else (an adapter, the scales of quantised weights, an
# unknown norm) could change its queries and keys unseen.
_PARTS = re.compile(
    r"(([qkvoc]|qkv|out)_proj|c_attn|query_key_value|dense|[qk]_norm)\.(weight|bias)"
    r"|sinks"
)
_BUFFERS = ("bias", "masked_bias", "rotary_emb.inv_freq")  # constants that old checkpoints hold


def _family(config) -> tuple[str, Callable]:
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"weights of model type {config.model_type!r} are not known here; "
            f"known: {', '.join(FAMILIES)}"
        )
    return FAMILIES[config.model_type]


def attention_module(model, layer: int) -> torch.nn.Module:
    """The attention of one layer of a model; ValueError for an unknown family."""
    return model.base_model.get_submodule(_family(model.config)[0].format(layer))


def head_weights(source) -> Iterator[HeadWeights]:
    """The query and key projections of every layer, in float64, one layer at a time.

    `source` is a transformers model, or a checkpoint of `load_checkpoint`, of which only these
    tensors are read: memory for one layer, whatever the size of the model. M of query head h is
    W_Q[h]^T W_K[⌊h / (H/H_kv)⌋]. What acts linearly after the projection is part of W and b: the
    learned gain of a query/key norm (not the norm itself), and OPT's own scale of its queries.
    Raises ValueError for an unknown family, or if the tensors are not those of the family.
    """
    config = source.config
    tensors, projections = _attention_tensors(source), _family(config)[1]
    if isinstance(source, Checkpoint):
        _require_attention(config, tensors)
    shapes = [(n, _head_dim(config), config.hidden_size) for n in _head_counts(config)]
    for layer in range(config.num_hidden_layers):
        place = f"layer {layer} of {config.model_type}"
        read = functools.partial(_read, tensors.get(layer, {}), place)
        try:
            (W_Q, b_Q), (W_K, b_K) = (
                [x if x is None else x.unflatten(0, shape[:2]) for x in parts]
                for parts, shape in zip(projections(read, config), shapes, strict=True)
            )
            fit = [W_Q.shape, W_K.shape] == shapes
        except RuntimeError:  # from unflatten or split
            fit = False
        if not fit:
            raise ValueError(
                f"the query and key weights in {place} are not of its configuration's shapes "
                f"{shapes}: weights and config.json do not belong together"
            )
        yield HeadWeights(layer, W_Q, W_K, b_Q, b_K)


def _attention_tensors(source) -> dict[int, dict[str, Callable[[], Tensor]]]:
    """For each layer, the tensors of its attention: what gives them, by their name in it."""
    if isinstance(source, Checkpoint):
        tensors = source.tensors
    else:
        tensors = {name: parameter.detach for name, parameter in source.named_parameters()}
    module = re.escape(_family(source.config)[0]).replace(r"\{\}", r"(\d+)")
    inside = re.compile(rf"(?:.*\.)?{module}\.(.+)")
    parts: dict[int, dict[str, Callable]] = {}
    for name, tensor in tensors.items():
        if (match := inside.fullmatch(name)) and match[2] not in _BUFFERS:
            layer = parts.setdefault(int(match[1]), {})
            if match[2] in layer or not _PARTS.fullmatch(match[2]):
                raise ValueError(
                    f"tensor {name} is not known in the attention of {source.config.model_type}: "
                    f"give plain weights, without quantisation or adapters"
                )
            layer[match[2]] = tensor
    return parts


def _require_attention(config, tensors: dict[int, dict]) -> None:
    """Refuse a checkpoint that lacks, or has besides, a tensor of its model's attention."""
    with _one_line("cannot build a model from config.json"), torch.device("meta"):
        expected = _attention_tensors(transformers.AutoModelForCausalLM.from_config(config))
    for layer in sorted(tensors.keys() | expected.keys()):
        found, wanted = (set(parts.get(layer, {})) for parts in (tensors, expected))
        for verb, names in (("lacks", wanted - found), ("has", found - wanted)):
            if names:
                raise ValueError(
                    f"layer {layer} of {config.model_type} {verb} {min(names)}: weights and "
                    f"config.json do not belong together"
                )


def _read(parts: dict[str, Callable], place: str, name: str, required: bool = True):
    """One tensor of a layer's attention in float64; None if it is missing and may be."""
    if name not in parts and not required:
        return None
    if name not in parts:
        raise ValueError(f"{place} lacks {name}: give all its weights, without quantisation")
    tensor = parts[name]()
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"{name} in {place} is {tensor.dtype}: give weights without quantisation")
    if not all(bound.isfinite() for bound in tensor.aminmax()):
        raise ValueError(f"{name} in {place} has NaN or infinite entries")
    return tensor.double()


def weight_singular_values(
    weights: HeadWeights, *, with_bias: bool = False, per_key_head: bool = False
) -> Tensor:
    """Singular values of the interaction matrix M = W_Q^T W_K of every query head of a layer.

    Returns float64 [H, min(D, d)], descending. With `with_bias`, M is that of the augmented
    [W b], which acts on (x, 1), D + 1 in the place of D; the same where there are no biases. With
    `per_key_head` the matrices of the query heads that share a key head are stacked: [H_kv, …].
    """
    _, W_Q, W_K, b_Q, b_K = weights
    if with_bias and b_Q is not None:
        W_Q, W_K = (torch.cat([W, b.unsqueeze(-1)], dim=-1) for W, b in ((W_Q, b_Q), (W_K, b_K)))
    # The same product as that of queries and keys, with D in the place of T.
    return logit_singular_values(W_Q.mT, W_K.mT, 1.0, row_centred=False, per_key_head=per_key_head)


def untrained(model, seed: int):
    """A model of the same architecture with new random weights, as transformers draws them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        new = type(model)(copy.deepcopy(model.config))
    return new.to(model.device, model.dtype).eval()


@torch.no_grad()
def shuffled_projections(model, unit: str, seed: int):
    """A copy of a model whose query and key projections are shuffled: same values, other places.

    With unit "entries" the entries of each head's W_Q change places at random, and so do those of
    each W_K. With unit "heads" every key head gets the W_K of another one, of any layer. Biases,
    norms and all other weights stay. Raises ValueError for an unknown family or a single key head.
    """
    require_one_of("unit", unit, ("entries", "heads"))
    copied, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    layers = [_projection_places(copied, layer) for layer in _attention_tensors(copied).values()]
    if unit == "entries":
        for values, *places in layers:
            for head in itertools.chain(*places):
                values[head] = values[head[torch.randperm(len(head), generator=generator)]]
    else:
        key_heads = torch.cat([values[places] for values, _, places in layers])
        if len(key_heads) < 2:
            raise ValueError("a single key head cannot change places with another")
        order = torch.randperm(len(key_heads), generator=generator)
        key_heads[order] = key_heads[order.roll(1)]  # one cycle through all: none keeps its own
        for values, _, places in layers:
            values[places], key_heads = key_heads[: len(places)], key_heads[len(places) :]
    for (values, *_), parts in zip(layers, _attention_tensors(copied).values(), strict=True):
        tensors = [tensor() for tensor in parts.values()]
        for tensor, part in zip(tensors, values.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))
    return copied


def _projection_places(model, parts: dict[str, Callable[[], Tensor]]) -> tuple[Tensor, ...]:
    """All values [n] of a layer's attention, and where among them W_Q [H, d·D] and W_K stand.

    The family's own reading of numbered tensors tells; of ones, what it multiplies them by.
    """
    tensors = {name: tensor() for name, tensor in parts.items()}
    sizes = [tensor.numel() for tensor in tensors.values()]
    found = []
    for numbers in (torch.arange(1.0, sum(sizes) + 1, dtype=torch.float64), torch.ones(sum(sizes))):
        numbered = {
            name: functools.partial(part.view, tensors[name].shape)
            for name, part in zip(tensors, numbers.split(sizes), strict=True)
            if "norm" not in name  # its gain stays with its layer
        }
        read = functools.partial(_read, numbered, "the numbered layer")
        found.append([weight for weight, _ in _family(model.config)[1](read, model.config)])
    places = [
        (numbered / factor).round().long().unflatten(0, (heads, -1)).flatten(1) - 1
        for numbered, factor, heads in zip(*found, _head_counts(model.config), strict=True)
    ]
    return torch.cat([tensor.flatten() for tensor in tensors.values()]), *places


def left_out(config, tensors: Iterable[str]) -> list[str]:
    """What a model does to its logits on the way to softmax, which the field E does not show.

    From its configuration, and the names of its tensors.
    """
    config, found = config.get_text_config(), ["causal mask"]
    if cap := getattr(config, "attn_logit_softcapping", None):
        found.append(f"soft-capping at {cap:g}")
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * layers
    for kind in dict.fromkeys(kinds):
        if kind != "full_attention":
            sliding = kind == "sliding_attention"
            what = f"sliding window of {window} tokens" if sliding else kind.replace("_", " ")
            found.append(f"{what} in {kinds.count(kind)} of {layers} layers")
    if any(name.endswith(".sinks") for name in tensors):
        found.append("attention sinks")
    return found


Visitor = Callable[[int, Tensor, Tensor, float], "tuple[Tensor, Tensor] | None"]


def record_attention(
    model, token_ids: Tensor, visit: Visitor, *, position: str = "rotary"
) -> Tensor:
    """Run `model` on token_ids [T] and show every layer's queries and keys to `visit`.

    visit(layer, queries [H, T, d], keys [H_kv, T, d], scale) is called once per attention layer,
    in order, with what softmax sees (position "rotary") or with what the rotary embedding is
    given (position "content"); if it returns (queries, keys), the model goes on with these
    (position "content": with these turned).
    Keys come one per KV head. Returns the logits [T, vocabulary].

    The first time that a model is recorded, this is proven on the first tokens; a model is refused
    (RuntimeError) that does not call the attention function exactly once per layer, whose logits
    are not those of the untouched model, or whose attention is not the softmax of the recorded
    logits over earlier tokens, soft-capping, windows and sinks allowed for (ALiBi is refused).
    """
    return _recorded(model, token_ids, lambda *shown: visit(*shown[:4]), position)


def _recorded(model, token_ids: Tensor, see: Callable, position: str) -> Tensor:
    """As `record_attention`; `see` is shown the turn and the weights of `_visited` besides."""
    require_one_of("position", position, ("rotary", "content"))
    if not isinstance(token_ids, Tensor) or token_ids.dtype not in (torch.int64, torch.int32):
        found = token_ids.dtype if isinstance(token_ids, Tensor) else type(token_ids).__name__
        raise ValueError(f"token_ids must be a tensor of int64 or int32, found {found}")
    if token_ids.ndim != 1 or len(token_ids) == 0:
        raise ValueError(f"token_ids must be one sequence [T], found {tuple(token_ids.shape)}")
    with torch.inference_mode():
        _require_same_logits(model, token_ids[None, :16], position)
        with _visited(model, see, position):
            return model(token_ids[None], use_cache=False).logits[0]


_verified = weakref.WeakKeyDictionary()  # model → the ways in which its recording is verified


def _require_same_logits(model, token_ids: Tensor, position: str) -> None:
    """Refuse a model whose logits change when it is recorded; once for each model and way (on a
    window of fewer tokens than these 16 every time: one token proves little)."""
    way = (model.config._attn_implementation, position, model.training)
    if way in _verified.setdefault(model, set()):
        return
    with _one_line(f"{model.config.model_type}: the model itself does not run"):
        stock = model(token_ids, use_cache=False).logits
    if not stock.isfinite().all():
        raise RuntimeError(f"{model.config.model_type}: its logits are NaN or infinite")
    with _visited(model, lambda *_: None, position, proven=True):
        routed = model(token_ids, use_cache=False).logits
    if not torch.allclose(stock, routed, rtol=1e-4, atol=1e-4 * stock.abs().max().item()):
        raise RuntimeError(
            f"{model.config.model_type}: the recorded model's logits differ from the stock "
            f"model's by {(stock - routed).abs().max():.3g}: its attention cannot be recorded"
        )
    if token_ids.shape[-1] == 16:
        _verified[model].add(way)


@contextlib.contextmanager
def _visited(model, see: Callable, position: str, proven: bool = False):
    """Route attention through `see`, then the model's ordinary attention; undo on exit.

    Besides what a visitor is shown, see(layer, queries, keys, scale, turn, weights) gets two
    functions: turn(x [n, N, d], positions [n, N]) is the layer's rotary embedding of x at these
    positions, negative ones allowed (None at position "rotary"); weights() is its attention
    [1, H, T, T] in float64, with all that acts on it.
    """
    ordinary, family = model.config._attn_implementation, model.config.model_type
    rotates = position == "content"
    seen: list[int] = []
    content: list[tuple[Tensor, Tensor, Callable]] = []

    def attention(module, query, key, value, attention_mask, **options):
        scale = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if query.shape[-2:] != key.shape[-2:] or query.shape[1] % key.shape[1]:
            raise RuntimeError(
                f"{family}: queries {tuple(query.shape[1:])} and keys {tuple(key.shape[1:])} are "
                f"not those of the same tokens: it cannot be recorded"
            )
        shown, turn = (query, key), None
        if rotates:
            *shown, turn = _content(family, module, content, query, key)
        seen.append(getattr(module, "layer_idx", None))
        recorded = family, query, key, attention_mask, scale, options
        weights = functools.partial(_attention_weights, *recorded)
        replaced = see(seen[-1], shown[0][0], shown[1][0], scale, turn, weights)
        if replaced is not None:
            query, key = (part.to(query.dtype) for part in replaced)
            if rotates:
                at = torch.arange(key.shape[-2], device=key.device)
                query, key = (turn(part, at.expand(part.shape[:2])) for part in (query, key))
            query, key = query[None], key[None]
        if ordinary == "eager":
            inner = sys.modules[type(module).__module__].eager_attention_forward
        else:
            inner = ALL_ATTENTION_FUNCTIONS[ordinary]
        output = inner(module, query, key, value, attention_mask, **options)
        if proven:
            _require_softmax(family, query, key, value, attention_mask, scale, options, output[0])
        return output

    with contextlib.ExitStack() as undo:
        if rotates:
            undo.enter_context(_before_rotation(model, content))
        AttentionInterface.register("visited", attention)
        # Without the mask function of the same name the model would attend to the future.
        AttentionMaskInterface.register("visited", ALL_MASK_ATTENTION_FUNCTIONS[ordinary])
        model.set_attn_implementation("visited")
        undo.callback(model.set_attn_implementation, ordinary)
        yield
    layers = list(range(model.config.get_text_config().num_hidden_layers))
    if seen != layers:
        alibi = family in ("bloom", "mpt") or getattr(model.config, "alibi", False)
        kind = "it adds ALiBi to its logits" if alibi else "its attention is of another kind"
        raise RuntimeError(
            f"{family}: the registered attention function was called in layers {seen}, expected "
            f"each of {len(layers)} once: {kind}"
        )


def _require_softmax(family, query, key, value, mask, scale, options, output) -> None:
    """Refuse a layer whose output [1, T, H, d_v] is not the softmax of s QK^T times the values."""
    weights = _attention_weights(family, query, key, mask, scale, options)
    values = value.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    expected = (weights @ values).transpose(1, 2)
    tolerance = max(1e-4, 4 * torch.finfo(output.dtype).eps)
    error = (output.reshape(expected.shape).double() - expected).abs().max()
    if not error <= tolerance * expected.abs().max():
        raise RuntimeError(
            f"{family}: its attention is not the softmax of the recorded logits over earlier "
            f"tokens (error {error:.2g}): something else acts on it, so it cannot be recorded"
        )


def _attention_weights(family, query, key, mask, scale, options) -> Tensor:
    """The softmax of s QK^T over earlier tokens, with the layer's mask, soft-capping and sinks:
    float64 [1, H, T, T]."""
    tokens, group = query.shape[-2], query.shape[1] // key.shape[1]
    earlier = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    visible = earlier if mask is None else mask
    if visible.dtype != torch.bool:
        visible = mask > torch.finfo(mask.dtype).min / 2
        if mask[visible].any():
            raise RuntimeError(
                f"{family}: its mask adds to the logits what the field does not show, such as "
                f"ALiBi: it cannot be recorded"
            )
    logits = scale * query.double() @ key.double().repeat_interleave(group, 1).mT
    if cap := options.get("softcap"):
        logits = cap * (logits / cap).tanh()
    logits = logits.masked_fill(~(visible & earlier), -torch.inf)
    if (sinks := options.get("s_aux")) is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, column], dim=-1)
    return logits.softmax(-1)[..., :tokens]


def _content(family, module, content, query, key) -> tuple[Tensor, Tensor, Callable]:
    """What a layer gave to its rotary embedding, and this; a layer that has none says so itself."""
    if not content and not getattr(module, "use_rope", True):
        return query, key, lambda part, positions: part
    if content and all(map(_turned, content[-1], (query, key))):
        return content.pop()
    raise ValueError(
        f"{family}: layer {getattr(module, 'layer_idx', None)} does not hand whole queries and "
        f"keys to a rotary embedding (it may have none): use position 'rotary'"
    )


def _turned(before: Tensor, after: Tensor) -> bool:
    """Whether `after` [1, H, T, d] can be `before` in its rotary embedding.

    At position 0 that is the identity, up to a factor that some kinds of it have.
    """
    if before.shape != after.shape:
        return False
    start, end = before[..., 0, :], after[..., 0, :]
    size = start.norm() * end.norm()
    return bool((start * end.norm() - end * start.norm()).norm() <= 0.01 * size)


@contextlib.contextmanager
def _before_rotation(model, content: list[tuple[Tensor, Tensor, Callable]]):
    """Keep the queries and keys that each layer gives to its rotary embedding, and this."""
    sources = {sys.modules[type(m).__module__] for m in model.modules()}
    rotating = [source for source in sources if hasattr(source, "apply_rotary_pos_emb")]
    if not rotating:
        raise ValueError(
            f"{model.config.model_type} has no rotary embedding that could be recorded (without "
            f"any, content and rotary fields are one): use position 'rotary'"
        )

    def keep(rotate):
        def kept(query, key, cos, sin, *arguments, **options):
            def turn(part, positions):
                """Each of the n parts is one of a batch, at positions of its own."""
                part, cosines = part.unsqueeze(1), cos[0][positions.abs()]
                sines = sin[0][positions.abs()] * positions.sign().unsqueeze(-1)
                return rotate(part, part, cosines, sines, *arguments, **options)[0].squeeze(1)

            content[:] = [(query, key, turn)]
            return rotate(query, key, cos, sin, *arguments, **options)

        return kept

    originals = [(source, source.apply_rotary_pos_emb) for source in rotating]
    try:
        for source, rotate in originals:
            source.apply_rotary_pos_emb = keep(rotate)
        yield
    finally:
        for source, rotate in originals:
            source.apply_rotary_pos_emb = rotate


class KeyMoments(NamedTuple):
    """Of one layer, sums over pairs of a query and a key, in float64; those of windows add up."""

    position: str
    queries: Tensor  # of zz^T [H_kv, d, d]
    weight: Tensor  # of 1 [H_kv, 1]
    keys: Tensor  # of k [H_kv, d]
    squares: Tensor  # of kk^T [H_kv, d, d]


def key_moments(
    model,
    token_ids: Tensor,
    *,
    position: str = "content",
    pairs: str = "attention",
    draws: int = 4,
) -> list[KeyMoments]:
    """What `key_projections` needs of a window of tokens [T], for each layer.

    Each query i counts as one, divided among the keys j as its attention divides (pairs
    "attention"), equally among those up to i ("causal") or among all ("all"). At position "content"
    the keys are those before the rotary embedding R, and z of the pair (i, j) is R_{i-j} q_i: there
    `draws` keys of each query, drawn by their weight, stand for all. Otherwise z is the query as
    softmax sees it. The scale of the logits is part of z. Raises what `record_attention` raises.
    """
    require_one_of("pairs", pairs, ("attention", "causal", "all"))
    require_whole("draws", draws, 1)
    found, generator = [], torch.Generator(model.device).manual_seed(0)

    def see(_, queries, keys, scale, turn, attention):
        heads, tokens, _ = queries.shape
        shared = (len(keys), heads // len(keys))
        if pairs == "attention":
            weights = attention()[0]
        else:
            weights = queries.new_ones(tokens, tokens, dtype=torch.float64)
            weights = weights.tril() if pairs == "causal" else weights
            weights = (weights / weights.sum(-1, keepdim=True)).expand(heads, -1, -1)
        # What a sink takes of an attention is no pair with any key. It may take all.
        of_keys = weights.sum(-1, keepdim=True)
        queries = scale * of_keys.sqrt() * queries.double()
        if turn:
            any_weights = (weights + (of_keys == 0)).flatten(0, 1)
            drawn = torch.multinomial(any_weights, draws, True, generator=generator)
            lags = torch.arange(tokens, device=drawn.device)[:, None] - drawn.view(heads, -1, draws)
            repeated = queries.repeat_interleave(draws, dim=1).float()
            queries = turn(repeated, lags.flatten(1)).double() / draws**0.5
        of_queries = (queries.mT @ queries).unflatten(0, shared).sum(1)
        each, keys = weights.sum(-2).unflatten(0, shared).mean(1).unsqueeze(-1), keys.double()
        of_keys = each.sum(-2), (each * keys).sum(-2), (each * keys).mT @ keys
        found.append(KeyMoments(position, of_queries, *of_keys))

    _recorded(model, token_ids, see, position)
    return found


def key_projections(*windows: list[KeyMoments]) -> list[KeyProjection]:
    """For each layer, the projection of its keys to fewer dimensions that suits some windows best.

    `windows` are the `key_moments` of one or more. One projection for each key head, for all the
    queries that share it, of keys centred at their mean (`best_projection`). Raises ValueError for
    no window, or windows of different models or positions.
    """
    if not all(isinstance(layer, KeyMoments) for window in windows for layer in window):
        raise ValueError("each argument must be what key_moments returns: key_projections(a, b)")
    kinds = {tuple((x.position, tuple(x.squares.shape)) for x in window) for window in windows}
    if len(kinds) != 1 or kinds == {()}:
        found = " and ".join(
            f"{len(kind)} layers, first {kind[0]}" if kind else "no layers" for kind in kinds
        )
        raise ValueError(
            f"projections need the moments of at least one window, all of one model at one "
            f"position, found {found or 'none'}"
        )
    projections = []
    for layers in zip(*windows, strict=True):
        (position, *_), parts = layers[0], zip(*(layer[1:] for layer in layers), strict=True)
        of_queries, weight, keys, squares = map(sum, parts)
        mean = keys / weight
        of_keys = squares - keys.unsqueeze(-1) * mean.unsqueeze(-2)
        projections.append(KeyProjection(position, mean, *best_projection(of_queries, of_keys)))
    return projections


def shared_ranks(projections: list[KeyProjection], rank: int) -> Tensor:
    """Ranks of n key heads whose mean is `rank`: where the most energy is, of all layers together.

    Returns int64 [layers, H_kv], each at least 1, their sum n · rank. Of all σ² (but the first of a
    head) the largest are kept, so that the energy left out is least.
    """
    require_whole("rank", rank, 1)
    _require_projections(projections)
    energy = torch.stack([projection.sigma for projection in projections]).square()
    limit = energy.shape[-1]
    if rank > limit:
        raise ValueError(f"rank must be 1 to {limit} for keys of this dimension, found {rank}")
    energy[..., 0] = torch.inf
    kept = torch.zeros_like(energy, dtype=torch.int64).flatten()
    kept[energy.flatten().topk(energy[..., 0].numel() * rank).indices] = 1
    return kept.view_as(energy).sum(-1)


def _require_projections(projections) -> None:
    kinds = {(x.position, tuple(x.sigma.shape)) for x in projections or ()}
    if len(kinds) != 1:
        raise ValueError(
            f"projections must be what key_projections returns, of layers of one shape, found "
            f"{sorted(kinds) or 'none'}"
        )


def compress_keys(
    model, token_ids: Tensor, projections: list[KeyProjection], ranks: int | Tensor
) -> Tensor:
    """The logits [T, vocabulary] of a model that keeps its keys in fewer dimensions.

    token_ids [T]; `ranks` is one rank for all key heads, or int64 [layers, H_kv]. No output
    depends on later tokens. The keys are replaced by those that their r numbers stand for, which
    gives what a cache of these numbers would; none is built.
    """
    _require_projections(projections)
    key_heads, d = projections[0].mean.shape
    shape, ranks = (len(projections), key_heads), torch.as_tensor(ranks)
    if ranks.dtype != torch.int64 or tuple(ranks.shape) not in ((), shape):
        raise ValueError(
            f"ranks must be a whole number, or int64 {list(shape)}, found {ranks.dtype} "
            f"{list(ranks.shape)}"
        )
    ranks = ranks.expand(shape)
    if ranks.min() < 1 or ranks.max() > d:
        raise ValueError(f"ranks must be 1 to {d} for these keys, found {ranks.unique().tolist()}")
    layers = model.config.get_text_config().num_hidden_layers

    def visit(layer, queries, keys, scale):
        if layers != len(projections) or keys.shape[::2] != (key_heads, d):
            raise ValueError(
                f"layer {layer} of {layers} has keys {tuple(keys.shape)}, the projections are of "
                f"{len(projections)} layers of {key_heads} key heads of dimension {d}: fit them to "
                f"this model"
            )
        _, mean, down, up, _ = projections[layer]
        kept = torch.arange(keys.shape[-1], device=keys.device) < ranks[layer].unsqueeze(-1)
        low = (keys.double() - mean.unsqueeze(-2)) @ (down * kept.unsqueeze(-2))
        return queries, mean.unsqueeze(-2) + low @ up.mT

    return record_attention(model, token_ids, visit, position=projections[0].position)


def next_token_loss(logits: Tensor, token_ids: Tensor) -> float:
    """Mean cross-entropy in nats of token i + 1 under logits [T, V] of row i, in pieces of rows."""
    if len(token_ids) < 2:
        raise ValueError(f"the next-token loss needs 2 tokens or more, found {len(token_ids)}")
    pieces = zip(logits[:-1].split(128), token_ids[1:].split(128), strict=True)
    total = sum(torch.nn.functional.cross_entropy(x, y, reduction="sum").item() for x, y in pieces)
    return total / (len(token_ids) - 1)


# ---------------------------------------------------------------------------------------------
# Sources: models and texts by name
# ---------------------------------------------------------------------------------------------


class LoadedModel(NamedTuple):
    name: str  # safe as the name of a folder
    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    provenance: dict


class Checkpoint(NamedTuple):
    """A model on disk: its tensors are read one at a time, when they are asked for."""

    name: str  # safe as the name of a folder
    config: transformers.PreTrainedConfig
    tensors: dict[str, Callable[[], Tensor]]
    provenance: dict


class LoadedText(NamedTuple):
    name: str  # safe as part of a file name
    text: str
    provenance: dict


def _sources(kind: str) -> dict[str, dict]:
    return tomllib.loads((ROOT / "data" / "sources.toml").read_text("utf-8"))[kind]


def results_name(name: str) -> str:
    """The name under which the results of a model or text are kept: safe for a file or folder."""
    _require_name("model or text", name)
    if not os.path.exists(name):
        return re.sub(r"[:@]", "-", name.replace("/", "--"))
    path = Path(name)
    plain = path.stem if path.suffix == ".gguf" else path.resolve().name
    return re.sub(r"[^\w]+", "-", plain).strip("-") or "unnamed"


def as_list(name: str, value: str | list) -> list:
    """A notebook's list parameter: papermill's option -p hands a list over as a string.

    Raises ValueError for what is no list, an empty one, or one that holds something twice.
    """
    listed = value
    if isinstance(value, str):
        try:
            listed = json.loads(value) if value.startswith("[") else [value]
        except ValueError:
            listed = None
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{name} must be a list that is not empty, found {value!r}")
    for item in listed:
        if listed.count(item) > 1:
            raise ValueError(f"{name} must be different, found {item!r} twice")
    return listed


def named_results(name: str, sources: list[str]) -> list[str]:
    """The names under which the results of models or texts are kept, which must be different."""
    names = list(map(results_name, sources))
    for kept in names:
        if names.count(kept) > 1:
            both = [source for source in sources if results_name(source) == kept]
            raise ValueError(
                f"results of {both[0]!r} and {both[1]!r} would both be named {kept!r}: rename one "
                f"of the {name}"
            )
    return names


def require_one_of(name: str, value, choices: tuple) -> None:
    """ValueError unless a notebook's parameter is one of its choices (papermill's option -p hands
    over `true` as a string; True it understands)."""
    if value not in choices:
        expected = " or ".join(map(repr, choices))
        raise ValueError(f"{name} must be {expected}, found {value!r}")


def require_whole(name: str, value, least: int) -> None:
    """ValueError unless a notebook's parameter is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, found {value!r}")


def _require_name(kind: str, name) -> None:
    if not isinstance(name, str):
        raise ValueError(f"the name of a {kind} must be a string, found {name!r}")


def _unknown(kind: str, name: str, also: str) -> ValueError:
    known = list(_sources(f"{kind}s"))
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ValueError(f"unknown {kind} {name!r}: {hint}known: {', '.join(known)}; or {also}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """A temporary folder in `parent`; what does not fit there is told in one line.

    It is locked while it is used, so that whoever comes next can tell, and removes, those of runs
    that were killed.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(".part-*"):
            with _locked(left) as unused:
                if unused:
                    shutil.rmtree(left, ignore_errors=True)
        with contextlib.ExitStack() as exits:
            folder = None
            while folder is None or not folder.exists():  # another run took it for a killed one's
                made = tempfile.TemporaryDirectory(
                    dir=parent, prefix=".part-", ignore_cleanup_errors=True
                )
                folder = Path(exits.enter_context(made))
                exits.enter_context(_locked(folder, wait=True))
            yield folder
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or _first_line(error)
        raise OSError(
            f"cannot write into {parent} ({reason}): free space there, or choose another folder"
        ) from None


@contextlib.contextmanager
def _locked(folder: Path, wait: bool = False) -> Iterator[bool]:
    """Whether this process has the lock on a folder, which the system drops when it ends."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # another has it, or the file system has no locks
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


def _archive(source: dict) -> Path:
    """The verified archive of a source, from the cache or, the first time, by pip."""
    path = CACHE / "archives" / source["archive"]
    if not path.exists():
        with _scratch(path.parent) as folder:
            wanted = folder / "wanted.txt"
            wanted.write_text(f"{source['package']} --hash=sha256:{source['archive_sha256']}\n")
            kind = "--only-binary" if path.suffix == ".whl" else "--no-binary"
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--require-hashes", kind, ":all:", "-r", str(wanted), "-d", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True)
            fetched = folder / source["archive"]
            reason = None
            if done.returncode or not fetched.exists():
                reason = _complaint(done)
            elif (found := _sha256(fetched)) != source["archive_sha256"]:
                reason = f"sha256 {found[:12]}…, expected {source['archive_sha256'][:12]}…"
            if reason:
                raise RuntimeError(
                    f"cannot fetch {source['package']} ({reason}): check the network and the space "
                    f"on disk, or copy {source['archive']} into {path.parent}"
                )
            os.replace(fetched, path)
    _verify(path, source["archive_sha256"])
    return path


def _complaint(pip: subprocess.CompletedProcess) -> str:
    """Why pip did not do what it was asked: one line of what it said."""
    if pip.returncode < 0:
        return f"pip was ended by {signal.Signals(-pip.returncode).name}"
    said = pip.stderr.strip().splitlines()
    errors = [line for line in said if line.startswith("ERROR")] or said
    return errors[-1] if errors else f"pip ended with code {pip.returncode}"


def _verify(path: Path, expected: str) -> None:
    try:
        found = _sha256(path)
    except OSError as error:
        raise RuntimeError(
            f"cannot read {path} ({error.strerror}): delete it and run again"
        ) from None
    if found != expected:
        raise RuntimeError(
            f"{path} is corrupt: sha256 {found[:12]}…, expected {expected[:12]}…: "
            f"delete it and run again"
        )


def _member(source: dict) -> bytes:
    """The bytes of a source's file inside its archive, verified; nothing is unpacked to disk.

    A file in several archives is the sum of its `parts`, in order.
    """
    contents = []
    for part in source.get("parts", [source]):
        path = _archive(part)
        try:
            if path.suffix == ".whl":
                with zipfile.ZipFile(path) as archive:
                    contents.append(archive.read(part["member"]))
            else:
                with tarfile.open(path) as archive:
                    contents.append(archive.extractfile(part["member"]).read())
        except (KeyError, AttributeError):  # no such member; one that is no file
            raise RuntimeError(
                f"{path} has no file {part['member']}: data/sources.toml and the package disagree"
            ) from None
    content = b"".join(contents)
    found = hashlib.sha256(content).hexdigest()
    if found != source["sha256"]:
        raise RuntimeError(
            f"{part['member']} in {path} has sha256 {found[:12]}…, "
            f"expected {source['sha256'][:12]}…: data/sources.toml and the package disagree"
        )
    return content


def text_kind(name: str) -> str:
    """What the name of a text stands for: a "source", "gutenberg" or a "file"; fetches nothing.

    Raises ValueError for a name that is none of these.
    """
    _require_name("text", name)
    if name in _sources("texts"):
        return "source"
    if re.fullmatch(r"gutenberg:[0-9]+", name):
        return "gutenberg"
    if os.path.isfile(name):
        return "file"
    if Path(name).suffix or "/" in name:
        raise ValueError(f"text file {name!r} not found from {Path.cwd()}: check the path")
    raise _unknown("text", name, "a text file, or gutenberg:<id>")


def load_text(name: str) -> LoadedText:
    """A text of data/sources.toml, a local UTF-8 file, or `gutenberg:<id>`; newlines are \\n.

    Raises ValueError for an unknown name or a file that is empty or not UTF-8, RuntimeError
    where it cannot be fetched or verified.
    """
    kind = text_kind(name)
    if kind == "source":
        source = _sources("texts")[name]
        content, origin = _member(source), source["origin"]
        if source["member"].endswith(".jsonl"):
            verses = (json.loads(line)["text"] for line in content.splitlines())
            content = "\n".join(verses).encode()
        text = _cut(_decoded(content, name), source.get("first_line"), source.get("end_marker"))
    elif kind == "gutenberg":
        number = name.removeprefix("gutenberg:")
        text, origin = _gutenberg(number), f"Project Gutenberg #{number}"
    else:
        with _one_line(f"cannot read text {name!r}"), open(name, "rb") as file:
            content = file.read(TEXT_LIMIT + 1)
        text, origin = _decoded(content, name), "local file"
    if not text.strip():
        raise ValueError(f"text {name!r} is empty: give a text with words in it")
    digest = hashlib.sha256(text.encode()).hexdigest()
    provenance = {"text": results_name(name), "text_origin": origin, "text_sha256": digest}
    return LoadedText(results_name(name), text, provenance)


def _decoded(content: bytes, name: str) -> str:
    if len(content) > TEXT_LIMIT:
        raise ValueError(f"text {name!r} is above {TEXT_LIMIT // 10**6} MB: cut it")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text {name!r} is not UTF-8 (byte {error.object[error.start]:#04x} at "
            f"{error.start}): save it as UTF-8"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _cut(text: str, first_line: str | None, end_marker: str | None) -> str:
    """The text from the line that is `first_line` up to the line that begins with `end_marker`."""
    lines = text.split("\n")
    if first_line is not None:
        lines = lines[[line.strip() for line in lines].index(first_line) :]
    if end_marker is not None:
        lines = lines[: [line.startswith(end_marker) for line in lines].index(True)]
    return "\n".join(lines)


def _gutenberg(number: str) -> str:
    """A book from Project Gutenberg's own site, its header and footer removed, cached.

    The site publishes no checksum, so the cached file carries its own in its name.
    """
    folder = CACHE / "gutenberg"
    cached = sorted(folder.glob(f"{number}-*.txt"))
    if cached:
        path = cached[0]
        with _one_line(f"cannot read {path}"):
            content = path.read_bytes()
        if hashlib.sha256(content).hexdigest()[:16] != path.stem.split("-")[1]:
            raise RuntimeError(f"{path} is corrupt: delete it and run again")
    else:
        address = GUTENBERG.format(id=number)
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                content = answer.read(TEXT_LIMIT + 1)
                if answer.length:  # unlike read(), read(n) does not tell
                    raise http.client.IncompleteRead(content, answer.length)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # it holds the connection open
            raise RuntimeError(
                f"cannot fetch Project Gutenberg #{number} from {address} ({error}): "
                f"check the number and the network, or give a local file"
            ) from None
    text = _decoded(content, f"gutenberg:{number}")
    marker = r"^\*\*\* ?(START|END) OF TH(?:E|IS) PROJECT GUTENBERG EBOOK.*$"
    marks = {m[1].upper(): m for m in re.finditer(marker, text, re.MULTILINE | re.IGNORECASE)}
    if not {"START", "END"} <= marks.keys():
        raise RuntimeError(
            f"Project Gutenberg #{number} has no START and END lines, so its header cannot be "
            f"removed: cut it by hand and give a local file"
        )
    if not cached:
        digest = hashlib.sha256(content).hexdigest()[:16]
        _write(folder / f"{number}-{digest}.txt", lambda part: part.write_bytes(content))
    return text[marks["START"].end() : marks["END"].start()].strip() + "\n"


def load_model(name: str) -> LoadedModel:
    """A model of data/sources.toml, a hub id, a local folder or a .gguf file; float32, eval mode.

    A hub id may name a revision, `organisation/name@revision`. Weights are safetensors or GGUF
    only and no code of a model's is run. A GGUF file is converted once, into the cache. Raises
    ValueError for a name that is none of these, RuntimeError where the model cannot be fetched,
    verified or loaded.
    """
    folder, provenance = _located(name)
    options = {"use_safetensors": True, "trust_remote_code": False, "dtype": torch.float32}
    with _one_line(f"cannot load model {name!r}"):
        config, _, shapes = _config_and_weights(folder)
        _require_room(config, shapes)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
        _require_loaded(model, info)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    provenance["left_out"] = left_out(model.config, dict(model.named_parameters()))
    return LoadedModel(provenance["model"], model.eval(), tokenizer, provenance)


def load_checkpoint(name: str) -> Checkpoint:
    """The weights of a model on disk, for `head_weights`; names and errors as `load_model`.

    No weight is read before it is asked for, and none stays in memory: shards may be of any size.
    """
    folder, provenance = _located(name)
    with _one_line(f"cannot load model {name!r}"):
        config, files, _ = _config_and_weights(folder)

    def tensor(name: str) -> Tensor:
        with safe_open(folder / files[name], framework="pt") as opened:
            return opened.get_tensor(name)

    tensors = {name: functools.partial(tensor, name) for name in files}
    provenance["left_out"] = left_out(config, files)
    return Checkpoint(provenance["model"], config, tensors, provenance)


def _config_and_weights(folder: Path) -> tuple:
    """The configuration in a folder, the file of each of its tensors, and the shapes of these."""
    files = _weight_files(folder)
    shapes = []
    for file in sorted(set(files.values())):
        with safe_open(folder / file, framework="pt") as opened:
            shapes += [opened.get_slice(name).get_shape() for name in opened.keys()]
    try:
        settings = json.loads((folder / "config.json").read_bytes())
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise ValueError("config.json is not a JSON object: get it again")
    _require_counts(settings, shapes)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return config, files, shapes


def _require_counts(settings: dict, shapes: list[list[int]]) -> None:
    """Refuse a number of layers, heads, experts, ... that no model of such weights can have: lists
    of that length are made before the weights are read."""
    limit = max([len(shapes), *itertools.chain(*shapes)])
    for name, value in settings.items():
        if isinstance(value, dict):
            _require_counts(value, shapes)
        elif re.match(r"(num|n)_|.*_count$", name) and isinstance(value, int) and value > limit:
            raise ValueError(f"its configuration has {name} {value}, its weights no room for that")


def _require_room(config, shapes: list[list[int]]) -> None:
    """Refuse a configuration of a far larger model than the weights, before memory is taken."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    wanted = sum(x.numel() for x in itertools.chain(model.parameters(), model.buffers()))
    held = sum(map(math.prod, shapes))
    if wanted > 2 * held + 10**7:
        raise ValueError(f"its configuration is of {wanted:,} numbers, the files hold {held:,}")


def _require_loaded(model, info: dict) -> None:
    """Refuse what transformers would fill with random numbers, or leave out without a word, and
    weights that are no numbers."""
    if info["missing_keys"]:
        raise ValueError(f"its weights lack {min(info['missing_keys'])}")
    for name, stored, expected in sorted(info["mismatched_keys"]):
        raise ValueError(
            f"{name} is {list(stored)}, its configuration expects {list(expected)}: weights and "
            f"configuration do not belong together"
        )
    for name in sorted(info["unexpected_keys"]):
        if re.search(r"\.\d+\.", name):  # in a layer
            raise ValueError(f"its weights have {name}, which its configuration has no place for")
    for name, parameter in model.named_parameters():
        if not all(bound.isfinite() for bound in parameter.aminmax()):
            raise ValueError(f"{name} has NaN or infinite entries")


@contextlib.contextmanager
def _one_line(problem: str):
    """Say in one line what a library says in many, with what it was about."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{problem}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    """What an error says first; a line that ends in a colon is joined with the next."""
    said = re.sub(r":\s*\n\s*", ": ", str(error).strip()) or type(error).__name__
    if isinstance(error, LookupError | ArithmeticError | TypeError):  # no sentence by itself
        said = f"{type(error).__name__}: {said}"
    return said.splitlines()[0]


_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)


def model_kind(name: str) -> str:
    """What the name of a model stands for: a "source", "gguf", "folder" or "hub"; fetches nothing.

    Raises ValueError for a name that is none of these.
    """
    _require_name("model", name)
    if name in _sources("models"):
        return "source"
    if name.endswith(".gguf") and os.path.isfile(name):
        return "gguf"
    if os.path.isdir(name):
        return "folder"
    if name.endswith(".gguf") or name.startswith((".", "/", "~")):
        raise ValueError(f"model {name!r} not found from {Path.cwd()}: check the path")
    if _HUB_ID.fullmatch(name) and ".." not in name:
        return "hub"
    raise _unknown("model", name, "a hub id such as openai-community/gpt2, a folder, a .gguf file")


def _located(name: str) -> tuple[Path, dict]:
    """The folder of a model's config.json, tokenizer and safetensors; the model's provenance."""
    kind = model_kind(name)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    provenance, path = {"model": results_name(name)}, Path(name)
    if kind == "source":
        source = _sources("models")[name]
        origin, digest = source["origin"], source["sha256"]
        folder = _converted(name, digest, name, lambda: _member(source))
    elif kind == "gguf":
        origin, digest = "local GGUF file", _sha256(path)
        folder = _converted(f"gguf-{digest[:16]}", digest, name, path.read_bytes)
    elif kind == "folder":
        with _one_line(f"cannot load model {name!r}"):
            files = sorted(set(_weight_files(path).values()))
            digests = "".join(_sha256(path / file) for file in files)
        origin, digest = "local folder", hashlib.sha256(digests.encode()).hexdigest()
        folder = path
    else:
        repository, revision = _HUB_ID.fullmatch(name).groups()
        folder = _from_hub(repository, revision)
        return folder, {**provenance, "model_origin": repository, "model_revision": folder.name}
    return folder, {**provenance, "model_origin": origin, "model_sha256": digest}


def _weight_files(folder: Path) -> dict[str, str]:
    """The file of every tensor in a folder of safetensors, which may be sharded."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not (folder / "config.json").is_file() or not (index.is_file() or single.is_file()):
        raise ValueError(
            "it needs config.json and model.safetensors, or its shards and their index"
        )
    shards, files = [single.name], {}
    if not single.is_file():
        try:
            shards = sorted(set(map(str, json.loads(index.read_bytes())["weight_map"].values())))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{index.name} is not an index of shards: get it again") from None
    for file in shards:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(
                f"{index.name} names {file!r}, which is not a safetensors file beside it"
            )
        if not (folder / file).is_file():
            raise ValueError(f"{file}, which {index.name} names, is missing: get it again")
        try:
            with safe_open(folder / file, framework="pt") as opened:
                files |= dict.fromkeys(opened.keys(), file)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged ({error}): get it again") from None
    return files


def _from_hub(repository: str, revision: str | None) -> Path:
    """The folder of a hub model's snapshot, named by its commit, fetched if the cache has none."""
    try:
        # Of what lies at its top: a folder beside it holds the same weights in other forms.
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
                ignore_patterns=["*/*", "consolidated*"],
            )
        )
    except GatedRepoError:
        raise RuntimeError(
            f"model {repository!r} is gated: accept its terms on the hub, then run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise RuntimeError(
            f"the hub has no public model {repository!r}: check the name, or run `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise RuntimeError(
            f"model {repository!r} has no revision {revision!r} on the hub"
        ) from None
    except Exception as error:  # a server that is no hub can cause any
        raise RuntimeError(
            f"cannot reach model {repository!r} on the hub ({_first_line(error)}): check the "
            f"network, or give a local folder"
        ) from None


class _BoundedReader(gguf.GGUFReader):
    """A reader that ends where the file does, whatever number of things it says to hold."""

    reads, limit = 0, 5_000_000  # a vocabulary of 262,144 tokens takes 2 million

    def _get(self, offset, dtype, count=1, override_order=None):
        self.reads += 1
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data) or self.reads > self.limit:
            raise ValueError(f"it holds less than it says at byte {offset}")
        return super()._get(offset, dtype, count, override_order)


def _gguf_contents(path: Path, label: str) -> tuple[dict, list[list[int]]]:
    """The metadata of a GGUF file (without its architecture's name), the shapes of its weights.

    Refuses a file that is damaged, or that transformers would load as another model.
    """
    try:
        reader = _BoundedReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = [tensor.name for tensor in reader.tensors]
        shapes = [tensor.shape.tolist() for tensor in reader.tensors]
        if sum(tensor.n_bytes for tensor in reader.tensors) > path.stat().st_size:
            raise ValueError("its tensors overlap")
        prefix = f"{fields['general.architecture']}."
        counts = {name: value for name, value in fields.items() if not name.startswith("GGUF.")}
        _require_counts(counts, shapes)
    except Exception as error:
        raise RuntimeError(
            f"{label} is not a whole GGUF file ({_first_line(error)}): get it again"
        ) from None
    lost = [f for f in (*fields, *tensors) if ".rope.scaling." in f or f == "rope_freqs.weight"]
    # A Mistral is called a llama there, and nothing but its name tells of its window.
    name = str(fields.get("general.name", ""))
    lost += [name] * ("mistral" in name.lower())
    if lost:
        raise ValueError(
            f"{label} has {lost[0]!r}, which transformers does not read from GGUF: give the "
            f"model's safetensors folder or hub id"
        )
    return {name.removeprefix(prefix): value for name, value in fields.items()}, shapes


def _require_as_stored(model, fields: dict, weights: int) -> None:
    """Refuse a model that is not what the GGUF file says that it was read from."""
    config, head_dim = model.config, _head_dim(model.config)
    rope = getattr(config, "rope_parameters", None) or {}
    sliding = rope.get("sliding_attention", {})  # some families have one for each type of layer
    rope = rope.get("full_attention", rope)
    read = {
        "attention.head_count": _head_counts(config)[0],
        "attention.head_count_kv": _head_counts(config)[1],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "rope.freq_base": rope.get("rope_theta"),
        "rope.freq_base_swa": sliding.get("rope_theta"),
        "rope.dimension_count": head_dim * rope.get("partial_rotary_factor", 1),
    }
    for name, stored in fields.items():
        if re.match(r"attention\.|rope\.|(attn_|final_)?logit", name) and "norm" not in name:
            if read.get(name) is None or not np.isclose(read[name], stored, rtol=1e-5):
                raise ValueError(f"{name} is {stored} there, which transformers does not read")
    scalar = getattr(config, "query_pre_attn_scalar", head_dim)
    if scalar != head_dim:  # no file stores it
        raise ValueError(f"its logits would be scaled by {scalar}^-1/2, its heads have {head_dim}")
    if config.model_type == "llama" and "attention.head_count_kv" not in fields:
        raise ValueError("it lacks attention.head_count_kv: transformers would misplace its rows")
    read_weights = sum(parameter.numel() for parameter in model.parameters())
    if read_weights != weights:
        raise ValueError(f"transformers reads {read_weights:,} of its {weights:,} weights")


def _converted(name: str, sha256: str, label: str, gguf_bytes: Callable[[], bytes]) -> Path:
    """The folder with the safetensors form of a GGUF file, made if the cache has none."""
    folder = CACHE / "models" / name
    manifest = folder / "manifest.json"
    if not folder.exists():
        with _scratch(folder.parent) as temporary:
            made = temporary / "made"
            (temporary / "model.gguf").write_bytes(gguf_bytes())
            fields, shapes = _gguf_contents(temporary / "model.gguf", label)
            options = {"gguf_file": "model.gguf", "trust_remote_code": False}
            with _one_line(f"cannot convert {label}"):
                config = transformers.AutoConfig.from_pretrained(temporary, **options)
                _require_room(config, shapes)
                model, info = transformers.AutoModelForCausalLM.from_pretrained(
                    temporary,
                    dtype=torch.float32,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                    **options,
                )
                _require_loaded(model, info)
                _require_as_stored(model, fields, sum(map(math.prod, shapes)))
                tokenizer = transformers.AutoTokenizer.from_pretrained(temporary, **options)
            # The weights are plain float32 now; what still calls them GGUF would stop the saving.
            model.hf_quantizer = None
            del model.config.quantization_config
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
            files = {file.name: _sha256(file) for file in sorted(made.iterdir())}
            record = {"gguf_sha256": sha256, "files": files}
            (made / manifest.name).write_text(json.dumps(record, indent=1))
            try:
                os.rename(made, folder)
            except OSError:
                if not folder.exists():
                    raise
                # another run was faster: its folder is as good
    try:
        record = json.loads(manifest.read_text())
        same = record["gguf_sha256"] == sha256
        sound = all(_sha256(folder / file) == digest for file, digest in record["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        same = sound = False
    if not (same and sound):
        raise RuntimeError(f"cached model {folder} is corrupt or outdated: delete it and run again")
    return folder


def token_window(source: LoadedModel, text: LoadedText, context: int, offset: int = 200) -> Tensor:
    """Tokens offset … offset + context - 1 of a text, no BOS: int64 [context].

    Raises ValueError if the text is too short or the context is beyond the model's limit.
    """
    require_whole("context", context, 1)
    require_whole("offset", offset, 0)
    limit = getattr(source.model.config, "max_position_embeddings", None)
    if limit is not None and context > limit:
        raise ValueError(
            f"context {context} is beyond the {limit} positions of {source.name}: lower context"
        )
    wanted, length = offset + context, 0
    tokens: list[int] = []
    # A prefix is tokenised as the whole text is, save near its end: take 64 tokens to spare.
    while len(tokens) < wanted + 64 and length < len(text.text):
        length = max(2 * length, 8 * wanted)
        tokens = source.tokenizer(text.text[:length], add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
    if len(tokens) < wanted:
        raise ValueError(
            f"text {text.name!r} has {len(tokens)} tokens, the window needs {wanted} "
            f"(offset {offset} + context {context}): lower them or give a longer text"
        )
    window = torch.tensor(tokens[offset:wanted])
    vocabulary = source.model.get_input_embeddings().num_embeddings
    if window.max() >= vocabulary:
        raise ValueError(
            f"the tokenizer of {source.name} gives token {window.max()}, its model knows "
            f"{vocabulary}: the two do not belong together"
        )
    return window


# ---------------------------------------------------------------------------------------------
# Results: tables, spectra, claims
# ---------------------------------------------------------------------------------------------


def output_folder(output_dir: str = "") -> Path:
    """Where a notebook's results go: `output_dir`, or by default the repository if the notebook
    runs inside it, else the folder it runs in (one's own runs leave the published results alone).
    """
    if output_dir:
        return Path(output_dir).resolve()
    here = Path.cwd().resolve()
    return ROOT if here.is_relative_to(ROOT) else here


def _write(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it into place."""
    with _scratch(path.parent) as folder:
        part = folder / path.name
        write(part)
        os.replace(part, path)


def _with_versions(provenance: dict) -> dict:
    versions = {lib.__name__: str(lib.__version__) for lib in (torch, transformers, np)}
    return {**provenance, **versions}


def _require(provenance: dict, expected: dict, path: Path) -> None:
    for key, value in expected.items():
        if provenance.get(key) != value:
            raise ValueError(
                f"{path} was made with {key} {provenance.get(key)!r}, expected {value!r}: "
                f"run the notebook that writes it again with {key} {value!r}"
            )


def _existing(path: Path) -> Path:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is missing: run the notebook that writes it first")
    return Path(path)


def save_table(table: pd.DataFrame, path: Path, provenance: dict) -> None:
    """Write a table as CSV under `# key: value` lines of provenance; floats to six digits.

    The last of these lines is a checksum of all the others.
    """
    content = _as_csv(table, provenance)
    _write(Path(path), lambda part: part.write_text(content, "utf-8"))


def _as_csv(table: pd.DataFrame, provenance: dict) -> str:
    facts = _with_versions(provenance).items()
    head = [f"# {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in facts]
    body = table.to_csv(index=False, float_format="%.6g", lineterminator="\n").splitlines()
    return "\n".join([*head, f'# sha256: "{_digest([*head, *body])}"', *body, ""])


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def load_table(path: Path, **expected) -> pd.DataFrame:
    """A table of `save_table`; its provenance is in `.attrs` and must agree with `expected`.

    Raises ValueError if it does not, or if the file was changed since.
    """
    path = _existing(path)
    try:
        lines = path.read_text("utf-8").splitlines()
        facts = list(itertools.takewhile(lambda line: line.startswith("# "), lines))
        provenance = {k: json.loads(v) for k, v in (line[2:].split(": ", 1) for line in facts)}
        same = provenance.pop("sha256") == _digest(lines[: len(facts) - 1] + lines[len(facts) :])
    except (ValueError, KeyError):
        same = False
    _require_unchanged(same, path)
    _require(provenance, expected, path)
    table = pd.read_csv(path, skiprows=len(facts), dtype={"measured": str})
    table.attrs = provenance
    return table


def _require_unchanged(same: bool, path: Path) -> None:
    if not same:
        raise ValueError(f"{path} is not as it was written: run the notebook that writes it again")


def save_spectra(sigma: Tensor, path: Path, provenance: dict) -> None:
    """Write singular values [layers, heads, n] as float32 safetensors with their provenance."""
    sigma = sigma.float().contiguous()
    facts = _with_versions(provenance) | {"sha256": _spectra_digest(sigma)}
    # One entry: the library writes several in an order that changes from run to run.
    metadata = {"provenance": json.dumps(facts, ensure_ascii=False)}
    _write(Path(path), lambda part: save_file({"sigma": sigma}, part, metadata))


def _spectra_digest(sigma: Tensor) -> str:
    return hashlib.sha256(sigma.numpy().tobytes()).hexdigest()


def load_spectra(path: Path, **expected) -> Tensor:
    """Singular values of `save_spectra`, float32 [layers, heads, n]; provenance must agree."""
    path = _existing(path)
    try:
        with safe_open(path, framework="pt") as file:
            provenance, sigma = json.loads(file.metadata()["provenance"]), file.get_tensor("sigma")
        same = provenance["sha256"] == _spectra_digest(sigma)
    except (SafetensorError, ValueError, KeyError, TypeError):
        same = False
    _require_unchanged(same, path)
    _require(provenance, expected, path)
    return sigma


VERDICTS = ("reproduced", "partly", "not reproduced", "not testable here")


def load_claims() -> dict[str, dict]:
    """The claims of data/claims.toml by id."""
    claims = tomllib.loads((ROOT / "data" / "claims.toml").read_text("utf-8"))["claim"]
    return {claim["id"]: claim for claim in claims}


def range_verdict(values, low: float, high: float) -> str:
    """All values inside [low, high]: reproduced; some: partly; none: not reproduced."""
    inside = [bool(low <= value <= high) for value in np.ravel(values)]
    if not inside:
        raise ValueError("a verdict on a range needs at least one value, found none")
    return "reproduced" if all(inside) else "partly" if any(inside) else "not reproduced"


def answer(claim_id: str, measured: str, verdict: str, model: str = "") -> dict:
    """One row of a claims table; prints the verdict as one line."""
    claims = load_claims()
    if claim_id not in claims:
        raise ValueError(f"data/claims.toml has no claim {claim_id!r}: {', '.join(claims)}")
    claim = claims[claim_id]
    if verdict not in VERDICTS:
        raise ValueError(f"verdict must be one of {', '.join(VERDICTS)}, found {verdict!r}")
    print(f"{claim_id}  paper: {claim['paper']}  measured: {measured}  -> {verdict}")
    return {"id": claim_id, "model": model, "measured": measured, "verdict": verdict}


def claim_table(output: Path) -> pd.DataFrame:
    """Every claim with what was measured under `output`: one row per claim and model."""
    results = Path(output) / "data" / "results"
    files = sorted([*results.glob("claims_*.csv"), *results.glob("*/claims_*.csv")])
    empty = pd.DataFrame(columns=["id", "model", "measured", "verdict"])
    answers = pd.concat([empty, *(load_table(file) for file in files)])
    claims = pd.DataFrame(load_claims().values())
    table = claims.merge(answers, on="id", how="left", sort=False)
    table["verdict"] = table["verdict"].fillna("not measured yet")
    columns = ["id", "statement", "paper", "reading", "model", "measured", "verdict", "notebook"]
    return table[columns].fillna("")


def readme_tables(root: Path) -> dict[str, str]:
    """The README's computed tables in Markdown: `verdicts`, `second` and `notebooks`."""
    claims = claim_table(root)
    verdicts = pd.DataFrame({"claim": claims.id})
    verdicts["statement, *and our reading*"] = claims.statement + "; *" + claims.reading + "*"
    verdicts["paper"] = claims.paper
    several = claims.model[claims.model != ""].nunique() > 1
    named = (claims.model + ": ").where(several & (claims.model != ""), "")
    verdicts["measured"] = named + claims.measured
    verdicts["verdict"] = "**" + claims.verdict + "**"
    second = load_table(root / "data" / "results" / "second_model.csv")
    papers = {number: claim["paper"] for number, claim in load_claims().items()}
    second.insert(1, "paper", second.id.map(papers))
    second = second.rename(columns={"id": "claim"}).drop(columns="model")
    second["verdict"] = "**" + second.verdict + "**"
    runtimes = load_table(root / "data" / "results" / "runtimes.csv").set_index("notebook")
    rows = []
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        figures = sorted((root / "figures").glob(f"{path.stem[:2]}_*.svg"))
        rows.append(
            {
                "notebook": f"[{path.stem}](notebooks/{path.name})",
                "claims": ", ".join(claims.id[claims.notebook == path.stem].drop_duplicates()),
                "figures": " ".join(
                    f"[{number}](figures/{figure.name})" for number, figure in enumerate(figures, 1)
                ),
                "seconds": runtimes["seconds"].get(path.stem, ""),
            }
        )
    return as_markdown(verdicts=verdicts, second=second, notebooks=pd.DataFrame(rows))


def as_markdown(**tables: pd.DataFrame) -> dict[str, str]:
    """Tables in Markdown by name, every cell as it is written."""
    as_written = {"index": False, "disable_numparse": True}
    return {name: table.to_markdown(**as_written) for name, table in tables.items()}


def update_readme(root: Path, tables: dict[str, str]) -> None:
    """Put computed tables between their `<!-- name -->` marks in README.md."""
    path = root / "README.md"
    text = path.read_text("utf-8")
    for name, table in tables.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if [text.count(start), text.count(end)] != [1, 1] or text.find(start) > text.find(end):
            raise ValueError(f"{path} needs {start} and then {end}, each once")
        before, rest = text.split(start)
        text = f"{before}{start}\n{table}\n{end}{rest.split(end)[1]}"
    _write(path, lambda part: part.write_text(text, "utf-8"))


# ---------------------------------------------------------------------------------------------
# Figures
# ---------------------------------------------------------------------------------------------


def figure_style() -> None:
    """The look of every figure: seaborn's ticks theme, a colour-blind-safe palette."""
    sns.set_theme(context="notebook", style="ticks", palette="colorblind")
    plt.rcParams.update(
        {"figure.dpi": 100, "savefig.bbox": "tight", "svg.hashsalt": "attention-spectra"}
    )


def save_figure(figure: plt.Figure, slug: str, plotted: pd.DataFrame, output: Path) -> None:
    """Save figures/<slug>.svg and .png, and the plotted numbers as data/figures/<slug>.csv."""
    places = {".svg": "figures", ".png": "figures", ".csv": "data/figures"}
    with _scratch(Path(output)) as folder:
        figure.savefig(folder / f"{slug}.svg", metadata={"Date": None})
        figure.savefig(folder / f"{slug}.png", dpi=150)
        (folder / f"{slug}.csv").write_text(_as_csv(plotted, {"figure": slug}), "utf-8")
        for suffix, place in places.items():
            path = Path(output, place, f"{slug}{suffix}")
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / path.name, path)


def plot_cumulative(ax: plt.Axes, sigma: Tensor, label: str, **line) -> pd.DataFrame:
    """Draw the share of Σσ² held by the first r components: median and 5-95 % band over heads.

    sigma [heads, n]. Returns the plotted numbers.
    """
    held = _shares(sigma, 2).cumsum(-1).numpy()
    low, median, high = np.quantile(held, [0.05, 0.5, 0.95], axis=0)
    r = np.arange(1, held.shape[-1] + 1)
    (drawn,) = ax.plot(r, median, label=label, **line)
    ax.fill_between(r, low, high, color=drawn.get_color(), alpha=0.2, linewidth=0)
    ax.set(xlabel="components r", ylabel="share of variance", xlim=(1, None), ylim=(0, 1.01))
    table = {"curve": label, "components": r, "p5": low, "median": median, "p95": high}
    return pd.DataFrame(table)


def plot_head_map(ax: plt.Axes, ranks: Tensor, label: str, **heatmap) -> pd.DataFrame:
    """Draw a number per head [layers, heads] as a layer × head map; returns the plotted numbers."""
    values = np.asarray(ranks)
    sns.heatmap(values, ax=ax, cmap="cividis", cbar_kws={"label": label}, **heatmap)
    ax.set(xlabel="query head", ylabel="layer")
    ax.tick_params(axis="both", rotation=0)
    layer, head = np.indices(values.shape)
    return pd.DataFrame({"layer": layer.ravel(), "head": head.ravel(), label: values.ravel()})
