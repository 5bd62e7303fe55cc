"""Definition and workloads in the JSON schema that FlashInfer-Bench and SOL-ExecBench share.

A definition has axes (constant, variable, or an expression of others), inputs and outputs with a
shape of axes and a dtype, and the Python source of a reference with ``run()``. A workload gives the
variable axes their values and says for each input how it is generated.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core import WeftError
from weft.workbench.judge.json_fields import (
    Field,
    NotAnAxisExpression,
    evaluate,
    parse_expression,
    read_json,
    read_json_lines,
)

SUPPORTED_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "bool")
OTHER_DTYPES = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1", "float4_e2m1fn_x2")
INPUT_TYPES = ("random", "scalar", "safetensors", "custom")


class NotSupported(Exception):
    """A valid file that cannot be judged here; the text is the reason."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Input or output: names of axes (or digits), None for a Python scalar, and a dtype of the schema."""

    name: str
    shape: tuple[str, ...] | None
    dtype: str


@dataclass(frozen=True, kw_only=True)
class ToleranceSpec:
    """Tolerance of a workload, as SOL-ExecBench applies it."""

    max_atol: float = 1e-2
    max_rtol: float = 1e-2
    required_matched_ratio: float = 0.99
    max_error_cap: float | None = None
    allow_negative_inf: bool = False


@dataclass(frozen=True, kw_only=True)
class InputSource:
    """Origin of an input: ``type`` as in the schema, with the fields that this type has."""

    type: str
    value: int | float | bool | None = None
    path: str = ""
    tensor_key: str = ""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Values of all axes, sources of the inputs, and the tolerance if the workload has one."""

    uuid: str
    axes: Mapping[str, int]
    inputs: Mapping[str, InputSource]
    tolerance: ToleranceSpec | None = None


@dataclass(frozen=True, kw_only=True)
class Definition:
    """Contract of a kernel, read from a file. ``axes`` are constants, None (variable) or expressions."""

    path: Path
    name: str
    op_type: str
    axes: Mapping[str, int | ast.expr | None]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    reference: str
    constraints: Mapping[str, ast.expr]
    custom_inputs: str = ""

    def shape(self, spec: TensorSpec, axes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the sizes of a tensor; a scalar has none."""
        return tuple(int(a) if a.isdigit() else axes[a] for a in spec.shape or ())

    def axis_values(self, variable: Mapping[str, int], where: Field) -> dict[str, int]:
        """Return the values of all axes; raise :class:`WeftError` if an expression has none."""
        values = {n: v for n, v in self.axes.items() if isinstance(v, int)} | dict(variable)
        pending = {n: v for n, v in self.axes.items() if isinstance(v, ast.expr)}
        while pending:
            # Expressions may use each other in any order; a round without a new value means a circle.
            ready = {n: e for n, e in pending.items() if _names(e) <= values.keys()}
            if not ready:
                raise WeftError(
                    f"{self.path.name}: axes", expected="expressions of other axes", got=_cycle(pending)
                )
            for name, expression in ready.items():
                values[name] = self._size(name, expression, values, where)
                del pending[name]
        return values

    def _size(self, name: str, expression: ast.expr, values: Mapping[str, int], where: Field) -> int:
        try:
            size = evaluate(expression, values)
        except ZeroDivisionError:
            size = "a division by zero"
        # M / 2 is a float in Python also where it is whole.
        if isinstance(size, float) and size.is_integer():
            size = int(size)
        if type(size) is not int or size < 0:
            raise where.error(
                f"axes that give {name} = {ast.unparse(expression)} an integer of at least 0", size
            )
        return size

    def check_constraints(self, axes: Mapping[str, int], where: Field) -> tuple[str, ...]:
        """Raise :class:`WeftError` for a violated constraint; return those that are not only of axes."""
        unchecked = []
        for text, expression in self.constraints.items():
            try:
                holds = evaluate(expression, axes)
            except NotAnAxisExpression:
                unchecked.append(text)
                continue
            except ZeroDivisionError:
                holds = False
            if not holds:
                values = ", ".join(f"{n} = {v}" for n, v in axes.items() if n in _names(expression))
                raise where.error(f"the definition's constraint {text}", values)
        return tuple(unchecked)


def _names(expression: ast.expr) -> set[str]:
    return {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)}


def _cycle(pending: Mapping[str, ast.expr]) -> str:
    return ", ".join(f"{n} = {ast.unparse(e)}" for n, e in pending.items())


# -- definition ----------------------------------------------------------------------------------


def read_definition(path: Path) -> Definition:
    """Read a definition; raise :class:`WeftError` that names the field if it is malformed."""
    file = read_json(path)
    axes = {name: _axis(axis) for name, axis in file.get("axes").members()}
    known = set(axes)
    for name, axis in file.get("axes").members():
        value = axes[name]
        if isinstance(value, ast.expr) and (unknown := _names(value) - known):
            raise axis.get("expression").error(
                "names of axes", f"{', '.join(sorted(unknown))}, which is no axis"
            )
    inputs = _tensors(file.get("inputs"), known)
    outputs = _tensors(file.get("outputs"), known)
    both = {i.name for i in inputs} & {o.name for o in outputs}
    if both:
        raise file.get("outputs").error("names that no input has", ", ".join(sorted(both)))
    reference = file.get("reference")
    functions = _functions(reference)
    _check_run(reference, functions, inputs)
    custom = file.get("custom_inputs_entrypoint", None)
    if custom.value is not None and custom.string() not in functions:
        raise custom.error("a top-level function of the reference")
    constraints = file.get("constraints", None)
    return Definition(
        path=path,
        name=file.get("name").string(),
        op_type=str(file.get("op_type", "").value or ""),
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        reference=reference.string(),
        constraints={c.string(): parse_expression(c) for c in constraints.items()}
        if constraints.value
        else {},
        custom_inputs=custom.value or "",
    )


def _axis(axis: Field) -> int | ast.expr | None:
    kind = axis.get("type").choice(("const", "var", "expr"))
    if kind == "const":
        return axis.get("value").integer()
    if kind == "var":
        return None
    expression = parse_expression(axis.get("expression"))
    try:
        # Evaluated only to refuse a call or an attribute; the values do not matter.
        with suppress(ZeroDivisionError):  # only at these values of the axes
            evaluate(expression, dict.fromkeys(_names(expression), 1))
    except NotAnAxisExpression as error:
        raise axis.get("expression").error("arithmetic on axes and integers", f"{error}") from error
    return expression


def _tensors(tensors: Field, axes: set[str]) -> tuple[TensorSpec, ...]:
    specs = []
    for name, tensor in tensors.members():
        shape = tensor.get("shape")
        dtype = tensor.get("dtype").choice((*SUPPORTED_DTYPES, *OTHER_DTYPES))
        names = None if shape.value is None else shape.strings()
        for item, axis in zip(shape.items() if names else [], names or (), strict=True):
            if axis not in axes and not axis.isdigit():
                raise item.error("an axis: " + ", ".join(sorted(axes)))
        specs.append(TensorSpec(name=name, shape=names, dtype=dtype))
    if not specs:
        raise tensors.error("at least one tensor")
    return tuple(specs)


def _functions(reference: Field) -> dict[str, ast.FunctionDef]:
    try:
        tree = ast.parse(reference.string())
    except (SyntaxError, ValueError) as error:
        raise reference.error("Python source", f"{type(error).__name__}: {error}") from error
    return {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}


def _check_run(
    reference: Field, functions: Mapping[str, ast.FunctionDef], inputs: Sequence[TensorSpec]
) -> None:
    if "run" not in functions:
        got = ", ".join(functions) or "no function"
        raise reference.error("Python source with a top-level function run", got)
    arguments = functions["run"].args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    least, most = len(names) - len(arguments.defaults), len(names)
    if len(inputs) < least or (len(inputs) > most and arguments.vararg is None):
        raise reference.error(
            f"run({', '.join(i.name for i in inputs)}), a parameter for each input",
            f"run({', '.join(names)})",
        )


# -- workloads -----------------------------------------------------------------------------------


def read_workloads(path: Path, definition: Definition) -> tuple[list[Workload], list[str]]:
    """Read the workloads of a definition, one on each line, and notes on what was not checked.

    A line may also be a trace that holds a ``workload``; lines of other definitions are left out.
    Raises :class:`WeftError` that names the line and the field if one is malformed, or if none is left.
    """
    workloads: dict[str, Workload] = {}
    unchecked: dict[str, None] = {}
    for line in read_json_lines(path):
        field = line
        if "workload" in line.value:
            if line.get("definition", definition.name).value != definition.name:
                continue
            field = line.get("workload").object()
        workload = _workload(field, definition)
        if workload.uuid in workloads:
            raise field.get("uuid").error("another uuid in each line")
        workloads[workload.uuid] = workload
        unchecked |= dict.fromkeys(definition.check_constraints(workload.axes, field.get("axes")))
    if not workloads:
        raise WeftError(f"{path}", expected=f"workloads of {definition.name}, one on each line", got="none")
    notes = [f"constraint not checked, it is not only of axes: {text}" for text in unchecked]
    return list(workloads.values()), notes


def _workload(field: Field, definition: Definition) -> Workload:
    axes = field.get("axes")
    variable = [n for n, v in definition.axes.items() if v is None]
    sizes = {}
    for name, size in axes.members():
        if name not in definition.axes:
            raise size.error("a variable axis of the definition: " + (", ".join(variable) or "none"))
        constant = definition.axes[name]
        if isinstance(constant, int) and size.integer() != constant:
            raise size.error(f"the definition's constant, {constant}")
        if constant is None:
            sizes[name] = size.integer(least=1)
    for name in variable:
        axes.get(name)  # raises if it is missing
    inputs = field.get("inputs", {})
    specs = {i.name: i for i in definition.inputs}
    sources = {}
    for name, source in inputs.members():
        if name not in specs:
            raise source.error("an input of the definition: " + ", ".join(specs))
        sources[name] = _source(source, specs[name], definition)
    kinds = {s.type for s in sources.values()}
    if "custom" in kinds and len(kinds - {"custom", "scalar"}) and not definition.custom_inputs:
        raise inputs.error("a custom_inputs_entrypoint in the definition")
    tolerance = field.get("tolerance", None)
    return Workload(
        uuid=field.get("uuid").string(),
        axes=definition.axis_values(sizes, axes),
        inputs=sources,
        tolerance=_tolerance(tolerance) if tolerance.value is not None else None,
    )


def _source(source: Field, spec: TensorSpec, definition: Definition) -> InputSource:
    kind = source.get("type").choice(INPUT_TYPES)
    if kind == "scalar":
        value = source.get("value")
        if not isinstance(value.value, bool):
            value.number()
        if spec.shape is not None:
            raise source.error(f"a tensor: {spec.name} has a shape in the definition", "a scalar")
        return InputSource(type=kind, value=value.value)
    if kind == "safetensors":
        path, key = source.get("path").string(), source.get("tensor_key").string()
        return InputSource(type=kind, path=path, tensor_key=key)
    if kind == "custom" and not definition.custom_inputs:
        raise source.get("type").error(
            "random, scalar or safetensors: no custom_inputs_entrypoint is defined"
        )
    return InputSource(type=kind)


def _tolerance(tolerance: Field) -> ToleranceSpec:
    default = ToleranceSpec()
    cap = tolerance.get("max_error_cap", None)
    return ToleranceSpec(
        max_atol=tolerance.get("max_atol", default.max_atol).number(),
        max_rtol=tolerance.get("max_rtol", default.max_rtol).number(),
        required_matched_ratio=tolerance.get(
            "required_matched_ratio", default.required_matched_ratio
        ).number(),
        max_error_cap=None if cap.value is None else cap.number(),
        allow_negative_inf=tolerance.get("allow_negative_inf", False).boolean(),
    )


def check_dtypes(definition: Definition) -> None:
    """Raise :class:`NotSupported` if the definition has a dtype that the check cannot compare."""
    for spec in (*definition.inputs, *definition.outputs):
        if spec.dtype in OTHER_DTYPES:
            raise NotSupported(
                f"{spec.name} is {spec.dtype}, for which Weft's check has no inputs and no tolerance"
            )


def workload_name(workload: Workload, definition: Definition) -> str:
    """Return the case's name: the variable axes with their values, or the uuid if there are none."""
    variable = [n for n, v in definition.axes.items() if v is None]
    return "-".join(f"{n}{workload.axes[n]}" for n in variable) or workload.uuid


def plain_scalar(spec: TensorSpec, value: float) -> Any:
    """Convert a number to the Python type of a scalar input's dtype."""
    if spec.dtype == "bool":
        return bool(value)
    return float(value) if spec.dtype.startswith(("float", "bfloat")) else int(value)
