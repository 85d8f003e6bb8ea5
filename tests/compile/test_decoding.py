"""A step of generation: attention to a cache is `decode_attention`, and what is between two products is one kernel."""

import pytest
import torch
import torch.nn.functional as F
from compiled import compiled

import cupyops
from cupyops._compile.backend import programs

HALF = torch.bfloat16
ROWS, WIDTH = 40, 64


def repeated(x, count):
    batch, heads, rows, width = x.shape
    return x[:, :, None, :, :].expand(batch, heads, count, rows, width).reshape(batch, heads * count, rows, width)


def attend(q, keys, values, mask, **options):
    keys, values = (repeated(x, q.shape[1] // x.shape[1]) if x.shape[1] < q.shape[1] else x for x in (keys, values))
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.125, **options)


def static(q, k, v, keys, values, position, mask):
    keys.index_copy_(2, position, k)
    values.index_copy_(2, position, v)
    return attend(q, keys, values, mask)


def growing(q, k, v, keys, values, position, mask):
    keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
    return attend(q, keys, values, mask), keys, values


def of_the_library(q, k, v, keys, values, position, mask):
    """The cache is written through an assignment, and the heads are repeated by PyTorch."""
    keys[:, :, position], values[:, :, position] = k, v
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.125, enable_gqa=True)


def positions(queries, rows, past):
    """(how far each query is from each key, number of each key)."""
    at = torch.arange(rows)
    return (past + torch.arange(queries))[:, None] - at, at


def seen(kind, batch, queries, rows, past):
    distance, at = positions(queries, rows, past)
    mask = (distance >= 0).expand(batch, 1, queries, rows)
    if kind == "padding on the left":
        return mask & (at >= torch.arange(batch)[:, None, None, None] * 3)
    if kind == "a window":
        return mask & (distance < 6)
    if kind == "one for all sequences":
        return (distance >= 0)[None, None]
    if kind == "of two dimensions":
        return distance >= 0
    if kind == "an empty row":
        return mask & (torch.arange(batch) > 0)[:, None, None, None]
    return mask.contiguous()


MASKS = ["causal", "padding on the left", "a window", "one for all sequences", "of two dimensions", "an empty row"]


def made(batch, heads, kv_heads, queries, rows):
    torch.manual_seed(batch + heads + queries)
    q = torch.randn(batch, queries, heads, WIDTH).transpose(1, 2)
    k, v = (torch.randn(batch, queries, kv_heads, WIDTH).transpose(1, 2) for _ in range(2))
    return q, k, v, *(torch.randn(batch, kv_heads, rows, WIDTH) for _ in range(2))


def relative(found, true):
    return ((found.double() - true.double()).norm() / true.double().norm().clamp_min(1e-30)).item()


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


def called():
    return [name for program in programs for name, _ in program.left]


def compare(function, tensors, position, mask, dtype, grad_mode=torch.no_grad):
    """Results and caches beside eager's and those in float64; returns the calls that are left."""
    results = []
    programs.clear()
    for to, run in ((torch.float64, function), (dtype, function), (dtype, compiled(function))):
        given = [x.detach().to(dtype).to(to, memory_format=torch.preserve_format, copy=True) for x in tensors]
        with grad_mode(), cupyops.simulate("sm_90"):
            y = outputs(run(*given, position, mask))
        results.append([*y, *given[3:]])
    for true, want, found in zip(*results, strict=True):
        assert found.shape == want.shape and found.dtype == want.dtype
        assert relative(found, true) <= 4 * relative(want, true) + 1e-6
    return called()


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "queries"), [(1, 8, 2, 1), (3, 4, 2, 4), (3, 4, 4, 1)])
def test_masks(batch, heads, kv_heads, queries, mask, dtype):
    """With heads that share keys, and without; of one query and of four; of one sequence and of three."""
    past = 17
    left = compare(
        static,
        made(batch, heads, kv_heads, queries, ROWS),
        torch.arange(past, past + queries),
        seen(mask, batch, queries, ROWS, past),
        dtype,
    )
    assert left.count("cupyops.decode_attention.default") == 1
    assert not any("scaled_dot_product" in name for name in left)
    assert sum("index_copy" in name for name in left) == (2 if queries > 1 else 0)  # equal indices would be a race


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("function", [static, growing, of_the_library])
def test_caches(function, grad_mode):
    rows = ROWS + (function is growing)
    left = compare(
        function, made(2, 8, 2, 1, ROWS), torch.tensor([9]), seen("causal", 2, 1, rows, 9), HALF, grad_mode=grad_mode
    )
    assert left == ["cupyops.decode_attention.default"]


def test_caches_of_any_length():
    """One graph for all: generate makes a cache as long as a call asks for."""
    step = compiled(static, dynamic=None)
    programs.clear()
    for rows in (40, 56, 72):
        tensors = [x.to(HALF) for x in made(2, 8, 2, 1, rows)]
        given = torch.tensor([rows - 3]), seen("causal", 2, 1, rows, rows - 3)
        want, true = (static(*(x.to(to, copy=True) for x in tensors), *given) for to in (HALF, torch.float64))
        for x in (*tensors[3:], given[1]):
            torch._dynamo.mark_dynamic(x, x.dim() - 1 if x.dtype is torch.bool else 2)
        with torch.no_grad(), cupyops.simulate("sm_90"):
            found = step(*tensors, *given)
        assert relative(found, true) <= 4 * relative(want, true) + 1e-6
    assert called() == ["cupyops.decode_attention.default"]


def test_a_cache_without_a_mask():
    """All keys are seen. One query of heads with keys of their own is PyTorch's, which is as fast."""
    assert compare(growing, made(2, 8, 2, 1, ROWS), None, None, HALF) == ["cupyops.decode_attention.default"]
    assert "decode" not in " ".join(compare(growing, made(2, 4, 4, 1, ROWS), None, None, HALF))


def test_beams_share_a_mask():
    """Beam search expands the masks, and reorders the caches at each step."""

    def step(q, k, v, keys, values, position, mask):
        order = torch.tensor([1, 0, 2, 2])
        keys.copy_(keys.index_select(0, order))
        values.copy_(values.index_select(0, order))
        return static(q, k, v, keys, values, position, mask)

    mask = seen("padding on the left", 2, 1, ROWS, 20)[:, None].expand(2, 2, 1, 1, ROWS).reshape(4, 1, 1, ROWS)
    left = compare(step, made(4, 4, 2, 1, ROWS), torch.tensor([20]), mask, HALF)
    assert "cupyops.decode_attention.default" in left


def per_head(q, k, v, keys, values, position, mask):
    slopes = torch.arange(q.shape[1])[:, None, None]
    return attend(q, keys, values, mask & (slopes < 3))


def additive(q, k, v, keys, values, position, mask):
    return attend(q, keys, values, torch.where(mask, 0.25, -1e4).to(q.dtype))


def many_queries(q, k, v, keys, values, position, mask):
    return attend(q.expand(-1, -1, 9, -1), keys, values, mask)


def by_flag(q, k, v, keys, values, position, mask):
    return attend(q, keys[:, :, :1], values[:, :, :1], None, is_causal=True)


@pytest.mark.parametrize("function", [per_head, additive, many_queries, by_flag])
def test_other_attention_is_pytorch_s(function):
    left = compare(function, made(2, 8, 2, 1, ROWS), None, seen("causal", 2, 1, ROWS, 9), HALF)
    assert not any("decode_attention" in name for name in left)


def test_training_is_pytorch_s():
    """There are no kernels for its gradient."""
    q, k, v, keys, values = (x.requires_grad_() for x in made(2, 8, 2, 1, ROWS))
    mask = seen("causal", 2, 1, ROWS, 9)
    want = torch.autograd.grad(attend(q, keys, values, mask).square().sum(), (q, keys, values))
    programs.clear()
    with cupyops.simulate("sm_90"):
        found = torch.autograd.grad(compiled(attend)(q, keys, values, mask).square().sum(), (q, keys, values))
    assert not any("decode_attention" in name for name in called())
    for a, b in zip(found, want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cache_that_is_written_between(when):
    """Heads are repeated as they were then: the single ones may have changed when attention reads them."""

    def step(q, k, v, keys, values, position, mask):
        if when == "before":
            keys.mul_(2)
        many = repeated(keys, 4), repeated(values, 4)
        if when == "after":
            keys.mul_(2)
            values.zero_()
        return F.scaled_dot_product_attention(q, *many, attn_mask=mask)

    compare(step, made(2, 8, 2, 1, ROWS), None, seen("causal", 2, 1, ROWS, 9), torch.float32)


def test_masked_keys_may_be_anything():
    """A cache longer than what it holds: nobody reads the rest."""
    q, k, v, keys, values = made(2, 8, 2, 1, ROWS)
    want = static(q, k, v, keys.clone(), values.clone(), torch.tensor([9]), seen("causal", 2, 1, ROWS, 9))
    keys[:, :, 10:] = values[:, :, 10:] = torch.nan
    with torch.no_grad(), cupyops.simulate("sm_90"):
        found = compiled(static)(q, k, v, keys, values, torch.tensor([9]), seen("causal", 2, 1, ROWS, 9))
    torch.testing.assert_close(found, want)


# -- the kernels of a layer --------------------------------------------------------------------------------------------

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
FAMILY = {"llama": (transformers.LlamaConfig, {}), "qwen3": (transformers.Qwen3Config, {"head_dim": 64})}


def launches(family, layers):
    """(generated kernels, calls) of a step of a model."""
    configuration, options = FAMILY[family]
    sizes = dict(vocab_size=96, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, intermediate_size=192)
    torch.manual_seed(0)
    config = configuration(**sizes, **options, num_hidden_layers=layers, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(HALF).eval()
    compiling = transformers.CompileConfig(backend="cupyops", mode=None, fullgraph=True)
    compiling._compile_all_devices = True  # as on a GPU
    torch._dynamo.reset()
    programs.clear()
    with cupyops.simulate("sm_90"):
        model.generate(
            torch.randint(3, 96, (2, 5)),
            max_new_tokens=3,
            do_sample=False,
            cache_implementation="static",
            compile_config=compiling,
        )
    (program,) = programs
    return len(program.kernels), called()


@pytest.mark.filterwarnings("ignore")  # of transformers, about its own configurations
@pytest.mark.parametrize("family", FAMILY)
def test_the_kernels_of_a_layer(family):
    """Positions (after the norms of heads) with both writes into the cache; residual sum and norm, twice."""
    fewer, more = launches(family, 1), launches(family, 2)
    assert more[0] - fewer[0] == 3
    added = [name for name in set(more[1]) for _ in range(more[1].count(name) - fewer[1].count(name))]
    assert added.count("aten.mm.default") == 5 and added.count("cupyops.gated_linear.default") == 1
    assert added.count("cupyops.decode_attention.default") == 1 and len(added) == 7
