"""Reading PTX: scopes, labels, initialisers, vectors, places, and text that is not PTX."""

import random

import numpy as np
import pytest
from simulator.kit import FILE, program, ptx

from cupyops.simulator import InvalidPtx, Pointer, Program, SimulatorError
from cupyops.simulator.translate.parser import parse
from cupyops.simulator.translate.ptx import (
    Address,
    Guard,
    Immediate,
    Instruction,
    Label,
    Negated,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)

HEAD = """.version 8.0
.target sm_80
.address_size 64
"""


def function(body, declarations="", head=".visible .entry kernel(.param .u64 p0)"):
    return parse(f"{HEAD}{declarations}\n{head}\n{{\n{body}\n}}\n").functions["kernel"]


def operands(text):
    registers = ".reg .b32 %r<4>; .reg .pred p, q; .reg .b64 %rd<3>;"
    (instruction,) = function(f"{registers}\n{text}").body
    return instruction.operands


def test_a_module():
    module = parse(
        HEAD
        + """
// a comment; with { braces
.extern .func (.param .b32 result) vprintf(.param .b64 a, .param .b64 b);
.visible .const .align 4 .f32 table[2] = {0f3F800000, 0fC0000000};
.func (.param .b32 out) twice(.param .b32 in) { ret; /* nothing
 at all */ }
.weak .entry one(.param .u64 .ptr .align 1 p, .param .align 8 .b8 pair[24]) .maxntid 8, 4, 2 .minnctapersm 2 { ret; }
.visible .entry two() .reqntid 64 .reqnctapercluster 2, 1, 1 { ret; }
.visible .entry three { ret; }
"""
    )
    assert module.target == "sm_80"
    functions = module.functions
    assert [name for name, f in functions.items() if f.entry] == ["one", "two", "three"]
    assert [functions[name].defined for name in ("vprintf", "twice", "one")] == [False, True, True]
    assert [(v.name, v.size, v.align) for v in functions["one"].parameters] == [("p", 8, 8), ("pair", 24, 8)]
    assert [v.name for v in functions["twice"].results] == ["out"]
    assert (functions["one"].max_threads, functions["two"].max_threads, functions["three"].max_threads) == (
        64,
        64,
        None,
    )
    assert functions["two"].required_block == (64, 1, 1) and functions["two"].cluster == (2, 1, 1)
    assert module.variables["table"].initial == ("0f3F800000", "0fC0000000")


def test_operands():
    assert operands("add.s32 %r1, %r2, -0x10;") == (Register("%r1"), Register("%r2"), Immediate("int", -16))
    assert operands("mov.u32 %r1, %tid.x;") == (Register("%r1"), Special("%tid.x"))
    assert operands("mov.u32 %r1, %lanemask_lt;")[1] == Special("%lanemask_lt")
    assert operands("mov.f32 %r1, 0f40490FDB;")[1] == Immediate("f32", 0x40490FDB)
    assert operands("mov.f64 %rd1, 0dC000000000000000;")[1] == Immediate("f64", 0xC000000000000000)
    assert operands("mov.u32 %r1, 4294967295U;")[1] == Immediate("int", 4294967295)
    assert operands("ld.global.u32 %r1, [%rd1+-8];")[1] == Address(Register("%rd1"), -8)
    assert operands("ld.param.u64 %rd1, [p0+16];")[1] == Address(Symbol("p0"), 16)
    assert operands("st.global.v2.u32 [%rd1], {%r1, %r2};")[1] == Vector((Register("%r1"), Register("%r2")))
    assert operands("setp.lt.and.s32 p|q, %r1, 5, !p;")[0] == Pair(Register("p"), Register("q"))
    assert operands("setp.lt.and.s32 p|q, %r1, 5, !p;")[3] == Negated(Register("p"))
    assert operands("shfl.sync.idx.b32 %r1|_, %r2, 0, 31, -1;")[0] == Pair(Register("%r1"), Sink())
    tensor = operands("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r3];")[0]
    assert tensor == Address(Register("%rd1"), 0, (Vector((Register("%r1"), Register("%r2"))),))


def test_an_instruction():
    (found,) = function(".reg .pred p; .reg .b64 a;\n.loc 1 7 3\n@!p ld.global.nc.L1::no_allocate.f32\n  a, [a];").body
    assert isinstance(found, Instruction)
    assert (found.opcode, found.modifiers) == ("ld", ("global", "nc", "L1::no_allocate", "f32"))
    assert found.name == "ld.global.nc.L1::no_allocate.f32"
    assert found.guard == Guard("p", True)
    assert (found.line, found.place.line) == (9, 7)
    assert found.text == "@!p ld.global.nc.L1::no_allocate.f32 a, [a]"


def test_registers():
    found = function(".reg .b32 %r<3>, x; .reg .pred %p<2>;\n.reg .f64 y;").registers
    assert found == {"%r0": "b32", "%r1": "b32", "%r2": "b32", "x": "b32", "%p0": "pred", "%p1": "pred", "y": "f64"}


def test_names_in_scopes():
    """An inner declaration hides the outer one of the same name, up to the closing brace."""
    body = """
    .reg .b32 x, y;
    mov.b32 x, 1;
    { .reg .b32 x; mov.b32 x, 2; { .reg .b32 x; mov.b32 x, y; } mov.b32 y, x; }
    { .reg .b32 x; mov.b32 x, 3; }
    mov.b32 y, x;
    """
    found = function(body)
    names = [[operand.name for operand in i.operands if isinstance(operand, Register)] for i in found.body]
    (outer,), (second,), (third, y), (y_again, second_again), (fourth,), (_, last) = names
    assert outer == last == "x" and y == y_again == "y" and second == second_again
    assert len({outer, second, third, fourth}) == 4
    assert all(found.registers[name] == "b32" for name in (second, third, fourth))


def test_labels_in_scopes():
    body = """
    .reg .pred p;
    bra outside;
    { again: @p bra again; bra done; done: }
    { again: @p bra again; bra outside; }
    { inner: { again: @p bra inner; bra again; } }
    outside: ret;
    """
    found = function(body).body
    labels = [item.name for item in found if isinstance(item, Label)]
    assert len(set(labels)) == len(labels) == 6
    targets = [item.operands[0].name for item in found if isinstance(item, Instruction) and item.opcode == "bra"]
    first, done, second, inner, third, outside = labels
    assert targets == [outside, first, done, second, outside, inner, third]


def test_the_compilers_labels_may_be_reached_from_outside():
    found = function(".reg .pred p;\n@p bra $L__BB0_2;\n{ .reg .b32 t; $L__BB0_2: ret; }").body
    assert found[0].operands == (Symbol("$L__BB0_2"),) and found[1] == Label("$L__BB0_2")


def test_tables_of_targets():
    body = """
    .reg .b32 r;
    { table: .branchtargets a, b, a; brx.idx r, table; a: ret; b: ret; }
    { table: .branchtargets a, a; brx.idx r, table; a: ret; }
    """
    found = function(body)
    jumps = [item for item in found.body if isinstance(item, Instruction) and item.opcode == "brx"]
    labels = {item.name for item in found.body if isinstance(item, Label)}
    tables = [found.branch_targets[jump.operands[1].name] for jump in jumps]
    assert [len(set(table)) for table in tables] == [2, 1] and len(labels) == 3
    assert tables[0][0] == tables[0][2] and set().union(*tables) == labels


def test_places_and_where_they_were_inlined():
    text = """
    .loc 1 10 5
    .loc 2 20 3, function_name $L__info_string0, inlined_at 1 10 5
    .loc 3 30 1, function_name $L__info_string1, inlined_at 2 20 3
    ret;
    .loc 1 11 5
    ret;
    """
    first, second = (item.place for item in function(text).body)
    assert (first.file, first.line) == (3, 30)
    assert (first.inlined_at.file, first.inlined_at.line) == (2, 20)
    assert (first.inlined_at.inlined_at.file, first.inlined_at.inlined_at.line) == (1, 10)
    assert first.inlined_at.inlined_at.inlined_at is None
    assert (second.file, second.line, second.inlined_at) == (1, 11, None)


def test_messages_show_the_calls_that_were_inlined():
    code = """
        __device__ void inner(float* p, int n) {
            p[n] = 1.f;
        }
        __device__ void outer(float* p) {
            inner(p, 5);
        }
        __global__ void kernel(float* y) {
            outer(y);
        }
    """
    kernels, symbol = program(code, "kernel")
    y = kernels.memory.allocate(np.zeros(4, np.float32), "y")
    with pytest.raises(SimulatorError) as caught:
        kernels.launch(symbol, (1,), (1,), [Pointer(y)])
    lines = [line.strip() for line in str(caught.value).splitlines()]
    at = lines.index(f"{FILE}:2 |  p[n] = 1.f;")
    assert lines[at + 1 : at + 3] == [f"inlined at {FILE}:5 |  inner(p, 5);", f"inlined at {FILE}:8 |  outer(y);"]


# --- variables ---


def test_initial_values():
    declarations = """
    .visible .global .align 4 .u32 number = 7;
    .global .align 8 .f64 fraction = 0d3FF8000000000000;
    .const .align 2 .u16 words[2][2] = {1, -1, 0x10, 65535};
    .global .align 1 .b8 text[8] = {104, 105};
    .global .align 8 .u64 address = generic(number);
    .global .align 8 .u64 addresses[2] = {words, generic(text)+3};
    .global .align 8 .b8 nothing[16];
    """
    variables = Program(f"{HEAD}{declarations}").variables
    contents = {name: allocation.buffer for name, allocation in variables.items()}
    assert contents["number"].view(np.uint32).tolist() == [7]
    assert contents["fraction"].view(np.float64).tolist() == [1.5]
    assert contents["words"].view(np.uint16).tolist() == [1, 65535, 16, 65535]
    assert contents["text"].tobytes() == b"hi" + bytes(6)
    assert contents["address"].view(np.uint64).tolist() == [variables["number"].base]
    assert contents["addresses"].view(np.uint64).tolist() == [variables["words"].base, variables["text"].base + 3]
    assert contents["nothing"].tolist() == [0] * 16


def test_an_initial_value_that_is_not_covered():
    with pytest.raises(InvalidPtx, match=r"the initial value 'mask\(0xff\) number' of odd is not covered"):
        Program(f"{HEAD}.global .u32 number;\n.global .u32 odd = mask(0xff) number;")


# --- what is not PTX ---


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("bra nowhere;", "PTX line 6: bra nowhere: no such label"),
        ("mov.u32 %r1, ?;", r"PTX line 6: cannot read the operand '\?'"),
        ("1234;", "PTX line 6: cannot read '1234'"),
        (".reg;", "PTX line 6: cannot read '.reg'"),
        (".local .align;", "PTX line 6: cannot read the variable"),
        (".local .q32 x;", r"PTX line 6: the type .q32 is not covered"),
        (".branchtargets a;", "PTX line 6: a .branchtargets without a label"),
        ("ld.global.u32 %r1, [%rd1+x];", r"PTX line 6: cannot read the operand '\[%rd1\+x\]'"),
        ("mov.u32 %r1, [];", "PTX line 6: cannot read"),
        ("add.s32", "';' expected before the end"),
        ("}}", "PTX line 6: a closing brace too many"),
    ],
)
def test_wrong_text(body, message):
    text = f"{HEAD}.visible .entry kernel()\n{{\n{body}\n}}\n"
    with pytest.raises(InvalidPtx, match=message):
        Program(text).kernel("kernel")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("add.s32 a, b, c;", "PTX line 1: 'add.s32 a, b, c' outside a function"),
        ("{ ret; }", "PTX line 1: a brace outside a function"),
        ("label: ret;", "outside a function"),
        (".reg .b32 x;", "outside a function"),
        (".entry kernel() { ret;", "PTX ends inside a function"),
        (".alias f, g;", "PTX line 1: .alias is not covered"),
        (".entry () {", "PTX line 1: cannot read the function"),
        (".section .debug_str {", "PTX line 1: '}' expected before the end"),
    ],
)
def test_wrong_text_outside_of_functions(text, message):
    with pytest.raises(InvalidPtx, match=message):
        parse(text)


def test_text_that_was_cut_or_garbled_is_either_read_or_refused():
    """Never anything but `InvalidPtx` or `UnsupportedInstruction`."""
    code = """
        __constant__ int table[3] = {1, 2, 3};
        __device__ __noinline__ int f(int n) { return table[n % 3]; }
        __global__ void kernel(int* y, float z) {
            __shared__ int s[32];
            s[threadIdx.x] = f(threadIdx.x);
            asm volatile("{.reg .pred p; setp.eq.u32 p, %0, 3; @p bra OUT; bar.warp.sync 0xffffffff; OUT: }" :: "r"(y[1]));
            __syncthreads();
            for (int i = 0; i < y[3]; i++) y[threadIdx.x] += s[(threadIdx.x + i) % 32] * __shfl_xor_sync(-1, y[2], i) * z;
        }
    """
    kernels, symbol = program(code, "kernel")
    text = ptx(code, "kernel")
    draw, refused = random.Random(0), 0
    for number in range(300):
        at = draw.randrange(len(text))
        if number % 3 == 0:
            broken = text[:at]
        else:
            broken = (
                text[:at]
                + draw.choice(["", ";", "{", "}", ",", "[", "%", ".x", "é", "\n", "1"])
                + text[at + draw.randrange(4) :]
            )
        try:
            Program(broken).kernel(symbol)
        except SimulatorError:
            refused += 1
    assert refused > 100
