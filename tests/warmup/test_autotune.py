"""The choice among configurations: made once for a key, kept on the disk, never where nothing can be timed."""

import contextlib
import json
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cupyops
from cupyops import CompileError, InputError
from cupyops._kernel.compile import backend
from cupyops._kernel.launch.versions import in_role
from cupyops._warmup import autotune as tuning  # cupyops.autotune is the decorator

CODE = """
template <int STEP> __global__ void twice(const float* x, float* y, int n) {
  static_assert(STEP < 8, "STEP is too big");
  for (int i = threadIdx.x * STEP; i < (threadIdx.x + 1) * STEP; ++i)
    if (i < n) y[i] = 2 * x[i];
}
"""
twice = cupyops.Kernel(CODE, "twice<STEP>", STEP=(1, 2, 8))
CONFIGS = {"one": dict(block=64, step=1), "two": dict(block=32, step=2)}


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """CPU tensors count as CUDA tensors, and configurations take the times of `gpu`; `gpu["timed"]` lists what was timed."""
    table = {"timed": [], "name": "GPU", "capturing": False}

    def microseconds(calls):
        table["timed"].append(list(calls))
        for call in calls.values():
            call()
        return {name: table[name] for name in calls}

    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "microseconds", microseconds)
    monkeypatch.setattr(tuning, "_gpu", lambda values: 0 if any(isinstance(v, torch.Tensor) for v in values) else None)
    monkeypatch.setattr(tuning, "_name", lambda device: table["name"])
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: table["capturing"])
    torch.use_deterministic_algorithms(False)
    return table


def launcher(configs=CONFIGS, **options):
    """A function that launches `twice`, and lists the configurations that it ran in."""
    ran = []

    @cupyops.autotune(configs=configs, **options)
    def launch(x, y, *, block, step):
        """Doubles."""
        ran.append((block, step))
        twice[1, block](x, y, x.numel(), STEP=step)
        return y

    return launch, ran


def other_process(launch):
    """As it is in a process that has only the disk."""
    launch.choices.clear()


X = torch.arange(50.0)


def call(launch, x=X):
    with cupyops.simulate():
        assert launch(x, torch.full_like(x, torch.nan)).tolist() == (2 * x).tolist()


def test_the_fastest_runs_and_is_remembered(gpu):
    launch, ran = launcher()
    gpu |= {"one": 9.0, "two": 3.0}
    call(launch)
    assert gpu["timed"] == [["one", "two"]] and list(launch.choices.values()) == ["two"]
    ran.clear()
    call(launch)
    assert ran == [(32, 2)] and len(gpu["timed"]) == 1
    assert launch.__name__ == "launch" and launch.__doc__ == "Doubles."


def test_one_choice_for_each_key(gpu):
    launch, _ = launcher(key=lambda x, y: x.numel() > 20)
    gpu |= {"one": 9.0, "two": 3.0}
    call(launch)
    gpu["two"] = 10.0
    call(launch, torch.ones(4))
    call(launch, torch.ones(9))
    call(launch, torch.ones(30))
    assert len(gpu["timed"]) == 2 and launch.choices == {(0, True): "two", (0, False): "one"}


def test_without_a_key_each_dtype_and_shape(gpu):
    launch, _ = launcher()
    gpu |= {"one": 9.0, "two": 3.0}
    for shape in ((4,), (2, 2), (4,), (5,)):
        call(launch, torch.ones(shape))
    assert len(gpu["timed"]) == 3 and (0, ((torch.float32, (5,)),) * 2) in launch.choices


def test_other_processes_read_the_disk(gpu, tmp_path):
    launch, ran = launcher()
    gpu |= {"one": 9.0, "two": 3.0}
    call(launch)
    other_process(launch)
    ran.clear()
    call(launch)
    assert ran == [(32, 2)] and len(gpu["timed"]) == 1
    (path,) = (tmp_path / "autotune").iterdir()
    assert json.loads(path.read_text())["microseconds"] == {"one": 9.0, "two": 3.0}
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("what", ["GPU", "NVRTC", "kernel", "configuration"])
def test_what_the_choice_depends_on(gpu, monkeypatch, what):
    launch, _ = launcher()
    gpu |= {"one": 9.0, "two": 3.0}
    call(launch)
    other_process(launch)
    if what == "GPU":
        gpu["name"] = "another GPU"
    elif what == "NVRTC":
        monkeypatch.setattr(backend, "nvrtc_version", lambda: (99, 0))
    elif what == "kernel":
        monkeypatch.setitem(globals(), "twice", cupyops.Kernel("// edited\n" + CODE, "twice<STEP>", STEP=(1, 2)))
    else:
        launch.configs["one"] = dict(block=128, step=1)
    with cupyops.simulate():
        launch.choose(X, torch.empty(50))
    assert len(gpu["timed"]) == 2


def test_a_function_whose_kernels_are_not_seen(gpu):
    """It is tuned all the same."""
    assert tuning._kernels(len) == [] and len(tuning._kernels(launcher()[0])) == 1
    tuned = cupyops.autotune(lambda x, a: a, configs={"one": dict(a=1), "two": dict(a=2)})
    gpu |= {"one": 9.0, "two": 3.0}
    assert tuned(X) == 2


def truncated(content):
    return content[:-9]


def forged(content):
    return content.replace(b'"choice": "two"', b'"choice": "one"')


def of_no_configuration(content):
    return content.replace(b"two", b"six")


def another_shape(content):
    return b"[1, 2]"


@pytest.mark.parametrize("damage", [truncated, forged, of_no_configuration, another_shape])
def test_a_damaged_choice_is_made_again(gpu, tmp_path, damage):
    launch, _ = launcher()
    gpu |= {"one": 9.0, "two": 3.0}
    call(launch)
    (path,) = (tmp_path / "autotune").iterdir()
    good = path.read_bytes()
    path.write_bytes(damage(good))
    other_process(launch)
    call(launch)
    assert len(gpu["timed"]) == 2 and path.read_bytes() == good


def test_a_choice_that_others_may_write_does_not_count(gpu, tmp_path):
    launch, _ = launcher()
    gpu |= {"one": 9.0, "two": 3.0}
    call(launch)
    (path,) = (tmp_path / "autotune").iterdir()
    path.chmod(0o666)
    other_process(launch)
    call(launch)
    assert len(gpu["timed"]) == 2


@pytest.mark.filterwarnings("ignore:the kernel cache .* is not used:UserWarning")
def test_without_a_folder_it_is_kept_in_the_process(gpu, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(tmp_path / "file" / "below"))
    launch, _ = launcher()
    gpu |= {"one": 9.0, "two": 3.0}
    call(launch)
    call(launch)
    assert len(gpu["timed"]) == 1


def test_a_full_disk_is_told(gpu, monkeypatch):
    launch, _ = launcher()
    gpu |= {"one": 9.0, "two": 3.0}

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tuning.cache, "write_record", full)
    with pytest.warns(UserWarning, match="the choice of .*launch cannot be kept in .*No space left"):
        call(launch)
    call(launch)
    assert len(gpu["timed"]) == 1


BROKEN = {"too big a step": dict(block=8, step=8), "too many threads": dict(block=2048, step=1)}


def test_configurations_that_do_not_compile_or_launch_are_left_out(gpu):
    launch, _ = launcher({**BROKEN, **CONFIGS})
    gpu |= {"one": 1.0, "two": 3.0}
    call(launch)
    assert gpu["timed"] == [["one", "two"]] and list(launch.choices.values()) == ["one"]


def test_where_none_launches_each_says_why(gpu):
    launch, _ = launcher(BROKEN)
    with cupyops.simulate(), pytest.raises(CompileError, match="STEP is too big") as caught:
        launch(X, torch.empty(50))
    first, second = caught.value.__notes__[-2:]
    assert "configuration 'too big a step' of" in first and "launch" in first
    assert "'too many threads'" in second and "2048" in second
    assert not launch.choices


def test_any_other_error_is_the_callers(gpu):
    @cupyops.autotune(configs={"fine": dict(parts=1), "wrong": dict(parts=0)})
    def launch(x, *, parts):
        return x.numel() // parts

    with pytest.raises(ZeroDivisionError):
        launch(X)
    assert not launch.choices


def test_mutated_tensors_are_copied_while_timed(gpu):
    @cupyops.autotune(configs=CONFIGS, mutates="x")
    def launch(x, scale=1, *, block, step):
        twice[1, block](x, x, x.numel(), STEP=step)
        return x

    gpu |= {"one": 9.0, "two": 3.0}
    x = torch.arange(20.0)
    with cupyops.simulate():
        assert launch(x) is x
        assert launch(x=torch.ones(20)).tolist() == [2.0] * 20
    assert x.tolist() == (2 * torch.arange(20.0)).tolist() and len(gpu["timed"]) == 1


def test_during_a_capture_nothing_is_timed(gpu):
    launch, ran = launcher()
    gpu |= {"one": 9.0, "two": 3.0, "capturing": True}
    call(launch)
    assert ran == [(64, 1)] and not gpu["timed"] and not launch.choices
    gpu["capturing"] = False
    call(launch)
    other_process(launch)
    gpu["capturing"], ran[:] = True, []
    call(launch)
    assert ran == [(32, 2)], "what the disk knows is taken"


def test_deterministic_algorithms_take_the_first(gpu):
    launch, ran = launcher()
    torch.use_deterministic_algorithms(True, warn_only=True)
    call(launch)
    assert ran == [(64, 1)] and not launch.choices


def test_on_the_cpu_in_the_simulator_and_in_a_dry_run_the_first_runs():
    launch, ran = launcher()
    torch.use_deterministic_algorithms(False)
    call(launch)
    with in_role():
        with FakeTensorMode():
            launch(torch.empty(3, device="cuda"), torch.empty(3, device="cuda"))
        launch(torch.empty(3, device="meta"), torch.empty(3, device="meta"))
    assert ran == [(64, 1)] * 3 and not launch.choices


def test_threads_time_once(gpu):
    launch, _ = launcher()
    gpu |= {"one": 9.0, "two": 3.0}
    barrier = threading.Barrier(6)

    def work(_):
        barrier.wait()
        return launch.choose(X, torch.empty(50))

    with cupyops.simulate(), ThreadPoolExecutor(6) as pool:
        assert set(pool.map(work, range(6))) == {"two"}
    assert len(gpu["timed"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(configs={}), "configs is {}, expected at least one name"),
        (dict(configs=[dict(block=1)]), "expected at least one name"),
        (dict(configs={"a": 3}), "configs has 'a': 3, expected a name and a dictionary"),
        (dict(configs={1: dict(block=3)}), "configs has 1"),
        (dict(configs={"a": dict(blok=3)}), r"configuration 'a' does not fit launch\(x, y, \*, block\): .*'blok'"),
        (dict(configs={"a": dict(block=3)}, mutates=("z",)), "mutates names 'z'; the parameters are x, y, block"),
    ],
)
def test_mistakes_are_told_at_once(options, message):
    def launch(x, y, *, block):
        pass

    launch.__qualname__ = "launch"
    with pytest.raises(InputError, match=message):
        cupyops.autotune(launch, **options)


def test_a_key_that_is_another_in_each_process(gpu):
    launch, _ = launcher(key=lambda x, y: object())
    with pytest.raises(InputError, match="key gives <object object at 0x.*give plain values"):
        launch(X, X)
    launch, _ = launcher(key=lambda x, y: [1])
    with pytest.raises(InputError, match=r"key gives \[1\], which is not hashable"):
        launch(X, X)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, monkeypatch):
    """One configuration does the work a thousand times over."""
    torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(tmp_path))
    slow = cupyops.Kernel(
        "__global__ void add_many(const float* x, float* y, int times, int n) {\n"
        "  const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "  for (int k = 0; k < times; ++k)\n"
        "    if (i < n) atomicExch(&y[i], x[i] + 1);\n"
        "}\n",
        "add_many",
    )

    @cupyops.autotune(configs={"thousandfold": dict(times=1000), "once": dict(times=1), "refused": dict(times=2**40)})
    def launch(x, y, *, times):
        slow[cupyops.ceil_div(x.numel(), 256), 256](x, y, times, x.numel())
        return y

    x = torch.randn(100_000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    assert torch.equal(launch(x, torch.empty_like(x)), x + 1) and list(launch.choices.values()) == ["once"]
    other_process(launch)
    y = torch.zeros_like(x)
    with torch.cuda.graph(graph):
        launch(x, y)
    graph.replay()
    assert torch.equal(y, x + 1) and list(launch.choices.values()) == ["once"]


def test_forked_children_do_not_wait_for_the_parents_locks(monkeypatch):
    monkeypatch.setitem(tuning._locks, "held by another thread", threading.Lock())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork
        pid = os.fork()
    if not pid:
        os._exit(len(tuning._locks))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
