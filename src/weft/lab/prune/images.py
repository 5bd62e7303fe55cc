"""Images of the pruning experiment: digits drawn here, or a user's own set.

A drawn digit is a line through a few points, moved, turned, sheared and scaled at random, with random
points, stroke width and contrast, two strokes of clutter and noise. Train and test images are drawn from
different streams of one seed, so that no test image is trained on.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import WeftError
from weft.core.json_files import regular_size

SIDE = 16  # pixels of a drawn image's side
CLUTTER = 2  # strokes in each image that belong to no digit
NOISE = 0.25  # standard deviation of each pixel's noise; ink is 1 and paper is 0
CHUNK = 500  # images that are drawn at once
MAX_FILE = 1 << 30  # bytes of a user's set, also after decompression
# The line of each digit: x to the right, y down, in a square from -1 to 1.
DIGITS: tuple[tuple[tuple[float, float], ...], ...] = (
    ((0, -0.9), (0.5, -0.6), (0.6, 0), (0.5, 0.6), (0, 0.9), (-0.5, 0.6), (-0.6, 0), (-0.5, -0.6), (0, -0.9)),
    ((-0.35, -0.55), (0.05, -0.9), (0.05, 0.9)),
    ((-0.5, -0.55), (-0.2, -0.9), (0.3, -0.85), (0.5, -0.45), (0.2, 0.1), (-0.55, 0.9), (0.6, 0.9)),
    ((-0.5, -0.85), (0.45, -0.85), (0, -0.15), (0.5, 0.2), (0.4, 0.75), (-0.1, 0.9), (-0.55, 0.65)),
    ((0.3, 0.9), (0.3, -0.9), (-0.55, 0.35), (0.65, 0.35)),
    ((0.5, -0.9), (-0.4, -0.9), (-0.45, -0.1), (0.2, -0.2), (0.55, 0.2), (0.35, 0.8), (-0.5, 0.8)),
    (
        (0.4, -0.9),
        (-0.2, -0.4),
        (-0.5, 0.3),
        (-0.25, 0.85),
        (0.3, 0.85),
        (0.5, 0.4),
        (0.2, 0.05),
        (-0.45, 0.3),
    ),
    ((-0.55, -0.9), (0.55, -0.9), (0.15, 0), (-0.1, 0.9)),
    ((0, 0), (0.4, -0.4), (0, -0.9), (-0.4, -0.4), (0, 0), (0.5, 0.45), (0, 0.9), (-0.5, 0.45), (0, 0)),
    ((0.45, -0.35), (0.05, -0.05), (-0.4, -0.35), (-0.2, -0.85), (0.35, -0.8), (0.45, -0.35), (0.2, 0.9)),
)
Floats = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """Train and test images as rows of features (count, features), with their classes (count,).

    ``name`` says where they come from, for the report and its record.
    """

    train_x: Floats
    train_y: Labels
    test_x: Floats
    test_y: Labels
    classes: int
    name: str

    @property
    def features(self) -> int:
        return int(self.train_x.shape[1])


def drawn_digits(train: int, test: int, seed: int) -> ImageSet:
    """Draw ``train`` and ``test`` digits; the same seed draws the same pixels."""
    streams = [np.random.default_rng((seed, part)) for part in range(2)]
    train_x, train_y = _draw(train, streams[0])
    test_x, test_y = _draw(test, streams[1])
    return ImageSet(
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        classes=len(DIGITS),
        name=f"digits drawn here, {SIDE}x{SIDE} pixels",
    )


def _draw(count: int, rng: np.random.Generator) -> tuple[Floats, Labels]:
    labels = np.arange(count) % len(DIGITS)  # each class equally often, to one image
    rng.shuffle(labels)
    images = [_draw_chunk(labels[i : i + CHUNK], rng) for i in range(0, count, CHUNK)]
    return np.concatenate(images), labels.astype(np.int64)


def _draw_chunk(labels: NDArray[Any], rng: np.random.Generator) -> Floats:
    """Return the images (count, SIDE * SIDE) of these digits."""
    count = len(labels)
    longest = max(map(len, DIGITS))
    # A shorter line ends in repeated points, whose segments have no length and add no ink.
    lines = np.array([[*line, *[line[-1]] * (longest - len(line))] for line in DIGITS])
    points = lines[labels] + rng.normal(0, 0.07, (count, longest, 2))
    ends = points[np.arange(count), [len(DIGITS[label]) - 1 for label in labels]]
    for index, label in enumerate(labels):
        points[index, len(DIGITS[label]) :] = ends[index]
    angle, shear = rng.normal(0, 0.22, count), rng.normal(0, 0.2, count)
    scale = rng.uniform(0.55, 0.85, (count, 2))
    cos, sin = np.cos(angle), np.sin(angle)
    turn = np.stack([np.stack([cos, -sin + shear], 1), np.stack([sin, cos], 1)], 1) * scale[:, None, :]
    points = points @ turn.transpose(0, 2, 1) + rng.uniform(-0.22, 0.22, (count, 1, 2))
    starts = rng.uniform(-1, 1, (count, CLUTTER, 2))
    stops = starts + rng.uniform(-0.6, 0.6, (count, CLUTTER, 2))
    width = rng.uniform(0.09, 0.17, (count, 1))
    ink = _ink(points[:, :-1], points[:, 1:], width)
    clutter = _ink(starts, stops, width)
    contrast = rng.uniform(0.7, 1.0, (count, 1))
    images = np.maximum(ink, clutter) * contrast + rng.normal(0, NOISE, ink.shape)
    return images.astype(np.float32)


def _ink(starts: NDArray[Any], stops: NDArray[Any], width: NDArray[Any]) -> NDArray[Any]:
    """Return the ink (count, pixels) of segments (count, segments, 2): 1 on a segment, 0 far from it."""
    axis = (np.arange(SIDE) + 0.5) * 2 / SIDE - 1
    pixels = np.stack(np.meshgrid(axis, axis, indexing="xy"), -1).reshape(1, 1, -1, 2)
    along = (stops - starts)[:, :, None]
    offset = pixels - starts[:, :, None]
    # The nearest point of the segment; the small constant keeps a segment without length finite.
    share = (offset * along).sum(-1) / ((along**2).sum(-1) + 1e-9)
    nearest = offset - np.clip(share, 0, 1)[..., None] * along
    distance = np.sqrt((nearest**2).sum(-1)).min(1)
    return np.clip(1.5 - distance / width, 0, 1)


MIN_IMAGES, MAX_FEATURES, MAX_CLASSES = 100, 4096, 1000
TEST_SHARE = 0.2  # of a user's set
# Errors of numpy and zipfile for a damaged file.
DAMAGE = (OSError, ValueError, TypeError, LookupError, EOFError, RuntimeError, MemoryError, SyntaxError)


def read_images(path: Path, seed: int) -> ImageSet:
    """Read a user's set: an .npz file with x (count, ...) of numbers and y (count,) of classes from 0.

    A fifth of the images, chosen by ``seed``, is the test set. Pixels are scaled to mean 0 and deviation 1 of
    the training set. Raises :class:`WeftError` for any other file.
    """
    expected = "an .npz file with the arrays x and y"
    try:
        if regular_size(path) > MAX_FILE:
            raise ValueError(f"more than {MAX_FILE} bytes")
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MAX_FILE:
                raise ValueError(f"more than {MAX_FILE} bytes after decompression")
        with np.load(path, allow_pickle=False) as arrays:
            x, y = np.asarray(arrays["x"]), np.asarray(arrays["y"])
    except (*DAMAGE, zipfile.BadZipFile, zlib.error) as error:
        raise WeftError("--data", expected=expected, got=f"{path}: {error}") from error
    _validate(path, x, y)
    pixels: Floats = x.reshape(len(x), -1).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(x))
    tests, trains = np.split(order, [int(len(x) * TEST_SHARE)])
    mean, deviation = float(pixels[trains].mean()), float(pixels[trains].std())
    pixels = ((pixels - mean) / (deviation or 1.0)).astype(np.float32)
    y = y.astype(np.int64)
    return ImageSet(
        train_x=pixels[trains],
        train_y=y[trains],
        test_x=pixels[tests],
        test_y=y[tests],
        classes=int(y.max()) + 1,
        name=path.name,
    )


def _validate(path: Path, x: NDArray[Any], y: NDArray[Any]) -> None:
    def refuse(expected: str, got: object) -> WeftError:
        return WeftError(f"--data {path}", expected=expected, got=got)

    if x.dtype.kind not in "buif" or x.ndim < 2 or len(x) < MIN_IMAGES:
        expected = f"x of numbers with at least {MIN_IMAGES} images, (count, ...)"
        raise refuse(expected, f"{x.dtype} of shape {x.shape}")
    if not 1 <= x[0].size <= MAX_FEATURES:
        raise refuse(f"x with 1 to {MAX_FEATURES} values an image", x[0].size)
    if y.dtype.kind not in "ui" or y.shape != (len(x),):
        raise refuse(f"y of integers, shape ({len(x)},)", f"{y.dtype} of shape {y.shape}")
    if y.min() < 0 or not 1 <= y.max() < MAX_CLASSES:
        raise refuse(f"classes from 0, 2 to {MAX_CLASSES} of them", f"{y.min()} to {y.max()}")
    # A number beyond float32 would be infinite after the conversion.
    if not (np.abs(x.astype(np.float64)) < np.finfo(np.float32).max / len(x)).all():
        raise refuse("finite numbers in x that float32 can sum", "others")
