"""The project's rules, each a function from a source tree to its violations.

A rule reads the source (ast, text) and imports nothing of it, so that it can be tried on a planted violation
as well as on the project itself. A violation reads ``path:line: what is wrong``.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

LAYERS = (
    "core",
    "machine",
    "backends",
    "dispatch",
    "ops",
    "workbench",
    "lab",
    "learn",
    "scaffold",
    "nn",
    "gpt2",
    "cli",
)
MAX_FILE, MAX_LINE, MAX_FUNCTION, MAX_KERNEL = 600, 110, 80, 150
MIN_MODULE = 40  # lines below which a module needs more than one importer
CODE = (".py", ".cu", ".cuh")
TEXT = (*CODE, ".md", ".toml", ".txt", ".html", ".j2", ".js", ".css", ".json", ".jsonl", "")
FOLDERS = ("src", "tests", "tools", "examples")
# Hosts that a link may name: sites of the projects that Weft is built on and of the papers that it cites.
PUBLIC = re.compile(
    r"(?:^|\.)(?:apache|arxiv|doi|numba|numpy|openreview|pypi|python|pytorch|semver|triton-lang|w3"
    r"|wikipedia)\.org$|(?:^|\.)(?:github|githubusercontent|keepachangelog|nvidia|amd|intel)\.com$"
    r"|(?:^|\.)(?:github\.io|docs\.rs)$|^localhost$|^127\.0\.0\.1$|\.example$"
)
# The distribution each imported name comes from, where the two differ.
DISTRIBUTIONS = {
    "pynvml": ("nvidia-ml-py",),
    "yaml": ("pyyaml",),
    "cuda": ("cuda-core", "cuda-bindings", "cuda-pathfinder"),
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's syntax tree, cached for all rules."""
    return tuple(ast.walk(tree_of(path)))


def files(root: Path, *suffixes: str, under: tuple[str, ...] = FOLDERS) -> list[Path]:
    paths = (p for folder in under for p in sorted((root / folder).rglob("*")))
    return [p for p in paths if p.is_file() and p.suffix in suffixes and _is_source(p, root)]


def all_text(root: Path) -> list[Path]:
    """Return every text file of the tree, except environments and caches."""
    paths = []
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(n for n in inner if _is_source(Path(folder, n), root))
        paths += [Path(folder, n) for n in sorted(names)]
    return [p for p in paths if p.suffix in TEXT and _is_source(p, root)]


def _is_source(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    generated = ("__pycache__", "build", "dist", "node_modules", "site")
    hidden = any(p.startswith(".") and p != ".ci" for p in parts)
    return not hidden and not any(p in generated or p.endswith(".egg-info") for p in parts)


def violation(root: Path, path: Path, line: int, problem: str) -> str:
    return f"{path.relative_to(root)}:{line}: {problem}"


def file_lengths(root: Path) -> Iterator[str]:
    """A file has at most 600 lines."""
    for path in files(root, *CODE, ".html", ".j2", ".js", ".css"):
        lines = len(path.read_text().splitlines())
        if lines > MAX_FILE:
            yield violation(root, path, lines, f"{lines} lines, more than {MAX_FILE}")


def small_modules(root: Path) -> Iterator[str]:
    """A module under 40 lines has more than one importer; ``__init__`` and commands are exempt.

    A module that nothing imports by name is loaded by the registry, by a command line or by a worker
    process, and is exempt too.
    """
    known = modules(root)
    importers: dict[str, set[str]] = {}
    for name, path in known.items():
        for _, target in imports(name, path, known):
            importers.setdefault(target, set()).add(name)
    for name, path in known.items():
        if path.name == "__init__.py" or name.startswith("weft.cli."):
            continue
        lines = len(path.read_text().splitlines())
        if lines < MIN_MODULE and len(importers.get(name, ())) == 1:
            (importer,) = importers[name]
            yield violation(root, path, lines, f"{lines} lines that only {importer} imports")


def line_lengths(root: Path) -> Iterator[str]:
    """A line has at most 110 columns, without a pragma at its end, which cannot move."""
    pragma = re.compile(r"\s+# (?:type: ignore|noqa)\b.*")
    for path in files(root, *CODE):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if len(pragma.sub("", line)) > MAX_LINE:
                yield violation(root, path, number, f"{len(line)} columns")


def function_lengths(root: Path) -> Iterator[str]:
    """A host function has at most 80 lines, a kernel 150."""
    for path in files(root, ".py"):
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                kernel = any("jit" in ast.unparse(d) for d in node.decorator_list)
                length = node.end_lineno - node.lineno + 1
                if length > (MAX_KERNEL if kernel else MAX_FUNCTION):
                    yield violation(root, path, node.lineno, f"{node.name} has {length} lines")
    for path in files(root, ".cu", ".cuh"):
        code = without_comments(path.read_text())
        for start in re.finditer(r"__(?:global|device)__[^;{]*\{", code):
            length = _until_closed(code, start.end()).count("\n") + start.group().count("\n") + 1
            if length > MAX_KERNEL:
                line = code[: start.start()].count("\n") + 1
                yield violation(root, path, line, f"a kernel of {length} lines")


def without_comments(cuda: str) -> str:
    """CUDA source with each comment replaced by its line ends."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), cuda, flags=re.DOTALL)


def _until_closed(code: str, start: int) -> str:
    depth = 1
    for i in range(start, len(code)):
        depth += {"{": 1, "}": -1}.get(code[i], 0)
        if depth == 0:
            return code[start:i]
    return code[start:]


def modules(root: Path) -> dict[str, Path]:
    """Module name -> file, for the package."""
    paths = {}
    for path in files(root, ".py", under=("src/weft",)):
        parts = path.relative_to(root / "src").with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imports(
    name: str, path: Path, known: dict[str, Path], *, deferred: bool = True, typing_only: bool = True
) -> Iterator[tuple[int, str]]:
    """Yield (line, module) for each import in a module.

    ``deferred`` includes imports inside functions, ``typing_only`` those under ``TYPE_CHECKING``.
    """
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
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not deferred:
            continue
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            if deferred and typing_only:
                stack.extend(n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.expr))
        else:
            # No import stands in an expression.
            stack.extend(n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.expr))


def layering(root: Path) -> Iterator[str]:
    """A module imports from its own layer and lower ones. Operators do not import one another, and
    ``workbench.calls`` imports no other package of the workbench."""
    known = modules(root)
    for name, path in known.items():
        for line, target in imports(name, path, known):
            parts, to = name.split("."), target.split(".")
            if to[0] != "weft" or len(to) == 1:
                continue
            own_layer = LAYERS.index(parts[1]) if len(parts) > 1 and parts[1] in LAYERS else 0
            target_layer = LAYERS.index(to[1]) if to[1] in LAYERS else 0
            if len(parts) > 1 and parts[1] not in (*LAYERS, "__main__"):
                yield violation(root, path, line, f"{name} belongs to no layer")
            elif target_layer > own_layer and parts[1:] != ["__main__"]:
                yield violation(root, path, line, f"{name} imports {target} from a higher layer")
            elif _another_operator(parts, to):
                yield violation(root, path, line, f"{name} imports another operator, {target}")
            elif parts[1:3] == ["workbench", "calls"] and to[1] == "workbench" and to[2:3] != ["calls"]:
                yield violation(root, path, line, f"{name} imports {target}, a higher room")


def _another_operator(parts: list[str], to: list[str]) -> bool:
    both = parts[1:2] == to[1:2] == ["ops"] and len(parts) > 2 and len(to) > 2
    return both and to[2] != parts[2] and not to[2].startswith("_")


def cycles(root: Path) -> Iterator[str]:
    """No module imports itself by way of others, imports inside functions included."""
    known = modules(root)
    graph = {}
    for name, path in known.items():
        graph[name] = {t for _, t in imports(name, path, known, typing_only=False) if t in known}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> Iterator[str]:
        if name in path:
            yield "circular import: " + " -> ".join((*path[path.index(name) :], name))
        elif name not in done:
            for target in sorted(graph[name]):
                yield from visit(target, (*path, name))
            done.add(name)

    for name in graph:
        yield from visit(name, ())


CHIP = re.compile(
    r"\b(?:[ABHV](?:100|200|300|800)|GB?[BH][23]00|GH200|H20|L40S?|A[34]0|A6000|GeForce|Tesla"
    r"|Quadro|RTX ?\w*|GTX ?\w*|MI[23]\d\dX?|Xeon|EPYC)\b"
)


def device_names(root: Path) -> Iterator[str]:
    """Outside machine/ no code decides by the name of a device. Comments and docstrings may name the
    device on which a figure was measured."""
    for path in files(root, *CODE, ".html", ".j2", ".js", ".css", under=("src/weft",)):
        if path.relative_to(root / "src/weft").parts[0] == "machine":
            continue
        if path.suffix == ".py":
            texts = list(_words(path))
        else:
            texts = list(enumerate(without_comments(path.read_text()).splitlines(), 1))
        for line, text in texts:
            if name := CHIP.search(text):
                yield violation(root, path, line, f"names the device {name.group()}")


def _words(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every name and every string that is not a docstring, with its line."""
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
                    yield violation(root, path, node.lineno, "a bare except")
                elif all(isinstance(n, ast.Pass) for n in node.body):
                    yield violation(root, path, node.lineno, "an except that only passes")
            elif isinstance(node, ast.Call) and "suppress" in ast.unparse(node.func):
                named = {ast.unparse(a) for a in node.args}
                if named & {"Exception", "BaseException"}:
                    yield violation(root, path, node.lineno, "suppresses every exception")


def unfinished(root: Path) -> Iterator[str]:
    """No mark of work put off, and no stub."""
    mark = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|X" r"XX)\b")
    for path in all_text(root):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if mark.search(line):
                yield violation(root, path, number, "work put off")
    for path in files(root, ".py", under=("src",)):
        for node in nodes_of(path):
            if isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node):
                yield violation(root, path, node.lineno, "a stub")


def operator_docstrings(root: Path) -> Iterator[str]:
    """The docstring of a public operator states its shapes, its dtypes and the errors that it raises."""
    for path in sorted((root / "src/weft/ops").glob("[a-z]*/__init__.py")):
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                text = ast.get_docstring(node) or ""
                for subject, pattern in (
                    ("shapes", r"[Ss]hape|\([A-Za-z*.]+, ?[A-Za-z*.]+\)"),
                    ("dtypes", r"float|fp32|bf16|dtype"),
                    ("errors", r"WeftError"),
                ):
                    if not re.search(pattern, text):
                        problem = f"{node.name}: the docstring does not tell its {subject}"
                        yield violation(root, path, node.lineno, problem)


def dependency_reasons(root: Path) -> Iterator[str]:
    """Every dependency has a comment with the reason for it."""
    path = root / "pyproject.toml"
    data = tomllib.loads(path.read_text())
    groups = [data["build-system"]["requires"], data["project"].get("dependencies", [])]
    groups += data["project"].get("optional-dependencies", {}).values()
    lines = path.read_text().splitlines()
    for requirement in (r for group in groups for r in group):
        for number, line in enumerate(lines, 1):
            _, requirement_text, after = line.partition(f'"{requirement}"')
            if requirement_text and not re.search(r"#\s*\S+ \S+", after):
                yield violation(root, path, number, f"{requirement} has no reason beside it")


def dependency_use(root: Path) -> Iterator[str]:
    """Every import of the package is a declared dependency, and every declared dependency is imported.

    A module imports an optional dependency inside a function only, so that the rest of the package works
    without it.
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
            distributions = DISTRIBUTIONS.get(top, (top.replace("_", "-"),))
            used.update(distributions if top != "cuda" else ())
            allowed = declared if target in at_once else declared | optional
            if not (top in sys.stdlib_module_names or top == "weft" or allowed & set(distributions)):
                yield violation(root, path, line, f"imports {top}, which pyproject.toml does not name")
    if "numba" in used:
        used.add("numba-cuda")  # it replaces numba.cuda and is not imported by name
    yield from (f"pyproject.toml: nothing imports {name}" for name in sorted(declared - used))


def _distributions(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[^\w-]", r)[0].lower() for r in requirements}


def private_places(root: Path) -> Iterator[str]:
    """No path of a private machine, and no link to a host that is not public."""
    path_of = re.compile(r"(?<![\w./-])/(?:(?:work|root|Users)/|home/(?!user\b|you\b))[\w.]")
    link = re.compile(r"https?://([\w.-]+)")
    for path in all_text(root):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if path_of.search(line):
                yield violation(root, path, number, "a path of a private machine")
            for host in link.findall(line):
                if not PUBLIC.search(host):
                    yield violation(root, path, number, f"a link to {host}")


# Words that do not say what a value is, and private terms that standard ones have replaced.
VAGUE_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
        found told said made kept held given wanted stranger strangers guest cell keeper hands hand lay
        scene holding spoil aside trial slot deal refill race course entrant stand rig dawdled tired fresh
        remember ran brought drawn say stay staying flow lean mores room specimens specimen handed picky
        unheard recalled way ways place maybe passes draws own_up answer_to dwell
        """,
    )
)
# "file: name" -> the reason why it is allowed
ALLOWED_NAMES = {
    "sanitize.py: race": "a data race, as compute-sanitizer's racecheck reports it",
    "sanitize.py: _RACE": "likewise",
    "test_sanitize.py: race": "likewise",
    "guarded_pages.py: place": "a verb: it places a tensor at a page",
}
NAMED_FOLDERS = ("src/weft", "tests")


def vague_names(root: Path) -> Iterator[str]:
    """A name says what the value is: no function, class, argument or variable is named by a vague word."""
    for path in files(root, ".py", under=NAMED_FOLDERS):
        for node in nodes_of(path):
            name = ""
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            if name.strip("_").lower() in VAGUE_WORDS and f"{path.name}: {name}" not in ALLOWED_NAMES:
                yield violation(root, path, node.lineno, f"{name} does not say what the value is")


# It reads a trace of hundreds of megabytes that the same process has just written.
OWN_FILES = ("instruments.py",)


def json_files(root: Path) -> Iterator[str]:
    """A JSON file is read by core/json_files.py, which survives FIFOs, deep nesting and huge integers."""
    for path in files(root, ".py", under=("src/weft",)):
        if path.name in OWN_FILES:
            continue
        for node in nodes_of(path):
            call = ast.unparse(node) if isinstance(node, ast.Call) else ""
            if re.match(r"json\.load\(|json\.loads\(.*\.read_", call):
                yield violation(root, path, node.lineno, "use weft.core.json_files.read_json")


OPENING = re.compile(
    r"(?:What|Whether|Which|Who|Whoever|How|Where|That|Those|Of|By|Nothing|Nobody|Somebody)\b"
)


def docstring_openings(root: Path) -> Iterator[str]:
    """A docstring starts with a verb or a noun, not with a question word."""
    for path in files(root, ".py", under=NAMED_FOLDERS):
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node) or ""
                if OPENING.match(text):
                    line = getattr(node, "lineno", 1)
                    yield violation(root, path, line, f"a docstring that opens with {text.split()[0]!r}")


def commands_documented(helps: dict[str, str], docs: str) -> Iterator[str]:
    """Each command's help shows an example, and a page of the docs describes the command."""
    for name, text in helps.items():
        if f"weft {name}" not in text:
            yield f"weft {name}: its help shows no example"
        if f"weft {name}" not in docs:
            yield f"weft {name}: no page of docs speaks of it"


RULES = (
    file_lengths,
    small_modules,
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
    vague_names,
    docstring_openings,
    json_files,
)
