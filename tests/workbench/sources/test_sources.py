"""Users' files: their declarations are loaded, and each mistake gives a one-line error."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.paths import EXAMPLES
from weft.core import WeftError, registry
from weft.core.record import PASS
from weft.workbench.check.check import check
from weft.workbench.sources.cuda_expr import ExpressionError, parse_number
from weft.workbench.sources.cuda_file import compile_only, read_header
from weft.workbench.sources.source import LoadedFile, Source, load

MINE = EXAMPLES / "mine"
HEAD = "import torch\nimport weft\n"
EAGER = '@weft.implementation("softmax", backend="eager")\n'
BODY = "def mine(x):\n    return torch.softmax(x, -1)\n"
OWN = """
CASES = [weft.case(weft.Input(name="x", shape=(3, 5)))]
@weft.operator("twice", cases=CASES, cost=lambda c, d: weft.Cost(read=60, written=60){more})
def reference(x):
    return {body}
"""


def load_file(path: Path) -> LoadedFile:
    return load(Source(kind="file", path=str(path)))


def error_of(tmp_path: Path, text: str, name: str = "mine.py") -> str:
    """Load a file with this text; return the expectation that its error states."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(WeftError) as caught:
        load_file(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tagged_functions_are_loaded_once_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        HEAD + EAGER + BODY + "again = mine\n" + EAGER.replace(")", ', name="second")') + "def b(x): ..."
    )
    assert [i.name for i in load_file(path).implementations] == ["mine", "second"]
    assert "second" not in registry.implementation_names("softmax")


def test_a_file_imports_the_current_version_of_its_siblings(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(HEAD + "import beside\n" + EAGER.replace(")", ", name=beside.NAME)") + BODY)
    for name in ("one", "two"):
        (tmp_path / "beside.py").write_text(f'NAME = "{name}"\n')
        assert load_file(path).implementations[0].name == name
    assert str(tmp_path) not in sys.path
    assert not (tmp_path / "__pycache__").exists()


def test_inspect_reads_the_source_of_a_loaded_function(tmp_path: Path) -> None:
    import inspect

    path = tmp_path / "mine.py"
    path.write_text(HEAD + EAGER + BODY)
    forward = load_file(path).implementations[0].forward
    assert inspect.getsource(forward) == EAGER + BODY
    path.write_text(HEAD + "\n\n" + EAGER + BODY.replace("-1", "1 - 2"))
    assert "1 - 2" in inspect.getsource(load_file(path).implementations[0].forward)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = (1,\n", "mine.py:1: syntax error: '(' was never closed"),
        ("a\0b", "mine.py"),
        ("import nowhere_at_all\n", "mine.py:1: running the file raised ModuleNotFoundError"),
        ("def f():\n    1 / 0\nf()\n", "mine.py:2: running the file raised ZeroDivisionError"),
        ("import sys\nsys.exit(3)\n", "mine.py:2: running the file raised SystemExit: 3"),
        ("x = 1\n", "mine.py declares nothing: expected @weft.implementation"),
        (HEAD + EAGER.replace("softmax", "sofmax") + BODY, "did you mean softmax"),
        (HEAD + EAGER.replace("eager", "tritn") + BODY, "mine.py:3: unknown backend"),
        (HEAD + EAGER.replace(")", ', name="torch")') + BODY, "softmax implementation 'torch'"),
        (
            HEAD + EAGER + BODY + EAGER + BODY,
            "mine.py:7: function 'mine' replaces the one in line 4",
        ),
        (HEAD + EAGER + BODY + EAGER.replace(")", ', name="mine")') + "def b(x): ...", "2 times"),
        (HEAD + OWN.format(more="", body="x").replace("twice", "gelu"), "already has an operator 'gelu'"),
        (
            HEAD + OWN.format(more=", tolerance=weft.Tolerance(baseline='tor', reason='r')", body="x"),
            "the tolerance of 'twice' depends on an unknown implementation",
        ),
    ],
)
def test_a_mistake_in_a_python_file_is_reported_in_one_line(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in error_of(tmp_path, text)


def test_a_missing_file_or_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="no file"):
        load_file(tmp_path / "nowhere.py")
    assert "expected a .py or .cu file, got .txt" in error_of(tmp_path, "", "mine.txt")


@pytest.mark.parametrize("body", ["x * 2", "x.double() * 2", "x", "x.t().t()"])
def test_an_operator_without_a_baseline_gets_its_reference(tmp_path: Path, body: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(HEAD + OWN.format(more=", differentiable=('x',)", body=body))
    loaded = load_file(path)
    (operator,), (eager,) = loaded.operators, loaded.implementations
    assert (eager.name, eager.backend, eager.operator) == ("eager", "eager", "twice")
    (case,) = operator.cases
    # The gradient of a copy is the incoming gradient itself, which no backward may return.
    for direction in operator.directions if "2" in body else ("forward",):
        verdict = check(operator, eager, case, direction, "cpu", n_seeds=2, baseline=eager)
        assert verdict.status == PASS, verdict.reason


KERNEL = 'extern "C" __global__ void k(const scalar_t* x, scalar_t* y, long long n) {}\n'
GOOD = """// weft: operator gelu
// weft: require contiguous x
// weft: let n = x.numel()
// weft: output y = empty_like(x)
// weft: launch k<<<cdiv(n, 256), 256>>>(x, y, n)
"""


def test_a_header_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "mine.cu"
    path.write_text(GOOD + "// weft: dtypes float32\n// weft: deterministic no\n" + KERNEL)
    (one,) = load_file(path).implementations
    assert (one.operator, one.name, one.backend) == ("gelu", "mine", "cuda")
    assert one.directions == ("forward",) and not one.deterministic
    gelu = registry.operator("gelu")
    assert one.supports(gelu.case("fp32-7x129"), "cuda")
    assert "float32" in one.supports(gelu.case("fp16-7x129"), "cuda").reason
    assert compile_only(path)[0].startswith("float32: ")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("// weft: operator gelu\n", "", "mine.cu does not name the operator"),
        ("gelu", "glu", "mine.cu:1: unknown operator"),
        ("require", "requir", "did you mean require?"),
        ("contiguous x", "contiguous z", "mine.cu:2: unknown tensor"),
        ("x.numel()", "x.sum()", "mine.cu:3: 'x.sum()'"),
        ("x.numel()", "x", "'x' is a tensor, not a number"),
        ("x.numel()", "m", "'m' in 'm' is not known before this line"),
        ("x.numel()", "__import__('os')", "mine.cu:3"),
        ("empty_like(x)", "ones_like(x)", "expected NAME = empty_like(TENSOR)"),
        ("empty_like(x)", "empty(n, float31)", "mine.cu:4: expected a dtype last"),
        ("let n", "let x", "expected a name that is not taken yet"),
        ("<<<cdiv(n, 256), 256>>>", "<<<256>>>", "mine.cu:5: expected <<<GRID, BLOCK>>>"),
        ("launch k", "launch q", "mine.cu:5: unknown kernel: expected one of k, got q"),
        ("(x, y, n)", "(x, y)", "arguments of k: expected 3 (const scalar_t* x"),
        ("(x, y, n)", "(x, n, n)", "takes 'scalar_t* y'"),
        ("(x, y, n)", "(x, y, n", "a parenthesis is not closed"),
        ('extern "C"', "", 'no kernel is extern "C"'),
        ("// weft: launch", "//", "the forward: expected at least 1 line 'launch"),
        ("long long n", "float n", "takes 'float n'"),
        ("{}", "{ y[0] = z; }", 'mine.cu:6: identifier "z" is undefined'),
    ],
)
def test_a_mistake_in_a_cu_file_is_reported_with_its_line(
    tmp_path: Path, old: str, new: str, expected: str
) -> None:
    text = GOOD + KERNEL
    assert text.count(old) >= 1
    assert expected in error_of(tmp_path, text.replace(old, new, 1), "mine.cu")


def test_a_call_that_does_not_match_the_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.cu"
    path.write_text(GOOD.replace("x.numel()", "7 / x.dim()") + KERNEL)
    (one,) = load_file(path).implementations
    with pytest.raises(WeftError, match=r"mine.cu:3: .*no value"):
        one.forward(torch.ones(()))
    with pytest.raises(WeftError, match="expected 1 tensors"):
        one.forward(torch.ones(3), torch.ones(3))


def test_an_empty_tensor_launches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.cu"
    path.write_text(GOOD.replace("x.numel()", "x.numel() / x.shape[-1]") + KERNEL)
    (one,) = load_file(path).implementations
    assert one.forward(torch.ones(5, 0)).shape == (5, 0)


NAMES = {"n": 7, "m": 1024, "x": torch.empty(3, 5, 2)}
numbers = st.deferred(
    lambda: (
        st.integers(0, 10**6).map(str)
        | st.sampled_from(["n", "m", "x.shape[0]", "x.shape[-1]", "x.numel()", "x.stride(0)", "x.dim()"])
        | st.tuples(numbers, st.sampled_from(["+", "-", "*"]), numbers).map("({0[0]} {0[1]} {0[2]})".format)
        | st.tuples(numbers, st.integers(1, 999)).map("({0[0]} // {0[1]})".format)
        | st.tuples(numbers, st.integers(1, 999)).map("({0[0]} % {0[1]})".format)
        | st.tuples(st.sampled_from(["min", "max"]), numbers, numbers).map("{0[0]}({0[1]}, {0[2]})".format)
        | numbers.map("-{}".format)
    )
)


@given(numbers)
def test_arithmetic_agrees_with_python(text: str) -> None:
    value = parse_number(text, frozenset({"x"}), frozenset({"n", "m"}))
    expected = eval(text, {"min": min, "max": max}, NAMES)
    if abs(expected) > 1 << 62:
        with pytest.raises(ExpressionError):
            value(NAMES)
        return
    assert value(NAMES) == expected
    assert parse_number(text.replace("//", "/"), frozenset("x"), frozenset("nm"))(NAMES) == expected


REFUSED = """x.data_ptr()
x.shape
x.shape[n]
x.shape[9](n)
x[0]
x.__class__
x.stride()
x.numel(1)
x
z
n if m else n
lambda: n
[n]
()
(n := 3)
n ** n
n << m
n @ m
n < m
n and m
not n
~n
n; m
'a'
f'{n}'
1j
True
None
...
(n).bit_length()
min(*x)
min(n)
cdiv(a=1, b=2)
open('f')"""


@given(st.integers(0, 10**9), st.integers(1, 10**5))
def test_rounding_up(a: int, b: int) -> None:
    up = parse_number(f"cdiv({a}, {b})", frozenset(), frozenset())({})
    assert (up - 1) * b < a <= up * b or a == up == 0
    power = parse_number(f"next_power_of_2({b})", frozenset(), frozenset())({})
    assert power & (power - 1) == 0 and power // 2 < b <= power


@given(
    st.sampled_from(REFUSED.splitlines()),
    st.sampled_from(["{}", "n + ({})", "max({}, n)", "-({})"]),
)
def test_expressions_outside_the_grammar_are_refused(text: str, template: str) -> None:
    with pytest.raises(ExpressionError):
        parse_number(template.format(text), frozenset({"x"}), frozenset({"n", "m"}))


@given(st.text(max_size=30))
def test_arbitrary_text_is_a_number_or_refused(text: str) -> None:
    try:
        loaded = parse_number(text, frozenset(), frozenset())({})
    except ExpressionError:
        return
    assert isinstance(loaded, int | float)


def test_the_examples_declare_their_documented_implementations() -> None:
    names = {
        p.name: [f"{i.operator} {i.name}" for i in load_file(p).implementations]
        for p in sorted(MINE.iterdir())
        if p.suffix in (".py", ".cu")
    }
    assert names == {
        "softmax.cu": ["softmax cuda/warp-a-row"],
        "softmax_naive.py": ["softmax naive"],
        "softmax_triton.py": ["softmax triton/whole-row"],
        "reglu.py": ["reglu triton/fused", "reglu eager"],
        "peers.py": [
            *(f"{name} torch/liger" for name in ("layer_norm", "rms_norm", "swiglu", "geglu")),
            *(f"{name} torch/quack" for name in ("rms_norm", "softmax")),
        ],
    }


def test_the_triton_examples_pass_the_check() -> None:
    softmax = registry.operator("softmax")
    (one,) = load_file(MINE / "softmax_triton.py").implementations
    for name in ("fp32-3x129", "fp16-3x7", "fp32-33x65-transposed", "fp32-31x67-neginf"):
        verdict = check(softmax, one, softmax.case(name), "forward", "cpu", n_seeds=1)
        assert verdict.status == PASS, verdict.reason
    assert not one.supports(SimpleNamespace(inputs=[SimpleNamespace(shape=(1, 70000))]), "cuda")
    loaded = load_file(MINE / "reglu.py")
    (reglu,), (fused, eager) = loaded.operators, loaded.implementations
    for case in reglu.select("edge", "cpu"):
        verdict = check(reglu, fused, case, "forward", "cpu", n_seeds=1, baseline=eager)
        assert verdict.status == PASS, verdict.reason


@pytest.mark.gpu
def test_the_cu_example_passes_on_a_gpu() -> None:
    softmax = registry.operator("softmax")
    (one,) = load_file(MINE / "softmax.cu").implementations
    for case in dict.fromkeys([*softmax.select("check", "cuda"), *softmax.select("edge", "cuda")]):
        if max(i.numel for i in case.inputs) <= 1 << 24:
            verdict = check(softmax, one, case, "forward", "cuda", n_seeds=2)
            assert verdict.status == PASS, f"{case.name}: {verdict.reason}"


def test_the_cu_example_compiles_without_weft_headers() -> None:
    loaded = read_header(MINE / "softmax.cu")
    assert [launch.kernel for launch in loaded.launches] == ["softmax_warp"]
    assert "#include" not in (MINE / "softmax.cu").read_text()
    assert len(compile_only(MINE / "softmax.cu")) == 3
