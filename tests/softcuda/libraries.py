"""Libraries with CUDA's names, which export what torch's own libraries import.

``runtime/`` has what does something. All else is a stub: it says its name and returns an error, or, of a library whose
functions compute, does nothing and returns that all is well.
"""
from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import softcuda
from .kept import Missing, whole

HERE = Path(__file__).resolve().parent
RUNTIME = HERE / "runtime"
#: Of it, what replaces torch's kernels, and needs its headers; what all libraries but the runtime have; the runtime.
OPS, OTHERS = RUNTIME / "ops.cpp", RUNTIME / "others.cpp"
OWN = [file for file in sorted(RUNTIME.glob("*.cpp")) if file not in (OPS, OTHERS)]
#: By its name what each library's functions begin with, where torch names no version, and what a stub returns.
LIBRARIES = {
    softcuda.RUNTIME: ("cuda", 801),
    "libcublas.so.13": ("cublas", 0),
    "libcublasLt.so.13": ("cublasLt", 0),
    "libcudnn.so.9": ("cudnn", 3000),
    "libcusparse.so.12": ("cusparse", 10),
    "libcusolver.so.12": ("cusolver", 7),
    "libcufft.so.12": ("cufft", 16),
    "libcufile.so.0": ("cuFile", 5001),
    "libcusparseLt.so.0": ("cusparseLt", 10),
    "libnccl.so.2": ("nccl", 3),
    "libcurand.so.10": ("curand", 201),
    "libnvrtc.so.13": ("nvrtc", 4),
    "libcupti.so.13": ("cupti", 15),
    "libnvshmem_host.so.3": ("nvshmem", 1),
    "libcuda.so.1": ("cu", 801),
}
#: Names of versions that are not the library's own.
VERSIONS = {"NVSHMEM": "libnvshmem_host.so.3"}
TEXTS = re.compile(r"(GetErrorString|GetResultString|GetStatusString|ncclGetLastError)$")
#: In front of a library's stubs. Weak: what runtime/ has of the same name takes a stub's place.
HEAD = """
#include <cstdio>

static long missing(const char* name, long error) { return fprintf(stderr, "softcuda: %s is a stub\\n", name), error; }
#define STUB extern "C" __attribute__((weak, visibility("default")))
"""


def sources() -> list[Path]:
    """All that the libraries are made from."""
    return sorted([*RUNTIME.iterdir(), HERE / "libraries.py", HERE / "softcuda.py"])


def built(torch: Path, cache: Path) -> Path:
    """The folder with the libraries, built now unless they were before: one for each torch, compiler and source.

    ``torch`` is the package's folder in the unpacked wheel, whose parent's name says which one it is.
    """
    compiler, _ = tools()
    key = hashlib.sha256(f"{torch.parent.name} {_said(compiler, '--version')}".encode())
    for file in sources():
        key.update(file.name.encode() + file.read_bytes())
    folder = cache / f"libraries-{torch.parent.name}-{key.hexdigest()[:12]}"
    return whole(folder, lambda room: build(torch, room, compiler), "builds the fake CUDA runtime, a minute or two")


def build(torch: Path, room: Path, compiler: str) -> None:
    """Builds all of them into the folder."""
    needed = imports(sorted((torch / "lib").glob("lib*.so")))
    stubbed(softcuda.RUNTIME, needed.pop(softcuda.RUNTIME), room, compiler, OWN)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(ops, torch, room, compiler)]
        jobs += [pool.submit(stubbed, library, names, room, compiler, [OTHERS]) for library, names in needed.items()]
        for job in jobs:
            job.result()
    shutil.copy(HERE / "softcuda.py", room)


def imports(libraries: Sequence[Path]) -> dict[str, set[str]]:
    """What the libraries import from each one of CUDA's: by the version of a name, or else by how it begins."""
    needed: dict[str, set[str]] = {name: set() for name in LIBRARIES}
    _, nm = tools()
    for library in libraries:
        for line in _said(nm, "-D", "--undefined-only", "--with-symbol-versions", str(library)).splitlines():
            kind, full = line.split()[-2:]
            name, _, version = full.partition("@")
            owner = VERSIONS.get(version, version)
            if not version and kind == "U":
                owner = _owner(name)
            if owner in needed:
                needed[owner].add(name)
    return needed


def _owner(name: str) -> str:
    """The library whose functions begin as this name does: the longest beginning decides."""
    fits = [(len(prefix), library) for library, (prefix, _) in LIBRARIES.items()
            if re.match(prefix + "[A-Z_]", name) and not name.startswith("cudaLib")]
    return max(fits)[1] if fits else ""


def stub(name: str, error: int) -> str:
    """The source of what stands for a function that nobody has written."""
    if TEXTS.search(name):
        return f'STUB const char* {name}(int) {{ return "an error of softcuda\'s stub"; }}'
    if error == 0:
        return f"STUB int {name}() {{ return 0; }}"
    return f'STUB long {name}() {{ return missing("{name}", {error}); }}'


def stubbed(library: str, names: set[str], room: Path, compiler: str, beside: Sequence[Path]) -> None:
    """Builds one library of CUDA's, which exports these names: of these sources, or stubs."""
    first, error = library == softcuda.RUNTIME, LIBRARIES[library][1]
    version = {owner: name for name, owner in VERSIONS.items()}.get(library, library)
    if library == "libcuda.so.1":
        version = ""  # The driver's functions have none.
    exported = "".join(f"{name}; " for name in sorted(names | ({"softcuda_*"} if first else set())))
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stubs.cpp"), Path(folder, "map")
        source.write_text("\n".join([HEAD, *(stub(name, error) for name in sorted(names)), ""]))
        script.write_text(f"{version} {{ {'global: ' * bool(exported)}{exported}local: *; }};\n")
        links = [] if first else [f"-L{room}", f"-l:{softcuda.RUNTIME}", "-Wl,-rpath,$ORIGIN"]
        compiled(compiler, "-O2", *map(str, [source, *beside]), "-o", str(room / library),
                 f"-Wl,-soname,{library}", f"-Wl,--version-script={script}", *links)


def ops(torch: Path, room: Path, compiler: str) -> None:
    """Builds what replaces torch's kernels."""
    compiled(compiler, "-O1", f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", str(OPS),
             "-o", str(room / softcuda.OPS), f"-L{torch}/lib", "-ltorch_cpu", "-lc10", "-lc10_cuda",
             f"-L{room}", f"-l:{softcuda.RUNTIME}", "-Wl,--allow-shlib-undefined")


def compiled(compiler: str, *words: str) -> None:
    """Compiles and links a shared library."""
    _said(compiler, "-std=c++20", "-fPIC", "-shared", "-w", *words)


def tools() -> tuple[str, str]:
    """Where the compiler is, and nm."""
    names = os.environ.get("CXX", "g++"), "nm"
    found = [shutil.which(name) for name in names]
    lacking = [name for name, path in zip(names, found) if path is None]
    if lacking:
        raise Missing(
            f"found no {' and no '.join(lacking)}: expected a C++ compiler and binutils to build the fake CUDA runtime "
            "with. Install them (with apt-get install g++ binutils, say), or name another compiler in the environment "
            "variable CXX."
        )
    return str(found[0]), str(found[1])


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"{command[0]} failed with exit status {done.returncode}:\n{done.stderr}\n{' '.join(command)}")
    return done.stdout
