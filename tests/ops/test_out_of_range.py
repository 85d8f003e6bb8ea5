"""Indices out of range: one error where they can be read, and in the same words what a kernel prints before it stops."""

import re

import pytest
import torch

import cupyops

COS, SIN, X, WEIGHT = torch.rand(4, 2), torch.rand(4, 2), torch.randn(3, 4), torch.randn(5, 4)
KEYS = torch.randn(4, 16, 2, 8)  # 4 blocks of a cache
CLASS, ROW, POSITION = "ignore_index or a class in [0, 4)", "a row of weight in [0, 3)", "one in [0, 4)"

CASES = {
    "rope": (lambda bad: cupyops.rope(X, COS, SIN, torch.tensor([0, bad, 2])), POSITION),
    "rope, a batch": (
        lambda bad: cupyops.rope(X.expand(2, 3, 4), COS, SIN, torch.tensor([[0, bad, 2], [0, 1, 2]])),
        POSITION,
    ),
    "decode_attention": (
        lambda bad: cupyops.decode_attention(*(KEYS[:1, :1], KEYS, KEYS), block_table=torch.tensor([[0, bad]])),
        POSITION,
    ),
    "embedding": (lambda bad: cupyops.embedding(torch.tensor([0, bad]), X), ROW),
    "embedding, int32": (lambda bad: cupyops.embedding(torch.tensor([[0, bad]], dtype=torch.int32), X), ROW),
    "cross_entropy": (lambda bad: cupyops.cross_entropy(X, torch.tensor([0, bad, 2])), CLASS),
    "cross_entropy, smooth": (
        lambda bad: cupyops.cross_entropy(X, torch.tensor([0, bad, 2]), label_smoothing=0.1, reduction="none"),
        CLASS,
    ),
    "nll_loss": (lambda bad: cupyops.nll_loss(X, torch.tensor([0, bad, 2])), CLASS),
    "nll_loss, weighted": (lambda bad: cupyops.nll_loss(X, torch.tensor([0, bad, 2]), torch.ones(4)), CLASS),
    "fused_linear_cross_entropy": (
        lambda bad: cupyops.fused_linear_cross_entropy(X, WEIGHT, torch.tensor([0, bad, 2])),
        CLASS.replace("4", "5"),
    ),
}


@pytest.mark.parametrize("low", [True, False], ids=["below", "beyond"])
@pytest.mark.parametrize("name", CASES)
def test_one_error_in_the_words_of_the_kernel(name, low, capfd):
    call, expected = CASES[name]
    bad = -1 if low else int(re.search(r"(\d+)\)$", expected)[1])
    with pytest.raises(cupyops.InputError) as error:
        call(bad)
    assert str(error.value).endswith(f"1{'],'[name.startswith(('rope', 'decode'))]} is {bad}, expected {expected}")
    if expected.startswith("ignore_index"):
        assert str(error.value).startswith("target[")
    with cupyops.simulate(), pytest.raises(cupyops.SimulatorError):
        call(bad)
    assert f"cupyops: {error.value}" in capfd.readouterr().out


@pytest.mark.parametrize("name", ["rope", "embedding", "cross_entropy", "nll_loss", "fused_linear_cross_entropy"])
def test_of_a_compiled_call(name):
    call, expected = CASES[name]
    bad = torch.tensor(7)
    with pytest.raises(cupyops.InputError, match="is 7, expected"):
        torch.compile(compilable(name), backend="aot_eager")(torch.stack((torch.tensor(0), bad, torch.tensor(2))))


def compilable(name):
    return {
        "rope": lambda index: cupyops.rope(X, COS, SIN, index),
        "embedding": lambda index: cupyops.embedding(index, X),
        "cross_entropy": lambda index: cupyops.cross_entropy(X, index),
        "nll_loss": lambda index: cupyops.nll_loss(X, index),
        "fused_linear_cross_entropy": lambda index: cupyops.fused_linear_cross_entropy(X, WEIGHT, index),
    }[name]


@pytest.mark.parametrize("bad", [-1, 7])
def test_where_it_cannot_be_read_nothing_wraps(bad):
    """Inside a transform PyTorch's own index is asked, which counts nothing from the end."""
    with pytest.raises((IndexError, RuntimeError)):
        torch.func.vmap(lambda positions: cupyops.rope(X, COS, SIN, positions))(torch.tensor([[0, bad, 2]]))


def test_what_is_ignored():
    for function in (cupyops.cross_entropy, cupyops.nll_loss):
        ours = function(X, torch.tensor([0, 9, 2]), ignore_index=9)
        torch.testing.assert_close(ours, function(X[::2], torch.tensor([0, 2])))
    fused = cupyops.fused_linear_cross_entropy(X, WEIGHT, torch.tensor([0, -7, 2]), ignore_index=-7)
    torch.testing.assert_close(fused, cupyops.fused_linear_cross_entropy(X[::2], WEIGHT, torch.tensor([0, 2])))


def test_no_row_that_is_named_is_scaled_before():
    """With max_norm, which changes the table, in the simulator too, where the indices are read."""
    weight = 9 * torch.ones(3, 4)
    with cupyops.simulate(), pytest.raises(cupyops.InputError, match="is 3, expected a row of weight"):
        cupyops.embedding(torch.tensor([0, 3]), weight, max_norm=1.0)
    assert torch.equal(weight, 9 * torch.ones(3, 4))
