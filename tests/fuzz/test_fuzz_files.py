"""Damaged files: a reader returns what it could read or raises a WeftError, and never hangs."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.fuzzing import Hung, control_characters, damage, deadline, generator
from helpers.paths import ROOT
from helpers.training_toys import SIZES
from weft import cli
from weft.core import Ceilings, WeftError, record
from weft.dispatch import choice
from weft.gpt2.data import shards, tokenisers
from weft.gpt2.model.config import ModelConfig
from weft.gpt2.model.weights import read_config
from weft.gpt2.report.run_record import losses
from weft.gpt2.train.checkpoint_files import FORMAT, STATE, read_state, seal
from weft.gpt2.train.run_directory import RUN, RunPlan, read_plan
from weft.gpt2.train.train_config import TrainConfig
from weft.lab.prune.images import read_images
from weft.machine.ceilings import FORMAT as CEILINGS_FORMAT
from weft.machine.ceilings import load as load_ceilings
from weft.workbench.compare import noise
from weft.workbench.judge.definition import read_definition, read_workloads
from weft.workbench.judge.gpumode import read_task_yml
from weft.workbench.judge.solution import read_solution
from weft.workbench.judge.suite import SuiteOptions, read_done
from weft.workbench.sources.cuda_file import read_header

RESULTS = ROOT / "results"
TRACE = ROOT / "examples" / "judge" / "flashinfer-trace" / "rmsnorm"
PLAN_SIZES = {k: v for k, v in SIZES.items() if k in TrainConfig.__dataclass_fields__}


@dataclass(frozen=True)
class Reader:
    """A file's name and good content, and the function that reads it."""

    name: str
    content: bytes
    read: Callable[[Path], object]


def _weft(*words: str) -> Callable[[Path], None]:
    """Return a reader that runs a command; ``FILE`` stands for the file."""

    def run(path: Path) -> None:
        sys.argv = ["weft", *(str(path) if word == "FILE" else word for word in words)]
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        before, sys.stdout = sys.stdout, out
        try:
            cli.app(standalone_mode=False)
        finally:
            sys.stdout = before
        assert not (strange := control_characters(out.buffer.getvalue().decode())), strange

    return run


def _resume(path: Path) -> None:
    plan = read_plan(path.parent)
    for kind, section in ((ModelConfig, "model"), (TrainConfig, "train")):
        known = {k: v for k, v in plan[section].items() if k in kind.__dataclass_fields__}
        kind(**known)  # type: ignore[operator]


def _compare_noise(path: Path) -> None:
    measured = noise.load(path)
    assert measured.of(("gelu", "torch", "c", "forward")) <= measured.wide * 1e9


def _records(file: str = "amd-epyc/bench.jsonl", count: int = 3, word: bytes = b"") -> bytes:
    lines = (RESULTS / file).read_bytes().splitlines()
    return b"\n".join([line for line in lines if b'"timing":{' in line and word in line][:count]) + b"\n"


def _plan() -> bytes:
    plan = RunPlan(
        model=ModelConfig(layers=1, heads=1, width=64),
        train=TrainConfig(**PLAN_SIZES),
        tokeniser="bytes",
        data=None,
        bpe_files=None,
        start=None,
        identity={"train": "a", "validation": "b"},
    )
    return json.dumps(plan.to_json()).encode()


def _state() -> bytes:
    content: dict[str, Any] = {"format": FORMAT, "step": 3, "files": {}, "model": {}}
    return json.dumps({**content, "seal": seal(content)}).encode()


def _ceilings() -> bytes:
    known = Ceilings(device="cpu", copy=1.0, read=2.0, fill=3.0, matrix={"fp32": 4.0}, measured="today")
    fields = {k: v for k, v in asdict(known).items() if k != "doubt"}
    data = {"format": CEILINGS_FORMAT, "ceilings": fields, "doubt": "", "machine": {"versions": {}}}
    return json.dumps(data).encode()


def _noise() -> bytes:
    spread = {"operator": "gelu", "implementation": "torch", "case": "c", "direction": "forward"}
    data = {"format": noise.FORMAT, "machine": {"device": "cpu"}, "runs": 2, "arguments": ["gelu"]}
    return json.dumps({**data, "spreads": [{**spread, "medians": [1.0, 1.1]}]}).encode()


def _shard() -> bytes:
    header = np.zeros(shards.HEADER_INTS, "<i4")
    header[:3] = shards.MAGIC, shards.VERSION, 9
    return header.tobytes() + np.arange(9, dtype="<u2").tobytes()


def _bpe(path: Path) -> None:
    (path.parent / "vocab.bpe").write_text("#version\n")
    tokenisers.read_bpe_files(path.parent)


def _alphabet() -> bytes:
    return json.dumps({letter: byte for byte, letter in tokenisers.byte_alphabet().items()}).encode()


def _images() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.zeros((100, 4), np.uint8), y=np.arange(100) % 3)
    return file.getvalue()


def readers() -> Iterator[Reader]:
    """Yield a small valid example of every kind of file that Weft reads."""
    trace = TRACE / "definition.json"
    table = sorted(choice.SHIPPED.glob("*.json"))[0]
    points = json.loads(table.read_text())
    small_table = json.dumps({**points, "points": points["points"][:2]}).encode()
    config = {"vocab_size": 256, "n_positions": 8, "n_layer": 1, "n_head": 1, "n_embd": 64}
    metrics_lines = b'{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.25, "validation": 3.5}\n'
    done = b'{"problem": "a", "key": "b", "correct": true, "reason": ""}\n'
    demos = (RESULTS / "nvidia-h200" / "demos.json").read_bytes()
    study = (RESULTS / "nvidia-h200" / "study-mlp.json").read_bytes()
    loops = (RESULTS / "intel-r-xeon-r-processor" / "loops-2026-11-24.json").read_bytes()
    no_pictures = ("--no-pictures", "--out", "study")
    yield Reader("records.jsonl", _records(), record.read)
    yield Reader("records.jsonl", _records(), _weft("compare", "FILE", "FILE"))
    yield Reader("records.jsonl", _records(), _weft("report", "FILE", "-o", "-"))
    on_gpu = _records("nvidia-h200/gelu.jsonl", 12, b"bf16-16384x16384")
    yield Reader("records.jsonl", on_gpu, _weft("tune", "--from", "FILE", "-o", "table.json"))
    yield Reader("noise.json", _noise(), _compare_noise)
    yield Reader("ceilings.json", _ceilings(), lambda path: load_ceilings(path, lambda line: None))
    yield Reader("table.json", small_table, choice.read)
    yield Reader(RUN, _plan(), _resume)
    yield Reader("metrics.jsonl", metrics_lines, lambda path: losses(path.parent))
    yield Reader(STATE, _state(), lambda path: read_state(path.parent))
    yield Reader("config.json", json.dumps(config).encode(), lambda path: read_config(path.parent))
    yield Reader("shard.bin", _shard(), _weft("data", "show", "FILE"))
    yield Reader("encoder.json", _alphabet(), _bpe)
    yield Reader(
        "task.yml",
        b'tests:\n  - {"size": 127, "seed": 42}\nbenchmarks:\n  - {"size": 9, "seed": 1}\n',
        read_task_yml,
    )
    yield Reader("definition.json", trace.read_bytes(), read_definition)
    yield Reader(
        "workload.jsonl",
        (TRACE / "workload.jsonl").read_bytes(),
        lambda path: read_workloads(path, read_definition(trace)),
    )
    solution = (TRACE / "right.json").read_bytes()
    yield Reader("right.json", solution, lambda path: read_solution(path, "rmsnorm_h512"))
    yield Reader("done.jsonl", done, lambda path: read_done(path, [], SuiteOptions()))
    yield Reader("softmax.cu", (ROOT / "examples" / "mine" / "softmax.cu").read_bytes(), read_header)
    yield Reader("images.npz", _images(), lambda path: read_images(path, 0))
    yield Reader("demos.json", demos, _weft("demo", "all", "--from", "FILE"))
    yield Reader("study.json", study, _weft("study", "mlp", "--redraw", "FILE", *no_pictures))
    yield Reader("loops.json", loops, _weft("study", "loops", "--redraw", "FILE", *no_pictures))


READERS = tuple(readers())


@pytest.mark.parametrize("number", range(len(READERS)), ids=[r.name for r in READERS])
def test_a_good_file_is_read(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reader accepts its undamaged file; otherwise a reader that refuses everything would pass."""
    monkeypatch.chdir(tmp_path)
    reader = READERS[number]
    (tmp_path / reader.name).write_bytes(reader.content)
    try:
        reader.read(tmp_path / reader.name)
    except SystemExit as stop:
        assert not stop.code


def _fuzz(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    n_refused = 0
    for number in range(count):
        rng, reader = generator("file", number), READERS[number % len(READERS)]
        path = tmp_path / reader.name
        content = damage(reader.content, rng)
        path.write_bytes(content)
        try:
            with deadline():
                reader.read(path)
        except (WeftError, cli.typer.Exit):
            n_refused += 1
        except (Exception, Hung) as error:
            damaged_file = tmp_path / f"damaged-{number}"
            damaged_file.write_bytes(content)
            raise AssertionError(f"example {number}: {reader.name} in {damaged_file}") from error
    assert count // 5 < n_refused < count


def test_damaged_files_are_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fuzz(3 * len(READERS), tmp_path, monkeypatch)


@pytest.mark.exhaustive
def test_many_damaged_files_are_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fuzz(max(300, 15 * len(READERS)), tmp_path, monkeypatch)
