"""What a launch is configured with: limits of every GPU, clusters, cooperation, overlap; the driver's structs."""

import ctypes
import re
from types import SimpleNamespace

import pytest
import torch
from toys import Recorder, executor

import cupyops
from cupyops import Kernel
from cupyops._kernel.launch import driver
from cupyops._kernel.launch.configuration import Configuration
from cupyops.errors import LaunchError

# each block writes its rank in the cluster, and how many blocks that has
CLUSTER = """
__global__ void f(int* x) {
  unsigned rank, size;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  if (threadIdx.x == 0) { x[2 * blockIdx.x] = rank; x[2 * blockIdx.x + 1] = size; }
}
"""
# a barrier of all blocks: it ends only if all of them run at the same time
MEET = """
__global__ void meet(int* x, unsigned* arrived) {
  if (threadIdx.x == 0) {
    x[blockIdx.x] = 1;
    __threadfence();
    atomicAdd(arrived, 1);
    while (atomicAdd(arrived, 0) < gridDim.x) {}
    x[blockIdx.x] += ((volatile int*)x)[gridDim.x - 1 - blockIdx.x];
  }
}
"""
# the first writes what the second reads, late, having let that begin
WRITE = """
__global__ void put(int* x) {
  asm volatile("griddepcontrol.launch_dependents;");
  for (int i = 0; i < 100; ++i) __nanosleep(1000);
  x[blockIdx.x * blockDim.x + threadIdx.x] = 3;
}
"""
READ = """
__global__ void twice(volatile int* x) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  x[blockIdx.x * blockDim.x + threadIdx.x] *= 2;
}
"""


def test_a_grid_by_true_division():
    with pytest.raises(
        LaunchError, match=r"grid is 3.9, .* 1 to 3 ints: use cupyops.ceil_div\(n, block\) for n threads$"
    ):
        Configuration.of(3.9, 32)
    for grid, block in (("4", 32), (4, 0.5)):
        with pytest.raises(LaunchError, match="expected an int or a tuple of 1 to 3 ints$"):
            Configuration.of(grid, block)


def test_what_is_configured():
    made = Configuration.of((2, 4), 32, 16, True, (2, 2))
    assert (made.grid, made.block, made.shared, made.cooperative, made.cluster) == (
        (2, 4, 1), (32, 1, 1), 16, True, (2, 2, 1),
    )  # fmt: skip
    assert (made.blocks, made.threads) == (8, 32)
    assert str(made) == (
        "grid (2, 4, 1), block (32, 1, 1), 16 bytes of dynamic shared memory, cooperative, cluster (2, 2, 1)"
    )
    assert str(Configuration.of(1, 2, overlap=True)).endswith("of dynamic shared memory, overlapping the grid before")
    assert str(Configuration.of(1, 2)) == "grid (1, 1, 1), block (2, 1, 1), 0 bytes of dynamic shared memory"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": 3}, r"grid \(4, 1, 1\) is no multiple of the cluster \(3, 1, 1\)"),
        ({"cluster": (1, 2)}, r"grid \(4, 1, 1\) is no multiple of the cluster \(1, 2, 1\)"),
        ({"cluster": 16}, r"cluster \(16, 1, 1\) has 16 blocks; CUDA allows 1 to 8"),
        ({"cluster": 0}, r"has 0 blocks; CUDA allows 1 to 8"),
        ({"cluster": (-1, -1)}, "CUDA allows 1 to 8"),
        ({"cluster": "2"}, "cluster is '2', expected an int or a tuple"),
        ({"cooperative": 1}, "cooperative is 1, expected a bool"),
        ({"overlap": None}, "overlap is None, expected a bool"),
        ({"shared": -1}, "shared memory is -1, expected a number of bytes"),
    ],
)
def test_what_no_gpu_can_launch(options, message):
    """Refused before there is a function to call, and in the name of the kernel."""
    with pytest.raises(LaunchError, match=rf"Kernel\(<text>: f\): .*{message}"):
        Kernel(CLUSTER, "f").configure(4, 32, **options)


def test_grid_and_block_are_refused_in_the_name_of_the_kernel():
    f = Kernel(CLUSTER, "f")
    for launch, message in [((1, 0), "block .* has 0 threads"), ((-1, 1), "grid .* is outside CUDA's limits")]:
        with pytest.raises(LaunchError, match=rf"Kernel\(<text>: f\): {message}"):
            f[launch]
        with pytest.raises(LaunchError, match=rf"Kernel\(<text>: f\): {message}"):
            f.configure(*launch)


def test_what_the_executor_sees():
    seen = []

    class Sees(Recorder):
        def __call__(self, specialised, device, configuration, args):
            seen.append(configuration)

    with executor("cpu", Sees()):
        f, x = Kernel(CLUSTER, "f"), torch.zeros(8, dtype=torch.int32)
        f.configure(4, 32, shared=8, cooperative=True, cluster=2)(x)
        f[4, 32, 8](x)
        f.configure(0, 32, cluster=2)(x)  # launches nothing
    assert seen == [Configuration.of(4, 32, 8, True, 2), Configuration.of(4, 32, 8)]


def test_clusters_in_the_simulator():
    f, x = Kernel(CLUSTER, "f"), torch.zeros(8, dtype=torch.int32)
    with cupyops.simulate("sm_90"):
        f[4, 32](x)
        assert x.tolist() == [0, 1] * 4
        f.configure(4, 32, cluster=2)(x)
        assert x.tolist() == [0, 2, 1, 2] * 2
    old = Kernel("__global__ void f(int* x) { x[0] = 1; }\n", "f")
    with cupyops.simulate(), pytest.raises(LaunchError, match="clusters need compute capability 9.0, here is sm_80"):
        old.configure(4, 32, cluster=2)(x)


def test_a_cluster_other_than_the_kernel_s_own():
    text = "__global__ void __cluster_dims__(2, 1, 1) f(int* x) { x[0] = 1; }\n"
    with (
        cupyops.simulate("sm_90"),
        pytest.raises(cupyops.SimulatorError, match=r"cluster \(4, 1, 1\); the kernel requires"),
    ):
        Kernel(text, "f").configure(4, 1, cluster=4)(torch.zeros(1, dtype=torch.int32))


def test_cooperative_in_the_simulator():
    x, arrived = torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with cupyops.simulate():
        Kernel(MEET, "meet").configure(3, 32, cooperative=True)(x, arrived)
    assert x.sum().item() >= 6 and arrived.item() == 3


def test_overlapping_in_the_simulator():
    x = torch.zeros(8, dtype=torch.int32)
    with cupyops.simulate("sm_90"):
        Kernel(WRITE, "put")[2, 4](x)
        Kernel(READ, "twice").configure(2, 4, overlap=True)(x)
    assert x.tolist() == [6] * 8


def test_a_kernel_that_does_not_wait_is_not_to_overlap():
    f, x = Kernel("__global__ void f(int* x) { x[0] = 1; }", "f"), torch.zeros(1, dtype=torch.int32)
    with (
        cupyops.simulate("sm_90"),
        pytest.raises(LaunchError, match="does not wait for the grid before it; write griddepcontrol.wait"),
    ):
        f.configure(1, 1, overlap=True)(x)
    with cupyops.simulate("sm_80"):  # where it is a launch like any other
        f.configure(1, 1, overlap=True)(x)
    assert x.item() == 1


def test_more_shared_memory_than_the_architecture_has():
    f = Kernel("__global__ void f(int* x) { x[0] = 1; }\n", "f")
    with (
        cupyops.simulate(),
        pytest.raises(LaunchError, match=r"f with grid .* sm_80 has 166912 bytes of shared memory"),
    ):
        f[1, 32, 163 * 1024 + 1](torch.zeros(1, dtype=torch.int32))


class Driver:
    """Stands in for libcuda: keeps what it was called with."""

    status = 0

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        config = config._obj
        attributes = {}
        for one in config.attributes[: config.count]:
            value = one.value.cluster
            attributes[one.id] = (value.x, value.y, value.z) if one.id == 4 else one.value.flag
        dims = [(dim.x, dim.y, dim.z) for dim in (config.grid, config.block)]
        self.seen = (*dims, config.shared, config.stream, attributes, function, parameters, extra)
        return self.status

    def cuGetErrorName(self, status, out):
        out._obj.value = b"CUDA_ERROR_NAME"

    def cuGetErrorString(self, status, out):
        out._obj.value = b"what it means"


def test_layout_of_the_structs():
    offsets = [getattr(driver._Config, name).offset for name, _ in driver._Config._fields_]
    assert offsets == [0, 12, 24, 32, 40, 48] and ctypes.sizeof(driver._Config) == 56
    assert driver._Attribute.value.offset == 8 and ctypes.sizeof(driver._Attribute) == 72


def test_a_launch_with_attributes(monkeypatch):
    library = Driver()
    monkeypatch.setattr(driver, "_library", lambda: library)
    launch = driver.launcher(Configuration.of((2, 4), 32, 16, True, (2, 2)))
    launch(1000, 2, 4, 1, 32, 1, 1, 16, 77, 2000, 0)
    attributes = {2: 1, 4: (2, 2, 1)}
    assert library.seen == ((2, 4, 1), (32, 1, 1), 16, 77, attributes, 1000, 2000, None)
    launch(1001, 2, 4, 1, 32, 1, 1, 16, 78, 2001, 0)  # the same on another stream
    assert library.seen == ((2, 4, 1), (32, 1, 1), 16, 78, attributes, 1001, 2001, None)
    monkeypatch.setattr(driver, "_can_overlap", lambda: True)
    driver.launcher(Configuration.of(2, 32, overlap=True))(1000, 2, 1, 1, 32, 1, 1, 0, 77, 2000, 0)
    assert library.seen == ((2, 1, 1), (32, 1, 1), 0, 77, {6: 1}, 1000, 2000, None)
    library.status = 1
    with pytest.raises(driver.DriverError, match="CUDA_ERROR_NAME: what it means"):
        launch(1000, 2, 4, 1, 32, 1, 1, 16, 77, 2000, 0)


@pytest.mark.parametrize(
    ("cuda", "capabilities", "can"), [(12030, (9, 10), True), (12020, (9, 9), False), (13000, (9, 8), False)]
)
def test_what_can_overlap(monkeypatch, cuda, capabilities, can):
    runtime = SimpleNamespace(driverGetVersion=lambda: cuda)
    monkeypatch.setattr(driver.backend, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capabilities[device], 0))
    assert driver._can_overlap.__wrapped__() is can


@pytest.mark.gpu
class TestGPU:
    def test_cooperative(self):
        meet = Kernel(MEET, "meet")
        for _ in range(2):  # the first in full, the second by the fast path
            x, arrived = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (100, 1))
            meet.configure(100, 64, cooperative=True)(x, arrived)
            assert x.sum().item() >= 200 and arrived.item() == 100
        with pytest.raises(LaunchError, match=r"meet with grid \(1000000, 1, 1\).*runs \d+ at the same time"):
            meet.configure(1_000_000, 64, cooperative=True)(x, arrived)

    def test_overlapping(self):
        if torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("no griddepcontrol before compute capability 9.0")
        put, twice = Kernel(WRITE, "put"), Kernel(READ, "twice")
        x = torch.zeros(64 * 256, dtype=torch.int32, device="cuda")
        for _ in range(20):
            put[64, 256](x)
            twice.configure(64, 256, overlap=True)(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            put[64, 256](x)
            twice.configure(64, 256, overlap=True)(x)
        assert (x == 6).all()
        x.zero_()
        graph.replay()
        assert (x == 6).all()

    def test_clusters(self):
        if torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("no clusters before compute capability 9.0")
        f = Kernel(CLUSTER, "f")
        for cluster in (2, 2, 4, 8, None):
            x = torch.zeros(32, dtype=torch.int32, device="cuda")
            f.configure(16, 32, cluster=cluster)(x)
            size = cluster or 1
            assert x.tolist() == [one for block in range(16) for one in (block % size, size)]

    def test_cluster_without_room(self):
        if torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("no clusters before compute capability 9.0")
        limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
        f, x = Kernel(CLUSTER, "f"), torch.zeros(32, dtype=torch.int32, device="cuda")
        f.configure(16, 32, shared=limit, cluster=2)(x)
        with pytest.raises(LaunchError, match=re.escape(f"{limit + 1} bytes of shared memory, the device has {limit}")):
            f.configure(16, 32, shared=limit + 1, cluster=2)(x)

    def test_static_and_dynamic_shared_memory_together_above_48_kb(self):
        code = """
        __global__ void f(int* x, int n) {
            __shared__ int own[6000];
            extern __shared__ int given[];
            for (int i = threadIdx.x; i < 6000; i += blockDim.x) own[i] = i;
            for (int i = threadIdx.x; i < n; i += blockDim.x) given[i] = 2 * i;
            __syncthreads();
            for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = given[n - 1 - i] + own[i % 6000];
        }
        """
        f = Kernel(code, "f")
        for n in (6200, 8000, 6200):
            x, i = torch.zeros(n, dtype=torch.int32, device="cuda"), torch.arange(n, dtype=torch.int32, device="cuda")
            f.configure(1, 256, shared=4 * n)(x, n)
            assert torch.equal(x, 2 * (n - 1 - i) + i % 6000)
