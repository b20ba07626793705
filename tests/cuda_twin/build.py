"""Builds the stub libraries for the PyTorch of this environment, and makes each of its Pythons load them at its start.

    .venv-twin/bin/python tests/cuda_twin/build.py          # half a minute; takes g++ and binutils

Each stub has the name of a library that PyTorch's CUDA build needs. Loaded first, it is taken for that library. Symbols
that PyTorch's libraries ask for and no source here defines become functions that are counted (`twin.notes`) and give 0
or an error. They get the versions that are asked for.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = Path(sys.prefix) / "lib/cuda_twin"
PTH = Path(sysconfig.get_path("purelib")) / "cuda_twin.pth"
# Name of the library: its sources, pattern of its symbols without a version, what functions give that nobody defines.
LIBRARIES: dict[str, tuple[list[str], str | None, int]] = {
    "libcudart.so.13": (["device.cpp", "runtime.cpp"], "cuda[A-Z]|__cuda", 801),
    "libcuda.so.1": (["driver.cpp"], "cu[A-Z][a-z]+(?<!cuFile)", 801),
    "libnvidia-ml.so.1": (["nvml.cpp"], None, 3),
    "libcublasLt.so.13": (["blaslt.cpp"], None, 15),
    "libcublas.so.13": (["blas.cpp"], None, 0),
    "libcudnn.so.9": (["dnn.cpp"], None, 0),
    "libcusparse.so.12": ([], None, 10),
    "libcusparseLt.so.0": ([], "cusparseLt", 10),
    "libcusolver.so.12": ([], None, 0),
    "libcufft.so.12": ([], None, 0),
    "libcufile.so.0": ([], "cuFile", 5000),
    "libnccl.so.2": ([], "nccl|pnccl", 3),
    "libcupti.so.13": ([], None, 999),
    "libnvshmem_host.so.3": ([], "nvshmem", 0),
    "libcurand.so.10": ([], None, 0),
}


def site() -> Path:
    """The folder that PyTorch and NVIDIA's packages are installed in."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "PyTorch is not installed"
    return Path(spec.origin).parents[1]


def needed_symbols() -> set[tuple[str, str]]:
    """(symbol, version) of what PyTorch and Triton leave to other libraries. The version may be empty."""
    found = set()
    for library in (site() / "torch/lib").glob("*.so"):
        listed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
        for line in listed.stdout.splitlines():
            name, _, version = line.split()[-1].partition("@")
            found.add((name, version.strip("@")))
    launcher = site() / "triton/backends/nvidia/driver.c"
    return found | {(name, "") for name in re.findall(r"\bcu[A-Z]\w+", launcher.read_text())}


def stub(name: str, code: int) -> str:
    """The source of a function that does nothing."""
    if re.search("GetErrorString|GetErrorName|GetLastError$", name) and "cuda" not in name:
        return f'__attribute__((weak)) const char* {name}() {{ return ""; }}'
    return f'__attribute__((weak)) intptr_t {name}() {{ twin_note("{name}"); return {code}; }}'


def build(library: str, symbols: set[tuple[str, str]]) -> None:
    sources, pattern, code = LIBRARIES[library]
    by_version = defaultdict(list)
    for name, version in sorted(symbols):
        own = version == library or (version.startswith("NVSHMEM") and "nvshmem" in library)
        if own or (not version and pattern and re.match(pattern, name)):
            by_version[version].append(name)
    functions = OUT / f"{library}.c"
    names = sorted({name for names in by_version.values() for name in names})
    functions.write_text(
        "\n".join(["#include <stdint.h>", "void twin_note(const char*);", *(stub(n, code) for n in names)])
    )
    versions = {v: " ".join(f"{n};" for n in names) for v, names in by_version.items() if v}
    if (
        library == "libcudart.so.13"
    ):  # its own functions have the version as well, those of the device are for the others
        versions = {library: "cuda*; __cuda*; twin_*; local: *;"}
    script = OUT / f"{library}.map"
    script.write_text("".join(f"{version} {{ global: {names} }};\n" for version, names in versions.items()))
    objects = []
    for source in [*(HERE / "src" / s for s in sources), functions]:
        compiler = ["g++", "-std=c++17"] if source.suffix == ".cpp" else ["gcc"]
        objects.append(OUT / f"{library}.{source.stem}.o")
        include = ["-I", site() / "nvidia/cu13/include", "-I", HERE / "src"]
        subprocess.run([*compiler, "-O1", "-w", "-fPIC", *include, "-c", source, "-o", objects[-1]], check=True)
    link = ["g++", "-shared", "-o", OUT / library, f"-Wl,-soname,{library}", *objects, "-ldl", "-lpthread"]
    link += [f"-Wl,--version-script={script}"] * bool(versions)
    link += [OUT / "libcudart.so.13", f"-Wl,-rpath,{OUT}"] * (library != "libcudart.so.13")
    subprocess.run(link, check=True)


def build_tracker() -> None:
    """The library that notes what the caching allocator and PyTorch's ops do, which is loaded when it is asked for."""
    torch = site() / "torch"
    include = [
        torch / "include",
        torch / "include/torch/csrc/api/include",
        site() / "nvidia/cu13/include",
        HERE / "src",
    ]
    command = [
        "g++",
        "-std=c++20",
        "-DNDEBUG",
        "-O1",
        "-w",
        "-fPIC",
        "-shared",
        *(w for folder in include for w in ("-I", folder)),
    ]
    command += [HERE / "src/tracker.cpp", f"-L{torch}/lib", "-lc10", "-lc10_cuda", "-ltorch_cpu"]
    subprocess.run([*command, OUT / "libcudart.so.13", "-o", OUT / "tracker.so"], check=True)


def main() -> None:
    PTH.unlink(missing_ok=True)
    OUT.mkdir(parents=True, exist_ok=True)
    symbols = needed_symbols()
    for library in LIBRARIES:
        build(library, symbols)
    build_tracker()
    settings = {"TRITON_LIBCUDA_PATH": str(OUT), "PYTORCH_NVML_BASED_CUDA_CHECK": "0"}
    libraries = [str(OUT / library) for library in LIBRARIES]
    load = f"list(map(ctypes.CDLL, {libraries}, [ctypes.RTLD_GLOBAL] * {len(libraries)}))"
    PTH.write_text(f"import ctypes, os; os.environ.update({settings}); {load}\n")


if __name__ == "__main__":
    main()
