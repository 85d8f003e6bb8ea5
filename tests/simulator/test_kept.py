"""Translations that are kept give what fresh ones give, and count only for the text that they were made of."""

import numpy as np
import pytest
from simulator.kit import ptx

from cupyops.simulator import OutOfBounds, Pointer, Program
from cupyops.simulator.translate import kept

SUMS = """
__device__ float scale = 2;

__global__ void sums(const float* x, float* y, int size) {
    __shared__ float part[64];
    part[threadIdx.x] = threadIdx.x < size ? x[threadIdx.x] : 0;
    __syncthreads();
    float total = part[threadIdx.x] + part[63 - threadIdx.x];
    for (int lane = 16; lane; lane /= 2) total += __shfl_xor_sync(0xffffffff, total, lane);
    y[threadIdx.x] = total;
    for (int more = size; more < 64; more++) y[threadIdx.x] += more;
}

__global__ void scaled(const float* x, float* y) {
    y[threadIdx.x] = scale * x[threadIdx.x];
}
"""


class Shelf:
    """Where translations are kept: here."""

    def __init__(self):
        self.content, self.written = None, 0

    def read(self):
        return self.content

    def write(self, content):
        self.content, self.written = content, self.written + 1


def launch(program, name, size=64, **options):
    x, y = np.random.default_rng(0).standard_normal(64).astype(np.float32), np.zeros(64, np.float32)
    places = [Pointer(program.memory.allocate(one, called)) for one, called in ((x, "x"), (y, "y"))]
    (symbol,) = [one for one in program.kernels() if name in one]
    program.launch(symbol, (1,), (64,), [*places, size] if name == "sums" else places, **options)
    return y


def test_what_was_kept_gives_the_same_and_is_not_translated_again(monkeypatch):
    text, shelf = ptx(SUMS, "sums"), Shelf()
    fresh = Program(text, place=shelf)
    first = launch(fresh, "sums")
    monkeypatch.setattr("cupyops.simulator.program.parse", None)  # which nothing calls any more
    again = Program(text, place=shelf)
    assert again.kernels() == fresh.kernels()
    (name,) = [name for name in again.kernels() if "sums" in name]
    assert again.static_shared(name) == 256
    np.testing.assert_array_equal(launch(again, "sums"), first)
    assert shelf.written == 1


def test_blocks_that_have_run_are_kept_as_code_and_others_as_text():
    text, shelf = ptx(SUMS, "sums"), Shelf()
    launch(Program(text, place=shelf), "sums")
    ((_, compiled),) = kept.load(text, shelf.content).kernels.items()
    assert {(bool(block.code), bool(block.text)) for block in compiled.blocks} == {(True, False), (False, True)}
    np.testing.assert_array_equal(launch(Program(text, place=shelf), "sums", 5), launch(Program(text), "sums", 5))


def test_faults_say_the_same():
    text, shelf = ptx(SUMS, "sums"), Shelf()
    messages = []
    for _ in range(2):
        program = Program(text, place=shelf)
        x, y = np.zeros(40, np.float32), np.zeros(64, np.float32)
        places = [Pointer(program.memory.allocate(one, called)) for one, called in ((x, "x"), (y, "y"))]
        with pytest.raises(OutOfBounds) as caught:
            program.launch(program.kernels()[0], (1,), (64,), [*places, 64])
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "PTX line" in messages[0] and shelf.written == 1


def test_another_form_of_a_kept_kernel_is_added():
    text, shelf = ptx(SUMS, "sums"), Shelf()
    first = launch(Program(text, place=shelf), "sums")
    again = Program(text, place=shelf)
    np.testing.assert_array_equal(launch(again, "sums"), first)  # a kernel that has run can be kept too
    np.testing.assert_array_equal(launch(again, "sums", approximate="worst"), first)
    assert shelf.written == 2
    found = kept.load(text, shelf.content)
    assert sorted(worst for _, _, worst in found.kernels) == [False, True]


def test_addresses_of_variables_are_those_of_the_process():
    text, shelf = ptx(SUMS, "scaled"), Shelf()
    first = launch(Program(text, place=shelf), "scaled")
    assert shelf.content is None
    program = Program(text, place=shelf)
    for _ in range(3):
        program.memory.allocate(np.zeros(4, np.uint8))
    np.testing.assert_array_equal(launch(program, "scaled"), first)


@pytest.mark.parametrize("wrong", ["nothing", "short", "a bit", "of another text", "of another version"])
def test_what_is_damaged_or_of_another_is_translated_anew(wrong, monkeypatch):
    text, shelf = ptx(SUMS, "sums"), Shelf()
    first = launch(Program(text, place=shelf), "sums")
    content = shelf.content
    if wrong == "of another version":
        monkeypatch.setattr(kept, "_version", lambda: b"another")
    flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    shelf.content = {"nothing": b"", "short": content[:-1], "a bit": flipped}.get(wrong, content)
    other = text + "\n// another\n" if wrong == "of another text" else text
    assert kept.load(other, shelf.content) is None
    np.testing.assert_array_equal(launch(Program(other, place=shelf), "sums"), first)
    assert shelf.written == 2 and kept.load(other, shelf.content) is not None
