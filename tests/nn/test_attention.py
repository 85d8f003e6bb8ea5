"""cupyops.nn.Attention: beside the same by PyTorch, and token by token beside all at once."""

import copy
import math

import pytest
import torch
from torch import nn

import cupyops

BATCH, ROWS, DIM, HEADS = 2, 11, 32, 4
OPTIONS = {
    "plain": {},
    "bias": {"bias": True, "head_dim": 6},
    "grouped": {"kv_heads": 2, "qk_norm": "rms"},
    "rope": {"kv_heads": 1, "rope": {}},
    "part": {"rope": {"dim": 4, "interleaved": True}, "qk_norm": "rms"},
    "window": {"window": 3, "rope": {}, "kv_heads": 2},
}
both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
each = pytest.mark.parametrize("name", OPTIONS)


def layer(name="rope", dtype=torch.float64, device="cpu", dim=DIM, **more):
    torch.manual_seed(0)
    options = {**OPTIONS[name], **more}
    if "rope" in options:
        options["rope"] = cupyops.nn.RoPE(**{"dim": dim // HEADS, "max_positions": 64, **options["rope"]})
    made = cupyops.nn.Attention(dim, HEADS, **options)
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.3)
    return made.to(device, dtype)


def tokens(rows=ROWS, dtype=torch.float64, device="cpu", dim=DIM, batch=BATCH):
    return torch.randn(batch, rows, dim, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def by_torch(of, x):
    """The same by PyTorch's functions and complex numbers."""
    q, k, v = (x @ of.qkv.weight.T + (0 if of.qkv.bias is None else of.qkv.bias)).split(
        [n * of.head_dim for n in (of.heads, of.kv_heads, of.kv_heads)], -1
    )
    q, k, v = (one.reshape(*x.shape[:2], -1, of.head_dim).transpose(1, 2) for one in (q, k, v))
    if of.q_norm is not None:
        q, k = (nn.functional.rms_norm(one, (of.head_dim,), n.weight) for one, n in ((q, of.q_norm), (k, of.k_norm)))
    if of.rope is not None:
        q, k = (turned(one, of.rope) for one in (q, k))
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    seen = torch.ones_like(distance, dtype=torch.bool) if not of.causal else distance >= 0
    seen = seen if of.window is None else seen & (distance <= of.window)
    y = nn.functional.scaled_dot_product_attention(q, k, v, seen.to(x.device), enable_gqa=True)
    y = y.transpose(1, 2).reshape(*x.shape[:2], -1)
    return y @ of.out.weight.T + (0 if of.out.bias is None else of.out.bias)


def turned(x, rope):
    head, rest = x[..., : rope.dim], x[..., rope.dim :]
    pairs = head.unflatten(-1, (-1, 2)) if rope.interleaved else head.unflatten(-1, (2, -1)).transpose(-1, -2)
    angles = torch.complex(rope.cos, rope.sin)[: x.shape[2]].to(torch.complex128)
    found = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angles)
    found = found if rope.interleaved else found.transpose(-1, -2)
    return torch.cat((found.flatten(-2), rest), -1)


@each
@pytest.mark.parametrize("causal", [True, False])
def test_values_and_gradients(name, causal):
    if not causal and name == "window":
        pytest.skip("a window is of causal attention")
    of, x = layer(name, causal=causal), tokens().requires_grad_()
    wanted = [x, *of.parameters()]
    y, expected = of(x), by_torch(of, x)
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    for found, right in zip(torch.autograd.grad(y, wanted, grad), torch.autograd.grad(expected, wanted, grad)):
        torch.testing.assert_close(found, right)


@both
@each
@pytest.mark.parametrize("parts", [(1,) * ROWS, (4, 1, 1, 1, 1, 1, 1, 1), (3, 3, 1, 4)], ids=str)
def test_token_by_token(name, parts, device):
    of, x = layer(name, device=device), tokens(device=device)
    with torch.no_grad():
        cache = of.new_cache(BATCH, ROWS)
        for _ in range(2):  # a second time in the same memory
            found = torch.cat([of(part, cache=cache) for part in x.split(parts, 1)], 1)
            torch.testing.assert_close(found, of(x))
            assert cache.lengths.tolist() == [ROWS] * BATCH
            cache.reset()


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_by_kernels(dtype, device):
    """Prefill by attention's, steps by those that decode; rows beyond are not read."""
    of, x = layer("window", dtype, device, dim=128), tokens(9, dtype, device, dim=128)
    expected = copy.deepcopy(of).double()(x.double())
    with torch.no_grad(), cupyops.simulate(), cupyops.never_slower(False), cupyops.trace() as trace:
        cache = of.new_cache(BATCH, 40)
        cache.keys.fill_(math.nan), cache.values.fill_(math.nan)
        found = torch.cat([of(part, cache=cache) for part in x.split((6, 1, 2), 1)], 1)
    assert (found.double() - expected).abs().max() <= 16 * torch.finfo(dtype).eps * expected.abs().max()
    kernels = [record.kernel.partition("<")[0] for record in trace.launches()]
    assert kernels.count("decode_attention_fwd_mma") == 2
    assert sum(name.startswith("attention_fwd") for name in kernels) == 1


def test_prompts_of_several_lengths():
    """Padded at the right; what follows takes the padding's place."""
    of, x = layer("rope"), tokens()
    lengths = [5, 3]
    with torch.no_grad():
        cache = of.new_cache(BATCH, 16)
        of(x[:, :5], cache=cache)
        cache.lengths.copy_(torch.tensor(lengths))
        found = [of(x[:, 5 + n : 6 + n], cache=cache) for n in range(4)]
        for b, length in enumerate(lengths):
            alone = torch.cat((x[b : b + 1, :length], x[b : b + 1, 5:9]), 1)
            expected = of(alone)[:, length:]
            torch.testing.assert_close(torch.cat(found, 1)[b : b + 1], expected)


def test_states_moves_and_copies():
    of = layer("part", torch.float32)
    assert list(of.state_dict()) == ["qkv.weight", "out.weight", "q_norm.weight", "k_norm.weight"]
    other = layer("part", torch.float32)
    with torch.no_grad():
        other.qkv.weight.zero_()
    other.load_state_dict(of.state_dict())
    x = tokens(dtype=torch.float32)
    torch.testing.assert_close(other(x), of(x))
    torch.testing.assert_close(copy.deepcopy(of)(x), of(x))
    of.to(torch.bfloat16)
    assert of(x.bfloat16()).dtype == torch.bfloat16 and of.new_cache(1, 4).keys.dtype == torch.bfloat16
    assert of.new_cache(1, 4, device="meta").lengths.is_meta
    assert cupyops.nn.Attention(8, 2, device="meta", dtype=torch.float16).qkv.weight.is_meta
    assert "kv_heads=2, causal=True, window=3" in repr(layer("window"))


def test_compiled_steps():
    """Of a prompt and of a step; neither is compiled again at another length."""
    torch._dynamo.reset()
    of, x = layer("rope", torch.float32), tokens(dtype=torch.float32)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(of, backend=backend, fullgraph=True)
    with torch.no_grad():
        cache = of.new_cache(BATCH, ROWS)
        found = torch.cat([compiled(part, cache=cache) for part in x.split((4, *(1,) * 7), 1)], 1)
        torch.testing.assert_close(found, of(x))
    assert len(graphs) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [True, False])
def test_a_step_as_a_cuda_graph(kernels):
    of, x = layer("grouped", torch.float16, "cuda", dim=256), tokens(20, torch.float16, "cuda", dim=256)
    with torch.no_grad(), cupyops.never_slower(not kernels):
        expected = of(x)
        cache = of.new_cache(BATCH, 32)
        found = [of(x[:, :4], cache=cache)]
        step = x[:, 4:5].clone()
        for _ in range(3):
            of(step, cache=cache)
        cache.lengths.fill_(4)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = of(step, cache=cache)
        cache.lengths.fill_(4)
        for row in range(4, 20):
            step.copy_(x[:, row : row + 1])
            graph.replay()
            found.append(y.clone())
        torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())


BAD = {
    "heads": (lambda: cupyops.nn.Attention(32, 4, kv_heads=3), "kv_heads is 3, expected a divisor of heads, 4"),
    "dim": (lambda: cupyops.nn.Attention(30, 4), "dim is 30, expected a multiple of heads, 4"),
    "norm": (lambda: cupyops.nn.Attention(32, 4, qk_norm="layer"), "qk_norm is 'layer', expected 'rms' or None"),
    "window": (lambda: cupyops.nn.Attention(32, 4, window=2, causal=False), "window is 2, expected at least 0"),
    "rope": (lambda: cupyops.nn.Attention(32, 4, rope=cupyops.nn.RoPE(16)), "rope turns 16 elements, expected at most"),
    "input": (lambda: layer()(tokens()[0]), r"input is a tensor of shape \(11, 32\), expected \(batch, rows, 32\)"),
    "gradient": (lambda: cached(layer(), grad=True), "a cache has no gradient"),
    "causal": (lambda: cached(layer(causal=False)), "the layer is not causal"),
    "batch": (lambda: cached(layer(), batch=3), r"cache has shape \(3, 16, 1, 8\), expected \(2, max_rows, 1, 8\)"),
    "full": (
        lambda: cached(layer(), rows=10),
        "cache has 10 rows, expected at least 11; make it with a larger max_rows",
    ),
}


def cached(of, batch=BATCH, rows=16, grad=False):
    with torch.set_grad_enabled(grad):
        return of(tokens(), cache=of.new_cache(batch, rows))


@pytest.mark.parametrize("bad", BAD)
def test_bad_input(bad):
    call, message = BAD[bad]
    with pytest.raises(cupyops.InputError, match=message):
        call()


@pytest.mark.parametrize("of_cache", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cache_of_another_dtype(dtype, of_cache):
    torch.manual_seed(0)
    layer = cupyops.nn.Attention(32, 4, kv_heads=2, rope=cupyops.nn.RoPE(8, max_positions=8), dtype=dtype).eval()
    x = torch.randn(2, 7, 32, dtype=dtype)
    with torch.no_grad():
        cache = layer.new_cache(2, max_rows=8, dtype=of_cache)
        found = torch.cat([layer(x[:, a:b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 7))], 1)
        expected = layer(x)
    assert found.dtype is dtype and cache.keys.dtype is of_cache
    coarsest = max(torch.finfo(one).eps for one in (dtype, of_cache))
    torch.testing.assert_close(found, expected, rtol=4 * coarsest, atol=4 * coarsest)
    with pytest.raises(cupyops.errors.InputError, match=r"dtype is torch.int8, expected None or one of torch.float16"):
        layer.new_cache(2, max_rows=8, dtype=torch.int8)
