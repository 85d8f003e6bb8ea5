"""Hazards of overloads, of indices and of layout: arguments that a rule does not name, views, slices, strides, addresses."""

import pytest
import torch
import torch.nn.functional as F
from compiled import assert_as_eager, compiled, traced

import cupyops

HALF = torch.bfloat16


def rand(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 5)).to(dtype).requires_grad_(grad)


def whole(*shape, high=10, low=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def kernels(programs):
    return sum(len(program.kernels) for program in programs)


# -- overloads and types -----------------------------------------------------------------------------------------------


def test_arguments_that_a_rule_does_not_name_are_not_dropped():
    def function(x, i):
        index, source = torch.tensor([[0, 1, 1, 0, 2]]), x[:1] * 2
        rounded = torch.round(x * 100, decimals=1), torch.round(x, decimals=-1), torch.round(x, decimals=2)
        divided = [torch.div(x, 0.3, rounding_mode=mode) for mode in (None, "floor", "trunc")]
        divided += [torch.div(i, 3, rounding_mode=mode) for mode in ("floor", "trunc")]
        placed = [torch.scatter(x, 0, index, source, reduce=one) for one in ("add", "multiply")]
        placed += [x.scatter(0, index, source), x.scatter(0, index, 0.5), x.scatter_add(0, index, source)]
        placed += [x.scatter_reduce(0, index, source, one, include_self=False) for one in ("mean", "amax", "prod")]
        cast = (torch.full_like(x, 3, dtype=torch.int64),)
        more = (
            x.sum(0, dtype=torch.float64),
            x.cumsum(0, dtype=torch.float64),
            torch.addmm(x, x, x[0].diag(), beta=2, alpha=3),
        )
        return *rounded, *divided, *placed, *cast, *more, torch.searchsorted(x[0].sort()[0], x[1], right=True)

    assert_as_eager(function, [rand(4, 5, grad=False) * 3, whole(4, 5, low=-9)], dynamo=False)


def test_each_overload_of_any_all_max_and_min():
    def function(x, y):
        truth = x > 0
        found = (
            truth.any(),
            truth.any(1),
            truth.any((0, 1)),
            truth.all(0, keepdim=True),
            torch.any(x.int(), 1),
            torch.all(x),
        )
        found += (
            x.max(),
            x.min(),
            *x.max(1),
            *x.min(0, keepdim=True),
            torch.max(x, y),
            torch.min(x, y),
            x.max(-1)[0] * 2,
        )
        return (
            *found,
            x.to(torch.uint8).any(),
            x.aminmax()[0],
            x.argmax(1),
            x.amax((0, 1), keepdim=True),
            x.median(),
            x.mode(0)[0],
        )

    assert_as_eager(function, [rand(4, 5, grad=False), rand(4, 5, grad=False)], dynamo=False)


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.int32, torch.uint8, torch.bool], ids=str)
def test_additions_with_alpha(dtype):
    def function(a, b):
        if dtype is torch.bool:
            return torch.add(a, b), torch.add(a, b, alpha=True), a.logical_xor(b), a & b
        alphas = [2, 3] if not dtype.is_floating_point else [2, -0.5]
        found = [op(a, b, alpha=n) for n in alphas for op in (torch.add, torch.sub, torch.rsub)]
        return *found, *(torch.add(a, 2, alpha=n) for n in alphas), *(torch.rsub(a, 5, alpha=n) for n in alphas)

    a = whole(3, 5).to(dtype)
    assert_as_eager(function, [a, a.flip(0)], dynamo=False)


def test_bounds_that_are_tensors_and_choices_that_are_numbers():
    def function(x, y, i):
        clamped = torch.clamp(x, y), torch.clamp(x, None, y), torch.clamp(x, y - 1, y), torch.clamp(x, y, y - 1)
        clamped += x.clamp(y[:1], y[0]), i.clamp(2, 7), i.clamp(0.5), i.clamp(max=i.flip(0)), i.clamp(-3, 300)
        chosen = (
            torch.where(x > 0, 1.0, x),
            torch.where(x > 0, x, 2),
            torch.where(x > 0, 1, 0),
            torch.where(i > 3, i, 0.5),
        )
        return *clamped, *chosen, torch.where(x > 0, 1.0, 2.0), torch.where(i > 3, x, i)

    assert_as_eager(function, [rand(3, 4), rand(3, 4), whole(3, 4)], dynamo=False)


TYPES = {
    "complex": lambda x: (torch.complex(x, x * 2) * 3).abs() + 1,
    "complex views": lambda x: torch.view_as_real(torch.view_as_complex(x.view(-1, 2)).conj() * 2) + x.view(-1, 2),
    "comparison of complex": lambda x: (torch.complex(x, x) == torch.complex(x, x.abs())).float() * x,
    "rfft": lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2) + x,
    "float8": lambda x: (x * 2).to(torch.float8_e4m3fn).float() + x,
    "unsigned of 16 bits": lambda x: (x.abs() * 100).to(torch.int32).to(torch.uint16).to(torch.int64) + 1,
    "unsigned of 32 and 64 bits": lambda x: (
        (x.abs() * 100).long().to(torch.uint32).to(torch.uint64).to(torch.int64) + 1
    ),
    "sparse": lambda x: torch.sparse.mm(x.detach().relu().to_sparse(), x.t()) + 1,
}


@pytest.mark.parametrize("name", TYPES)
def test_types_that_no_kernel_knows_are_left_to_pytorch(name):
    assert_as_eager(lambda x: TYPES[name](x * 1.5) * 2, [rand(4, 6, grad=False)], dynamo=False)


def quantized(x, offsets):
    return (torch.quantize_per_tensor(x * 2, 0.1, 0, torch.qint8).dequantize() + 1,)


def nested(x, offsets):
    found = torch.nested.nested_tensor_from_jagged(x * 2, offsets)
    return (found.sin() * 3).values() + 1, found.sum(1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", [quantized, nested], ids=lambda f: f.__name__)
def test_tensors_that_are_more_than_numbers_are_left_to_pytorch(function):
    fast, x, offsets = (
        compiled(function, fullgraph=False, dynamic=None),
        rand(8, 4, grad=False),
        torch.tensor([0, 2, 5, 8]),
    )
    with cupyops.simulate():
        for got, want in zip(fast(x, offsets), function(x, offsets), strict=True):
            torch.testing.assert_close(got, want)


def test_calls_without_a_rule_are_pytorchs_and_recorded():
    def function(x):
        return (
            torch.linalg.inv(x * 2) + 1,
            x.kthvalue(2)[0] * 2,
            F.grid_sample(x[None, None], x[None, :4, :2, None].mT.expand(1, 4, 2, 2), align_corners=False),
        )

    programs = assert_as_eager(function, [rand(6, 6, grad=False)], dynamo=False, factor=64)
    left = {name for program in programs for name, _ in program.left}
    assert "aten.kthvalue.default" in left
    assert all(reason for program in programs for _, reason in program.left)


# -- indices -----------------------------------------------------------------------------------------------------------


SLICES = [(0, 99, 1), (-99, 3, 1), (2, -1, 1), (-3, 99, 1), (5, 2, 1), (0, 7, 2), (1, 99, 3), (-5, -1, 2), (7, 7, 1)]


@pytest.mark.parametrize("start,end,step", SLICES, ids=str)
def test_slices_beyond_both_ends_with_steps_and_of_nothing(start, end, step):
    def function(x, y):
        part = x[start:end:step]
        placed = torch.slice_scatter(x, part * 2 + 1, 0, start, end, step)
        column = x[:, start:end:step]
        written = x * 2
        written[start:end:step] = part * 3
        written[:, start:end:step] += column
        return (
            part + 1,
            column.sum(),
            placed,
            torch.slice_scatter(y, y[:, start:end:step] * 2, 1, start, end, step),
            written,
        )

    assert_as_eager(function, [rand(7, 7), rand(5, 7)], dynamo=False)


def test_one_index_narrow_and_scatters_of_slices():
    def function(x, y):
        chosen = x[-1] + 1, x[:, -2] * 2, x.narrow(0, 1, 3) + 1, x.narrow(1, -3, 2) * 2, x[2][3] + x[0, 0]
        placed = torch.select_scatter(x, y[0], 0, -1), torch.select_scatter(x, y[:, 0], 1, 2)
        placed += torch.diagonal_scatter(x, y[0, :5]), torch.slice_scatter(x, y[:2], 0, -2), x.diagonal(1) * 2
        return *chosen, *placed, x[..., None] + 1, x[None, 1:2, ..., -1], x[1:-1, 1:-1].relu(), x.tril(-1), x.triu(1)

    assert_as_eager(function, [rand(5, 6), rand(5, 6)], dynamo=False)


def test_concatenations_of_empties_of_mixed_types_and_of_many():
    def function(x, y, i, nothing):
        found = (
            torch.cat([x, nothing, y]),
            torch.cat([nothing, nothing]),
            torch.cat([x[:0], y]),
            torch.cat([x[:, :0], y], 1),
        )
        found += (
            torch.cat([x, i]),
            torch.cat([i, x.half()]),
            torch.cat([x.half(), y.bfloat16()], 1),
            torch.cat([i > 3, i]),
        )
        found += (
            torch.cat([x[k : k + 1] for k in range(3)] * 4),
            torch.cat([x.t(), y.t()]).relu(),
            torch.cat([x, x * 2, x], -1),
        )
        return (
            *found,
            torch.stack([x, y], 1),
            torch.stack([x] * 9),
            torch.cat([x[:, 1:], y[:, ::2]], 1).exp(),
            torch.hstack([x, y]),
        )

    assert_as_eager(function, [rand(3, 8), rand(3, 8), whole(3, 8), torch.zeros(0)], dynamo=False)


def test_padding_and_what_reads_it():
    def function(x, i):
        truth = i > 3
        padded = (
            F.pad(x, (1, 2)),
            F.pad(x, (-1, 2, 3, -2)),
            F.pad(x, (2, -3), value=float("-inf")),
            F.pad(i, (1, 1), value=-7),
        )
        padded += (
            F.pad(truth, (1, 0), value=True),
            F.pad(x[:0], (1, 1, 2, 2), value=3.0),
            F.pad(x.half(), (3, 0), value=0.1),
        )
        read = (
            F.pad(x, (2, 1), value=-1.0).exp(),
            F.pad(x, (0, 3)).sum(-1),
            F.pad(x, (1, 1), value=9.0).amax(1),
            F.pad(x, (2, 2)).cos(),
        )
        read += (
            F.pad(x * 2, (3, 1)).softmax(-1),
            F.pad(i + 5, (1, 1)).sum(),
            F.pad(x, (1, 0))[:, 1:] - x,
            F.pad(x, (8, 8)).mean(0),
        )
        return (
            *padded,
            *read,
            F.pad(x, (1, 2), mode="replicate"),
            F.pad(x[None], (2, 1), mode="reflect"),
            x.roll(2, 1),
            x.roll((1, -1), (0, 1)),
        )

    assert_as_eager(function, [rand(4, 8), whole(4, 8)], dynamo=False)


def test_an_index_under_padding_is_not_read():
    """Where a mask hides an element, what computes its index may compute nonsense."""

    def function(table, i, x):
        moved = (
            F.pad(F.embedding(i - 5, table), (0, 0, 3, 2)),
            torch.cat([table[i - 5], x], 0),
            F.pad(x.gather(0, (i - 5)[:, None]), (0, 1, 2, 2)),
        )
        return *moved, F.pad(table.index_select(0, i - 5), (0, 0, 1, 1)).sum(0)

    assert_as_eager(function, [rand(6, 4), torch.tensor([5, 6, 10, 7]), rand(8, 4)], dynamo=False)


def test_views_of_different_factorings_in_one_kernel():
    def function(x):
        flat = x.view(-1)
        found = (
            (flat.view(8, 12) * 2).view(12, 8) + 1,
            flat.view(3, 32).sum(1),
            flat.view(6, 16).amax(0),
            x.view(2, 48).softmax(-1),
        )
        found += (
            flat.view(4, 24).t().reshape(8, 12) * x.view(8, 12),
            flat.view(2, 3, 16).permute(2, 0, 1).reshape(4, 24).relu(),
        )
        return (
            *found,
            (x.view(4, 4, 6).transpose(0, 1).reshape(96) + flat).view(16, 6).mean(0),
            x.unflatten(-1, (2, 3)).flatten(0, 1),
        )

    assert_as_eager(function, [rand(16, 6)], dynamo=False)


def test_dimensions_of_one_squeezed_and_expanded_in_turn():
    def function(x, w):
        y = x.unsqueeze(1).expand(-1, 3, -1).unsqueeze(-1) * w.view(1, 3, 1, 1)
        z = y.squeeze(-1).unsqueeze(0).expand(2, -1, -1, -1)[:, :, :1].squeeze(2)
        found = (
            y.squeeze().sum(1),
            z.mean(0),
            y.sum((1, 3), keepdim=True).squeeze(3),
            (x[None, :, None] * w[:, None, None, None]),
        )
        return (
            *found,
            z.squeeze() + z.unsqueeze(2).squeeze(2),
            x.expand(1, 4, 5).squeeze(0).relu(),
            (w.expand(4, 3) * 2).sum(0),
        )

    assert_as_eager(function, [rand(4, 5), rand(3)], dynamo=False)


def test_indices_negative_repeated_and_broadcast():
    def function(x, i, j):
        one = x[i], x[:, i], x[i, :, 1], x[..., i], x[i] * 2 + x[j], x[:, [0, -1, 0]], x[[2, 2, -1]].sum(0)
        two = x[i, j], x[i[:, None], j], x[:, i, j], x[i, :, j], x[None, i], x[i, 1:], x[i, -1], x[i][j].relu()
        more = (
            x.index_select(1, j),
            x.take(i),
            x.gather(1, i[None, :, None].expand(2, -1, 2) % 3),
            x[torch.tensor(1)],
            x[i.int()],
        )
        return (
            *one,
            *two,
            *more,
            F.embedding(j, x[:, 0]),
            torch.take_along_dim(x, i[None, :3, None] % 3, 1),
            x[i.view(2, 2)] + 1,
        )

    assert_as_eager(function, [rand(3, 3, 5), torch.tensor([0, -1, 2, 1]), torch.tensor([1, 1, 0, 2])], dynamo=False)


def test_masks_as_indices_that_are_written_through():
    def function(x, m, v):
        written = x * 2
        written[m] = 0.5
        row = x.clone()
        row[m[:, 0]] = 0.25
        return written, row, torch.where(m, x, 0), x.masked_fill(m, -1), x.masked_scatter(m, v.expand(3, 4) * 2)

    assert_as_eager(function, [rand(3, 4), rand(3, 4, grad=False) > 0, rand(4)], dynamo=False)


def test_writes_by_index_with_duplicates_add_up_and_are_the_same_bits_twice():
    def function(x, i, v):
        added = (
            x.index_add(0, i, v),
            x.index_put((i,), v, accumulate=True),
            x.scatter_add(0, i[:, None].expand(-1, 4), v),
        )
        copied = x.index_copy(0, i[:2], v[:2]), x.index_fill(0, i, 2.0), x.index_put((i[:2], i[:2]), v[:2, 0])
        gathered = (
            x.gather(0, i[:3, None].expand(-1, 2)),
            x.gather(1, i[:2, None] % 4),
            x.scatter(0, i[:2, None], v[:2, :1]),
        )
        return (
            *added,
            *copied,
            *gathered,
            x.scatter_reduce(0, i[:, None].expand(-1, 4), v, "amax"),
        )

    arguments = [rand(5, 4), torch.tensor([0, 2, 0, 4, 2, 0]), rand(6, 4)]
    assert_as_eager(function, arguments, dynamo=False)
    fast = traced(function)
    with cupyops.simulate():
        first, second = fast(*arguments), fast(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


OUT_OF_RANGE = {
    "embedding": lambda x, i: F.embedding(i, x * 1.0) + 1,
    "rows": lambda x, i: x[i] * 2,
    "gather": lambda x, i: x.gather(0, i[:, None]) + 1,
    "index_select": lambda x, i: x.index_select(0, i) + 1,
}


@pytest.mark.parametrize("number", [5, 100, -6, 2**40])
@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_an_index_out_of_range_is_an_error_and_never_a_wild_read(name, number):
    fast = traced(OUT_OF_RANGE[name])
    x, good = rand(5, 4, grad=False), torch.tensor([0, 1, 4])
    with cupyops.simulate():
        assert torch.equal(fast(x, good), OUT_OF_RANGE[name](x, good))
        with pytest.raises(Exception, match="(?i)trap|index"):
            fast(x, torch.tensor([0, number, 1]))
        assert torch.equal(fast(x, good), OUT_OF_RANGE[name](x, good))


def test_an_embedding_does_not_wrap_negative_indices():
    fast = traced(lambda x, i: F.embedding(i, x) + 1)
    with cupyops.simulate(), pytest.raises(Exception, match="(?i)trap|index"):
        fast(rand(5, 4, grad=False), torch.tensor([0, -1]))


# -- layout ------------------------------------------------------------------------------------------------------------


def channels_last(x):
    return x.detach().contiguous(memory_format=torch.channels_last).requires_grad_(x.requires_grad)


LAYOUTS = {
    "contiguous": rand(2, 8, 4, 6),
    "channels_last": channels_last(rand(2, 8, 4, 6)),
    "permuted": rand(6, 4, 8, 2, grad=False).permute(3, 2, 1, 0).requires_grad_(),
    "partly permuted": rand(2, 4, 8, 6, grad=False).transpose(1, 2).requires_grad_(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_strides_of_results_and_gradients_are_eagers(name):
    def function(x, w):
        y = x * w.view(1, -1, 1, 1)
        copies = (
            y.contiguous(),
            y.contiguous(memory_format=torch.channels_last),
            torch.empty_like(y).copy_(x),
            x.clone(),
        )
        shapes = (
            y.permute(0, 2, 3, 1) + 1,
            y.transpose(1, 2),
            y.flatten(2) * 2,
            y[:, ::2] * 2,
            y.sum(1),
            y.mean((2, 3)),
            y.to(HALF),
        )
        pools = (
            F.interpolate(y, scale_factor=2),
            F.avg_pool2d(y, 2),
            F.max_pool2d(y, 2),
            F.interpolate(y, size=(3, 5), mode="bilinear"),
        )
        like = (
            torch.zeros_like(x),
            torch.ones_like(y.permute(3, 2, 1, 0)) * 2,
            torch.full_like(x, 2.0, memory_format=torch.contiguous_format),
        )
        return (
            *copies,
            *shapes,
            *pools,
            *like,
            F.conv2d(y, w.expand(3, 8)[..., None, None]),
            F.softmax(y, 1),
            F.pad(y, (1, 1)),
        )

    assert_as_eager(function, [LAYOUTS[name], rand(8)], dynamo=False, eps=32)


def test_strides_that_are_not_dense():
    def function(x):
        views = x.expand(2, 3, 4), x[:, ::2], x.t(), x[::2, 1:3].t()
        gaps = torch.empty_strided((3, 4), (10, 2)).copy_(x + 1)
        return (
            *views,
            *(one + 1 for one in views),
            x.new_zeros(4, 3).t() + x,
            x[:, ::2].clone(),
            x.t().contiguous(),
            gaps,
        )

    assert_as_eager(function, [rand(3, 4, grad=False)], dynamo=False)
    assert_as_eager(function, [rand(6, 8, grad=False)[::2, ::2]], dynamo=False)


def test_as_strided_of_what_is_computed_by_kernels_and_by_calls():
    def function(x, image, w):
        y = x * 2
        windows = y.as_strided((3, 4), (2, 1)) * 3, y.as_strided((2, 2), (4, 1), 1) + 1, x.as_strided((4,), (5,), 2) * 2
        convolved = F.conv2d(image, w, padding=1)  # channels_last, as its input
        order = convolved.permute(0, 2, 3, 1).contiguous().as_strided((8,), (3,), 1), convolved.flatten(2).sum(-1)
        return (
            *windows,
            *order,
            torch.as_strided_copy(y, (2, 3), (1, 2)),
            y.unfold(0, 3, 2).sum(-1),
            y.unfold(0, 4, 1) * 2,
        )

    arguments = [rand(24), channels_last(rand(2, 3, 4, 4)), rand(4, 3, 3, 3)]
    assert_as_eager(function, arguments, dynamo=False, eps=32)


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.int8], ids=str)
def test_inputs_at_any_address_read_and_written(dtype, offset):
    """Also where one call has another alignment than the one before."""

    def function(x, y):
        z = x + y * 2
        x.copy_(z)
        y.add_(1)
        return z.as_strided((8,), (2,), 0), x[1:] + y[:-1]

    fast = traced(function)
    for shift in (0, offset, 0):
        given = [(torch.arange(80) % 7).to(dtype)[s : s + 64] for s in (shift, 2 * shift)]
        wanted = [one.clone() for one in given]
        results = function(*wanted)
        held = [torch.zeros(80, dtype=dtype) for _ in given]
        views = [h[s : s + 64].copy_(g) for h, s, g in zip(held, (shift, 2 * shift), given)]
        with cupyops.simulate(), torch.no_grad():
            found = fast(*views)
        assert all(torch.equal(a, b) for a, b in zip([*found, *views], [*results, *wanted]))


def test_as_strided_of_an_input_off_its_storage():
    def function(x):
        return x * 2 + 1, x.as_strided((3,), (2,), x.storage_offset() + 1) * 3, x.as_strided((4,), (1,), 0) + 1

    assert_equal_on_view(function, torch.arange(40.0)[3:30])


def assert_equal_on_view(function, x):
    want = function(x)
    with cupyops.simulate():
        found = traced(function)(x)
    assert all(torch.equal(a, b) for a, b in zip(found, want))


def test_expanded_and_overlapping_inputs_at_odd_addresses():
    base = torch.arange(40.0)
    for x in (base[1:2].expand(5), base[3:7].expand(6, 4), base[1:].as_strided((4, 4), (2, 1), 1), base[5:29:3]):
        assert_equal_on_view(lambda x: (x * 2 + 1, x.sum()), x)


def test_views_that_calls_return_at_odd_addresses():
    def function(x):
        y = torch.linalg.inv(x).contiguous()
        return y.as_strided((3,), (1,), 1) * 2, torch.view_as_real(torch.view_as_complex(y.view(-1, 2)))[1:] + 1

    assert_as_eager(function, [rand(4, 4, grad=False) + 4 * torch.eye(4)], dynamo=False, factor=64)


@pytest.mark.parametrize("shape", [(2**31 + 5,), (70000, 30700)], ids=str)
def test_more_elements_than_32_bits_count(shape):
    """The text of the kernel alone: it counts in 64 bits, and its grid is one of a GPU."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    from cupyops._compile.program import Program

    with FakeTensorMode():
        x = torch.empty(shape, dtype=torch.int8)
        graph = make_fx(lambda x: [x + 1, (x * 2).sum(0)])(x)
    program = Program(graph)
    texts = [unit.kernel for unit in program.schedule.units if hasattr(unit, "kernel")]
    assert texts and all(
        "long long" in kernel.text for kernel in texts if kernel.trace.rows * kernel.trace.columns >= 2**31
    )
    assert all(kernel.grid[0] < 2**31 and kernel.grid[1] < 65536 for kernel in texts)
