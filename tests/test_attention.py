"""Attention: a visitor sees what softmax sees, in order, and leaves the model as it was."""

import copy
import gc
import itertools
import math
import sys
import weakref
from contextlib import nullcontext

import pytest
import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close

import families
import helpers

FAMILIES = list(families.KNOWN)
ROTARY = [family for family in FAMILIES if families.is_rotary(family)]
EVERY_WAY = pytest.mark.parametrize(("family", "implementation"), families.PROVEN)
TOKENS = torch.randint(0, 61, (24,), generator=torch.Generator().manual_seed(2))


def stock_logits(model, tokens):
    with torch.no_grad():
        return model(tokens[None], use_cache=False).logits[0]


def recorded(model, tokens, **options):
    """What the visitor was shown, one (layer, queries, keys, scale) a call."""
    seen = []
    helpers.record_attention(model, tokens, lambda *shown: seen.append(shown), **options)
    return seen


def attention_modules(model):
    layers = range(model.config.num_hidden_layers)
    return [helpers.attention_module(model, layer) for layer in layers]


def attention_inputs(model, tokens):
    """x [T, D] of every layer's attention, caught by hooks on the untouched model."""
    inputs = []

    def keep(module, args, kwargs):
        inputs.append((args[0] if args else kwargs["hidden_states"])[0])

    hooks = [m.register_forward_pre_hook(keep, with_kwargs=True) for m in attention_modules(model)]
    stock_logits(model, tokens)
    for hook in hooks:
        hook.remove()
    return inputs


def test_every_known_family_is_proven():
    assert FAMILIES == list(helpers.FAMILIES)


@EVERY_WAY
def test_recording_changes_nothing_and_visits_each_layer_once(tiny_model, family, implementation):
    model, visits, options = tiny_model(family, implementation), [], families.KNOWN[family]

    def visit(layer, queries, keys, scale):
        visits.append(layer)
        assert queries.shape == (4, 24, 8 if "head_dim" in options or family == "gpt_neox" else 6)
        assert keys.shape == (options.get("num_key_value_heads", 4), *queries.shape[1:])

    before = stock_logits(model, TOKENS)
    logits = helpers.record_attention(model, TOKENS, visit)
    assert visits == [0, 1, 2]
    assert_close(logits, before)
    assert torch.equal(stock_logits(model, TOKENS), before)
    assert model.config._attn_implementation == implementation


def rms_of_projection(attention, name, x):
    """What a query or key norm divides by, [heads or 1, T, 1]; 1 where the family has none."""
    norm = getattr(attention, f"{name}_norm", None)
    if norm is None:
        return 1
    raw = getattr(attention, f"{name}_proj")(x)
    raw = raw.unflatten(-1, (-1, len(norm.weight))).transpose(0, 1)  # a head's, or all in one
    return (raw.square().mean(-1, keepdim=True) + attention.config.rms_norm_eps).sqrt()


def rotary_factor(model):
    """What the rotary embedding multiplies queries and keys by, besides turning them (YaRN)."""
    return getattr(getattr(model.base_model, "rotary_emb", None), "attention_scaling", 1.0)


def has_query_bias(model):
    fused = "c_attn", "query_key_value", "qkv_proj"
    return any(f"{part}.bias" in name for part in ("q_proj", *fused) for name in model.state_dict())


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "position"),
    [*((family, "rotary") for family in FAMILIES), *((family, "content") for family in ROTARY)],
)
def test_weights_of_a_head_give_its_queries_and_keys(tiny_model, family, position):
    """At position 0 the rotary embedding is the identity; before it, at every position."""
    model = tiny_model(family)
    compared = 1 if position == "rotary" else len(TOKENS)
    layers = zip(
        recorded(model, TOKENS, position=position),
        helpers.head_weights(model),
        attention_modules(model),
        attention_inputs(model, TOKENS),
        strict=True,
    )
    for (layer, queries, keys, _), weights, attention, x in layers:
        assert weights.layer == layer
        projections = [
            ("q", queries, weights.W_Q, weights.b_Q),
            ("k", keys, weights.W_K, weights.b_K),
        ]
        for name, shown, weight, bias in projections:
            assert weight.shape == (len(shown), shown.shape[-1], model.config.hidden_size)
            assert (bias is None) == (not has_query_bias(model))
            assert weight.dtype == torch.float64
            projected = x.double() @ weight.mT
            if bias is not None:
                projected = projected + bias[:, None]
            projected = projected / rms_of_projection(attention, name, x)
            if position == "rotary":
                projected = projected * rotary_factor(model)
            assert_close(
                shown[:, :compared].double(), projected[:, :compared], atol=1e-5, rtol=1e-4
            )


@pytest.mark.parametrize("family", ROTARY)
def test_rotary_queries_are_the_content_turned(tiny_model, family):
    model = tiny_model(family)
    pairs = zip(recorded(model, TOKENS), recorded(model, TOKENS, position="content"), strict=True)
    for turned, content in pairs:
        for after, before in zip(turned[1:3], content[1:3], strict=True):
            before = before * rotary_factor(model)
            assert_close(after[:, 0], before[:, 0])
            assert_close(after.norm(dim=-1), before.norm(dim=-1))
            same = torch.allclose(after[:, 1:], before[:, 1:], atol=0.1)
            assert same == (family == "smollm3" and turned[0] == 1)  # a layer without rotation


@pytest.mark.parametrize("family", FAMILIES)
def test_softmax_of_the_recorded_logits_is_the_models_attention(tiny_model, family):
    """Scale, grouping and what the visitor sees, against the weights the model itself returns."""
    model, tokens = tiny_model(family), TOKENS[:16]
    with torch.inference_mode():
        attentions = model(tokens[None], output_attentions=True, use_cache=False).attentions
    future = torch.ones(16, 16, dtype=torch.bool).triu(1)
    for layer, queries, keys, scale in recorded(model, tokens):
        logits = scale * queries @ keys.repeat_interleave(len(queries) // len(keys), 0).mT
        if cap := getattr(model.config, "attn_logit_softcapping", None):
            logits = cap * torch.tanh(logits / cap)
        weights = logits.masked_fill(future, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True)
        sinks = getattr(helpers.attention_module(model, layer), "sinks", None)
        total = total if sinks is None else total + sinks.detach().exp().view(-1, 1, 1)
        assert_close(weights / total, attentions[layer][0])


@pytest.mark.parametrize(
    ("family", "scales"),
    [
        ("gpt2", [6**-0.5, 6**-0.5 / 2, 6**-0.5 / 3]),  # scaled by layer
        ("llama", [8**-0.5] * 3),
        ("gpt_neox", [8**-0.5] * 3),
        ("gemma2", [50**-0.5] * 3),
        ("gemma3_text", [50**-0.5] * 3),
        ("granite", [0.3] * 3),
        ("opt", [1.0] * 3),  # its queries are scaled already
    ],
)
def test_scale_is_the_models_own(tiny_model, family, scales):
    assert [shown[3] for shown in recorded(tiny_model(family), TOKENS)] == pytest.approx(scales)


@EVERY_WAY
def test_later_tokens_never_reach_earlier_logits(tiny_model, family, implementation):
    model, changed = tiny_model(family, implementation), TOKENS.clone()
    changed[15:] = (changed[15:] + 1) % 61
    one, other = (
        helpers.record_attention(model, tokens, lambda *_: None) for tokens in (TOKENS, changed)
    )
    assert_close(one[:15], other[:15])
    assert not torch.allclose(one[15:], other[15:], atol=0.1)


@pytest.mark.parametrize("position", ["rotary", "content"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_layers_queries_and_keys_are_forgotten_before_the_next(
    tiny_model, implementation, position
):
    memory = []

    def visit(layer, queries, keys, scale):
        assert all(kept.expired() for kept in memory)
        memory.extend(StorageWeakRef(part.untyped_storage()) for part in (queries, keys))

    helpers.record_attention(tiny_model("llama", implementation), TOKENS, visit, position=position)
    assert len(memory) == 6


@pytest.mark.parametrize("family", FAMILIES)
def test_replacing_by_the_same_changes_nothing(tiny_model, family):
    model = tiny_model(family)
    logits = helpers.record_attention(
        model, TOKENS, lambda layer, queries, keys, _: (queries, keys)
    )
    assert_close(logits, stock_logits(model, TOKENS))


def query_parameters(attention, config):
    """The part of the query/key/value projections that makes queries, as views."""
    for parameter in attention.parameters():
        parameter.requires_grad_(False)
    if hasattr(attention, "q_proj"):
        return list(attention.q_proj.parameters())
    if hasattr(attention, "qkv_proj"):
        return [attention.qkv_proj.weight[: 4 * config.head_dim]]
    return [p.unflatten(0, (4, 3, 8))[:, 0] for p in attention.query_key_value.parameters()]


@pytest.mark.parametrize("position", ["rotary", "content"])
@pytest.mark.parametrize("family", ROTARY)
def test_replacing_by_zeros_makes_attention_uniform(tiny_model, family, position):
    """As if W_Q and b_Q were zero, which makes every logit equal."""
    model = tiny_model(family)
    uniform = copy.deepcopy(model)
    for attention in attention_modules(uniform):
        for parameter in query_parameters(attention, model.config):
            parameter.data.zero_()

    def zeros(layer, queries, keys, scale):
        return torch.zeros_like(queries), torch.zeros_like(keys)

    logits = helpers.record_attention(model, TOKENS, zeros, position=position)
    assert_close(logits, stock_logits(uniform, TOKENS))
    assert not torch.allclose(logits, stock_logits(model, TOKENS), atol=0.1)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_centred_keys_of_full_rank_change_no_softmax(tiny_model, implementation):
    """softmax(E) = softmax(Ẽ), in float64 factors that the model takes in its own precision."""
    model = tiny_model("gpt2", implementation)

    def full_rank(layer, queries, keys, scale):
        return helpers.low_rank_factors(queries, keys, queries.shape[-1])

    logits = helpers.record_attention(model, TOKENS, full_rank)
    assert_close(logits, stock_logits(model, TOKENS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("position", ["rotary", "content"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_raising_visitor_leaves_the_model_as_it_was(tiny_model, implementation, position):
    model = tiny_model("llama", implementation)
    source = sys.modules[type(attention_modules(model)[0]).__module__]
    before, rotate = stock_logits(model, TOKENS), source.apply_rotary_pos_emb

    def fail(layer, *_):
        raise ZeroDivisionError(f"layer {layer}")

    with pytest.raises(ZeroDivisionError, match="layer 0"):
        helpers.record_attention(model, TOKENS, fail, position=position)
    assert model.config._attn_implementation == implementation
    assert source.apply_rotary_pos_emb is rotate
    assert torch.equal(stock_logits(model, TOKENS), before)


def test_content_leaves_the_rotary_embedding_as_it_was(tiny_model):
    model = tiny_model("qwen3")
    source = sys.modules[type(attention_modules(model)[0]).__module__]
    rotate = source.apply_rotary_pos_emb
    recorded(model, TOKENS, position="content")
    assert source.apply_rotary_pos_emb is rotate


@pytest.mark.parametrize("family", families.REFUSED)
def test_what_cannot_be_recorded_truly_is_refused(tiny_model, family):
    with pytest.raises(RuntimeError, match=rf"^{family}: ") as raised:
        recorded(tiny_model(family), TOKENS)
    assert families.REFUSED[family][1] in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("family", families.ROTARY_ONLY)
def test_content_that_is_not_all_that_is_rotated_is_refused(tiny_model, family):
    model = tiny_model(family)
    assert len(recorded(model, TOKENS)) == 3
    with pytest.raises(ValueError, match=rf"^{family}: layer \d does not hand whole queries"):
        recorded(model, TOKENS, position="content")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_model_that_looks_ahead_is_refused(tiny_model, implementation):
    model = tiny_model("gemma3_text", implementation, use_bidirectional_attention=True)
    with pytest.raises(RuntimeError, match="not the softmax of the recorded logits over earlier"):
        recorded(model, TOKENS)


def test_the_text_part_of_a_larger_model_is_recorded():
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision = {**small, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config={**families.GEMMA, **ids}, vision_config=vision)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert [shown[0] for shown in recorded(model, TOKENS)] == [0, 1, 2]
    sliding = "sliding window of 16 tokens in 2 of 3 layers"
    assert helpers.left_out(model.config, model.state_dict()) == ["causal mask", sliding]


@pytest.mark.parametrize(
    ("family", "changes", "also"),
    [
        ("llama", {}, []),
        ("mistral", {}, ["sliding window of 16 tokens in 3 of 3 layers"]),
        ("mistral", {"sliding_window": None}, []),
        (
            "gemma2",
            {},
            ["soft-capping at 3", "sliding window of 16 tokens in 2 of 3 layers"],
        ),
        ("gpt_oss", {}, ["sliding window of 16 tokens in 2 of 3 layers", "attention sinks"]),
    ],
)
def test_what_a_field_leaves_out_is_said(tiny_model, family, changes, also):
    model = tiny_model(family, **changes)
    assert helpers.left_out(model.config, model.state_dict()) == ["causal mask", *also]


def test_a_model_that_attends_twice_in_a_layer_is_refused(tiny_model, monkeypatch):
    model = tiny_model("llama")
    attention = attention_modules(model)[1]
    once = attention.forward

    def twice(*args, **kwargs):
        once(*args, **kwargs)
        return once(*args, **kwargs)

    monkeypatch.setattr(attention, "forward", twice)
    with pytest.raises(RuntimeError, match=r"^llama: the .+ called in layers \[0, 1, 1, 2\]"):
        recorded(model, TOKENS)


def test_a_model_whose_logits_differ_is_refused(tiny_model):
    model = copy.deepcopy(tiny_model("gpt2"))
    recorded(model, TOKENS)
    model.train()  # dropout: no two passes agree
    for _ in range(2):  # a refusal is not forgotten
        with pytest.raises(RuntimeError, match=r"^gpt2: its attention is not the softmax"):
            recorded(model, TOKENS)


@pytest.mark.parametrize(("change", "refused"), [(1e-6, False), (1e-3, True)])
def test_a_small_difference_of_logits_is_refused_and_rounding_is_not(tiny_model, change, refused):
    model = tiny_model("llama")

    def disturb(module, _, output):
        if model.config._attn_implementation == "visited":
            output.logits = output.logits + change * output.logits.abs().max()

    model.register_forward_hook(disturb)
    with pytest.raises(RuntimeError, match="logits differ") if refused else nullcontext():
        recorded(model, TOKENS)


def test_a_recorded_model_can_be_forgotten(tiny_model):
    model = tiny_model("llama")
    recorded(model, TOKENS)
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None


def test_a_model_is_compared_once_for_each_way_of_recording_it(tiny_model):
    model, passes = tiny_model("llama", "eager"), []
    model.register_forward_hook(lambda *_: passes.append(None))

    def passes_of(**options):
        passes.clear()
        helpers.record_attention(model, TOKENS, lambda *_: None, **options)
        return len(passes)

    assert [passes_of(), passes_of(), passes_of(position="content"), passes_of()] == [3, 1, 3, 1]
    model.set_attn_implementation("sdpa")
    assert [passes_of(), passes_of()] == [3, 1]


def test_a_short_window_proves_nothing_for_a_longer_one(tiny_model):
    model = tiny_model("bert")
    recorded(model, TOKENS[:1])  # one token sees itself, whatever the mask
    with pytest.raises(RuntimeError, match="not the softmax of the recorded logits"):
        recorded(model, TOKENS)


def test_keys_of_other_tokens_are_refused(tiny_model, monkeypatch):
    """As of a model that adds compressed keys of its own on a long context."""
    model = tiny_model("llama")
    recorded(model, TOKENS)
    source = sys.modules[type(attention_modules(model)[0]).__module__]
    rotate = source.apply_rotary_pos_emb

    def one_key_less(*args, **kwargs):
        query, key = rotate(*args, **kwargs)
        return query, key[:, :, 1:]

    monkeypatch.setattr(source, "apply_rotary_pos_emb", one_key_less)
    with pytest.raises(RuntimeError, match=r"^llama: queries .* and keys .* are not those of the"):
        recorded(model, TOKENS)


def test_content_is_refused_without_a_rotary_embedding(tiny_model):
    with pytest.raises(ValueError, match=r"gpt2 has no rotary embedding.*use position 'rotary'"):
        recorded(tiny_model("gpt2"), TOKENS, position="content")


@pytest.mark.parametrize(
    ("tokens", "position", "message"),
    [
        (TOKENS, "before", "position must be 'rotary' or 'content', found 'before'"),
        (TOKENS[None], "rotary", r"one sequence \[T\], found \(1, 24\)"),
        (TOKENS[:0], "rotary", r"one sequence \[T\], found \(0,\)"),
    ],
)
def test_recording_refuses_bad_arguments(tiny_model, tokens, position, message):
    with pytest.raises(ValueError, match=message):
        recorded(tiny_model("llama"), tokens, position=position)


def test_one_token_can_be_recorded(tiny_model):
    assert [shown[1].shape for shown in recorded(tiny_model("llama"), TOKENS[:1])] == [
        (4, 1, 8)
    ] * 3


UNNORMALISED = [f for f in FAMILIES if not families.is_normalised(families.tiny(f))]


def changed_entries(ones, others):
    return sum(int((one != other).sum()) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("unit", ["entries", "heads"])
@pytest.mark.parametrize("family", FAMILIES)
def test_shuffling_moves_query_and_key_weights_and_nothing_else(tiny_model, family, unit):
    model = tiny_model(family)
    before = copy.deepcopy(model.state_dict())
    shuffled = helpers.shuffled_projections(model, unit, seed=0)
    pairs = list(zip(helpers.head_weights(model), helpers.head_weights(shuffled), strict=True))
    moved = sum(changed_entries(one[1:3], other[1:3]) for one, other in pairs)
    assert moved == changed_entries(model.parameters(), shuffled.parameters()) > 0
    for one, other in pairs:
        assert (unit == "heads") == torch.equal(one.W_Q, other.W_Q)
        assert not torch.equal(one.W_K, other.W_K)
        for bias, same in zip(one[3:], other[3:], strict=True):
            assert bias is same is None or torch.equal(bias, same)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    again = helpers.shuffled_projections(model, unit, seed=0)
    assert changed_entries(shuffled.parameters(), again.parameters()) == 0
    other = helpers.shuffled_projections(model, unit, seed=1)
    assert changed_entries(shuffled.parameters(), other.parameters()) > 0
    assert not torch.allclose(stock_logits(shuffled, TOKENS), stock_logits(model, TOKENS))


@pytest.mark.parametrize("family", UNNORMALISED)
def test_shuffling_entries_keeps_the_values_of_each_head(tiny_model, family):
    model = tiny_model(family)
    shuffled = helpers.shuffled_projections(model, "entries", seed=0)
    for one, other in zip(helpers.head_weights(model), helpers.head_weights(shuffled), strict=True):
        for W, moved in zip(one[1:3], other[1:3], strict=True):
            assert torch.equal(*(x.flatten(1).sort().values for x in (W, moved)))
            # Hardly an entry in its place, and rows mixed with columns.
            assert (W != moved).double().mean() > 0.95
            assert not torch.allclose(W.norm(dim=-1), moved.norm(dim=-1), rtol=0.01)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", UNNORMALISED)
def test_shuffling_heads_gives_each_key_head_another_of_the_model(tiny_model, family, seed):
    model = tiny_model(family)
    shuffled = helpers.shuffled_projections(model, "heads", seed)
    own, given = (
        torch.cat([weights.W_K for weights in helpers.head_weights(m)]) for m in (model, shuffled)
    )
    equal = (own[:, None] == given).flatten(2).all(-1)
    assert (equal.sum(0) == 1).all()
    assert (equal.sum(1) == 1).all()
    assert not equal.diagonal().any()
    layers = torch.arange(len(own)) // (len(own) // 3)
    assert (layers[equal.int().argmax(0)] != layers).any()


def test_shuffling_refuses_a_single_key_head_and_an_unknown_unit(tiny_model):
    single = tiny_model("llama", num_hidden_layers=1, num_key_value_heads=1)
    with pytest.raises(ValueError, match="a single key head cannot change places"):
        helpers.shuffled_projections(single, "heads", seed=0)
    with pytest.raises(ValueError, match=r"unit must be .*'rows'"):
        helpers.shuffled_projections(single, "rows", seed=0)


@EVERY_WAY
def test_an_untrained_model_has_the_same_form_and_other_weights(tiny_model, family, implementation):
    model, state = tiny_model(family, implementation), torch.get_rng_state()
    one, other = (helpers.untrained(model, seed) for seed in (0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    for ours, theirs in zip(one.named_parameters(), model.named_parameters(), strict=True):
        assert ours[0] == theirs[0]
        assert ours[1].shape == theirs[1].shape
    first, second, trained = (next(helpers.head_weights(m)).W_Q for m in (one, other, model))
    assert not torch.equal(first, second)
    assert torch.isclose(first.std(), second.std(), rtol=0.2)
    assert not torch.isclose(first.std(), trained.std(), rtol=0.2)  # 0.5 in the tests
    again = next(helpers.head_weights(helpers.untrained(model, 0)))
    assert torch.equal(first, again.W_Q)
    assert [shown[0] for shown in recorded(one, TOKENS)] == [0, 1, 2]
    assert one.config._attn_implementation == implementation
    assert not one.training


def test_weights_of_an_unknown_family_are_refused(tiny_model):
    with pytest.raises(ValueError, match="model type 'bloom' are not known here; known: gemma, "):
        next(helpers.head_weights(tiny_model("bloom")))


def test_weights_of_a_head_carry_no_gradient(tiny_model):
    for weights in helpers.head_weights(tiny_model("qwen3")):
        assert not any(part.requires_grad for part in weights[1:])


@pytest.mark.parametrize("tokens", [2, 128, 129, 130, 300])
def test_next_token_loss_is_the_mean_cross_entropy(tokens):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(tokens, 61, generator=generator)
    token_ids = torch.randint(0, 61, (tokens,), generator=generator)
    expected = torch.nn.functional.cross_entropy(logits[:-1], token_ids[1:]).item()
    assert helpers.next_token_loss(logits, token_ids) == pytest.approx(expected, rel=1e-6)


def test_next_token_loss_of_one_token_is_refused():
    with pytest.raises(ValueError, match="token"):
        helpers.next_token_loss(torch.zeros(1, 61), torch.zeros(1, dtype=torch.long))


def test_default_model(smollm2):
    """The numbers known for it: shape, precision, and the flat spectrum of its weights."""
    config = smollm2.model.config
    assert (config.num_hidden_layers, config.num_attention_heads) == (30, 9)
    assert {p.dtype for p in smollm2.model.parameters()} == {torch.float32}
    assert not smollm2.model.training
    ranks = []
    for weights in helpers.head_weights(smollm2.model):
        grouped = weights.W_Q.unflatten(0, (3, 3))
        sigma = helpers.product_singular_values(grouped.mT, weights.W_K.mT[:, None])
        ranks.append(helpers.threshold_rank(sigma).flatten())
    ranks = torch.cat(ranks)
    assert len(ranks) == 270
    assert (ranks.min(), ranks.median(), ranks.max()) == (4, 37, 47)


@pytest.fixture(scope="module")
def alice(smollm2):
    """Loss, and r90 of every head over the first 256 and 1,024 tokens of the window on Alice."""
    tokens = helpers.token_window(smollm2, helpers.load_text("alice"), 1024)
    ranks = {256: [], 1024: []}

    def visit(layer, queries, keys, scale):
        for context, found in ranks.items():
            sigma = helpers.logit_singular_values(queries[:, :context], keys[:, :context], scale)
            found.append(helpers.threshold_rank(sigma))

    logits = helpers.record_attention(smollm2.model, tokens, visit)
    loss = helpers.next_token_loss(logits, tokens)
    return loss, {context: torch.cat(found).double() for context, found in ranks.items()}


def test_loss_on_alice(alice):
    assert alice[0] == pytest.approx(3.165, abs=0.01)


@pytest.mark.parametrize(("context", "median"), [(256, 10), (1024, 13)])
def test_logit_field_on_alice(alice, context, median):
    ranks = alice[1][context]
    assert len(ranks) == 270
    assert ranks.median() == median


def test_default_model_loads_from_the_cache_without_the_network(smollm2, monkeypatch):
    monkeypatch.setattr(helpers, "_archive", None)  # calling it would fail
    again = helpers.load_model("smollm2-135m")
    assert again.provenance == smollm2.provenance
    assert isinstance(again.model, transformers.LlamaForCausalLM)


# Keys of fewer dimensions ----------------------------------------------------------------------


def fitted(model, *windows, **options):
    return helpers.key_projections(
        *(helpers.key_moments(model, tokens, **options) for tokens in windows)
    )


@pytest.mark.parametrize("family", ROTARY)
def test_turning_by_the_distance_gives_the_logits(tiny_model, family):
    """R_i q_i · R_j k_j = R_{i-j} q_i · k_j, for keys before and behind the query."""
    model = tiny_model(family)
    content = recorded(model, TOKENS, position="content")
    turns = []
    helpers._recorded(model, TOKENS, lambda *shown: turns.append(shown[4]), "content")
    i, j = torch.cartesian_prod(*[torch.arange(len(TOKENS))] * 2).T
    for turn, shown, (_, queries, keys, _) in zip(
        turns, content, recorded(model, TOKENS), strict=True
    ):
        keys, before = (
            part.repeat_interleave(len(queries) // len(part), 0) for part in (keys, shown[2])
        )
        turned = turn(shown[1][:, i], (i - j).expand(len(queries), -1))
        still = turn(shown[1], torch.zeros(shown[1].shape[:2], dtype=torch.int64))
        factor = still.norm() / shown[1].norm()  # gpt_oss scales what it turns
        assert_close(factor * shown[1], still)
        found, expected = (turned * before[:, j]).sum(-1), (queries[:, i] * keys[:, j]).sum(-1)
        assert_close(factor * found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("position", ["rotary", "content"])
@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_all_dimensions_are_the_model(tiny_model, family, position):
    if position == "content" and family not in ROTARY:
        return
    model = tiny_model(family)
    projections = fitted(model, TOKENS, position=position)
    assert [part.position for part in projections] == [position] * 3
    d = projections[0].down.shape[-1]
    logits = helpers.compress_keys(model, TOKENS, projections, d)
    assert_close(logits, stock_logits(model, TOKENS), atol=1e-3, rtol=1e-3)
    fewer = helpers.compress_keys(model, TOKENS, projections, 1)
    assert not torch.allclose(fewer, logits, atol=0.01)


@pytest.mark.parametrize("position", ["rotary", "content"])
def test_keys_of_fewer_dimensions_see_no_later_token(tiny_model, position):
    model, changed = tiny_model("gemma3_text"), TOKENS.clone()
    changed[20:] = changed[20:].flip(0)
    projections = fitted(model, TOKENS.flip(0), position=position)
    one, other = (helpers.compress_keys(model, ids, projections, 3) for ids in (TOKENS, changed))
    assert_close(one[:20], other[:20], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(one[20:], other[20:], atol=0.01)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_cache_of_fewer_numbers_gives_these_logits(tiny_model, implementation):
    """Queries and keys of r dimensions, in the place of the keys that r numbers stand for."""
    model = tiny_model("qwen2", implementation)
    projections = fitted(model, TOKENS, position="rotary")
    ranks = torch.tensor([[1, 3], [2, 8], [5, 5]])

    def of_fewer_numbers(layer, queries, keys, scale):
        _, mean, down, up, _ = projections[layer]
        kept = (torch.arange(8) < ranks[layer][:, None]).unsqueeze(-2)
        queries = queries.double() @ (up * kept).repeat_interleave(2, 0)
        return queries[..., :r], ((keys - mean[:, None]) @ down)[..., :r]

    r = int(ranks.max())
    logits = helpers.record_attention(model, TOKENS, of_fewer_numbers)
    assert_close(
        helpers.compress_keys(model, TOKENS, projections, ranks), logits, atol=1e-4, rtol=1e-4
    )


def weighted(shown, weights):
    """The projections of one layer from every pair by itself: slow, and another way."""
    _, queries, keys, scale = shown
    heads, tokens, d = queries.shape
    group = heads // len(keys)
    found = []
    for number, key_head in enumerate(keys.double()):
        of_queries, of_keys = torch.zeros(2, d, d, dtype=torch.float64)
        own = weights[number * group : (number + 1) * group].double()
        mean = sum(own[:, :, j].sum() * key_head[j] for j in range(tokens)) / own.sum()
        for head, row in zip(queries.double()[number * group :][:group], own, strict=True):
            for i, j in itertools.product(range(tokens), repeat=2):
                of_queries += row[i, j] * torch.outer(scale * head[i], scale * head[i])
                of_keys += row[i, j] / group * torch.outer(key_head[j] - mean, key_head[j] - mean)
        found.append((mean, *helpers.best_projection(of_queries, of_keys)))
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


def assert_same_projections(found, expected):
    mean, down, up, sigma = expected
    assert_close(found.mean, mean, atol=1e-5, rtol=1e-4)
    assert_close(found.sigma, sigma, atol=1e-5, rtol=1e-4)
    for r in (1, 4):
        ours, theirs = (u[..., :r] @ d[..., :r].mT for d, u in ((found.down, found.up), (down, up)))
        assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen2"])
def test_pairs_count_by_the_models_own_attention(tiny_model, family):
    """With windows, soft-capping and sinks, as the model itself reports it."""
    model, tokens = tiny_model(family, "eager"), TOKENS[:20]
    with torch.no_grad():
        attentions = model(tokens[None], output_attentions=True).attentions
    projections = fitted(model, tokens, position="rotary")
    for found, shown, weights in zip(projections, recorded(model, tokens), attentions, strict=True):
        assert_same_projections(found, weighted(shown, weights[0, :, :, : len(tokens)]))


@pytest.mark.parametrize("pairs", ["all", "causal"])
def test_pairs_without_attention(tiny_model, pairs):
    model, tokens = tiny_model("llama"), TOKENS[:16]
    weights = torch.ones(4, 16, 16)
    if pairs == "causal":
        weights = weights.tril() / torch.arange(1, 17)[:, None]
    else:
        weights /= 16
    projections = fitted(model, tokens, position="rotary", pairs=pairs)
    for found, shown in zip(projections, recorded(model, tokens), strict=True):
        assert_same_projections(found, weighted(shown, weights))
        if pairs == "all":  # the spectrum of the field itself
            stacked = helpers.logit_singular_values(*shown[1:], per_key_head=True)
            assert_close(found.sigma, stacked, atol=1e-6, rtol=1e-6)


def test_pairs_before_the_rotary_embedding_are_drawn_by_attention(tiny_model):
    """Many draws come near the sum over all pairs, each turned by its distance, and not near
    the one turned the other way."""
    model, tokens = tiny_model("qwen2"), TOKENS[:12]
    shown = []
    helpers._recorded(
        model, tokens, lambda *seen: shown.append((*seen[:5], seen[5]()[0])), "content"
    )
    (found, *_) = fitted(model, tokens, draws=2000)
    _, queries, keys, scale, turn, weights = shown[0]
    i, j = torch.cartesian_prod(*[torch.arange(12)] * 2).T

    def moments(lags):
        turned = scale * turn(queries[:, i], lags.expand(4, -1)).double()
        turned = turned * weights[:, i, j].sqrt().unsqueeze(-1)
        return (turned.mT @ turned).unflatten(0, (2, 2)).sum(1)

    each = weights.sum(-2).unflatten(0, (2, 2)).mean(1).unsqueeze(-1)
    centred = keys.double() - found.mean.unsqueeze(-2)
    of_keys = (each * centred).mT @ centred
    assert_close(found.mean, (each * keys).sum(-2) / each.sum(-2), atol=1e-6, rtol=1e-6)
    right, wrong = (
        (found.sigma - helpers.best_projection(moments(lags), of_keys)[2]).norm()
        / found.sigma.norm() for lags in (i - j, j - i)
    )  # fmt: skip
    assert right < 0.02 < 0.05 < wrong


def test_moments_of_windows_add_up(tiny_model):
    """Two windows as one: with all pairs in each, sums over both."""
    model = tiny_model("llama")
    windows = TOKENS[:16], TOKENS[8:]
    found = fitted(model, *windows, position="rotary", pairs="all")
    shown = [recorded(model, tokens) for tokens in windows]
    for layer, projection in enumerate(found):
        queries, keys = (
            torch.cat([of[layer][part] for of in shown], dim=1).double() for part in (1, 2)
        )
        assert_close(projection.mean, keys.mean(-2))
        spectrum = helpers.logit_singular_values(queries, keys, shown[0][0][3], per_key_head=True)
        assert_close(projection.sigma, spectrum, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"pairs": "some"}, "pairs must be .* found 'some'"),
        ("llama", {"position": "after"}, "position must be .* found 'after'"),
        ("gpt2", {}, "gpt2 has no rotary embedding .* use position 'rotary'"),
    ],
)
def test_what_cannot_be_fitted_is_refused(tiny_model, family, options, message):
    with pytest.raises(ValueError, match=message):
        helpers.key_moments(tiny_model(family), TOKENS, **options)


@pytest.fixture(scope="module")
def moments():
    """By name: the moments of a window of some models, at some positions."""
    small = families.tiny("llama", num_hidden_layers=2)
    model = families.tiny("llama")
    return {
        "rotary": helpers.key_moments(model, TOKENS, position="rotary"),
        "content": helpers.key_moments(model, TOKENS, position="content"),
        "fewer layers": helpers.key_moments(small, TOKENS, position="content"),
        "fewer dimensions": helpers.key_moments(families.tiny("llama", head_dim=4), TOKENS),
    }


MIXED = "at least one window, all of one model at one position, found "
NO_WINDOWS = {
    "no windows": ([], MIXED + "none"),
    "two positions": (["rotary", "content"], MIXED + ".* and .* layers"),
    "another depth": (["content", "fewer layers"], MIXED + ".*2 layers"),
    "another dimension": (["content", "fewer dimensions"], MIXED + ".*4, 4"),
}


@pytest.mark.parametrize(("names", "message"), NO_WINDOWS.values(), ids=NO_WINDOWS)
def test_projections_fitted_to(moments, names, message, fault):
    with fault.raises(ValueError, message):
        helpers.key_projections(*(moments[name] for name in names))


def test_projections_fitted_to_windows_in_a_list(moments, fault):
    with fault.raises(ValueError, "each argument must be what key_moments returns"):
        helpers.key_projections([moments["content"], moments["content"]])


RANKS = {
    "0": (0, r"ranks must be 1 to 8 for these keys, found \["),
    "9": (9, r"ranks must be 1 to 8 for these keys, found \["),
    "one of 9": (torch.tensor([[1, 1], [1, 1], [1, 9]]), "ranks must be 1 to 8 for these keys"),
    "2.5": (2.5, "ranks must be a whole number, or int64"),
    "NaN": (math.nan, "ranks must be a whole number, or int64"),
    "True": (True, "ranks must be a whole number, or int64"),
    "a list": ([2, 3], r"ranks must be a whole number, or int64 \[3, 2\], found torch.int64 \[2\]"),
    "fractions": (torch.full((3, 2), 1.5), "ranks must be a whole number, or int64"),
}


@pytest.mark.parametrize(("ranks", "message"), RANKS.values(), ids=RANKS)
def test_keys_of_rank(tiny_model, ranks, message, fault):
    model = tiny_model("llama")
    with fault.raises(ValueError, message):
        helpers.compress_keys(model, TOKENS, fitted(model, TOKENS), ranks)


OTHERS = [{"num_hidden_layers": 4}, {"num_hidden_layers": 2}, {"head_dim": 4}]


@pytest.mark.parametrize("changes", [*OTHERS, {"num_key_value_heads": 4}], ids=str)
def test_projections_of_another_model(tiny_model, changes, fault):
    model, other = tiny_model("llama"), tiny_model("llama", **changes)
    with fault.raises(ValueError, r"layer \d of \d has keys .* of 3 layers of 2 key heads"):
        helpers.compress_keys(other, TOKENS, fitted(model, TOKENS), 2)


@pytest.mark.parametrize("none", [[], None], ids=repr)
def test_projections_that_are_none(tiny_model, none, fault):
    with fault.raises(ValueError, "projections must be what key_projections returns.* none"):
        helpers.compress_keys(tiny_model("llama"), TOKENS, none, 2)
    with fault.raises(ValueError, "projections must be what key_projections returns.* none"):
        helpers.shared_ranks(none, 2)


@pytest.mark.parametrize("draws", [0, -1, 2.5])
def test_moments_of_draws(tiny_model, draws, fault):
    with fault.raises(ValueError, "draws must be a whole number of at least 1, found"):
        helpers.key_moments(tiny_model("llama"), TOKENS, draws=draws)


def test_moments_of_an_attention_that_a_sink_takes(tiny_model):
    """Nothing is left to weigh by: the moments of that head are zero, and no other changes."""
    model = copy.deepcopy(tiny_model("gpt_oss", "eager"))
    before = helpers.key_moments(model, TOKENS)
    model.model.layers[2].self_attn.sinks.data[:] = 1e4  # the last: the others see the same
    after = helpers.key_moments(model, TOKENS)
    assert not after[2].squares.any()
    assert not after[2].queries.any()
    for ours, theirs in zip(after[:2], before[:2], strict=True):
        assert torch.equal(ours.squares, theirs.squares)
    assert before[2].squares.any()


WRONG = [[1, 2, 3], None, torch.zeros(4), torch.ones(4, dtype=torch.bool)]


@pytest.mark.parametrize("tokens", WRONG, ids=["a list", "None", "floats", "booleans"])
def test_token_ids_as(tiny_model, tokens, fault):
    with fault.raises(ValueError, "token_ids must be a tensor of int64 or int32, found"):
        helpers.record_attention(tiny_model("llama"), tokens, lambda *_: None)


def with_sigma(sigma):
    return [helpers.KeyProjection("rotary", None, None, None, layer) for layer in sigma]


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_shared_ranks_leave_out_the_least_energy(rank):
    sigma = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(0)).abs().sort(
        -1, descending=True
    ).values * torch.tensor([[9.0], [1.0]])
    found = helpers.shared_ranks(with_sigma(sigma), rank)
    assert found.shape == (2, 2)

    def left_out(ranks):
        heads = zip(sigma.flatten(0, 1), ranks, strict=True)
        return sum(head[kept:].square().sum().item() for head, kept in heads)

    possible = [r for r in itertools.product(range(1, 5), repeat=4) if sum(r) == 4 * rank]
    assert left_out(found.flatten()) == min(map(left_out, possible))
    assert (left_out([rank] * 4) == left_out(found.flatten())) == (rank in (1, 4))


def test_shared_ranks_of_heads_without_energy():
    ranks = helpers.shared_ranks(with_sigma(torch.tensor([[[0.0, 0, 0], [3, 2, 1]]])), 2)
    assert ranks.tolist() == [[1, 3]]


@pytest.mark.parametrize("rank", [0, 5, 2.5, "3", None], ids=repr)
def test_a_shared_rank(rank, fault):
    with fault.raises(ValueError, f"rank must be (1 to 4|a whole number) .*found {rank!r}"):
        helpers.shared_ranks(with_sigma(torch.ones(3, 2, 4)), rank)
