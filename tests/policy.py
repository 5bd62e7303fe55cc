"""The house's rules, each a function from a tree to the places where it is broken.

They read the source (ast, text) and import nothing of it, so that each can be tried on a planted
violation as well as on the house itself. A violation reads ``path:line: what is wrong``.
"""

from __future__ import annotations

import ast
import os
import re
import statistics
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

FLOORS = ("core", "machine", "backends", "ops", "workbench", "nn", "gpt2", "cli")
LONGEST_FILE, MEDIAN_FILE, LONGEST_LINE, HOST_FUNCTION, KERNEL = 400, 150, 100, 60, 120
CODE = (".py", ".cu", ".cuh")
TEXT = (*CODE, ".md", ".toml", ".txt", ".html", ".j2", ".js", ".css", ".json", ".jsonl", "")
FOLDERS = ("src", "tests", "tools", "examples")
# Where a link may lead: the homes of what Weft is built on and of the papers it cites.
PUBLIC = re.compile(
    r"(?:^|\.)(?:apache|arxiv|doi|numba|numpy|openreview|pypi|python|pytorch|semver|triton-lang|w3"
    r"|wikipedia)\.org$|(?:^|\.)(?:github|githubusercontent|keepachangelog|nvidia|amd|intel)\.com$"
    r"|(?:^|\.)(?:github\.io|docs\.rs)$|^localhost$|^127\.0\.0\.1$|\.example$"
)
# The distribution each imported name comes from, where the two differ.
DISTRIBUTIONS = {
    "pynvml": ("nvidia-ml-py",),
    "cuda": ("cuda-core", "cuda-bindings", "cuda-pathfinder"),
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Walked once for all rules."""
    return tuple(ast.walk(tree_of(path)))


def files(root: Path, *suffixes: str, under: tuple[str, ...] = FOLDERS) -> list[Path]:
    found = (p for folder in under for p in sorted((root / folder).rglob("*")))
    return [p for p in found if p.is_file() and p.suffix in suffixes and _ours(p, root)]


def all_text(root: Path) -> list[Path]:
    """Every text file of the tree, environments and caches excepted."""
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(n for n in inner if _ours(Path(folder, n), root))
        found += [Path(folder, n) for n in sorted(names)]
    return [p for p in found if p.suffix in TEXT and _ours(p, root)]


def _ours(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    made = ("__pycache__", "build", "dist", "node_modules")
    hidden = any(p.startswith(".") and p != ".ci" for p in parts)
    return not hidden and not any(p in made or p.endswith(".egg-info") for p in parts)


def where(root: Path, path: Path, line: int, what: str) -> str:
    return f"{path.relative_to(root)}:{line}: {what}"


def file_lengths(root: Path) -> Iterator[str]:
    """A file has at most 400 lines, and half of the package's have under 150."""
    for path in files(root, *CODE, ".html", ".j2", ".js", ".css"):
        lines = len(path.read_text().splitlines())
        if lines > LONGEST_FILE:
            yield where(root, path, lines, f"{lines} lines, more than {LONGEST_FILE}")
    lengths = [len(p.read_text().splitlines()) for p in files(root, *CODE, under=("src",))]
    if lengths and statistics.median(lengths) >= MEDIAN_FILE:
        yield f"src: the median file has {statistics.median(lengths)} lines"


def line_lengths(root: Path) -> Iterator[str]:
    """A line has at most 100 columns; a pragma at its end, which cannot move, is not counted."""
    pragma = re.compile(r"\s+# (?:type: ignore|noqa)\b.*")
    for path in files(root, *CODE):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if len(pragma.sub("", line)) > LONGEST_LINE:
                yield where(root, path, number, f"{len(line)} columns")


def function_lengths(root: Path) -> Iterator[str]:
    """A host function has at most 60 lines, a kernel 120."""
    for path in files(root, ".py"):
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                kernel = any("jit" in ast.unparse(d) for d in node.decorator_list)
                length, most = (
                    node.end_lineno - node.lineno + 1,
                    KERNEL if kernel else HOST_FUNCTION,
                )
                if length > most:
                    yield where(root, path, node.lineno, f"{node.name} has {length} lines")
    for path in files(root, ".cu", ".cuh"):
        code = without_comments(path.read_text())
        for start in re.finditer(r"__(?:global|device)__[^;{]*\{", code):
            length = _until_closed(code, start.end()).count("\n") + start.group().count("\n") + 1
            if length > KERNEL:
                line = code[: start.start()].count("\n") + 1
                yield where(root, path, line, f"a kernel of {length} lines")


def without_comments(cuda: str) -> str:
    """CUDA source with each comment replaced by its line ends."""
    return re.sub(
        r"//[^\n]*|/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), cuda, flags=re.DOTALL
    )


def _until_closed(code: str, start: int) -> str:
    depth = 1
    for i in range(start, len(code)):
        depth += {"{": 1, "}": -1}.get(code[i], 0)
        if depth == 0:
            return code[start:i]
    return code[start:]


def modules(root: Path) -> dict[str, Path]:
    """Module name -> file, for the package."""
    found = {}
    for path in files(root, ".py", under=("src/weft",)):
        parts = path.relative_to(root / "src").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(
    name: str, path: Path, known: dict[str, Path], *, deferred: bool = True
) -> Iterator[tuple[int, str]]:
    """(line, module) for each import in a module; ``deferred`` says whether those count that run
    later (inside functions) or never (under TYPE_CHECKING)."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    stack: list[ast.AST] = list(tree_of(path).body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, base] if base else up)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in known else base
        elif deferred or not (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ):
            # No import stands in an expression.
            stack.extend(n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.expr))


def layering(root: Path) -> Iterator[str]:
    """A module imports only from its own floor and those below; operators not from one another."""
    known = modules(root)
    for name, path in known.items():
        for line, target in imports(name, path, known):
            parts, to = name.split("."), target.split(".")
            if to[0] != "weft" or len(to) == 1:
                continue
            mine = FLOORS.index(parts[1]) if len(parts) > 1 and parts[1] in FLOORS else 0
            theirs = FLOORS.index(to[1]) if to[1] in FLOORS else 0
            if len(parts) > 1 and parts[1] not in (*FLOORS, "__main__"):
                yield where(root, path, line, f"{name} stands on no floor")
            elif theirs > mine and parts[1:] != ["__main__"]:
                yield where(root, path, line, f"{name} imports {target} from a higher floor")
            elif _another_operator(parts, to):
                yield where(root, path, line, f"{name} imports another operator, {target}")


def _another_operator(parts: list[str], to: list[str]) -> bool:
    both = parts[1:2] == to[1:2] == ["ops"] and len(parts) > 2 and len(to) > 2
    return both and to[2] != parts[2] and not to[2].startswith("_")


def cycles(root: Path) -> Iterator[str]:
    """No module imports itself by way of others, counting what runs on import."""
    known = modules(root)
    graph = {
        n: {t for _, t in imports(n, p, known, deferred=False) if t in known}
        for n, p in known.items()
    }
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> Iterator[str]:
        if name in way:
            yield "circular import: " + " -> ".join((*way[way.index(name) :], name))
        elif name not in done:
            for target in sorted(graph[name]):
                yield from visit(target, (*way, name))
            done.add(name)

    for name in graph:
        yield from visit(name, ())


CHIP = re.compile(
    r"\b(?:[ABHV](?:100|200|300|800)|GB?[BH][23]00|GH200|H20|L40S?|A[34]0|A6000|GeForce|Tesla"
    r"|Quadro|RTX ?\w*|GTX ?\w*|MI[23]\d\dX?|Xeon|EPYC)\b"
)


def device_names(root: Path) -> Iterator[str]:
    """Outside machine/ no code decides by the name of a device. Comments and docstrings may tell
    on which device a figure was seen."""
    for path in files(root, *CODE, ".html", ".j2", ".js", ".css", under=("src/weft",)):
        if path.relative_to(root / "src/weft").parts[0] == "machine":
            continue
        if path.suffix == ".py":
            found = list(_words(path))
        else:
            found = list(enumerate(without_comments(path.read_text()).splitlines(), 1))
        for line, text in found:
            if name := CHIP.search(text):
                yield where(root, path, line, f"names the device {name.group()}")


def _words(path: Path) -> Iterator[tuple[int, str]]:
    """Every name and every string that is not a docstring, with its line."""
    bare = {id(n.value) for n in nodes_of(path) if isinstance(n, ast.Expr)}
    for node in nodes_of(path):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Constant) and id(node) not in bare:
            yield node.lineno, str(node.value)


def swallowed_errors(root: Path) -> Iterator[str]:
    """No bare except, and none that only passes; suppress() names what it expects."""
    for path in files(root, ".py"):
        for node in nodes_of(path):
            if isinstance(node, ast.ExceptHandler):
                if node.type is None:
                    yield where(root, path, node.lineno, "a bare except")
                elif all(isinstance(n, ast.Pass) for n in node.body):
                    yield where(root, path, node.lineno, "an except that only passes")
            elif isinstance(node, ast.Call) and "suppress" in ast.unparse(node.func):
                named = {ast.unparse(a) for a in node.args}
                if named & {"Exception", "BaseException"}:
                    yield where(root, path, node.lineno, "suppresses every exception")


def unfinished(root: Path) -> Iterator[str]:
    """No mark of work put off, and no stub."""
    mark = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|X" r"XX)\b")
    for path in all_text(root):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if mark.search(line):
                yield where(root, path, number, "work put off")
    for path in files(root, ".py", under=("src",)):
        for node in nodes_of(path):
            if isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node):
                yield where(root, path, node.lineno, "a stub")


def operator_docstrings(root: Path) -> Iterator[str]:
    """A public operator says what shapes and dtypes it takes and what it raises."""
    for path in sorted((root / "src/weft/ops").glob("[a-z]*/__init__.py")):
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                text = ast.get_docstring(node) or ""
                for word, pattern in (
                    ("shapes", r"[Ss]hape|\([A-Za-z*.]+, ?[A-Za-z*.]+\)"),
                    ("dtypes", r"float|fp32|bf16|dtype"),
                    ("errors", r"WeftError"),
                ):
                    if not re.search(pattern, text):
                        what = f"{node.name}: the docstring does not tell its {word}"
                        yield where(root, path, node.lineno, what)


def dependency_reasons(root: Path) -> Iterator[str]:
    """Every dependency says why it is there."""
    path = root / "pyproject.toml"
    data = tomllib.loads(path.read_text())
    groups = [data["build-system"]["requires"], data["project"].get("dependencies", [])]
    groups += data["project"].get("optional-dependencies", {}).values()
    lines = path.read_text().splitlines()
    for requirement in (r for group in groups for r in group):
        for number, line in enumerate(lines, 1):
            _, found, after = line.partition(f'"{requirement}"')
            if found and not re.search(r"#\s*\S+ \S+", after):
                yield where(root, path, number, f"{requirement} has no reason beside it")


def dependency_use(root: Path) -> Iterator[str]:
    """What the package imports is declared, and what is declared is imported.

    What only an extra brings may be imported by who needs it, inside a function: the rest of the
    package works without.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    declared = _distributions(project["dependencies"])
    extras = project.get("optional-dependencies", {})
    optional = _distributions(r for e in extras if e not in ("test", "dev") for r in extras[e])
    known, used = modules(root), set()
    for name, path in known.items():
        at_once = {target for _, target in imports(name, path, known, deferred=False)}
        for line, target in imports(name, path, known):
            top = target.split(".")[0]
            if top == "cuda" and target.count("."):
                used.add("cuda-" + target.split(".")[1])
            wanted = DISTRIBUTIONS.get(top, (top.replace("_", "-"),))
            used.update(wanted if top != "cuda" else ())
            allowed = declared if target in at_once else declared | optional
            if not (top in sys.stdlib_module_names or top == "weft" or allowed & set(wanted)):
                yield where(root, path, line, f"imports {top}, which pyproject.toml does not name")
    if "numba" in used:
        used.add("numba-cuda")  # it takes the place of numba.cuda and is not imported by name
    yield from (f"pyproject.toml: nothing imports {name}" for name in sorted(declared - used))


def _distributions(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[^\w-]", r)[0].lower() for r in requirements}


def private_places(root: Path) -> Iterator[str]:
    """No path of somebody's own machine, and no link to a host that is not public."""
    path_of = re.compile(r"(?<![\w./-])/(?:(?:work|root|Users)/|home/(?!user\b|you\b))[\w.]")
    link = re.compile(r"https?://([\w.-]+)")
    for path in all_text(root):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if path_of.search(line):
                yield where(root, path, number, "a path of somebody's own machine")
            for host in link.findall(line):
                if not PUBLIC.search(host):
                    yield where(root, path, number, f"a link to {host}")


def commands_documented(helps: dict[str, str], docs: str) -> Iterator[str]:
    """Each command's help shows an example, and the docs speak of it."""
    for name, text in helps.items():
        if f"weft {name}" not in text:
            yield f"weft {name}: its help shows no example"
        if f"weft {name}" not in docs:
            yield f"weft {name}: no page of docs speaks of it"


RULES = (
    file_lengths,
    line_lengths,
    function_lengths,
    layering,
    cycles,
    device_names,
    swallowed_errors,
    unfinished,
    operator_docstrings,
    dependency_reasons,
    dependency_use,
    private_places,
)
