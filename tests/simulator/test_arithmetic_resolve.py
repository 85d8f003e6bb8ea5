"""What `resolve` promises the code that calls the functions, form by form, and what it refuses."""

from typing import Any

import numpy as np
import pytest

from cupyops.simulator.arithmetic import Operation, combine, resolve
from cupyops.simulator.errors import UnsupportedInstruction

DTYPES = {
    "b1": bool,
    **{f"u{width}": f"uint{width}" for width in (8, 16, 32, 64)},
    **{f"s{width}": f"int{width}" for width in (8, 16, 32, 64)},
    "f32": "float32",
    "f64": "float64",
}
# Instructions as they are written, with the number of their operands.
FORMS = """
3 add.s32 add.u64 add.u16 add.sat.s32 add.u16x2 add.cc.u32 addc.cc.u32 addc.u64 sub.s16 sub.sat.s32 sub.cc.s64 subc.u32
3 mul.lo.s32 mul.hi.u32 mul.hi.s64 mul.wide.u16 mul.wide.s32 mul24.lo.u32 mul24.hi.s32 div.s32 div.u64 rem.s16 rem.u32
3 min.u32 min.relu.s32 max.s64 max.relu.s16x2 max.u16x2
4 mad.lo.u32 mad.hi.s32 mad.wide.u32 mad.lo.cc.u32 madc.hi.cc.u32 madc.lo.u64 mad24.lo.s32 mad24.hi.sat.s32 sad.u32
4 dp4a.u32.s32 dp2a.lo.s32.u32 bfe.s64 bfe.u32 fns.b32 shf.l.wrap.b32 shf.r.clamp.b32 prmt.b32 prmt.b32.b4e
2 abs.s32 neg.s64 popc.b64 clz.b32 brev.b64 bfind.s32 bfind.shiftamt.u64 not.pred not.b16 cnot.b32
3 and.pred or.b32 xor.b64 shl.b16 shl.b64 shr.s64 shr.u16 bmsk.clamp.b32 szext.wrap.s32
5 bfi.b64 bfi.b32
3 add.f32 add.rz.ftz.sat.f32 sub.rn.f64 mul.rm.f64 mul.ftz.f32 div.rn.f32 div.full.f32 div.approx.ftz.f32 div.rp.f64
3 add.f16 add.rn.ftz.sat.f16x2 sub.bf16 mul.rn.bf16x2 min.f16 min.NaN.xorsign.abs.bf16x2 max.ftz.NaN.f32 min.f64
3 add.rn.f32x2 add.rz.sat.f32.bf16 sub.f32.f16 copysign.f32 copysign.f64
4 fma.rn.f32 fma.rp.ftz.sat.f32 fma.rz.f64 fma.rn.f16 fma.rn.relu.bf16x2 fma.rn.f32x2 fma.rm.f32.f16 mad.rn.f32 max.f32
2 abs.f32 abs.ftz.f16x2 neg.bf16 neg.f64 sqrt.rn.f32 sqrt.approx.ftz.f32 sqrt.rz.f64 rcp.approx.f32 rcp.rn.f64
2 rcp.approx.ftz.f64 rsqrt.approx.f32 rsqrt.approx.f64 rsqrt.approx.ftz.f64 ex2.approx.ftz.f32 ex2.approx.f16x2
2 ex2.approx.ftz.bf16 lg2.approx.f32 sin.approx.f32 cos.approx.ftz.f32 tanh.approx.f32 tanh.approx.bf16x2
2 testp.normal.f32 testp.infinite.f64
3 setp.lt.s32 setp.hi.u64 setp.eq.b16 setp.neu.ftz.f32 setp.num.f64 setp.ge.f16 setp.ltu.bf16x2 set.lt.u32.f32
3 set.eq.f32.s64 set.gt.f16x2.f16x2 set.nan.s32.bf16x2 set.ne.u16.f16 set.eq.bf16.f16
4 setp.lt.and.u32 setp.gt.xor.f16x2 set.ne.or.f32.f64 selp.b32 selp.f64 selp.u16 slct.u64.s32 slct.ftz.f32.f32
2 cvt.u8.u32 cvt.sat.s8.s64 cvt.s64.s32 cvt.rzi.s32.f32 cvt.rni.ftz.u64.f32 cvt.rmi.s16.f64 cvt.rpi.u8.f16 cvt.rn.f32.u64
2 cvt.rz.f32.s64 cvt.rp.f64.u64 cvt.rn.f16.s32 cvt.rz.bf16.u64 cvt.f32.f16 cvt.f64.bf16 cvt.rn.f16.f32 cvt.rm.bf16.f64
2 cvt.rn.sat.f16.f32 cvt.rni.f32.f32 cvt.sat.f32.f32 cvt.rzi.f16.f16 cvt.rn.relu.satfinite.bf16.f32 cvt.rna.tf32.f32
2 cvt.rn.bf16.f16 cvt.rn.satfinite.e4m3x2.f16x2 cvt.rn.relu.f16x2.e5m2x2 cvt.rn.f32.f64 cvt.rn.relu.tf32.f32
3 cvt.rn.f16x2.f32 cvt.rz.relu.bf16x2.f32 cvt.rn.satfinite.e5m2x2.f32 cvt.pack.sat.s16.s32
4 cvt.pack.sat.u8.s32.b32 cvt.pack.sat.s4.s32.b32
"""
INSTRUCTIONS = [(name, int(line.split()[0])) for line in FORMS.strip().splitlines() for name in line.split()[1:]]


def operation_of(instruction: str, operands: int) -> Operation:
    opcode, *modifiers = instruction.split(".")
    operation = resolve(opcode, tuple(modifiers), operands)
    assert operation is not None
    return operation


def drawn(view: str, count: int, rng: np.random.Generator) -> np.ndarray:
    dtype = np.dtype(DTYPES[view])
    if view == "b1":
        return rng.integers(0, 2, count).astype(bool)
    bits = rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8).view(dtype)
    if dtype.kind == "f":
        return np.where(rng.integers(0, 2, count) == 1, bits, rng.standard_normal(count)).astype(dtype)
    return np.where(rng.integers(0, 2, count) == 1, bits, rng.integers(0, 40, count)).astype(dtype)


def called(operation: Operation, arguments: list[Any]) -> tuple[Any, ...]:
    with np.errstate(all="ignore"):
        result = operation.function(*arguments)
    return result if isinstance(result, tuple) else (result,)


def bits(value: Any) -> int:
    """The bits of a scalar, those of any NaN being alike."""
    return -1 if value != value else int.from_bytes(value.tobytes(), "little")


@pytest.mark.parametrize("instruction, operands", INSTRUCTIONS)
def test_arrays_and_scalars_in_every_mixture(instruction: str, operands: int):
    operation = operation_of(instruction, operands)
    assert len(operation.takes) == operands - 1
    views = operation.takes + (("b1",) if operation.carry_in else ())
    gives = operation.gives + (("b1",) if operation.carry_out else ())
    arrays = [drawn(view, 37, np.random.default_rng(len(instruction))) for view in views]
    copies = [array.copy() for array in arrays]
    lanes = [called(operation, [array[lane] for array in arrays]) for lane in range(37)]
    for lane in lanes:
        assert len(lane) == len(gives)
        for value, view in zip(lane, gives):
            assert isinstance(value, np.generic) and value.dtype == np.dtype(DTYPES[view])
    for mixture in range(1 << len(arrays)):
        kept = [mixture >> i & 1 for i in range(len(arrays))]
        results = called(operation, [array if keep else array[5] for array, keep in zip(arrays, kept)])
        expected = [
            called(operation, [array[lane if keep else 5] for array, keep in zip(arrays, kept)]) for lane in range(37)
        ]
        for index, (result, view) in enumerate(zip(results, gives)):
            assert result.dtype == np.dtype(DTYPES[view])
            if mixture:
                assert result.shape == (37,)
                assert [bits(value) for value in result] == [bits(lane[index]) for lane in expected]
    assert all(array.tobytes() == copy.tobytes() for array, copy in zip(arrays, copies))


@pytest.mark.parametrize("table", [0x00, 0x96, 0xE8, 0xF0, 0xCC, 0xAA, 0xFF, 0xC0, 0x3C])
def test_lop3_in_every_mixture(table: int):
    operation = operation_of("lop3.b32", 5)
    rng = np.random.default_rng(table)
    arrays = [drawn("u32", 20, rng) for _ in range(3)]
    for mixture in range(8):
        arguments = [array if mixture >> i & 1 else array[3] for i, array in enumerate(arrays)]
        (result,) = called(operation, [*arguments, np.uint32(table)])
        assert np.ndim(result) == (mixture > 0) and result.dtype == np.uint32
        for lane in range(20 if mixture else 1):
            a, b, c = (int(x[lane]) if np.ndim(x) else int(x) for x in arguments)
            columns = [(a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1 for bit in range(32)]
            expected = sum((table >> column & 1) << bit for bit, column in enumerate(columns))
            assert int(result[lane] if mixture else result) == expected


@pytest.mark.parametrize("opcode", ["mov", "ld", "st", "bra", "atom", "shfl", "mma", "cvta", "wgmma", "nonsense"])
def test_what_is_not_arithmetic(opcode: str):
    assert resolve(opcode, ("b32",), 2) is None


REFUSED = """
2 add.s32 abs.u32 sqrt.f32 rcp.f32 sqrt.rn.approx.f32 ex2.f32 ex2.approx.f64 ex2.approx.bf16 tanh.approx.ftz.f32
2 cvt.f16.f32 cvt.s32.f32 cvt.rn.s32.f32 cvt.f32.s32 cvt.rn.e4m3x2.f16x2 cvt.rs.f16x2.f32 cvt.rn.satfinite.e2m1x2.f32
2 cvt.rn.relu.f32.f64 cvt.rni.f32.f16 cvt.rn.rz.f16.f32 cvt.relu.s8.s32 cvt.rna.relu.tf32.f32 testp.f32 testp.odd.f32
2 rsqrt.rn.f32 lg2.approx.f16 rsqrt.approx.sat.f64
3 add.sat.u32 add.rn.s32 add.rx.f32 add.f32.s32 mul.s32 mul.wide.u64 mul.lo.hi.s32 mul.sat.s32 div.f32 div.approx.f64
3 add.rz.f16 add.ftz.bf16 add.sat.bf16 min.relu.u32 min.abs.f32 min.xorsign.f64 min.NaN.f64 setp.lo.s32 setp.lt.b32
3 setp.ltu.u32 setp.s32 setp.lt.and.s32 setp.lt.ftz.f64 set.lt.f64.f32 shl.s32 shf.l.wrap.b32 and.u32 sub.u16x2
3 bmsk.b32 cvt.rn.f16.f32 cvt.pack.sat.u8.s32 copysign.f16 addc.cc.u16 madc.lo.u32 cvt.pack.u16.s32
4 fma.f32 fma.rn.relu.f32 fma.rn.sat.relu.f16 fma.rn.oob.f16 fma.rz.bf16 mad.u32 mad.lo.sat.s32 mad.wide.u64 dp4a.u32
4 dp2a.u32.u32 prmt.b32.f5e prmt.b64 shf.l.b32 selp.pred slct.u32.u32 setp.lt.nand.s32 min.xorsign.abs.f32 bfe.b32
5 lop3.b64 lop3.and.b32 bfi.u32
"""


@pytest.mark.parametrize(
    "instruction, operands",
    [(name, int(line.split()[0])) for line in REFUSED.strip().splitlines() for name in line.split()[1:]],
)
def test_what_is_refused_is_named(instruction: str, operands: int):
    opcode, *modifiers = instruction.split(".")
    with pytest.raises(UnsupportedInstruction, match=f"`{instruction}`"):
        resolve(opcode, tuple(modifiers), operands)


@pytest.mark.parametrize("op, type_", [("add", "b32"), ("and", "u32"), ("inc", "s32"), ("mul", "f32"), ("min", "b64")])
def test_atomics_that_are_refused(op: str, type_: str):
    with pytest.raises(UnsupportedInstruction, match=f"`{op}.{type_}`"):
        combine(op, type_)


@pytest.mark.parametrize(
    "op, type_", [("add", "f32"), ("add", "f16x2"), ("inc", "u32"), ("exch", "b64"), ("max", "s32")]
)
def test_atomics_of_scalars(op: str, type_: str):
    dtype = {"f32": np.float32, "s32": np.int32, "b64": np.uint64}.get(type_, np.uint32)
    with np.errstate(all="ignore"):
        result = combine(op, type_)(dtype(0), dtype(1))
    assert isinstance(result, dtype)
    assert result.item() == 1


def test_exchange_of_many_with_one():
    assert combine("exch", "u32")(np.zeros(3, np.uint32), np.uint32(7)).tolist() == [7, 7, 7]
