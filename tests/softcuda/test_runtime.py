"""The fake runtime by itself, built from its sources and called as torch calls it."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.softcuda import libraries, softcuda
from tests.softcuda.kept import Missing

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(
    sys.platform != "linux" or shutil.which(os.environ.get("CXX", "g++")) is None or shutil.which("nm") is None,
    reason="needs Linux, g++ (or another C++ compiler named in CXX) and nm",
)]
#: Of the runtime, as far as these tests go, with a function that nobody has written.
NAMES = {"cudaMalloc", "cudaFree", "cudaMemcpyAsync", "cudaStreamCreateWithFlags", "cudaStreamWaitEvent",
         "cudaEventCreateWithFlags", "cudaEventRecord", "cudaStreamSynchronize", "cudaEventQuery", "cudaGraphLaunch",
         "cudaSetDevice", "cudaGetErrorString", "cudaDeviceCanAccessPeer"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runtime and cuBLAS."""
    room = tmp_path_factory.mktemp("libraries")
    compiler, _ = libraries.tools()
    libraries.stubbed(softcuda.RUNTIME, NAMES, room, compiler, libraries.OWN)
    names = {"cublasGetVersion_v2", "cublasSgemm_v2", "cublasGetStatusString"}
    libraries.stubbed("libcublas.so.13", names, room, compiler, [libraries.OTHERS])
    return room


Told = Callable[..., str]


@pytest.fixture
def told(folder: Path) -> Told:
    """What a process prints that has loaded the runtime as ``cuda``."""
    def run(source: str, errors: bool = False, **variables: str) -> str:
        begin = f"import ctypes\ncuda = ctypes.CDLL({str(folder / softcuda.RUNTIME)!r})\nP = ctypes.c_void_p\n"
        done = subprocess.run([sys.executable, "-c", begin + source], capture_output=True, text=True, check=True,
                              env={**os.environ, **variables})
        return done.stderr if errors else done.stdout

    return run


#: Writes on two streams to one place, in between what a test puts there.
WRITES = """
def made(function, *more):
    out = P()
    assert function(ctypes.byref(out), *more) == 0
    return out

a, b = [made(cuda.cudaStreamCreateWithFlags, 1) for _ in range(2)]
x, y = [made(cuda.cudaMalloc, ctypes.c_size_t(4096)) for _ in range(2)]
event = made(cuda.cudaEventCreateWithFlags, 2)

def copy(stream, to=0, size=64):
    cuda.cudaMemcpyAsync(P(x.value + to), y, ctypes.c_size_t(size), 3, stream)

copy(a)
cuda.cudaEventRecord(event, a)
MEANWHILE
cuda.softcuda_hazards.restype = ctypes.c_char_p
print(cuda.softcuda_hazards().decode())
"""
HAZARD = "1 write after write: memcpy on stream 1 of cuda:0 does not wait for memcpy on stream 0 of cuda:0"


@pytest.mark.parametrize(("meanwhile", "expected"), [
    ("copy(b)", HAZARD),
    ("copy(b, to=63)", HAZARD),
    ("copy(b, to=64)", ""),
    ("cuda.cudaStreamWaitEvent(b, event, 0); copy(b)", ""),
    ("copy(a); cuda.cudaStreamWaitEvent(b, event, 0); copy(b)", HAZARD),
    ("cuda.cudaStreamSynchronize(a); copy(b)", ""),
    ("cuda.cudaEventQuery(event); copy(b)", HAZARD),
    ("cuda.cudaFree(made(cuda.cudaMalloc, ctypes.c_size_t(4096))); copy(b)", ""),
], ids=["at once", "one byte", "beside", "an event", "an earlier event", "the host", "a query", "other memory freed"])
def test_two_writes_are_a_hazard_unless_something_orders_them(meanwhile: str, expected: str, told: Told) -> None:
    found = told(WRITES.replace("MEANWHILE", meanwhile), SOFTCUDA_HAZARDS="2", SOFTCUDA_LAG="1000")
    assert found.strip() == expected


def test_a_hazard_is_said_when_it_is_found(told: Told) -> None:
    assert told(WRITES.replace("MEANWHILE", "copy(b)"), errors=True, SOFTCUDA_HAZARDS="1").startswith("softcuda: write")


def test_memory_ends_where_the_device_ends(told: Told) -> None:
    asked = "out = P()\nprint(*[cuda.cudaMalloc(ctypes.byref(out), ctypes.c_size_t(600 << 10)) for _ in range(2)])"
    assert told(asked, SOFTCUDA_MEMORY_MIB="1").split() == ["0", "2"]


def test_devices_are_as_many_as_are_visible(told: Told) -> None:
    asked = "print(*[cuda.cudaSetDevice(number) for number in range(4)])"
    assert told(asked, SOFTCUDA_DEVICES="3").split() == ["0", "0", "0", "101"]
    assert told(asked, SOFTCUDA_DEVICES="3", CUDA_VISIBLE_DEVICES="0,2,7").split() == ["0", "0", "101", "101"]


def test_the_first_devices_reach_each_others_memory(told: Told) -> None:
    each = "cuda.cudaDeviceCanAccessPeer(ctypes.byref(out), *pair); print(out.value)"
    asked = f"out = ctypes.c_int()\nfor pair in (0, 1), (2, 0), (1, 1): {each}"
    assert told(asked, SOFTCUDA_DEVICES="3").split() == ["1", "1", "0"]
    assert told(asked, SOFTCUDA_DEVICES="3", SOFTCUDA_PEERS="2").split() == ["1", "0", "0"]


def test_what_nobody_has_written_says_its_name_and_fails(told: Told) -> None:
    assert told("print(cuda.cudaGraphLaunch())").strip() == "801"
    assert told("cuda.cudaGraphLaunch()", errors=True).strip() == "softcuda: cudaGraphLaunch is a stub"


def test_a_library_has_what_is_written_in_place_of_stubs(folder: Path, told: Told) -> None:
    source = f"""
cublas, version = ctypes.CDLL({str(folder / "libcublas.so.13")!r}), ctypes.c_int()
print(cublas.cublasSgemm_v2(), cublas.cublasGetVersion_v2(None, ctypes.byref(version)), version.value)
print(hasattr(cublas, "cudnnGetVersion"))
"""
    assert told(source).split() == ["0", "0", "130000", "False"]  # The last one is of another library.


def test_imports_go_to_the_library_of_their_version_or_else_of_their_name(folder: Path, tmp_path: Path) -> None:
    source, made = tmp_path / "it.cpp", tmp_path / "libit.so"
    names = ("cudaMalloc", "cublasLtCreate", "cublasCreate_v2", "cuInit", "cudnnCreate", "custom", "cudaLibraryLoad")
    calls = "".join(f'extern "C" int {name}();\nint call_{name}() {{ return {name}(); }}\n' for name in names)
    source.write_text(calls)
    compiler, _ = libraries.tools()
    libraries.compiled(compiler, str(source), "-o", str(made), f"-L{folder}", f"-l:{softcuda.RUNTIME}")
    found = {library: its for library, its in libraries.imports([made]).items() if its}
    assert found == {
        softcuda.RUNTIME: {"cudaMalloc"},  # By its version: it was linked with the runtime.
        "libcublasLt.so.13": {"cublasLtCreate"}, "libcublas.so.13": {"cublasCreate_v2"}, "libcuda.so.1": {"cuInit"},
        "libcudnn.so.9": {"cudnnCreate"},
    }


def test_what_the_compiler_says_is_told(tmp_path: Path) -> None:
    source = tmp_path / "it.cpp"
    source.write_text("no such thing")
    with pytest.raises(Missing, match="failed with exit status 1:\n.*it.cpp"):
        libraries.compiled(libraries.tools()[0], str(source), "-o", str(tmp_path / "it.so"))
