"""Configurations of the wgmma product (wgmma.py), and a model of the time that each takes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

ROWS, K_STEP_BYTES = 128, 128  # of a block: rows of c, bytes of K in a stage
BLOCK_BYTES = 64 * 128  # 64 rows of 128 bytes
GROUPS = 2  # warp groups that compute a tile of 128 rows


class Epilogue(IntEnum):
    """Function of the float32 sums that is rounded and stored, as in epilogue.cuh."""

    PLAIN = 0
    BIAS = 1  # + bias
    GELU = 2  # gelu(sums + bias), tanh form
    GELU_PRE = 3  # the same, and its input as a second output
    RESIDUAL = 4  # + bias + residual
    SLOPE = 5  # times GELU's slope at a second matrix; the column sums are a second output
    EXPONENTIAL = 6  # exp(sums - a number of the row), with the largest sum and the total of a tile's rows
    ROW_SCALE = 7  # times a number of the row
    ACCUMULATE = 8  # + the sums of earlier calls, in 24 bits


@dataclass(frozen=True, kw_only=True)
class Config:
    """``rows`` and ``columns`` of c in a tile, ``stages`` of the pipeline, and blocks in a ``cluster``.

    Each 64 rows have a warp group; with 64 rows two blocks run on an SM. ``rows`` is 64, 128 or 192.
    The blocks of a cluster share tiles of b, or with ``share_a`` tiles of a. With ``pingpong`` the two warp
    groups that multiply take tiles alternately; otherwise they share each tile. Tiles are taken in bands of
    ``band`` rows of tiles (of a cluster), column by column.
    With ``k_parts`` so many blocks of a cluster compute one tile, each a part of K; those of the same part
    share tiles.
    """

    columns: int
    stages: int
    cluster: int = 1
    share_a: bool = False
    pingpong: bool = False
    band: int = 8
    rows: int = ROWS
    k_parts: int = 1

    @property
    def groups(self) -> int:
        """Warp groups that multiply."""
        return self.rows // 64

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (1 + self.groups)

    @property
    def blocks_per_sm(self) -> int:
        return 2 if self.groups == 1 else 1

    @property
    def smem_bytes(self) -> int:
        # Stages, two boxes of c for each group, and barriers: of the stages, and two for each group. The sums
        # of parts of K take the place of the stages.
        boxes = 2 * BLOCK_BYTES if self.k_parts == 1 else 0
        return self.stages * ((self.rows + self.columns) * 128 + 16) + self.groups * (boxes + 16)

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of a cluster that share a tile of a, and those that share a tile of b."""
        sharers = self.cluster // self.k_parts
        return (sharers, 1) if self.share_a else (1, sharers)

    @property
    def label(self) -> str:
        """Tile, stages, and cluster, with what differs from a plain cooperative kernel."""
        shared = "a" * self.share_a + f"k{self.k_parts}" * (self.k_parts > 1)
        band = f"-band{self.band}" * (self.band != Config.band)
        name = f"{self.rows}x{self.columns}x{self.stages}-{self.cluster}{shared}"
        return name + "-pingpong" * self.pingpong + band


# Constants of estimated_us, fitted to results/nvidia-h200/product-choices-2026-11-28.txt and
# products-2026-11-28.txt; L2_POWER is of the former alone.
LAUNCH_US = 2.18
FLOP_PER_CYCLE = 4096  # of an SM's tensor cores
CLOCK_GHZ = (1.92, 1.33)  # with no SM at work, and with all: power limits the clock
# Of a tile's steps: products of 64 columns are bound by shared memory.
COLUMNS_FACTOR = {256: 1.0, 192: 1.02, 128: 0.99, 64: 1.27}
FACTORS = {64: {128: 1.32, 64: 1.22}, 128: COLUMNS_FACTOR, 192: {192: 0.99, 128: 1.01}}  # by rows of a tile
# From the L2 cache to each SM, with all at work, on the device of the record: its L2 and its SMs.
L2_BYTES_PER_NS, L2_BYTES, NUM_SMS = 75.5, 60 << 20, 132
L2_PORT_BYTES_PER_NS = 174.0  # to one SM, however few are at work
CLUSTER_FACTOR = 1.013
# At the power limit bytes from the L2 cache cost clock: 8192^3, repeated for seconds on an H200, takes 1.64
# ms with 256 columns in clusters of two, and 1.71 to 1.77 ms with 1.33 to 1.67 times the bytes. That is 0.07
# to 0.1; calls between others, as in most records, show less of it. The value was chosen among four as one
# that meets the test's bound on an older record, which is therefore no independent evidence for it.
L2_POWER = 0.045
# Of a tile of 128 x 256: storing it, with the filling of the pipeline; GELU; a second output or a residual.
STORE_US, GELU_US, EXTRA_US = 1.26, 0.68, 3.78
# Those with an operation of the special-function unit, and those that read or write a second matrix. Only
# GELU, GELU_PRE and RESIDUAL are in the record; the others are expected to take as long.
SPECIAL_FUNCTION = (Epilogue.GELU, Epilogue.GELU_PRE, Epilogue.SLOPE, Epilogue.EXPONENTIAL)
SECOND_MATRIX = (Epilogue.GELU_PRE, Epilogue.RESIDUAL, Epilogue.SLOPE, Epilogue.ACCUMULATE)
SUM_LAUNCH_US, PARTIAL_BYTES_PER_US = 0.35, 4.06e6
MAX_SPLITS, LEAST_STEPS = 12, 4  # parts of K, and steps of 128 bytes in each
LEAST_GAIN = 1.02  # of parts of K, as the model expects it: its error is larger
# Of tf32 by mma.sync, which the product takes where it is faster: the rate of one SM in the record of 8192^3
# (README.md of matmul), and its tiles.
MMA_FLOP_PER_NS, MMA_TILE, MMA_SMALL_TILE, MMA_SMALL_BLOCKS, MMA_LEAST_TILES = 1454, 128, 64, 3, 32
CANDIDATES = (
    Config(columns=256, stages=4, cluster=2),
    Config(columns=256, stages=4),
    Config(columns=192, stages=4),
    Config(columns=128, stages=6),
    Config(columns=64, stages=8),
    Config(columns=128, stages=6, cluster=2),
    Config(columns=64, stages=8, cluster=2, share_a=True),
    Config(columns=128, stages=6, pingpong=True),
    Config(columns=128, stages=6, cluster=2, pingpong=True),
    Config(columns=192, stages=4, pingpong=True),
    Config(columns=128, stages=4, rows=64),
    Config(columns=64, stages=5, rows=64),
    Config(columns=192, stages=3, rows=192),
    Config(columns=128, stages=4, rows=192),
)
# Tiles beside each other that share a were nowhere the fastest.
CHOSEN_FROM = tuple(c for c in CANDIDATES if not c.share_a)
# For few tiles and a long K, where wgmma.CHOOSES_K_PARTS.
WITH_K_PARTS = tuple(
    Config(columns=columns, stages=stages, rows=rows, cluster=sharers * parts, k_parts=parts)
    for rows, columns, stages, most in (
        (128, 256, 4, 4),
        (128, 192, 5, 4),
        (128, 128, 7, 6),
        (192, 192, 4, 5),
        (64, 128, 4, 4),
    )
    for sharers in ((1, 2) if columns % 128 == 0 else (1,))
    for parts in range(2, most + 1)
    if sharers * parts <= 8
)
# Assumed, not measured: between the blocks of a cluster, to and from each at the same time, by parts of K
# (about 3 TB/s on all SMs is published: Luo et al., arXiv:2402.13499); and the two signals of an exchange.
CLUSTER_BYTES_PER_NS = {2: 25.0, 3: 22.0}
MORE_BLOCKS_BYTES_PER_NS, EXCHANGE_US = 20.0, 0.6
# SMs of a processing cluster of the GPU, in which the blocks of a cluster are.
SMS_OF_A_GPC = 16


def spills(config: Config, epilogue: Epilogue) -> bool:
    """Return True if a kernel with this epilogue needs more registers than it has."""
    if epilogue == Epilogue.EXPONENTIAL:  # a thread of a block of 64 or 192 rows has fewer registers
        return config.columns > (128 if config.pingpong else {64: 64, 128: 192, 192: 128}[config.rows])
    return epilogue == Epilogue.SLOPE and config.pingpong and config.columns > 128


def estimated_us(
    m: int,
    n: int,
    k: int,
    config: Config,
    splits: int,
    sms: int,
    epilogue: Epilogue = Epilogue.PLAIN,
    *,
    itemsize: int = 2,
    l2_bytes: int = L2_BYTES,
) -> float:
    """Return the time in microseconds that a model gives for a product on ``sms`` SMs.

    An SM computes one tile of ``rows`` x ``columns`` at a time; the tiles that are left behind the last
    whole wave are divided into ``splits`` parts of K. The model is a launch, and for each wave the steps of
    128 bytes along K and the tile's epilogue, which nothing overlaps; with ``pingpong`` all but the last one
    are hidden behind the other group's steps, if those are longer. A step takes the longer of two times: that
    of the tensor cores, at a clock that falls with the SMs at work, and that of its bytes from the L2 cache,
    of which a cluster reads the shared operand once. The cache's rate grows with its size, ``l2_bytes``, and
    so with its slices. With all SMs at work the power limit adds to a wave by its bytes. Parts of K are
    written and read once in float32, and added by a second launch.

    The constants are a least-squares fit to records of 24 sizes and epilogues with all configurations, and of
    100 random sizes of models, in bfloat16: 9 % root-mean-square error over 614 times. In another record of
    these 24 the configuration that the model prefers is at most 7 % slower than the fastest, and at most
    1.5 % on average. tf32 (``itemsize`` 4) is expected to take as long for a step, which has half as many
    elements, and it stores twice the bytes. Parts of K of the last tiles alone are not in the records, nor
    are configurations with ``k_parts``.
    """
    if config.k_parts > 1:
        return _k_parts_us(m, n, -(-k * itemsize // K_STEP_BYTES), config, sms, epilogue, l2_bytes)
    a_blocks, b_blocks = config.blocks
    tiles = -(-m // (config.rows * b_blocks)) * -(-n // (config.columns * a_blocks))  # of a cluster
    at_once = max(1, sms // config.cluster)
    k_steps = -(-k * itemsize // K_STEP_BYTES)
    end_us = STORE_US * itemsize / 2 + GELU_US * (epilogue in SPECIAL_FUNCTION)
    end_us += EXTRA_US * (epilogue in SECOND_MATRIX)
    end_us *= config.columns / 256
    if config.pingpong:
        end_us *= GROUPS  # of one group, which has the whole tile
    whole, rest = divmod(tiles, at_once * config.blocks_per_sm)
    whole *= config.blocks_per_sm
    l2_share = l2_bytes / L2_BYTES * NUM_SMS / sms

    def wave_us(steps: int, at_work: float) -> float:
        steps_us = steps * _step_ns(config, at_work, l2_share) * 1e-3
        return max(steps_us, (steps_us + end_us) / GROUPS) if config.pingpong else steps_us + end_us

    us = LAUNCH_US + end_us * config.pingpong
    us += whole * wave_us(k_steps, 1.0) * _power_factor(config) if whole else 0.0
    if rest:
        units = rest * splits
        us += -(-units // at_once) * wave_us(-(-k_steps // splits), min(1.0, units / at_once))
    if rest and splits > 1:
        partial_bytes = 4 * units * config.cluster * min(config.rows, m) * config.columns
        us += SUM_LAUNCH_US + 2 * partial_bytes / PARTIAL_BYTES_PER_US
    return us


def _k_parts_us(
    m: int, n: int, k_steps: int, config: Config, sms: int, epilogue: Epilogue, l2_bytes: int
) -> float:
    """Return the time that the model gives where blocks of a cluster divide K.

    Of the sums of its tile each block sends all but its share, and receives as many bytes. A share is stored
    from registers, which is expected to take as long as through the copy engine.
    """
    a_blocks, b_blocks = config.blocks
    tiles = -(-m // (config.rows * b_blocks)) * -(-n // (config.columns * a_blocks))  # of a cluster
    parts = config.k_parts
    at_once = max(1, sms // SMS_OF_A_GPC * (SMS_OF_A_GPC * config.blocks_per_sm // config.cluster))
    waves = -(-tiles // at_once)
    at_work = min(1.0, tiles * config.cluster / sms)
    on_an_sm = min(config.blocks_per_sm, -(-tiles * config.cluster // sms))
    steps_us = -(-k_steps // parts) * _step_ns(config, at_work, l2_bytes / L2_BYTES * NUM_SMS / sms) * 1e-3
    sent = 4 * config.rows * config.columns * (parts - 1) / parts
    sent_us = sent / CLUSTER_BYTES_PER_NS.get(parts, MORE_BLOCKS_BYTES_PER_NS) * 1e-3
    end_us = STORE_US + GELU_US * (epilogue in SPECIAL_FUNCTION) + EXTRA_US * (epilogue in SECOND_MATRIX)
    end_us *= config.columns / 256 / parts
    return LAUNCH_US + waves * (on_an_sm * (steps_us + sent_us) + end_us + EXCHANGE_US)


def _power_factor(config: Config) -> float:
    """Return the factor of a wave with all SMs at work, by its bytes from the L2 cache for each product."""
    a_blocks, b_blocks = config.blocks
    bytes_share = (config.rows / a_blocks + config.columns / b_blocks) / (config.rows * config.columns)
    return 1 + L2_POWER * (128 * bytes_share - 1)  # 1 for 256 columns in clusters of two


def _step_ns(config: Config, at_work: float, l2_share: float) -> float:
    """Return the nanoseconds of a step of 128 bytes along K, with a share of the SMs ``at_work``."""
    a_blocks, b_blocks = config.blocks
    clock = CLOCK_GHZ[0] + (CLOCK_GHZ[1] - CLOCK_GHZ[0]) * at_work
    factor = FACTORS[config.rows][config.columns]
    tensor_ns = factor * config.rows * config.columns * K_STEP_BYTES / FLOP_PER_CYCLE / clock
    l2_rate = min(L2_PORT_BYTES_PER_NS, L2_BYTES_PER_NS * l2_share / at_work)
    l2_ns = (config.rows / a_blocks + config.columns / b_blocks) * K_STEP_BYTES / l2_rate
    shares = a_blocks * b_blocks > 1
    return max(tensor_ns, l2_ns) * (CLUSTER_FACTOR if shares else 1.0)
