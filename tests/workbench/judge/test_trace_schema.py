"""The JSON schema of FlashInfer-Bench and SOL-ExecBench: fields, inputs, outputs and own checks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.trace_problems import PROBLEMS, definition, solution, workloads, write_json, write_problem
from weft.core import WeftError
from weft.workbench.judge import trace_problem
from weft.workbench.judge.definition import NotSupported, read_definition, read_workloads
from weft.workbench.judge.judge import TRACE, detect_format
from weft.workbench.judge.problem import Problem
from weft.workbench.judge.solution import check_buildable, read_solution, write_sources

Change = Callable[[dict[str, Any]], object]


def read(folder: Path, name: str, workload_file: Path | None = None, **spec: Any) -> Problem:
    path = write_problem(folder, name)
    candidate = write_json(folder / "solution.json", solution(name, PROBLEMS[name].right, **spec))
    (folder / "sources").mkdir(exist_ok=True)
    return trace_problem.read_problem(path, candidate, workload_file, "cpu", 1, folder / "sources")


# -- malformed files -----------------------------------------------------------------------------

# For each rule of the schema: the change that breaks it, the field that the error names, and a word of it.
BAD_DEFINITIONS: dict[str, tuple[Change, str, str]] = {
    "no name": (lambda d: d.pop("name"), "name", "this field"),
    "empty name": (lambda d: d.update(name=" "), "name", "not empty"),
    "no axes": (lambda d: d.pop("axes"), "axes", "this field"),
    "axes a list": (lambda d: d.update(axes=[]), "axes", "a JSON object"),
    "axis type": (lambda d: d["axes"]["n"].update(type="fixed"), "axes.n.type", "const or var or expr"),
    "no constant": (lambda d: d["axes"]["n"].pop("value"), "axes.n.value", "this field"),
    "constant a text": (lambda d: d["axes"]["n"].update(value="40"), "axes.n.value", "an integer"),
    "constant negative": (lambda d: d["axes"]["n"].update(value=-1), "axes.n.value", "at least 0"),
    "expression a call": (
        lambda d: d["axes"]["wide"].update(expression="len(n)"),
        "axes.wide.expression",
        "arithmetic",
    ),
    "expression of no axis": (
        lambda d: d["axes"]["wide"].update(expression="2 * q"),
        "axes.wide.expression",
        "no axis",
    ),
    "no expression": (lambda d: d["axes"]["wide"].update(expression="2 *"), "axes.wide.expression", "Python"),
    "no inputs": (lambda d: d.update(inputs={}), "inputs", "at least one"),
    "no shape": (lambda d: d["inputs"]["x"].pop("shape"), "inputs.x.shape", "this field"),
    "shape a text": (lambda d: d["inputs"]["x"].update(shape="rows"), "inputs.x.shape", "a list"),
    "shape of numbers": (lambda d: d["inputs"]["x"].update(shape=[3]), "inputs.x.shape[0]", "a string"),
    "unknown axis": (
        lambda d: d["outputs"]["y"].update(shape=["rows", "k"]),
        "outputs.y.shape[1]",
        "an axis",
    ),
    "unknown dtype": (lambda d: d["inputs"]["x"].update(dtype="fp32"), "inputs.x.dtype", "one of float64"),
    "no outputs": (lambda d: d.pop("outputs"), "outputs", "this field"),
    "a name twice": (lambda d: d["outputs"].update(x=d["outputs"]["y"]), "outputs", "no input has"),
    "no reference": (lambda d: d.update(reference=""), "reference", "not empty"),
    "reference no Python": (lambda d: d.update(reference="def run(:"), "reference", "SyntaxError"),
    "no run": (lambda d: d.update(reference="def go(x): return x"), "reference", "function run"),
    "run with other arguments": (
        lambda d: d.update(reference="def run(x, z): return x"),
        "reference",
        "run(x)",
    ),
    "no generator": (
        lambda d: d.update(custom_inputs_entrypoint="make"),
        "custom_inputs_entrypoint",
        "top-level function",
    ),
    "constraint no expression": (lambda d: d.update(constraints=["n =="]), "constraints[0]", "expression"),
}
BAD_WORKLOADS: dict[str, tuple[Change, str, str]] = {
    "no axes": (lambda w: w.pop("axes"), "axes", "this field"),
    "missing axis": (lambda w: w["axes"].pop("rows"), "axes.rows", "this field"),
    "unknown axis": (lambda w: w["axes"].update(columns=3), "axes.columns", "variable axis"),
    "other constant": (lambda w: w["axes"].update(n=3), "axes.n", "constant, 40"),
    "axis of zero": (lambda w: w["axes"].update(rows=0), "axes.rows", "at least 1"),
    "axis a text": (lambda w: w["axes"].update(rows="9"), "axes.rows", "an integer"),
    "no uuid": (lambda w: w.pop("uuid"), "uuid", "this field"),
    "unknown input": (lambda w: w["inputs"].update(z={"type": "random"}), "inputs.z", "an input"),
    "input type": (lambda w: w["inputs"]["x"].update(type="zeros"), "inputs.x.type", "random or scalar"),
    "scalar for a tensor": (
        lambda w: w["inputs"].update(x={"type": "scalar", "value": 1}),
        "inputs.x",
        "a tensor",
    ),
    "file without a key": (
        lambda w: w["inputs"].update(x={"type": "safetensors", "path": "a"}),
        "inputs.x.tensor_key",
        "this field",
    ),
    "custom without a generator": (
        lambda w: w["inputs"]["x"].update(type="custom"),
        "inputs.x.type",
        "no custom_inputs_entrypoint",
    ),
    "tolerance a text": (lambda w: w.update(tolerance={"max_atol": "1"}), "tolerance.max_atol", "a number"),
}
BAD_SOLUTIONS: dict[str, tuple[Change, str, str]] = {
    "no name": (lambda s: s.pop("name"), "name", "this field"),
    "no author": (lambda s: s.pop("author"), "author", "this field"),
    "another definition": (lambda s: s.update(definition="gemm"), "definition", "silu_mul"),
    "no spec": (lambda s: s.pop("spec"), "spec", "this field"),
    "language": (lambda s: s["spec"].update(language="fortran"), "spec.language", "one of python"),
    "no languages": (lambda s: s["spec"].update(languages=[]), "spec.languages", "at least one"),
    "languages mixed": (
        lambda s: s["spec"].update(languages=["triton", "cuda_cpp"]),
        "spec.languages",
        "not of both",
    ),
    "no hardware": (lambda s: s["spec"].update(target_hardware=[]), "spec.target_hardware", "at least one"),
    "entry point": (
        lambda s: s["spec"].update(entry_point="main.py"),
        "spec.entry_point",
        "file.py::function",
    ),
    "entry of no source": (
        lambda s: s["spec"].update(entry_point="k.py::run"),
        "spec.entry_point",
        "a file of sources",
    ),
    "entry of another language": (lambda s: s["spec"].update(language="cuda"), "spec.entry_point", "suffix"),
    "style": (
        lambda s: s["spec"].update(destination_passing_style="yes"),
        "spec.destination_passing_style",
        "true or false",
    ),
    "binding": (lambda s: s["spec"].update(binding="pybind"), "spec.binding", "torch or tvm-ffi"),
    "flags": (
        lambda s: s["spec"].update(compile_options={"cflags": "-O3"}),
        "spec.compile_options.cflags",
        "a list",
    ),
    "no sources": (lambda s: s.update(sources=[]), "sources", "at least one"),
    "path outside": (lambda s: s["sources"][0].update(path="../main.py"), "sources[0].path", "relative"),
    "path absolute": (lambda s: s["sources"][0].update(path="/main.py"), "sources[0].path", "relative"),
    "path twice": (lambda s: s["sources"].append(s["sources"][0]), "sources[1].path", "another path"),
    "no content": (lambda s: s["sources"][0].update(content=""), "sources[0].content", "not empty"),
}


def assert_names_field(error: WeftError, file: str, field: str, word: str) -> None:
    assert error.what.startswith(file) and error.what.endswith(f": {field}"), error
    assert error.expected and error.got and word in str(error) and "\n" not in str(error), error


@pytest.mark.parametrize("rule", BAD_DEFINITIONS)
def test_a_malformed_definition_names_the_field(tmp_path: Path, rule: str) -> None:
    change, field, word = BAD_DEFINITIONS[rule]
    data = definition("silu_mul")
    change(data)
    with pytest.raises(WeftError) as raised:
        read_definition(write_json(tmp_path / "definition.json", data))
    assert_names_field(raised.value, "definition.json", field, word)


@pytest.mark.parametrize("rule", BAD_WORKLOADS)
def test_a_malformed_workload_names_the_line_and_the_field(tmp_path: Path, rule: str) -> None:
    change, field, word = BAD_WORKLOADS[rule]
    good, bad = workloads("silu_mul")
    bad = json.loads(json.dumps(bad))
    change(bad)
    (tmp_path / "w.jsonl").write_text(f"{json.dumps(good)}\n\n{json.dumps(bad)}\n")
    parsed = read_definition(write_json(tmp_path / "definition.json", definition("silu_mul")))
    with pytest.raises(WeftError) as raised:
        read_workloads(tmp_path / "w.jsonl", parsed)
    assert_names_field(raised.value, "w.jsonl, line 3", field, word)


@pytest.mark.parametrize("rule", BAD_SOLUTIONS)
def test_a_malformed_solution_names_the_field(tmp_path: Path, rule: str) -> None:
    change, field, word = BAD_SOLUTIONS[rule]
    data = solution("silu_mul", "pass")
    change(data)
    with pytest.raises(WeftError) as raised:
        read_solution(write_json(tmp_path / "s.json", data), "silu_mul")
    assert_names_field(raised.value, "s.json", field, word)


@pytest.mark.parametrize("text", ["{", "[1]", "", '"x"'])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(WeftError, match=r"d\.json"):
        read_definition(tmp_path / "d.json")


def test_axes_that_define_each_other_are_refused(tmp_path: Path) -> None:
    data = definition("silu_mul")
    data["axes"]["wide"]["expression"] = "2 * wide"
    parsed = read_definition(write_json(tmp_path / "d.json", data))
    (tmp_path / "w.jsonl").write_text(json.dumps(workloads("silu_mul")[0]))
    with pytest.raises(WeftError, match="wide = 2 \\* wide"):
        read_workloads(tmp_path / "w.jsonl", parsed)


def test_a_violated_constraint_is_refused_and_one_of_tensors_is_noted(tmp_path: Path) -> None:
    data = definition("gemm") | {"constraints": ["m % 16 == 0 and m >= n // 3", "int(a[0, 0]) == m"]}
    parsed = read_definition(write_json(tmp_path / "d.json", data))
    workload = workloads("gemm")[0]
    (tmp_path / "w.jsonl").write_text(json.dumps(workload))
    _, notes = read_workloads(tmp_path / "w.jsonl", parsed)
    assert len(notes) == 1 and "int(a[0, 0]) == m" in notes[0]
    (tmp_path / "w.jsonl").write_text(json.dumps(workload | {"axes": {"m": 17}}))
    with pytest.raises(WeftError, match=r"line 1: axes: .*m % 16 == 0.*got n = 48, m = 17"):
        read_workloads(tmp_path / "w.jsonl", parsed)


# -- what is read --------------------------------------------------------------------------------


def test_a_workload_is_a_case_with_its_axes_and_scalars(tmp_path: Path) -> None:
    problem = read(tmp_path, "rmsnorm")
    assert [c.name for c in problem.operator.cases] == ["rows7", "rows32"]
    case = problem.operator.cases[1]
    assert [(i.name, i.shape) for i in case.inputs] == [("x", (32, 96)), ("gain", (96,))]
    x, gain = problem.operator.draw(case, 3, "cpu")
    exact = problem.operator.reference(x.double(), gain.double(), **case.params)
    by_hand = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * gain.double()
    assert torch.allclose(exact, by_hand, rtol=1e-14)
    assert not torch.equal(x, problem.operator.draw(case, 4, "cpu")[0])


def test_traces_of_a_data_set_are_found_by_the_definition_s_name(tmp_path: Path) -> None:
    for name in ("gemm", "softmax"):
        write_json(tmp_path / "definitions" / "kind" / f"{name}.json", definition(name))
        lines = [{"definition": name, "solution": None, "workload": w} for w in workloads(name)]
        lines.append({"definition": "other", "workload": {}})
        target = tmp_path / "workloads" / "kind" / f"{name}.jsonl"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("\n".join(map(json.dumps, lines)))
    candidate = write_json(tmp_path / "solutions" / "s.json", solution("softmax", PROBLEMS["softmax"].right))
    assert detect_format(tmp_path, candidate) == TRACE
    files = trace_problem.find_files(tmp_path, candidate, None)
    assert files.definition.name == "softmax.json" and files.workloads.name == "softmax.jsonl"
    assert files.root == tmp_path.resolve()
    problem = trace_problem.read_problem(tmp_path, candidate, None, "cpu", 1, tmp_path)
    assert [c.name for c in problem.operator.cases] == ["rows5-n4096"]
    write_json(candidate, solution("gemm", "pass") | {"definition": "no_such"})
    with pytest.raises(WeftError, match="a definition named no_such"):
        trace_problem.find_files(tmp_path, candidate, None)


def test_missing_workloads_are_named_with_the_option(tmp_path: Path) -> None:
    path = write_json(tmp_path / "d.json", definition("add"))
    candidate = write_json(tmp_path / "s.json", solution("add", "pass"))
    with pytest.raises(WeftError, match="--workloads"):
        trace_problem.find_files(path, candidate, None)
    with pytest.raises(WeftError, match="no such file"):
        trace_problem.find_files(path, candidate, tmp_path / "none.jsonl")
    with pytest.raises(WeftError, match="CANDIDATE"):
        trace_problem.find_files(path, tmp_path / "s.py", None)


def test_safetensors_inputs_are_read_and_a_missing_file_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    stored = torch.randn(1000)
    save_file({"a": stored, "short": stored[:5].clone()}, tmp_path / "blob.safetensors")
    workload = workloads("add")[0]
    source = {"type": "safetensors", "path": "data/blob.safetensors", "tensor_key": "a"}
    lines = tmp_path / "own.jsonl"

    def problem(**changes: str) -> Problem:
        lines.write_text(json.dumps(workload | {"inputs": {**workload["inputs"], "a": source | changes}}))
        return read(tmp_path, "add", lines)

    first = problem()
    a, b = first.operator.draw(first.operator.cases[0], 9, "cpu")
    # A file's values do not vary with the seed, so each seed multiplies them by factors of its own.
    factor = a / stored
    assert 0.5 <= float(factor.min()) < float(factor.max()) <= 1.5
    assert not bool(((b / stored).abs() <= 1.5).all())
    for changes, message in (
        ({"path": "gone.safetensors"}, r"gone\.safetensors in .*got no such file"),
        ({"tensor_key": "none"}, "the tensor none"),
        ({"tensor_key": "short"}, r"inputs\.a: expected float32 \(1000,\), got float32 \(5,\)"),
    ):
        with pytest.raises(WeftError, match=message):
            problem(**changes)


def test_an_output_of_another_form_than_declared_is_the_definition_s_mistake(tmp_path: Path) -> None:
    data = definition("batched_gemm")
    data["outputs"]["c"]["shape"] = ["batch", "n", "m"]
    path = write_problem(tmp_path, "batched_gemm")
    write_json(path, data)
    candidate = write_json(tmp_path / "s.json", solution("batched_gemm", "c = torch.bmm(a, b)"))
    with pytest.raises(WeftError, match=r"outputs\.c: expected float32 \(3, 20, 12\)"):
        trace_problem.read_problem(path, candidate, None, "cpu", 1, tmp_path)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"languages": ["cutlass"], "entry_point": "main.py::run"}, "cutlass"),
        ({"language": "tilelang"}, "tilelang"),
        ({"language": "cpp", "entry_point": "main.cpp::run"}, "tvm-ffi"),
        ({"languages": ["cuda_cpp"], "entry_point": "main.cpp::run"}, "needs a GPU"),
    ],
)
def test_what_cannot_be_built_here_is_not_supported_with_its_reason(
    tmp_path: Path, spec: dict[str, Any], reason: str
) -> None:
    data = solution("add", "pass", **spec)
    data["sources"][0]["path"] = data["spec"]["entry_point"].partition("::")[0]
    with pytest.raises(NotSupported, match=reason):
        check_buildable(read_solution(write_json(tmp_path / "s.json", data), "add"), "cpu")


def test_a_dtype_that_the_check_lacks_is_not_supported(tmp_path: Path) -> None:
    path = write_problem(tmp_path, "add")
    data = definition("add")
    data["inputs"]["a"]["dtype"] = "float8_e4m3fn"
    write_json(path, data)
    candidate = write_json(tmp_path / "s.json", solution("add", "pass"))
    with pytest.raises(NotSupported, match="a is float8_e4m3fn"):
        trace_problem.read_problem(path, candidate, None, "cpu", 1, tmp_path)


def test_sources_are_written_below_the_folder(tmp_path: Path) -> None:
    data = solution("add", "c = a")
    data["sources"].append({"path": "lib/parts.py", "content": "x = 1"})
    parsed = read_solution(write_json(tmp_path / "s.json", data), "add")
    write_sources(parsed, tmp_path / "out")
    assert (tmp_path / "out" / "lib" / "parts.py").read_text() == "x = 1"


# -- the suites' own checks ----------------------------------------------------------------------


def test_the_own_check_is_the_rule_of_the_solution_s_suite(tmp_path: Path) -> None:
    flashinfer = read(tmp_path, "batched_gemm")
    sol = read(tmp_path, "batched_gemm", languages=["pytorch"])
    assert flashinfer.own_rule.startswith("FlashInfer-Bench") and sol.own_rule.startswith("SOL-ExecBench")
    case = flashinfer.operator.cases[0]
    exact = flashinfer.baseline.forward(*flashinfer.operator.draw(case, 1, "cpu"), **case.params)
    assert flashinfer.own_check and sol.own_check
    for own_check in (flashinfer.own_check, sol.own_check):
        assert own_check(case, 1, exact)[0] and own_check(case, 1, exact + 0.009)[0]
        assert not own_check(case, 1, exact * 1.1)[0] and not own_check(case, 1, exact.half())[0]
    one_off = exact.clone()
    one_off.view(-1)[0] += 1.0  # of 720 elements: SOL-ExecBench asks for 99 % of them
    assert sol.own_check(case, 1, one_off)[0] and not flashinfer.own_check(case, 1, one_off)[0]
    assert not sol.own_check(case, 1, torch.zeros_like(exact))[0]
