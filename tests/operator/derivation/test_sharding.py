"""Rules of how work is split over devices: how they are read, and what is chosen."""

import math

import pytest
import toys
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

import cupyops
from cupyops._operator.derivation import sharding
from cupyops.errors import InputError


def chosen(rule, mesh, *tensors):
    """`tensors` are shapes with placements."""
    operands = sharding.read(rule).tensors
    given = [
        sharding.Tensor(operand.labels(len(shape)), shape, places, 4 * math.prod(shape))
        for operand, (shape, *places) in zip(operands, tensors)
    ]
    return sharding.choose(given, mesh)


LINEAR = "...k, nk, +n -> ...n"


@pytest.mark.parametrize(
    "tensors, expected",
    [
        ([((6, 4), Replicate()), ((8, 4), Replicate())], None),  # what is on every device stays so
        ([((6, 4), Shard(0)), ((8, 4), Replicate())], -1),
        ([((6, 4), Replicate()), ((8, 4), Shard(0))], "n"),
        ([((6, 4), Shard(1)), ((8, 4), Shard(1))], "k"),
        ([((6, 4), Shard(0)), ((80, 4), Shard(0))], "n"),  # the smaller one is sent
        ([((60, 4), Shard(0)), ((8, 4), Shard(0))], -1),
        ([((6, 4), Partial()), ((8, 4), Replicate())], -1),  # reduce_scatter is half of all_reduce
        ([((1, 4), Shard(0)), ((8, 4), Replicate())], None),  # too few to split
    ],
)
def test_where_the_least_is_sent(tensors, expected):
    assert chosen(LINEAR, [2], *tensors) == [expected]


def test_each_dimension_of_a_mesh():
    x, weight = ((6, 4), Shard(0), Replicate()), ((8, 4), Replicate(), Shard(0))
    assert chosen(LINEAR, [2, 2], x, weight) == [-1, "n"]
    assert chosen("...C -> ...C", [2, 2], ((8, 4), Shard(0), Shard(0))) == [-1, -1]
    assert chosen("...C -> ...C", [4, 4], ((8, 4), Shard(0), Shard(0))) == [-1, None]  # 8 are not split in 16


def test_heads_are_split_evenly():
    rule = "bhQD, bhKD -> bhQK"
    places = Shard(1)
    assert chosen(rule, [2], ((1, 8, 3, 5), places), ((1, 2, 3, 5), places)) == ["h"]
    assert chosen(rule, [4], ((1, 8, 3, 5), places), ((1, 2, 3, 5), places)) == [None]


@pytest.mark.parametrize("text", ["...k, nk", "a.b -> a", "aa -> a", "x y; z -> x", "a, -1 -> a"])
def test_what_is_no_rule(text):
    with pytest.raises(InputError, match="is no rule such as"):

        @cupyops.operator(toys.fresh(), sharding=text)
        def of(x: Tensor) -> Tensor:
            return x


def test_every_operator_has_a_rule():
    ours = {name: one for name, one in cupyops.operators().items() if name.startswith("cupyops::")}
    assert not [name for name, one in ours.items() if one.definition.sharding is None]
