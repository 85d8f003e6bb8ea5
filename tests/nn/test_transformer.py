"""The modules that torch.nn has not: gated activations and rotary embedding."""

import pytest
import torch

import cupyops


@pytest.mark.parametrize("packed", [False, True])
def test_gated(device, packed):
    x = torch.randn(3, 8, device=device)
    gate, up = x.chunk(2, -1)
    given = (x,) if packed else (gate, up)
    torch.testing.assert_close(cupyops.nn.SwiGLU()(*given), torch.nn.functional.silu(gate) * up)
    for approximate in ("none", "tanh"):
        layer = cupyops.nn.GEGLU(approximate)
        expected = torch.nn.functional.gelu(gate, approximate=approximate) * up
        torch.testing.assert_close(layer(*given), expected)
        assert repr(layer) == f"GEGLU(approximate={approximate!r})"


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(device, interleaved):
    """The scalar product of two turned rows hangs on how far apart they are, not on where."""
    layer = cupyops.nn.RoPE(8, max_positions=32, base=100.0, interleaved=interleaved, device=device)
    assert not layer.state_dict() and layer.cos.shape == (32, 4)
    q, k = torch.randn(2, 1, 8, device=device)
    turned = [layer(v.expand(32, 8)) for v in (q, k)]
    products = turned[0] @ turned[1].t()
    for apart in (-3, 0, 5):
        diagonal = products.diagonal(apart)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    places = torch.tensor([7, 3], device=device)
    torch.testing.assert_close(layer(q.expand(2, 8), places), turned[0][places])
    assert layer(q.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_bias_gelu(device, approximate):
    layer = cupyops.nn.BiasGELU(6, approximate, device=device)
    x = torch.randn(3, 6, device=device)
    torch.testing.assert_close(layer(x), torch.nn.functional.gelu(x, approximate=approximate))
    torch.nn.init.ones_(layer.bias)
    torch.testing.assert_close(layer(x), torch.nn.functional.gelu(x + 1, approximate=approximate))
    assert list(layer.state_dict()) == ["bias"] and repr(layer) == f"BiasGELU(6, approximate={approximate!r})"
