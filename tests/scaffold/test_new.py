"""Starting files: each passes its check if it can run here, and compiles otherwise."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from helpers.interpreting import asked_twice
from weft import backends
from weft.cli.new import new
from weft.core import Case, Implementation, Operator, WeftError, registry
from weft.core.record import PASS
from weft.scaffold import starters
from weft.workbench.check.check import check
from weft.workbench.sources.cuda_file import compile_only
from weft.workbench.sources.source import LoadedFile, Source, load

OPERATORS = starters.OPERATORS
# Elements of the largest quick case, and of the largest case with --slow: the interpreter runs one program
# at a time, the simulator one thread.
QUICK_SIZES = {"eager": 2000, "triton": 500, "numba": 30}
SLOW_SIZES = {"eager": 1 << 18, "triton": 1 << 15, "numba": 600}
QUICK_CASES = 6  # cases without --slow, spread over the quick ones
GPU_SIZE = 1 << 24  # elements; `weft check` also runs larger cases
RUNNABLE = [(o, b) for o in OPERATORS for b in starters.BACKENDS if b != "cuda"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Run small cases on one core: on a busy machine, waking threads takes ten times as long as the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_starter(folder: Path, operator: str, backend: str) -> Path:
    path = folder / starters.file_name(operator, backend)
    path.write_text(starters.starter(operator, backend, name=f"{backend}/mine", file=path.name))
    return path


def load_one(path: Path) -> LoadedFile:
    return load(Source(kind="file", path=str(path)))


def cases(operator: Operator, largest: int, smallest: int = -1) -> list[Case]:
    chosen = dict.fromkeys([*operator.select("check", "cpu"), *operator.select("edge", "cpu")])
    return [c for c in chosen if smallest < max(i.numel for i in c.inputs) <= largest]


def judge(
    operator: Operator,
    one: Implementation,
    chosen: list[Case],
    baseline: Implementation | None = None,
) -> int:
    """Check the cases in all directions that can run; assert that each passes, and return their number."""
    passed = 0
    for case in chosen:
        for direction in one.directions:
            support = backends.support(one, case, "cpu", direction)
            if not support:
                continue
            with warnings.catch_warnings(), asked_twice(not support.timed):
                warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns about intended NaN
                verdict = check(operator, one, case, direction, "cpu", n_seeds=1, baseline=baseline)
            assert verdict.status == PASS, f"{case.name} {direction}: {verdict.reason}"
            passed += 1
    return passed


@pytest.mark.sampled(1, each=lambda operator, backend: backend)
@pytest.mark.parametrize(("operator", "backend"), RUNNABLE)
def test_a_starter_passes_its_check(operator: str, backend: str, tmp_path: Path) -> None:
    (one,) = load_one(write_starter(tmp_path, operator, backend)).implementations
    assert (one.operator, one.backend, one.name) == (operator, backend, f"{backend}/mine")
    assert one.directions == ("forward", "backward")
    spec = registry.operator(operator)
    small = cases(spec, QUICK_SIZES[backend])
    if backend == "numba":  # the simulator computes all types as it does float32
        small = [c for c in small if c.dtype == "float32"]
        small.sort(key=lambda c: -max(i.numel for i in c.inputs))  # not only rows of one element
    few = QUICK_CASES // 2 if backend == "numba" else QUICK_CASES
    assert judge(spec, one, small[:: -(-len(small) // few)]) >= QUICK_CASES // 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(("operator", "backend"), RUNNABLE)
def test_a_starter_passes_at_every_case(operator: str, backend: str, tmp_path: Path) -> None:
    (one,) = load_one(write_starter(tmp_path, operator, backend)).implementations
    spec = registry.operator(operator)
    assert judge(spec, one, cases(spec, SLOW_SIZES[backend])) >= 12


@pytest.mark.sampled(2)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_cuda_starter_compiles_for_every_architecture(operator: str, tmp_path: Path) -> None:
    path = write_starter(tmp_path, operator, "cuda")
    dtypes = len(registry.operator(operator).dtypes)
    for arch in ("sm_80", "sm_90", "sm_100"):
        assert len(compile_only(path, arch)) == dtypes


@pytest.mark.gpu
@pytest.mark.parametrize("backend", starters.BACKENDS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_starter_passes_on_a_gpu(operator: str, backend: str, tmp_path: Path) -> None:
    small = [c for c in gpu_cases(operator) if not has_large_output(operator, c)]
    assert count_passes_on_a_gpu(write_starter(tmp_path, operator, backend), operator, small) >= 20


@pytest.mark.gpu
@pytest.mark.alone  # its check, with the reference, needs the whole memory of a device
@pytest.mark.parametrize("backend", starters.BACKENDS)
def test_a_matmul_starter_passes_beyond_31_bit_indices_on_a_gpu(backend: str, tmp_path: Path) -> None:
    large = [c for c in gpu_cases("matmul") if has_large_output("matmul", c)]
    assert large
    if not count_passes_on_a_gpu(write_starter(tmp_path, "matmul", backend), "matmul", large):
        pytest.skip(f"{backend}'s starting file does not take {[c.name for c in large]}")


def gpu_cases(operator: str) -> list[Case]:
    spec = registry.operator(operator)
    chosen = dict.fromkeys([*spec.select("check", "cuda"), *spec.select("edge", "cuda")])
    return [c for c in chosen if max(i.numel for i in c.inputs) <= GPU_SIZE]


def has_large_output(operator: str, case: Case) -> bool:
    return registry.operator(operator).cost(case, "forward").written > 4 * GPU_SIZE


def count_passes_on_a_gpu(path: Path, operator: str, chosen: list[Case]) -> int:
    (one,) = load_one(path).implementations
    spec, passed = registry.operator(operator), 0
    for case in chosen:
        for direction in one.directions:
            if backends.support(one, case, "cuda", direction):
                verdict = check(spec, one, case, direction, "cuda", n_seeds=2)
                assert verdict.status == PASS, f"{case.name} {direction}: {verdict.reason}"
                passed += 1
    return passed


def test_an_operator_starter_passes_its_check(tmp_path: Path) -> None:
    path = tmp_path / "rms.py"
    path.write_text(starters.own_operator("rms", name="triton/mine", file=path.name))
    loaded = load_one(path)
    (operator,), (eager, triton) = loaded.operators, loaded.implementations
    assert (operator.name, eager.name, triton.name) == ("rms", "eager", "triton/mine")
    small = cases(operator, 8000)
    assert judge(operator, eager, small, eager) == 2 * len(small)
    assert judge(operator, triton, small, eager) == len(small) - 3  # all but bfloat16's
    bench = operator.select("bench", "cuda")[0]
    assert operator.cost(bench, "forward").nbytes == 2 * 32768 * 4096 * 2


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("backend", starters.BACKENDS)
def test_a_starter_names_the_next_steps(operator: str, backend: str) -> None:
    text = starters.starter(operator, backend, name="quick", file="mine.x")
    for message in (
        f"weft check {operator} --with mine.x",
        f"weft bench {operator} --with mine.x",
        "Change first",
        "quick",
        "float32",
    ):
        assert message in text or (backend == "cuda" and message == "float32")
    assert [line for line in text.splitlines() if len(line) > 100] == []


def test_each_operator_has_a_starter_for_each_backend() -> None:
    there = {p.name for p in starters.HERE.glob("*.j2")}
    due = {f"{o}_{b}{starters.ending(b)}.j2" for o in OPERATORS for b in starters.BACKENDS}
    assert there == due | {"operator.py.j2"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("sofmax", "triton", "m"), "did you mean softmax"),
        (("softmax", "tritn", "m"), "did you mean triton"),
        (("softmax", "triton", "triton"), "of its own"),
        (("softmax", "triton", 'a"b'), "expected a name such as"),
    ],
)
def test_an_impossible_starter_is_refused(call: tuple[str, str, str], message: str) -> None:
    operator, backend, name = call
    with pytest.raises(WeftError, match=message):
        starters.starter(operator, backend, name=name, file="f.py")


@pytest.mark.parametrize(
    ("operator", "name", "message"),
    [("softmax", "m", "Weft's own"), ("My Op", "m", "small letters"), ("rms", "eager", "another")],
)
def test_an_impossible_operator_is_refused(operator: str, name: str, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        starters.own_operator(operator, name=name, file="f.py")


def command(*arguments: str) -> tuple[str, str, BaseException | None]:
    import typer

    app = typer.Typer()
    app.command()(new)
    done = CliRunner().invoke(app, list(arguments))
    return done.stdout, done.stderr, done.exception


def test_the_command_writes_a_file_and_names_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out, err, error = command("gelu", "--backend", "cuda", "--name", "cuda/wide")
    assert error is None and out == "gelu_cuda.cu\n"
    assert "weft check gelu --with gelu_cuda.cu" in err
    assert "// weft: name cuda/wide" in Path("gelu_cuda.cu").read_text()
    out, err, error = command("--operator", "twist")
    assert error is None and out == "twist.py\n" and "weft bench --with twist.py" in err


def test_the_command_overwrites_a_file_only_with_force(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("kept")
    _, _, error = command("softmax", "--out", str(path))
    assert isinstance(error, WeftError) and "exists already" in str(error)
    assert path.read_text() == "kept"
    _, _, error = command("softmax", "--out", str(path), "--force")
    assert error is None and "softmax" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "got none"),
        (("softmax", "--operator", "rope"), "got OPERATOR and --operator"),
        (("softmax", "--backend", "cuda", "--out", "x.py"), "ends in .cu"),
        (("softmax", "--out", "nowhere/x.py"), "cannot be written"),
    ],
)
def test_a_wrong_call(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, _, error = command(*arguments)
    assert isinstance(error, WeftError) and message in str(error)
