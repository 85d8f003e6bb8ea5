"""Divergence: kernels against the same steps in Python, in any order of threads and blocks, in batches of any size."""

import random

import numpy as np
import pytest
from simulator.kit import fails, launch, program, ptx, run

from cupyops.simulator import OutOfBounds, Pointer, Program, WarpFault
from cupyops.simulator.machine import machine

MASK = 0xFFFFFFFF
THREADS = [(2, 96), (3, 40)]  # (blocks, threads of each); 40: the second warp has eight lanes


def signed(value: int) -> int:
    return (value + (1 << 31) & MASK) - (1 << 31)


def collatz(i, x):
    n, steps = i + 1, 0
    while n != 1:
        n = 3 * n + 1 if n % 2 else n // 2
        steps += 1
    return steps


def nested(i, x):
    total = 0
    for j in range(i % 7):
        for k in range(j, x[i] % 11):
            if (j * k) % 3 == i % 3:
                continue
            total += j * k + 1
            if total > 60:
                break
        if total > 100:
            return total
    return -total


def leaves(i, x):
    for j in range(20):
        if x[i] % (j + 2) == 0:
            return 100 + j
        if j > i % 9:
            break
    return -1


def switched(i, x):
    total, kind = 0, x[i] % 9
    if kind == 0:
        total += 1
    if kind in (0, 1):
        total += 20
    elif kind == 2:
        total = 300
    elif kind in (3, 4):
        total += 4000
    if kind in (3, 4, 5):
        total += i
    elif kind == 7:
        total = -7
    elif kind not in (0, 1, 2):
        total = 999
    return total


def gotos(i, x):
    n, state, seen = x[i] % 50, 0, 0
    while True:
        if state == 0:
            n += 3
            state = 1 if n % 2 else 2
        elif state == 1:
            n += 5
            seen += 1
            state = 0 if n < 80 else 3
        elif state == 2:
            n += 1
            seen += 10
            state = 1 if n % 3 == 0 else 0
        else:
            return n * 1000 + seen


def strides(i, x):
    total, j = 0, i
    while j < 40:
        step = x[j] % 5 + 1
        for _ in range(step):
            total = total * 3 + j & 0xFFFF
        j += step
    return total


KERNELS = {
    collatz: """
        int n = i + 1, steps = 0;
        while (n != 1) { n = n % 2 ? 3 * n + 1 : n / 2; steps++; }
        y[i] = steps;""",
    nested: """
        int total = 0;
        for (int j = 0; j < i % 7; j++) {
            for (int k = j; k < x[i] % 11; k++) {
                if ((j * k) % 3 == i % 3) continue;
                total += j * k + 1;
                if (total > 60) break;
            }
            if (total > 100) { y[i] = total; return; }
        }
        y[i] = -total;""",
    leaves: """
        for (int j = 0; j < 20; j++) {
            if (x[i] % (j + 2) == 0) { y[i] = 100 + j; return; }
            if (j > i % 9) break;
        }
        y[i] = -1;""",
    switched: """
        int total = 0;
        switch (x[i] % 9) {
            case 0: total += 1;
            case 1: total += 20; break;
            case 2: total = 300; break;
            case 3:
            case 4: total += 4000;
            case 5: total += i; break;
            case 7: total = -7; break;
            default: total = 999;
        }
        y[i] = total;""",
    gotos: """
        int n = x[i] % 50, seen = 0;
        a: n += 3; if (n % 2) goto b; else goto c;
        b: n += 5; seen += 1; if (n < 80) goto a; else goto d;
        c: n += 1; seen += 10; if (n % 3 == 0) goto b; else goto a;
        d: y[i] = n * 1000 + seen;""",
    strides: """
        int total = 0;
        for (int j = i; j < 40; ) {
            int step = x[j] % 5 + 1;
            for (int k = 0; k < step; k++) total = (total * 3 + j) & 0xffff;
            j += step;
        }
        y[i] = total;""",
}


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(("blocks", "threads"), THREADS)
@pytest.mark.parametrize("reference", KERNELS, ids=lambda function: function.__name__)
def test_against_python(reference, blocks, threads, seed):
    code = f"""
        __global__ void kernel(const int* x, int* y) {{
            int i = blockIdx.x * blockDim.x + threadIdx.x;{KERNELS[reference]}
        }}
    """
    count = blocks * threads
    x, y = np.random.default_rng(1).integers(0, 1000, count).astype(np.int32), np.zeros(count, np.int32)
    run(code, "kernel", blocks, threads, x, y, seed=seed)
    assert y.tolist() == [reference(i, x.tolist()) for i in range(count)]


def test_a_jump_table():
    """brx.idx."""
    code = """
        __global__ void table(const int* x, int* y) {
            int i = threadIdx.x, v;
            asm volatile(
                "{\\n"
                ".reg .u32 r;\\n"
                "mov.u32 r, %1;\\n"
                "targets: .branchtargets zero, one, two, one;\\n"
                "brx.idx r, targets;\\n"
                "zero: mov.s32 %0, 10; bra.uni done;\\n"
                "one: mov.s32 %0, 11; bra.uni done;\\n"
                "two: mov.s32 %0, 12;\\n"
                "done:\\n"
                "}" : "=r"(v) : "r"(x[i]));
            y[i] = v;
        }
    """
    x = np.array([0, 1, 2, 3, 3, 2, 1, 0], np.int32)
    y = np.zeros(8, np.int32)
    for seed in (None, 4):
        run(code, "table", 1, 8, x, y, seed=seed)
        assert y.tolist() == [10, 11, 12, 11, 11, 12, 11, 10]


# --- warps in diverged code ---

HALVES = """
    __global__ void halves(int* y) {
        int lane = threadIdx.x % 32, v = threadIdx.x;
        if (lane < 16) {
            for (int offset = 8; offset > 0; offset /= 2) v += __shfl_down_sync(0x0000ffff, v, offset, 16);
        } else {
            v *= 10;
            for (int offset = 8; offset > 0; offset /= 2) v += __shfl_down_sync(0xffff0000, v, offset, 16);
            v = -v;
        }
        y[threadIdx.x] = __shfl_sync(0xffffffff, v, lane & 16);
    }
"""


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_half_warps_with_masks_of_their_own(seed):
    y = np.zeros(64, np.int32)
    run(HALVES, "halves", 1, 64, y, seed=seed)
    sums = [sum(range(start, start + 16)) for start in range(0, 64, 16)]
    assert y.tolist() == [sign * sums[half] for half, sign in enumerate([1, -10, 1, -10]) for _ in range(16)]


@pytest.mark.parametrize("unroll", [1, 4])
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_masks_that_are_computed_in_a_loop_of_varying_length(seed, unroll):
    """Each round is among the lanes that are left; unrolled, they meet at different copies of it."""
    code = """
        __global__ void rounds(const int* x, int* y) {
            int lane = threadIdx.x % 32, left = x[threadIdx.x], sum = 0;
            unsigned mask = __ballot_sync(0xffffffff, left > 0);
            #pragma unroll UNROLL
            while (left > 0) {
                int leader = __ffs(mask) - 1;
                sum += __shfl_sync(mask, left, leader) * (lane == leader ? 100 : 1);
                left--;
                mask = __ballot_sync(mask, left > 0);
            }
            y[threadIdx.x] = sum;
        }
    """.replace("UNROLL", str(unroll))
    assert ptx(code, "rounds").count("shfl.sync") == (1 if unroll == 1 else 5)
    x = np.random.default_rng(2).integers(0, 12, 96).astype(np.int32)
    y = np.zeros(96, np.int32)
    run(code, "rounds", 1, 96, x, y, seed=seed)
    expected = []
    for warp in x.reshape(3, 32):
        left, sums = warp.tolist(), [0] * 32
        while lanes := [lane for lane in range(32) if left[lane] > 0]:
            for lane in lanes:
                sums[lane] += left[lanes[0]] * (100 if lane == lanes[0] else 1)
            left = [value - 1 if value > 0 else value for value in left]
        expected += sums
    assert y.tolist() == expected


def test_a_warp_goes_on_while_another_waits_for_it():
    """Warp 1 lacks a lane, which waits for what warp 0 does after the very instruction at which both stand."""
    code = """
        __global__ void handover(int* y) {
            __shared__ volatile int flag;
            if (threadIdx.x == 0) flag = 0;
            __syncthreads();
            if (threadIdx.x == 40) while (atomicAdd(const_cast<int*>(&flag), 0) == 0) {}
            int sum = __reduce_add_sync(0xffffffff, threadIdx.x);
            if (threadIdx.x == 0) atomicExch(const_cast<int*>(&flag), 1);
            y[threadIdx.x] = sum;
        }
    """
    y = np.zeros(64, np.int32)
    for seed in (None, 0, 1):
        run(code, "handover", 1, 64, y, seed=seed)
        assert y.tolist() == [496] * 32 + [496 + 1024] * 32


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_different_masks_one_after_the_other(seed):
    """The halves of the warp come one after the other to an exchange among themselves, then meet."""
    code = """
        __global__ void twice(int* y) {
            int v = threadIdx.x, n = v < 16 ? 1 : 20;
            unsigned half = v < 16 ? 0x0000ffff : 0xffff0000;
            for (int i = 0; i < n; i++) asm volatile("add.s32 %0, %0, 2;" : "+r"(v));
            asm volatile("shfl.sync.bfly.b32 %0, %0, 1, 0x1f, %1; shfl.sync.bfly.b32 %0, %0, 16, 0x1f, 0xffffffff;"
                         : "+r"(v) : "r"(half));
            y[threadIdx.x] = v;
        }
    """
    y = np.zeros(32, np.int32)
    run(code, "twice", 1, 32, y, seed=seed)
    assert y.tolist() == [(lane ^ 17) + (2 if (lane ^ 17) < 16 else 40) for lane in range(32)]


def test_a_shuffle_that_names_lanes_in_the_other_branch():
    code = """
        __global__ void wrong(int* y) {
            int v = threadIdx.x;
            if (v % 2) v = __shfl_xor_sync(0xffffffff, v, 2);  // here
            else __syncthreads();
            y[threadIdx.x] = v;
        }
    """
    says = [
        "a warp-wide instruction names lanes that are elsewhere",
        "mask 0xffffffff; lanes 0, 2, 4, 6, 8, 10 and 10 more",
    ]
    fails(WarpFault, code, "wrong", 1, 32, np.zeros(32, np.int32), says=["thread (1,0,0)", *says])


# --- programs drawn at random ---


class Writer:
    """Draws a program of nested ifs, loops, breaks and shuffles, as CUDA C and as Python over the lanes of a warp."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.may_leave = seed % 3 == 0
        self.loops = 0

    def body(self, depth: int, whole: bool, in_loop: bool) -> list:
        """`whole`: all lanes of the warp come here together, so that they may shuffle."""
        return [self.statement(depth, whole, in_loop) for _ in range(self.random.randint(1, 4))]

    def statement(self, depth: int, whole: bool, in_loop: bool) -> tuple:
        draw = self.random.random
        if depth and draw() < 0.45:
            if draw() < 0.5:
                return (
                    "if",
                    self.condition(),
                    self.body(depth - 1, False, in_loop),
                    self.body(depth - 1, False, in_loop),
                )
            uniform = whole and draw() < 0.5
            self.loops += 1
            count = ("constant", self.random.randint(1, 3)) if uniform else ("lane", self.random.randint(2, 5))
            return ("for", self.loops, count, self.body(depth - 1, uniform, not uniform))
        if whole and draw() < 0.3:
            mode, sides = self.random.choice(["xor", "up", "down"]), (self.side(depth), self.side(depth))
            return ("apart", self.condition(), mode, *sides)
        if whole and draw() < 0.6:
            return ("shuffle", self.random.choice(["xor", "up", "down"]), self.random.choice([1, 2, 4, 8, 16]))
        if in_loop and draw() < 0.2:
            return ("break", self.condition())
        if self.may_leave and not whole and draw() < 0.08:
            return ("leave", self.condition())
        return ("set", self.random.choice("abc"), self.random.choice("abc"), self.random.randint(1, 9))

    def side(self, depth: int) -> tuple:
        """One branch of two that both have a shuffle: what is before it, what is given, how far away the other lane is."""
        before = self.body(max(0, depth - 2), False, False)
        return before, self.random.choice("abc"), self.random.choice([1, 2, 4, 8, 16]), self.random.choice("abc")

    def condition(self) -> tuple:
        return (self.random.choice("abc"), self.random.randint(2, 6), self.random.randint(0, 3))


def in_c(body: list) -> str:
    lines = []
    for kind, *rest in body:
        if kind == "set":
            lines.append(f"{rest[0]} = {rest[0]} * 3 + {rest[1]} + {rest[2]}u;")
        elif kind in ("break", "leave"):
            lines.append(f"if ({condition_in_c(rest[0])}) {'break' if kind == 'break' else 'goto out'};")
        elif kind == "shuffle":
            value = f"__shfl_{rest[0]}_sync(0xffffffff, b, {rest[1]})"
            lines.append(f"a += {value};")
        elif kind == "apart":
            branches = [
                f"{{ {in_c(before)} {to} += __shfl_{rest[1]}_sync(0xffffffff, {given}, {by}); }}"
                for before, given, by, to in rest[2:]
            ]
            lines.append(f"if ({condition_in_c(rest[0])}) {' else '.join(branches)}")
        elif kind == "if":
            lines.append(f"if ({condition_in_c(rest[0])}) {{ {in_c(rest[1])} }} else {{ {in_c(rest[2])} }}")
        else:
            number, (by, bound), inner = rest
            end = f"{bound}" if by == "constant" else f"(a + lane) % {bound}"
            lines.append(f"for (int i{number} = 0, n{number} = {end}; i{number} < n{number}; i{number}++)")
            lines.append(f"{{ c += i{number}; {in_c(inner)} }}")
    return "\n".join(lines)


def condition_in_c(condition: tuple) -> str:
    name, modulus, rest = condition
    return f"({name} + lane) % {modulus} == {rest % modulus}"


class Warp:
    """Runs the same program for 32 lanes, each a dictionary of its variables."""

    def __init__(self, values: list[int]) -> None:
        self.lanes = [{"a": v & MASK, "b": (v * 7 + 1) & MASK, "c": lane} for lane, v in enumerate(values)]
        self.left: set[int] = set()

    def run(self, body: list, active: set[int]) -> set[int]:
        """Run `body` for the active lanes; the lanes that break out of the loop around it."""
        broken: set[int] = set()
        for kind, *rest in body:
            active = active - broken - self.left
            if kind == "set":
                for lane in active:
                    values = self.lanes[lane]
                    values[rest[0]] = (values[rest[0]] * 3 + values[rest[1]] + rest[2]) & MASK
            elif kind == "break":
                broken |= self.holds(rest[0], active)
            elif kind == "leave":
                self.left |= self.holds(rest[0], active)
            elif kind == "shuffle":
                self.shuffle(rest[0], [("b", rest[1], "a")] * 32)
            elif kind == "apart":
                then = self.holds(rest[0], active)
                for (before, *_), lanes in zip(rest[2:], (then, active - then)):
                    self.run(before, lanes)
                self.shuffle(rest[1], [rest[2 if lane in then else 3][1:] for lane in range(32)])
            elif kind == "if":
                then = self.holds(rest[0], active)
                broken |= self.run(rest[1], then) | self.run(rest[2], active - then)
            else:
                self.loop(*rest[1:], active)
        return broken

    def loop(self, count: tuple, body: list, active: set[int]) -> None:
        by, bound = count
        ends = {lane: bound if by == "constant" else (self.lanes[lane]["a"] + lane & MASK) % bound for lane in active}
        for turn in range(6):
            active = {lane for lane in active if turn < ends[lane]} - self.left
            if not active:
                return
            for lane in active:
                self.lanes[lane]["c"] = (self.lanes[lane]["c"] + turn) & MASK
            active -= self.run(body, active)

    def holds(self, condition: tuple, active: set[int]) -> set[int]:
        name, modulus, rest = condition
        return {lane for lane in active if ((self.lanes[lane][name] + lane) & MASK) % modulus == rest % modulus}

    def shuffle(self, mode: str, sides: list[tuple]) -> None:
        """For each lane: the variable that it gives, how far away it reads, the variable to which that is added."""
        given = [values[name] for values, (name, _, _) in zip(self.lanes, sides)]
        for lane, (values, (_, by, to)) in enumerate(zip(self.lanes, sides)):
            other = {"xor": lane ^ by, "up": lane - by, "down": lane + by}[mode]
            values[to] = (values[to] + given[other if 0 <= other < 32 else lane]) & MASK


def has_leave(body: list) -> bool:
    return any(s[0] == "leave" or any(has_leave(part) for part in bodies(s)) for s in body)


def bodies(statement: tuple) -> list[list]:
    """The bodies within a statement."""
    parts = [part[0] if isinstance(part, tuple) and isinstance(part[0], list) else part for part in statement]
    return [part for part in parts if isinstance(part, list)]


def drawn(seed: int) -> tuple[str, list]:
    """(the program as CUDA C, as a list). Where a lane may leave early, the lanes meet no more and do not shuffle."""
    writer = Writer(seed)
    body = writer.body(4, True, False) + writer.body(4, True, False)
    if has_leave(body):
        body = without_shuffles(body)
    code = f"""
        __global__ void kernel(const unsigned* x, unsigned* y) {{
            unsigned i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
            unsigned a = x[i], b = x[i] * 7 + 1, c = lane;
            {in_c(body)}
            out: y[3 * i] = a; y[3 * i + 1] = b; y[3 * i + 2] = c;
        }}
    """
    return code, body


def without_shuffles(body: list) -> list:
    result: list = []
    for kind, *rest in body:
        if kind == "apart":
            result.append(("if", rest[0], *(without_shuffles(side[0]) for side in rest[2:])))
        elif kind != "shuffle":
            result.append((kind, *(without_shuffles(part) if isinstance(part, list) else part for part in rest)))
    return result


@pytest.mark.parametrize("seed", range(24))
def test_a_program_drawn_at_random(seed, monkeypatch):
    """The same results as in Python: in every order, in batches of any size, checked or not."""
    code, body = drawn(seed)
    x = np.random.default_rng(seed).integers(0, 1 << 32, 3 * 64).astype(np.uint32)
    expected = []
    for warp in x.reshape(-1, 32).tolist():
        lanes = Warp(warp)
        lanes.run(body, set(range(32)))
        expected += [[values[name] for name in "abc"] for values in lanes.lanes]
    loaded = program(code, "kernel")
    for options in ({}, {"seed": 1}, {"seed": 2, "check": False}, {"check": False}):
        for threads in (16384, 64) if options else (16384, 1):
            monkeypatch.setattr(machine, "_THREADS_PER_BATCH", threads)
            y = np.zeros((192, 3), np.uint32)
            launch(loaded, ["x", "y"], 3, 64, x, y, **options)
            assert y.tolist() == expected, options


def test_the_programs_drawn_have_everything_in_them():
    kinds = set()

    def collect(body, depth):
        for statement in body:
            kinds.add((statement[0], depth > 1))
            for part in bodies(statement):
                collect(part, depth + 1)

    for seed in range(24):
        collect(drawn(seed)[1], 0)
    assert {(kind, True) for kind in ("set", "if", "for", "break", "leave", "shuffle", "apart")} <= kinds


def test_a_guard_keeps_its_value_though_its_source_is_written():
    """`p2 = p1; p1 = false; @p2 bra`, by a part of the threads: the branch goes by the old value."""
    ptx = """
    .version 8.0
    .target sm_80
    .address_size 64
    .entry twice(.param .u64 y) {
      .reg .pred %p<4>;
      .reg .b32 %r<4>;
      .reg .b64 %rd<4>;
      ld.param.u64 %rd1, [y];
      mov.u32 %r1, %tid.x;
      mov.u32 %r2, 0;
      setp.ge.u32 %p3, %r1, 16;
      @%p3 bra DONE;
      setp.lt.u32 %p1, %r1, 99;
      bra.uni AGAIN;
    AGAIN:
      mov.pred %p2, %p1;
      mov.pred %p1, 0;
      add.u32 %r2, %r2, 1;
      @%p2 bra AGAIN;
    DONE:
      mul.wide.u32 %rd2, %r1, 4;
      add.s64 %rd3, %rd1, %rd2;
      st.global.u32 [%rd3], %r2;
      ret;
    }
    """
    text = Program(ptx)
    y = np.zeros(32, np.int32)
    text.launch("twice", (1,), (32,), [Pointer(text.memory.allocate(y, "y"))])
    assert y.tolist() == [2] * 16 + [0] * 16


def test_a_branch_beyond_its_table():
    """brx.idx goes by a table; what lies behind it is no target."""
    ptx = """
    .version 8.0
    .target sm_80
    .address_size 64
    .entry beyond(.param .u32 limit) {
      .reg .b32 %r<4>;
      mov.u32 %r1, %tid.x;
    table: .branchtargets ZERO, ONE;
      brx.idx %r1, table;
    ZERO:
      ret;
    ONE:
      ret;
    }
    """
    text = Program(ptx)
    text.launch("beyond", (1,), (2,), [0])
    with pytest.raises(OutOfBounds, match=r"(?s)a branch to target 2 of a table of 2\n  thread \(2,0,0\)"):
        text.launch("beyond", (1,), (3,), [0])
