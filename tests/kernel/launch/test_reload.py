"""An edited .cu file is read again in an interactive session, and only there."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import cupyops
from cupyops import Kernel
from cupyops._kernel.launch import fastpath, reload
from cupyops.errors import CompileError, SourceError

TEXT = '#include "number.cuh"\n__global__ void put(float* x) {{ x[0] = NUMBER + {}; }}\n'


class Folder:
    """A kernel and its header; each writing gives the files another time stamp."""

    def __init__(self, path):
        self.path, self.stamp = path, 10**18
        self.header(1)
        self.body(0)
        self.kernel = Kernel(path / "put.cu", "put")

    def write(self, name, text):
        self.stamp += 1
        (self.path / "writing").write_text(text)
        os.utime(self.path / "writing", ns=(self.stamp, self.stamp))
        os.replace(self.path / "writing", self.path / name)

    def header(self, number):
        self.write("number.cuh", f"#pragma once\n#define NUMBER {number}\n")

    def body(self, number):
        self.write("put.cu", TEXT.format(number))

    def result(self):
        with cupyops.simulate():
            return self.launched()

    def launched(self):
        x = torch.zeros(1)
        self.kernel[1, 1](x)
        return x.item()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(reload, "INTERVAL", 0)
    monkeypatch.setenv("CUPYOPS_RELOAD", "1")
    return Folder(tmp_path)


def test_an_edited_file_is_compiled_again(folder):
    assert folder.result() == 1
    before = folder.kernel._specialised[()]
    assert folder.result() == 1 and folder.kernel._specialised[()] is before
    folder.body(10)
    assert folder.result() == 11
    folder.header(2)  # what it includes counts as well
    assert folder.result() == 12
    folder.write("put.cu", "__global__ void put(double* y, float* x) {}\n")  # other parameters
    assert folder.kernel[1, 1] and folder.kernel.declared == [("double*", "y"), ("float*", "x")]


def test_a_file_that_is_being_saved(folder):
    """What is there for a moment is an error for a moment."""
    assert folder.result() == 1
    folder.write("put.cu", "__global__ void put(float* x) { x[0] = ")
    for _ in range(2):
        with pytest.raises(CompileError, match="put.cu"):
            folder.result()
    folder.write("put.cu", '#include "gone.cuh"\n')
    with pytest.raises(SourceError, match="gone.cuh"):
        folder.result()
    (folder.path / "put.cu").unlink()
    with pytest.raises(SourceError, match="no CUDA source"):
        folder.result()
    folder.body(5)
    assert folder.result() == 6


def test_text_with_a_header(folder):
    """CUDA C that is given as text has files too: what it includes."""
    beside = {"__file__": str(folder.path / "module.py"), "Kernel": Kernel}
    (folder.path / "module.py").write_text("")
    exec(compile(f"made = Kernel({TEXT.format(0)!r}, 'put')", beside["__file__"], "exec"), beside)
    folder.kernel = beside["made"]
    assert folder.result() == 1
    folder.header(4)
    assert folder.result() == 4


def test_variables_begin_anew(folder):
    folder.write("put.cu", "__device__ int v = 3;\n__global__ void put(float* x) { x[0] = v; }\n")
    with cupyops.simulate():
        folder.kernel.globals()["v"].set(8)
        folder.write("put.cu", "__device__ int v = 4;\n__global__ void put(float* x) { x[0] = v; }\n")
        assert folder.kernel.globals()["v"].get().item() == 4


def test_what_is_on_the_fast_path_leaves_it(folder, monkeypatch):
    """Also for a launch function that somebody holds: the table in which it looks is empty then."""
    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice"):
        monkeypatch.setattr(torch._C, name, lambda *device: 0, raising=False)
    folder.result()
    kernel, table = folder.kernel, folder.kernel._table
    arguments = kernel._specialised[()].arguments(kernel._specialised[()].binary("sm_80"))
    table[()] = fastpath.entry(arguments, 0, 1, [], list)
    kernel._fast = fastpath.configure(arguments, (), 0, table, kernel._launch)
    folder.body(20)
    x = torch.zeros(1)
    with cupyops.simulate():
        kernel[1, 1](x)
    assert x.item() == 21 and not table and kernel._table is not table and kernel._fast is None


def test_what_was_compiled_from_the_old_text_does_not_come_back(folder):
    """A launch that was under way when the file was edited puts nothing on the fast path."""
    folder.result()
    kernel, old = folder.kernel, folder.kernel._specialised[()]
    folder.body(20)
    kernel._reload()
    kernel._make_fast(old, None)  # looks at nothing of what was loaded
    assert not kernel._table and kernel._fast is None


def test_threads_see_one_text_or_the_other(folder):
    folder.result()
    barrier = threading.Barrier(4)

    def work(_):
        barrier.wait()
        return [folder.launched() for _ in range(5)]

    with cupyops.simulate(), ThreadPoolExecutor(4) as pool:
        found = pool.map(work, range(4))
        folder.body(30)
        assert {one for several in found for one in several} <= {1, 31}
    assert folder.result() == 31


def test_files_are_looked_at_now_and_then(folder, monkeypatch):
    monkeypatch.setattr(reload, "INTERVAL", 1000)
    assert folder.result() == 1 and folder.result() == 1  # looked at just now
    folder.body(10)
    assert folder.result() == 1
    monkeypatch.setattr(reload, "INTERVAL", 0)
    assert folder.result() == 11


@pytest.mark.parametrize(
    ("asked", "prompt", "wanted"),
    [("", False, False), ("", True, True), ("1", False, True), ("0", True, False), (" 0 ", True, False)],
)
def test_when_it_is_wanted(monkeypatch, asked, prompt, wanted):
    monkeypatch.setenv("CUPYOPS_RELOAD", asked)
    monkeypatch.delattr(sys, "ps1", raising=False)
    if prompt:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert reload.wanted() is wanted


def test_a_program_keeps_what_it_read(folder, monkeypatch):
    monkeypatch.setenv("CUPYOPS_RELOAD", "0")
    assert folder.result() == 1
    folder.body(10)
    assert folder.result() == 1


@pytest.mark.gpu
def test_on_a_gpu(folder):
    """Through the fast path."""
    kernel, x = folder.kernel, torch.zeros(1, device="cuda")
    for number in (0, 10, 20):
        folder.body(number)
        for _ in range(2):
            x.zero_()
            kernel[1, 1](x)
            assert x.item() == number + 1
