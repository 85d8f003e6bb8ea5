import pytest
import torch
from contract import Make, OperatorContract, Sample

import cupyops


def philox(seed, counter, rounds=7):
    """Philox4x32, number by number, as its paper draws it."""
    key, words = [seed % 2**32, (seed >> 32) % 2**32], [counter % 2**32, counter >> 32, 0, 0]
    for _ in range(rounds):
        left, right = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [right >> 32 ^ words[1] ^ key[0], right % 2**32, left >> 32 ^ words[3] ^ key[1], left % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return words


SEED = 0x123456789ABCDEF  # of the samples


def seeded(x, p):
    """The operator, by the seed of the samples."""
    seed = torch.full((), SEED, dtype=torch.int64, device=x.device)
    return cupyops.operators()["cupyops::dropout"](x, seed, p)


def by_mask(x, p):
    """A product with the mask that the seed of the samples makes."""
    bits = torch.tensor([word for i in range((x.numel() + 3) // 4) for word in philox(SEED, i)][: x.numel()])
    factor = (bits.view(x.shape) >= p * 2**32).to(x.device, torch.float64) / (1 - p if p < 1 else 1)
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * factor.to(wide)).to(x.dtype)


class TestDropout(OperatorContract):
    function = staticmethod(seeded)
    torch_function = staticmethod(by_mask)
    kernels = {"dropout_contiguous", "dropout_strided"}

    def samples(self, make: Make):
        yield Sample(make(3, 7), 0.5)
        yield Sample(make(2, 3, 4, 5), 0.25)
        yield Sample(make(1031), 0.1)
        yield Sample(make(6, 9, 4).detach().transpose(0, 2)[:, ::2].requires_grad_(make.requires_grad), 0.3)
        yield Sample(make(), 0.5)
        yield Sample(make(0, 3), 0.5)

    def small_samples(self, make: Make):
        return (sample for sample in self.samples(make) if sample.args[0].numel() < 100)

    @pytest.mark.gpu
    def test_more_than_2_31(self):
        """The mask goes by the index of an element, and does not begin anew."""
        x = torch.ones(2**32 + 4096, device="cuda", dtype=torch.float16)
        kept = cupyops.dropout(x, 0.5) != 0
        assert 1800 < int(kept[-4096:].sum()) < 2300
        for before in (2**31, 2**32):
            assert not torch.equal(kept[-4096:], kept[-4096 - before : x.numel() - before])


def test_known_answers():
    """The authors' own table, by which the Philox of these tests is known to be right."""
    assert philox(0, 0) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert philox(0, 0, rounds=10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("seed", [0, 1, -(2**63), SEED])
def test_uniform(device, seed):
    """The numbers fall evenly into 16 bins, each word by itself: chi squared within five sigma of what is expected."""
    n, bins = 1 << 18, 16
    drop, seed = cupyops.operators()["cupyops::dropout"], torch.tensor(seed, device=device)
    ones = torch.ones(n, device=device)
    below = torch.stack([(drop(ones, seed, k / bins) == 0).view(-1, 4).sum(0) for k in range(1, bins)]).double()
    counts = torch.diff(below, dim=0, prepend=below[:1] * 0, append=torch.full_like(below[:1], n / 4))
    expected = n / 4 / bins
    squared = ((counts - expected) ** 2 / expected).sum(0)
    assert (abs(squared - (bins - 1)) < 5 * (2 * (bins - 1)) ** 0.5).all()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_frequency(device, p):
    """How many are dropped, and how many neighbours together, within five sigma of what is independent."""
    n = 200_000
    y = cupyops.dropout(torch.ones(n, device=device), p)
    dropped = (y == 0).double()
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))
    assert abs(dropped.mean().item() - p) < 5 * (p * (1 - p) / n) ** 0.5
    for step in (1, 2, 4):
        both = (dropped[step:] * dropped[:-step]).mean().item()
        assert abs(both - p * p) < 5 * (3 * p * p * (1 - p * p) / n) ** 0.5


def test_the_seed_makes_the_mask(device):
    x = torch.randn(40, 30, device=device, requires_grad=True)
    torch.manual_seed(5)
    first, other = cupyops.dropout(x), cupyops.dropout(x)
    torch.manual_seed(5)
    assert torch.equal(cupyops.dropout(x), first) and not torch.equal(first, other)
    torch.manual_seed(5)
    assert torch.equal(cupyops.dropout(x.t().contiguous().t()), first)
    (grad,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(grad, torch.where(first == 0, 0.0, 2.0))


def test_the_ends(device):
    x = torch.tensor([1.0, float("nan"), float("inf")], device=device)
    assert cupyops.dropout(x, 0.0) is x and cupyops.dropout(x, 0.7, training=False) is x
    torch.testing.assert_close(cupyops.dropout(x, 1.0), x * 0, equal_nan=True)
    y = torch.ones(100, device=device)
    assert cupyops.dropout(y, 0.5, inplace=True) is y and set(y.tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
def test_other_numbers_stay_or_go(device, dtype):
    """All of them, as in PyTorch, which drops none of them at random."""
    x = torch.tensor([1, 0, 3], dtype=dtype, device=device)
    assert cupyops.dropout(x, 0.0) is x and cupyops.nn.Dropout(0.5).eval()(x) is x
    assert torch.equal(cupyops.dropout(x, 1.0), torch.zeros_like(x))
    y = x.clone()
    assert cupyops.dropout(y, 1.0, inplace=True) is y and not y.any()
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.nn.functional.dropout(x.cpu(), 0.5)
    with pytest.raises(cupyops.InputError, match="input"):
        cupyops.dropout(x, 0.5)


def test_transforms(device):
    x = torch.ones(4, 50, device=device)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(cupyops.dropout)(x)
    same = torch.func.vmap(cupyops.dropout, randomness="same")(x)
    different = torch.func.vmap(cupyops.dropout, randomness="different")(x)
    assert torch.equal(same[0], same[1]) and not torch.equal(different[0], different[1])
    again = torch.utils.checkpoint.checkpoint(cupyops.dropout, leaf := x.clone().requires_grad_(), use_reentrant=False)
    again.sum().backward()
    assert torch.equal(leaf.grad, again)


@pytest.mark.gpu
def test_each_replay_has_its_own_mask():
    x = torch.ones(10_000, device="cuda")
    cupyops.dropout(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cupyops.dropout(x)
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append(y.clone())
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


def test_bad_input():
    for bad in (torch.arange(3), None):
        with pytest.raises(cupyops.InputError, match="input"):
            cupyops.dropout(bad)
    for bad in (-0.1, 1.5, "0.5", float("nan"), True):
        with pytest.raises(cupyops.InputError, match="p is"):
            cupyops.dropout(torch.ones(2), bad)
