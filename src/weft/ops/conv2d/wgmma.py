"""Host code of conv2d_wgmma.cu: convolution of half types by Hopper's tensor cores and copy engine.

conv2d_prepare.cu first copies images and weights so that the channels of a pixel are adjacent. Images that
already are so (channels last) are read as they lie. So are images for a window of one place, whose pixels
are adjacent.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from weft.backends.nvrtc import CudaSource
from weft.machine.device_limits import num_sms
from weft.ops._common.hopper import tensor_map
from weft.ops._common.hopper.tensor_map import TensorMap
from weft.ops._common.layout import CUDA_TYPES, HALF_DTYPES, dtype_name

ARCH = 90  # wgmma exists on sm_90a alone
THREADS, PREPARE_THREADS, WARP = 384, 256, 32
ATOM = 8  # pixels of a row of a tile come in whole atoms; channels and pixels of a thread that prepares
CHUNK, STEP_CHANNELS = 64, 16  # channels of a box, and of one product
BUFFERS_BYTES, BARRIER_BYTES = 2 * 2 * 64 * 128, 16  # of both groups; of a stage
A_STAGES = 4
# By pixel groups: outputs of a block, and pixels and stages of a tile of b. 0: a window of one place.
OUTPUTS, B_ROWS, B_STAGES = {0: 128, 1: 128, 2: 64}, {1: 336, 2: 576}, {0: 4, 1: 3, 2: 2}
WIDTHS, POINTWISE_WIDTHS = (64, 128, 192, 224, 256), (64, 128, 192, 256)
# Estimates that compare configurations, not measured: clocks of a tile's start and end; bytes of the L2 cache
# that an SM gets a clock; clocks of a copy, however small.
TILE_CLOCKS, L2_BYTES_A_CLOCK, COPY_CLOCKS = 2000, 32, 100
LIMIT = 1 << 31


class ConvArguments(ctypes.Structure):
    """``ConvArguments`` of conv2d_wgmma.cu."""

    _fields_ = (
        ("x", TensorMap),
        ("weight", TensorMap),
        ("y", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("outputs", "rows", "columns", "tall", "wide")),
        *((name, ctypes.c_int) for name in ("down", "across", "output_blocks", "units")),
        *((name, ctypes.c_int) for name in ("window_rows", "window_columns", "padding", "chunks")),
        ("row_group", ctypes.c_int),
        ("reserved", ctypes.c_int * 16),  # the structure is aligned to 64 bytes
    )


class PrepareArguments(ctypes.Structure):
    """``PrepareArguments`` of conv2d_prepare.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "to", "weight", "packed")),
        *((name, ctypes.c_longlong) for name in ("image_stride", "channel_stride", "row_stride")),
        *((name, ctypes.c_int) for name in ("images", "channels", "padded", "height", "width")),
        *((name, ctypes.c_int) for name in ("outputs", "places", "image_blocks", "channel_lanes")),
        *((name, ctypes.c_int) for name in ("channel_tiles", "pixel_tiles", "wide")),
    )


class Program(NamedTuple):
    """``pixels`` of a group's product; ``groups`` of pixels, 0 for a window of one place; products a step."""

    pixels: int
    groups: int
    steps: int

    @property
    def smem_bytes(self) -> int:
        a, b = A_STAGES * OUTPUTS[self.groups], B_STAGES[self.groups] * B_ROWS.get(self.groups, self.pixels)
        return (a + b) * 128 + BUFFERS_BYTES + BARRIER_BYTES * (A_STAGES + B_STAGES[self.groups])


class Tiling(NamedTuple):
    """``tall`` rows of ``wide`` pixels for each group; rows of the window that a tile of b serves."""

    program: Program
    tall: int
    wide: int
    row_group: int


@cache
def source(dtype: torch.dtype, program: Program) -> CudaSource:
    defines = {
        "WEFT_T": CUDA_TYPES[dtype],
        "BN": program.pixels,
        "PIXEL_GROUPS": max(program.groups, 1),
        "POINTWISE": int(program.groups == 0),
        "KSTEPS": program.steps,
    }
    return CudaSource(
        file=Path(__file__).with_name("conv2d_wgmma.cu"),
        kernels=("conv2d",),
        defines=tuple((name, str(value)) for name, value in defines.items()),
        label=f"wgmma-{dtype_name(dtype)}-{program.pixels}-{program.groups}-{program.steps}",
        min_arch=ARCH,
        max_arch=ARCH,
    )


@cache
def prepare_source(dtype: torch.dtype) -> CudaSource:
    return CudaSource(
        file=Path(__file__).with_name("conv2d_prepare.cu"),
        kernels=("conv2d_prepare",),
        defines=(("WEFT_T", CUDA_TYPES[dtype]),),
        label=f"prepare-{dtype_name(dtype)}",
        min_arch=ARCH,  # where its only user runs
        max_arch=ARCH,
    )


def supports(x: torch.Tensor, weight: torch.Tensor, padding: int) -> bool:
    """Return True for half types whose sizes are within the copy engine's 32-bit coordinates."""
    outputs, places = weight.shape[0], weight.shape[2] * weight.shape[3]
    pixels = x.shape[0] * (x.shape[2] + 2 * padding) * (x.shape[3] + 2 * padding)
    # Rows of the weights, at least as many numbers as tiles of a call, and as warps that prepare images.
    sizes = (outputs * places, pixels * -(-outputs // 64), pixels * -(-x.shape[1] // CHUNK))
    return x.dtype in HALF_DTYPES and max(sizes) < LIMIT // 2


@lru_cache(maxsize=4096)
def choose(
    images: int,
    channels: int,
    outputs: int,
    rows: int,
    columns: int,
    window: tuple[int, int],
    is_pointwise: bool,
    sms: int,
) -> Tiling:
    """Return the tiling that costs least by an estimate of products, loads and waves."""
    steps = min(CHUNK // STEP_CHANNELS, 1 << max(0, (-(-channels // STEP_CHANNELS) - 1).bit_length()))

    def cost(tiling: Tiling) -> tuple[float, int]:
        program, tall, wide, row_group = tiling
        groups = max(program.groups, 1)
        tiles = images * -(-rows // (tall * groups)) * -(-columns // wide)
        waves = -(-tiles * -(-outputs // OUTPUTS[program.groups]) // sms)
        places = -(-channels // CHUNK) * window[0] * window[1]
        lines = places * (groups * tall + row_group - 1) / row_group  # of b that a tile loads
        loads = lines * max(wide * 128 / L2_BYTES_A_CLOCK, COPY_CLOCKS)
        loads += places * OUTPUTS[program.groups] * 128 / L2_BYTES_A_CLOCK
        products = places * program.steps * program.pixels
        return waves * (max(products, loads) + TILE_CLOCKS), program.pixels

    if is_pointwise:
        programs = [Program(pixels, 0, steps) for pixels in POINTWISE_WIDTHS]
        return min((Tiling(p, 1, p.pixels, 1) for p in programs), key=cost)
    tilings = []
    for groups in (1, 2):
        for pixels in WIDTHS:
            for wide in range(ATOM, min(pixels, -(-columns // ATOM) * ATOM) + 1, ATOM):
                tall = min(pixels // wide, -(-rows // groups))
                row_group = min(window[0], B_ROWS[groups] // wide - groups * tall + 1)
                tilings.append(Tiling(Program(pixels, groups, steps), tall, wide, row_group))
    return min(tilings, key=cost)


def is_pointwise(x: torch.Tensor, weight: torch.Tensor, padding: int) -> bool:
    """Return True if images are matrices (channels, pixels) that the copy engine reads as they lie."""
    has_one_place = tuple(weight.shape[2:]) == (1, 1) and padding == 0
    return has_one_place and x.shape[1] % ATOM == 0 and has_adjacent_pixels(x)


def has_adjacent_pixels(x: torch.Tensor) -> bool:
    """Return True if the pixels of an image are adjacent, and each 8 of them 16 aligned bytes."""
    area, rows_are_adjacent = x.shape[2] * x.shape[3], x.stride(2) == x.shape[3] or x.shape[2] == 1
    strides = [s for s, size in zip(x.stride()[:2], x.shape[:2], strict=True) if size > 1]
    is_aligned = x.data_ptr() % 16 == 0 and area % ATOM == 0 and all(s > 0 and s % ATOM == 0 for s in strides)
    return is_aligned and rows_are_adjacent and (x.stride(3) == 1 or x.shape[3] == 1)


def forward(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, padding: int) -> None:
    """Write the convolution to ``y``, contiguous and not empty; see :func:`supports`."""
    pointwise = is_pointwise(x, weight, padding)
    images, outputs, rows, columns = y.shape
    window = (weight.shape[2], weight.shape[3])
    if pointwise:
        rows, columns = 1, rows * columns
    sms = num_sms(x.device)
    program, tall, wide, row_group = choose(
        images, x.shape[1], outputs, rows, columns, window, pointwise, sms
    )
    if pointwise:
        pixels = x.as_strided((1, images, x.shape[1], columns), (0, x.stride(0), x.stride(1), 1))
        image_map = tensor_map.encode_heads(pixels, CHUNK)
        is_aligned = weight.is_contiguous() and weight.data_ptr() % 16 == 0
        packed = weight if is_aligned else weight.clone(memory_format=torch.contiguous_format)
        packed = packed.view(outputs, x.shape[1])
    else:
        pixels, packed = prepare(x, weight)
        image_map = tensor_map.encode_heads(pixels, wide)
    groups = max(program.groups, 1)
    down, across = -(-rows // (tall * groups)), -(-columns // wide)
    output_blocks = -(-outputs // OUTPUTS[program.groups])
    arguments = ConvArguments(
        x=image_map,
        weight=tensor_map.encode(packed, OUTPUTS[program.groups]),
        y=y.data_ptr(),
        outputs=outputs,
        rows=rows,
        columns=columns,
        tall=tall,
        wide=wide,
        down=down,
        across=across,
        output_blocks=output_blocks,
        units=images * down * across * output_blocks,
        window_rows=window[0],
        window_columns=window[1],
        padding=padding,
        chunks=-(-x.shape[1] // CHUNK),
        row_group=row_group,
    )
    kernel = source(x.dtype, program)["conv2d"]
    kernel(min(arguments.units, sms), THREADS, arguments, shared=program.smem_bytes)


def prepare(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (N, H, W, C) that the copy engine reads, and weights (R S O, C padded to 8).

    Images are a copy, padded likewise, unless their channels are adjacent already.
    """
    images, channels, height, width = x.shape
    outputs, places = weight.shape[0], weight.shape[2] * weight.shape[3]
    padded = -(-channels // ATOM) * ATOM
    to = x.permute(0, 2, 3, 1)
    is_ready = channels == padded and tensor_map.fits_heads(to)
    lanes = min(8, 1 << (padded // ATOM - 1).bit_length())
    pixel_tiles = -(-height * width // (WARP // lanes * ATOM))
    channel_tiles = -(-padded // (lanes * ATOM))
    blocks = 0
    if not is_ready:
        x = x if x.stride(3) == 1 or width == 1 else x.contiguous()
        to = x.new_empty(images, height, width, padded)
        blocks = -(-images * pixel_tiles * channel_tiles // (PREPARE_THREADS // WARP))
    packed = weight.new_empty(places * outputs, padded)
    weight = weight.contiguous()
    arguments = PrepareArguments(
        x=x.data_ptr(),
        to=to.data_ptr(),
        weight=weight.data_ptr(),
        packed=packed.data_ptr(),
        image_stride=x.stride(0),
        channel_stride=x.stride(1),
        row_stride=x.stride(2),
        images=images,
        channels=channels,
        padded=padded,
        height=height,
        width=width,
        outputs=outputs,
        places=places,
        image_blocks=blocks,
        channel_lanes=lanes,
        channel_tiles=channel_tiles,
        pixel_tiles=pixel_tiles,
        wide=int(has_adjacent_pixels(x)),
    )
    weight_blocks = -(-outputs * padded // PREPARE_THREADS)
    kernel = prepare_source(x.dtype)["conv2d_prepare"]
    kernel(blocks + weight_blocks, PREPARE_THREADS, arguments)
    return to, packed


def aot_kernels() -> tuple[CudaSource, ...]:
    """Return programs of each number of groups and each width."""
    programs = [Program(224, 1, 4), Program(256, 1, 4), Program(224, 2, 4), Program(256, 2, 1)]
    programs += [Program(128, 1, 2), Program(64, 2, 1), Program(192, 0, 4), Program(256, 0, 4)]
    sources = [source(dtype, program) for dtype in HALF_DTYPES for program in programs]
    return (*sources, *(prepare_source(dtype) for dtype in HALF_DTYPES))
