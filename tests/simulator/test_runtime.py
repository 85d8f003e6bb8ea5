"""What the device runtime offers: printf, assert, trap, malloc."""

import numpy as np
import pytest
from simulator.kit import fails, run

from cupyops.simulator import DeviceAssert, OutOfBounds, Trap, Uninitialized


def printed(statement, grid=1, block=1, *, before="", **options):
    """What a kernel of one statement prints."""
    lines = []
    code = f"""
        __global__ void say(const char* text, int n, double d, long long wide) {{
            {before}
            {statement}
        }}
    """
    text = np.frombuffer(b"words\0", np.uint8).copy()
    run(code, "say", grid, block, text, -42, 3.25, -(2**40), output=lines.append, **options)
    return "".join(lines)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (r'"plain\n"', "plain\n"),
        (r'"%d|%5d|%-5d|%05d|%+d|%i", n, n, n, n, -n, n', "-42|  -42|-42  |-0042|+42|-42"),
        (r'"%u|%x|%X|%#x|%o|%08x", 42u, 42u, 42u, 42u, 42u, 42u', "42|2a|2A|0x2a|52|0000002a"),
        (r'"%u|%x", n, n', "4294967254|ffffffd6"),
        (r'"%lld|%ld|%llu|%llx", wide, wide, 1ull << 63, 1ull << 40', f"{-(2**40)}|{-(2**40)}|{2**63}|{2**40:x}"),
        (r'"%zu|%hd|%hhd", sizeof(double), short(7), char(8)', "8|7|8"),
        (r'"%f|%.2f|%8.3f|%-9.1f|%.0f", d, d, d, d, d', "3.250000|3.25|   3.250|3.2      |3"),
        (r'"%e|%g|%G", d, d, 1e30', "3.250000e+00|3.25|1E+30"),
        (r'"%*d|%-*d|%.*f|%*.*f", 6, n, 6, n, 1, d, 7, 2, d', "   -42|-42   |3.2|   3.25"),
        (r'"%*d|", -6, n', "-42   |"),
        (r'"%.*f", -1, d', "3.250000"),
        (r'"%s|%8s|%-8s|%.2s", text, "const", "const", "const"', "words|   const|const   |co"),
        (r'"%c%c|%3c|%%|%d%%", 72, 105, 33, n', "Hi|  !|%|-42%"),
        (r'"%f|%f|%f", 1.0 / (d - 3.25), -1.0 / (d - 3.25), 0.0 / (d - 3.25)', "inf|-inf|nan"),
        (r'"%d %f %lld %s %d %c %f\n", n, d, wide, text, 1, 65, 2.0', "-42 3.250000 -1099511627776 words 1 A 2.000000\n"),
        (r'"%a %A %a", d, d, 1.0', "0x1.ap+1 0X1.AP+1 0x1p+0"),
    ],
)  # fmt: skip
def test_conversions(arguments, expected):
    assert printed(f"printf({arguments});").replace("-nan", "nan") == expected


def test_pointers_are_printed_as_the_kernel_sees_them():
    first, second = printed(r'printf("%p %p", text, text + 16);').split()
    assert first.startswith("0x") and int(second, 16) - int(first, 16) == 16


def test_a_string_in_local_memory():
    before = "char own[8]; for (int i = 0; i < 6; i++) own[(i + n + 42) % 8] = text[i];"
    assert printed(r'printf("<%s>", own);', before=before) == "<words>"


def test_every_thread_prints_in_turn():
    statement = r'if (threadIdx.x % 2) printf("%d:%d\n", blockIdx.x, threadIdx.x);'
    lines = printed(statement, 3, 6).splitlines()
    assert lines == [f"{block}:{thread}" for block in range(3) for thread in (1, 3, 5)]


def test_printf_gives_the_number_of_arguments():
    code = """
        __global__ void count(int* y) { y[0] = printf("%d %d", 1, 2); y[1] = printf("x"); }
    """
    y = np.zeros(2, np.int32)
    run(code, "count", 1, 1, y, output=lambda text: None)
    assert y.tolist() == [2, 0]


def test_a_failed_assert():
    code = """
        extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, size_t);
        __global__ void positive(const float* x) {
            if (!(x[threadIdx.x] > 0.f)) __assertfail("x > 0", "other.cu", 12, "positive", 1);  // here
        }
    """
    x = np.ones(64, np.float32)
    run(code, "positive", 1, 64, x)
    x[[40, 50]] = -1
    says = ["assertion `x > 0` failed", "thread (40,0,0) of block (0,0,0), and 1 more threads", "other.cu:12, positive"]
    fails(DeviceAssert, code, "positive", 1, 64, x, says=says)


def test_the_assert_macro():
    code = """
        __global__ void even(int n) {
            assert(n % 2 == 0);  // here
        }
    """
    run(code, "even", 1, 1, 4)
    fails(
        DeviceAssert, code, "even", 1, 32, 3, says=["assertion `n % 2 == 0` failed", "thread (0,0,0) of block (0,0,0)"]
    )


@pytest.mark.parametrize("statement", ["__trap()", 'asm volatile("trap;")'])
def test_trap(statement):
    code = f"""
        __global__ void give_up(int n) {{
            if (threadIdx.x > n) {statement};  // here
        }}
    """
    run(code, "give_up", 1, 32, 31)
    says = [
        "the kernel executed trap: __trap(), or what the compiler made of undefined behaviour",
        "thread (21,0,0) of block (0,0,0), and 21 more threads",
    ]
    fails(Trap, code, "give_up", 2, 32, 20, says=says)


# --- the device's heap ---


def test_malloc():
    code = """
        __global__ void squares(int* y) {
            int* own = static_cast<int*>(malloc((threadIdx.x + 1) * sizeof(int)));
            for (int i = 0; i <= threadIdx.x; i++) own[i] = i * i;
            int sum = 0;
            for (int i = 0; i <= threadIdx.x; i++) sum += own[i];
            y[threadIdx.x] = sum;
            free(own);
        }
    """
    y = np.zeros(32, np.int32)
    run(code, "squares", 1, 32, y)
    assert y.tolist() == [sum(i * i for i in range(n + 1)) for n in range(32)]


def test_what_malloc_gives_holds_nothing():
    code = """
        __global__ void read(int* y) {
            int* own = static_cast<int*>(malloc(16));
            y[0] = own[2];  // here
        }
    """
    fails(Uninitialized, code, "read", 1, 1, np.zeros(1, np.int32), says=["read of `malloc` where nothing was written"])


def test_beyond_what_malloc_gave():
    code = """
        __global__ void beyond(int n) {
            int* own = static_cast<int*>(malloc(16));
            own[n] = 1;  // here
        }
    """
    run(code, "beyond", 1, 1, 3)
    fails(
        OutOfBounds, code, "beyond", 1, 1, 4, says=["write of 4 bytes outside `malloc`", "offset 16: just past the end"]
    )


def test_after_free():
    code = """
        __global__ void after(int* y) {
            volatile int* own = static_cast<int*>(malloc(16));
            own[0] = 1;
            free(const_cast<int*>(own));
            y[0] = own[0];  // here
        }
    """
    fails(OutOfBounds, code, "after", 1, 1, np.zeros(1, np.int32), says=["read of 4 bytes through"])


@pytest.mark.parametrize("pointer", ["y", "own + 1"])
def test_free_of_what_malloc_did_not_give(pointer):
    code = f"""
        __global__ void wrong(int* y) {{
            int* own = static_cast<int*>(malloc(16));
            own[0] = y[0];
            free({pointer});  // here
        }}
    """
    fails(OutOfBounds, code, "wrong", 1, 1, np.zeros(1, np.int32), says=["free of a pointer that malloc did not give"])


def test_free_of_null():
    code = "__global__ void nothing(int* y) { free(nullptr); y[0] = 1; }"
    y = np.zeros(1, np.int32)
    run(code, "nothing", 1, 1, y)
    assert y[0] == 1
