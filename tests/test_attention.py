"""Attention: a visitor sees what softmax sees, in order, and leaves the model as it was."""

import copy
import gc
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
