"""cupyops.nn.MultiheadAttention against torch.nn's: every argument of constructor and call, states, errors, swap."""

import copy
import inspect
import itertools
import pickle

import pytest
import torch
from torch import nn

import cupyops

ROWS, KEYS, BATCH, WIDTH, HEADS = 4, 5, 2, 16, 2
CONSTRUCTORS = [
    {},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True, "bias": False},
    {"add_bias_kv": True, "add_zero_attn": True, "kdim": 6},
    {"kdim": 6, "vdim": 10},
]
ATTENDED = "cupyops::scaled_dot_product_attention"


def pair(device="cpu", dtype=torch.float64, **options):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **options).to(device, dtype)
    for name, parameter in theirs.named_parameters():
        nn.init.normal_(parameter, std=0.5 if "weight" in name else 0.1)
    ours = cupyops.nn.MultiheadAttention(WIDTH, HEADS, **options).to(device, dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def inputs(module, batched=True, same=False, device="cpu", dtype=torch.float64, rows=ROWS, keys=KEYS, batch=BATCH):
    torch.manual_seed(1)
    shapes = [(rows, WIDTH)] if same else [(rows, WIDTH), (keys, module.kdim), (keys, module.vdim)]
    if batched:
        shapes = [(batch, r, w) if module.batch_first else (r, batch, w) for r, w in shapes]
    found = [torch.randn(shape, dtype=torch.float64).to(device, dtype).requires_grad_() for shape in shapes]
    return found * 3 if same else found


def masks(kind, batched=True, rows=ROWS, keys=KEYS, batch=BATCH, device="cpu", dtype=torch.float64):
    """(key_padding_mask, attn_mask) by what they are; every query sees a key."""
    padding = torch.arange(keys) >= torch.tensor([[keys - 1], [keys - 2]])[:batch]
    padding = padding if batched else padding[0]
    flat = torch.ones(rows, keys, dtype=torch.bool).triu(1)
    deep = torch.stack([flat.roll(n, 0) if n % 2 else flat for n in range((batch if batched else 1) * HEADS)])
    added = lambda mask: torch.randn(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf).to(dtype)
    found = {
        "none": (None, None),
        "padding": (padding, None),
        "two": (None, flat),
        "three": (None, deep),
        "both": (padding, deep),
        "floats": (added(padding), added(flat)),
    }[kind]
    return tuple(None if mask is None else mask.to(device) for mask in found)


def run(module, tensors, *args, **kwargs):
    y, weights = module(*tensors, *args, **kwargs)
    torch.manual_seed(2)
    wanted = [*dict.fromkeys(tensors), *module.parameters()]
    return (
        y,
        weights,
        *torch.autograd.grad(y, wanted, torch.randn(y.shape, dtype=torch.float64).to(y), allow_unused=True),
    )


def compare(ours, theirs, tensors, *args, **kwargs):
    torch.testing.assert_close(run(ours, tensors, *args, **kwargs), run(theirs, tensors, *args, **kwargs))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("options", CONSTRUCTORS, ids=str)
def test_values_and_gradients(options, batch_first):
    ours, theirs = pair(batch_first=batch_first, **options)
    for batched, kind, training in itertools.product(
        (True, False), ("none", "padding", "two", "three", "both", "floats"), (True, False)
    ):
        ours.train(training), theirs.train(training)
        padding, mask = masks(kind, batched)
        compare(ours, theirs, inputs(ours, batched), padding, False, mask)
    q, k, v = inputs(ours)
    if ours.kdim == ours.vdim == WIDTH:
        compare(ours, theirs, inputs(ours, same=True), need_weights=False)
    if ours.kdim == ours.vdim:
        compare(ours, theirs, (q, k, k), need_weights=False)
    for average in (True, False):  # by PyTorch's forward
        compare(ours, theirs, (q, k, v), masks("padding")[0], True, masks("two")[1], average)


@pytest.mark.parametrize("kind", ["two", "both"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_causal_as_a_hint(batch_first, kind):
    """With it the mask is not read, but beside padding."""
    ours, theirs = pair(batch_first=batch_first)
    padding, mask = masks(kind, keys=ROWS)
    compare(ours, theirs, inputs(ours, same=True), padding, need_weights=False, attn_mask=mask, is_causal=True)


def test_result_is_contiguous_and_heads_are_not_copied():
    for batch_first in (False, True):
        ours, _ = pair(batch_first=batch_first, dtype=torch.float16)
        x = inputs(ours, same=True, dtype=torch.float16)
        with cupyops.simulate(), cupyops.trace() as trace:
            y, weights = ours(*x, need_weights=False)
        assert y.is_contiguous() and weights is None
        kernels = [record.kernel.partition("<")[0] for record in trace.launches()]
        assert kernels == ["gemm_fwd", "attention_fwd_mma", "gemm_fwd"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_kernels(causal, batch_first):
    """In the simulator, with gradients; odd rows."""
    ours, theirs = pair(batch_first=batch_first, dtype=torch.float16)
    x = inputs(ours, same=True, dtype=torch.float16, rows=37)
    mask = torch.ones(37, 37, dtype=torch.bool).triu(1) if causal else None
    with cupyops.simulate(), cupyops.trace() as trace:
        found = run(ours, x, need_weights=False, attn_mask=mask, is_causal=causal)
    wide = [one.detach().double().requires_grad_() for one in x[:1]] * 3
    exact = run(theirs.double(), wide, need_weights=False, attn_mask=mask, is_causal=causal)
    for a, b in zip(found, exact):
        assert a is b is None or (a.double() - b).abs().max() <= 8e-3 * b.abs().max()
    assert {"attention_fwd_mma", "attention_bwd_mma"} <= {r.kernel.partition("<")[0] for r in trace.launches()}


@pytest.mark.gpu
@pytest.mark.parametrize("batch_first", [False, True])
def test_on_the_gpu(batch_first):
    for dtype, most in ((torch.float16, 8e-3), (torch.float32, 1e-5)):
        ours, theirs = pair("cuda", dtype, batch_first=batch_first)
        x = inputs(ours, same=True, device="cuda", dtype=dtype, rows=37)
        found = run(ours, x, need_weights=False)
        with torch.no_grad():
            evaluated = ours.eval()(*x, need_weights=False)[0]
        wide = [one.detach().double().requires_grad_() for one in x[:1]] * 3
        exact = run(theirs.double(), wide, need_weights=False)
        for a, b in ((evaluated, exact[0]), *zip(found, exact)):
            assert a is b is None or (a.double() - b).abs().max() <= most * b.abs().max()


def test_dropout_in_training_alone():
    ours, theirs = pair(dropout=1.0)
    compare(ours, theirs, inputs(ours), need_weights=False)
    ours.eval(), theirs.eval()
    compare(ours, theirs, inputs(ours), need_weights=False)


@pytest.mark.parametrize("options", CONSTRUCTORS, ids=str)
def test_states(options):
    ours, theirs = pair(**options)
    assert list(ours.state_dict()) == list(theirs.state_dict()) and repr(ours) == repr(theirs)
    theirs.load_state_dict(ours.state_dict())
    starts = []
    for package in (cupyops.nn, nn):
        torch.manual_seed(5)
        starts.append(package.MultiheadAttention(WIDTH, HEADS, **options).state_dict().values())
    assert all(map(torch.equal, *starts))
    x = inputs(ours)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(other(*x, need_weights=False), ours(*x, need_weights=False))
    assert ours.to("meta").out_proj.weight.is_meta


def test_signatures_are_torch_s():
    for name in ("__init__", "forward"):
        ours, theirs = (inspect.signature(getattr(p.MultiheadAttention, name)) for p in (cupyops.nn, nn))
        assert list(ours.parameters) == list(theirs.parameters)
        assert [p.default for p in ours.parameters.values()] == [p.default for p in theirs.parameters.values()]


BAD = {
    "rank": lambda m, q, k, v: m(q[None], k, v, need_weights=False),
    "rank of key": lambda m, q, k, v: m(q, k[0], v, need_weights=False),
    "width": lambda m, q, k, v: m(q[..., :-1], k, v, need_weights=False),
    "batch": lambda m, q, k, v: m(q[:, :1], k, v, need_weights=False),
    "rows of value": lambda m, q, k, v: m(q, k, v[:-1], need_weights=False),
    "padding": lambda m, q, k, v: m(q, k, v, torch.ones(BATCH, KEYS + 1, dtype=torch.bool), need_weights=False),
    "mask": lambda m, q, k, v: m(q, k, v, attn_mask=torch.ones(ROWS, 1, dtype=torch.bool), need_weights=False),
    "kind of mask": lambda m, q, k, v: m(q, k, v, attn_mask=torch.ones(ROWS, KEYS).long(), need_weights=False),
    "hint": lambda m, q, k, v: m(q, k, v, is_causal=True, need_weights=False),
    "dtype": lambda m, q, k, v: m(q.float(), k, v, need_weights=False),
}


@pytest.mark.parametrize("bad", BAD)
def test_errors_are_torch_s(bad):
    ours, theirs = pair()
    with pytest.raises(Exception) as expected:  # noqa: PT011  # whatever PyTorch raises
        BAD[bad](theirs, *inputs(theirs))
    with pytest.raises(expected.type) as found:
        BAD[bad](ours, *inputs(ours))
    assert str(found.value) == str(expected.value)


def test_arguments_of_the_constructor():
    for given in ((0, 2), (7, 2)):
        with pytest.raises((ValueError, AssertionError)) as expected:
            nn.MultiheadAttention(*given)
        with pytest.raises(expected.type, match=str(expected.value)):
            cupyops.nn.MultiheadAttention(*given)


def test_compile():
    torch._dynamo.reset()
    ours, _ = pair(dtype=torch.float32, batch_first=True)
    x = inputs(ours, same=True, dtype=torch.float32)[0]
    padding = masks("padding", keys=ROWS)[0]
    call = lambda x: ours(x, x, x, padding, need_weights=False)[0]
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x))


def test_autocast():
    ours, theirs = pair(dtype=torch.float32)
    x = inputs(ours, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        (found, _), (expected, _) = ours(*x, need_weights=False), theirs(*x, need_weights=False)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("training", [False, True])
def test_swap_in_a_transformer(training):
    """Training by our module; in evaluation PyTorch's layer reads the weights of the module, which are where they were."""
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 16, dropout=0.0, batch_first=True).double().train(training)
    src, target = (torch.randn(2, rows, WIDTH, dtype=torch.float64) for rows in (5, 3))
    mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)
    call = lambda: model(src, target, tgt_mask=mask, tgt_is_causal=True)
    with torch.set_grad_enabled(training):
        expected = call()
        with cupyops.swap(model) as swap, cupyops.trace() as trace:
            torch.testing.assert_close(call(), expected)
    assert {one.by for one in swap.replaced if one.type is nn.MultiheadAttention} == {cupyops.nn.MultiheadAttention}
    attended = [record for record in trace.records if record.operator == ATTENDED]
    assert len(attended) == (3 if training else 2)  # of the encoder in evaluation PyTorch's own kernel
    assert type(model.encoder.layers[0].self_attn) is nn.MultiheadAttention
