"""The compiled library for pip: tiles/_C.abi3.so, for every Python from 3.10 on.

A plain Extension, not CUDAExtension, which would link libc10, libc10_cuda and libtorch_cuda too:
the stable ABI's functions are in libtorch_cpu. It has no PyInit function and is not imported:
the package loads it with torch.ops.load_library. It uses nothing of Python, hence py_limited_api.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup

# pip runs this file without its folder on the path, and toolchain.py is in it.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import toolchain

toolkit = toolchain.prepare()

from torch.utils import cpp_extension  # noqa: E402

setup(
    ext_modules=[
        Extension(
            "tiles._C",
            ["csrc/binding.cpp", "csrc/tiles.cu"],
            include_dirs=[*cpp_extension.include_paths(), str(toolkit / "include")],
            library_dirs=[*cpp_extension.library_paths(), str(toolchain.cuda_libraries(toolkit))],
            libraries=toolchain.LIBRARIES,
            extra_compile_args={"cxx": toolchain.CXX_FLAGS, "nvcc": toolchain.NVCC_FLAGS},
            py_limited_api=True,
            language="c++",
        )
    ],
    cmdclass={"build_ext": cpp_extension.BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
