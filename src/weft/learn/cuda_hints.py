"""Hints for slips of people who know Python and begin with C++: beside the compiler's message or a fault's.

Some slips compile and do something else: ``find_slip`` looks for them in the source before it is compiled.
"""

from __future__ import annotations

import re
from pathlib import Path

COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.S)
KERNEL = re.compile(
    r"__global__\s[\w\s]*?\bvoid\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(([^)]*)\)", re.S
)
LAUNCH = re.compile(r"(\w+)\s*(?:<[^<>;(){}]*>\s*)?<<<(.*?)>>>\s*\(", re.S)
TERM = r"(?<![\w<.])[\w.]+(?:\[[^\]]*\])?"
TARGET = r"\w+(?:\[[^\];]*\])*"
PAIR = r"\(\s*[^(),]+,\s*[^(),]+\)"
QUOTES = str.maketrans("‘’", "''")

# (pattern in the source line, pattern in the compiler's or the emulator's message, hint); "" matches all.
# \1 and further in a hint are groups of the source line.
HINTS = (
    (
        r"[\w)]\s*//\s*[\w(]+\s*\)*\s*;",
        "",
        "// starts a comment in C++; whole-number division is /",
    ),
    (r"\w\s*//=", "", "// starts a comment in C++; whole-number division is /="),
    (r"\b(?:if|elif|while)\b\s+[^({]*:\s*$", "", "an if is written: if (i < n) statement;"),
    (r"\bif\b\s*[^(\s]", "expected '\\('", "an if is written: if (i < n) statement;"),
    (
        r"\bfor\b\s+\w+\s+in\b",
        "",
        "a loop is written: for (int i = start; i < n; i += step) { ... }",
    ),
    (r"\breturn\b", "return-statement with a value", "a kernel returns nothing: assign to y[i]"),
    (
        r"\b(\w+)\[(\w+)\]\[(\w+)\]",
        "invalid types .* for array subscript",
        r"\1 is one-dimensional: \1[\2 * columns + \3], with a row's number of columns",
    ),
    (
        r"\b(\w+)\s*=\s*cudaMalloc\s*\(",
        "cudaMalloc",
        r"cudaMalloc takes two arguments: cudaMalloc(&\1, bytes)",
    ),
    (r"cudaMalloc\s*\(", 'macro "cudaMalloc"', "cudaMalloc takes two arguments: cudaMalloc(&a, bytes)"),
    (
        r"cudaMalloc\s*\(\s*(\w+)\s*,",
        "cudaMalloc gets",
        r"cudaMalloc takes the address of the variable: cudaMalloc(&\1, bytes)",
    ),
    (r"cudaMemcpy", "too few arguments", "cudaMemcpy(target, source, bytes, cudaMemcpyHostToDevice)"),
    (r"cudaMemcpy\s*\(\s*(\w+)", "invalid conversion", r"the target comes first, and \1 may only be read"),
    (r"\belse\s*:", "", "else has no colon: else statement;"),
    (
        r"\b(threadIdx|blockIdx|blockDim|gridDim)\b(?!\s*\.)",
        "convert|conversion|no match|invalid",
        r"\1 has three numbers: choose \1.x or \1.y",
    ),
    (
        r"\b(\w+)\[\w+\](?:\.\w+)?\s*[-+*/]?=[^=]",
        "const float4|discards qualifiers|read-only",
        r"\1 points to const, which may only be read; where it is written: float4* \1 = (float4*)...",
    ),
    (
        r"\bcudaStreamCreate\s*\(\s*([^&\s][^)]*)\)",
        "does not fit",
        r"cudaStreamCreate takes the address of the stream: cudaStreamCreate(&\1)",
    ),
    (
        r"\bcudaStreamSynchronize\s*\(\s*(\w+)\s*\)",
        "does not fit",
        r"cudaStreamSynchronize waits for one stream; for all: cudaDeviceSynchronize()",
    ),
    (
        r"<<<[^;]*,[^;]*,[^;]*>>>",
        "the launch of .* does not fit",
        "in <<< >>> the third value is the bytes of dynamic shared memory; a stream is the fourth",
    ),
    (r"\bcudaMemset\s*\(", "too few arguments", "cudaMemset(target, 0, bytes)"),
    (
        r"\bcudaMemcpyToSymbol\s*\(\s*&\s*(\w+)",
        "cannot bind",
        r"cudaMemcpyToSymbol takes the array itself: cudaMemcpyToSymbol(\1, source, bytes)",
    ),
    (
        r"\batomicAdd\s*\(\s*(\w+(?:\[[^\]]*\])*)\s*,",
        "no matching function",
        r"atomicAdd takes an address, and a value of the same type: atomicAdd(&\1, v)",
    ),
    (
        r"\b__shared__\b",
        "storage size|must be constant|not constant",
        "its size is known before the launch: __shared__ float s[256]",
    ),
    (
        r"^\s*(\w+)\s*=",
        "incompatible types in assignment of .* to '.*\\[",
        r"an array is not assigned: copy its elements, or bytes by cudaMemcpy or cudaMemcpyToSymbol",
    ),
    (r"[^=!<>]=[^=]", "lvalue required as left operand", "= assigns, == compares"),
    (
        r"(?<!_)\b(popc|ffs|ballot_sync|any_sync|all_sync|shfl\w*_sync|syncthreads|syncwarp)\b",
        "not declared",
        r"this name starts with two underscores: __\1",
    ),
    ("", "no match for 'operator.*float4", "a float4 has no arithmetic: v.x *= a; and likewise y, z, w"),
    (r"#", "stray '#'|preprocessing directive", "a comment starts with // in C++"),
    (r"\*\*", "unary '\\*'", "C++ has no **: write x * x"),
    (r"\b(?:True|False|None)\b", "not declared", "C++ writes true, false and nullptr"),
    (r"\bdef\b", "", "a function is written: float name(float x) { return x; }"),
    (
        r"^\s*(\w+)\s*=[^=]",
        "not declared",
        r"a variable's first line names its type: int \1 = ..., float \1 = ...",
    ),
)


def strip_comments(source: str) -> str:
    """Return the source with comments blanked, on the same lines."""
    return COMMENT.sub(lambda m: m[1] or re.sub(r"[^\n]", " ", m[0]), source)


def hint(line: str, message: str) -> str:
    """Return the hint for a source line and the message about it, "" if the table has none.

    >>> hint("  return a * x[i];", "return-statement with a value, in function returning 'void'")
    'a kernel returns nothing: assign to y[i]'
    """
    message = message.translate(QUOTES)
    for pattern, about, text in HINTS:
        match = re.search(pattern, line)
        if match and re.search(about, message):
            return match.expand(text)
    return ""


def find_slip(source: str) -> str:
    """Return the reason for the first slip that g++ would take for something else, "" if there is none.

    >>> find_slip("void run() {\\n  dim3 grid = (3, 4);\\n}").splitlines()[-1]
    'hint: (3, 4) is only 4 in C++; write dim3 grid(3, 4)'
    """
    code = strip_comments(source)
    kernels = dict(KERNEL.findall(code))
    slips = sorted(_slips(code, kernels))
    if not slips:
        return ""
    position, what, text = slips[0]
    number = code.count("\n", 0, position) + 1
    return reason(number, what, source.splitlines()[number - 1], text)


def _slips(code: str, kernels: dict[str, str]) -> list[tuple[int, str, str]]:
    """Return positions, what stands there, and hints."""
    slips = []
    for name in kernels:
        written = f"a launch is written {name}<<<blocks, threads>>>(...)"
        for match in re.finditer(rf"\b{name}\s*\[[^\];]*\]\s*\(", code):
            slips.append((match.start(), f"{name} is a kernel, and no array", written))
        for match in re.finditer(rf"(?<!void )\b{name}\s*\(", code):
            if not re.search(r"\b(?:void|\))\s*$", code[max(0, match.start() - 40) : match.start()]):
                slips.append((match.start(), f"{name} is called without <<< >>>", written))
    for match in LAUNCH.finditer(code):
        name = match[1]
        for pair in re.finditer(rf"(?<![\w)])\s*{PAIR}", match[2]):
            inner = pair[0].strip()
            last = inner[1:-1].split(",")[-1].strip()
            text = f"{inner} is only {last} in C++; write dim3{inner}"
            slips.append((match.start(2) + pair.start(), "a pair in a launch", text))
        arguments = _arguments(code, match.end())
        if _arguments(match[2] + ")", 0) == 1:
            text = f"a launch is written {name}<<<blocks, threads>>>(...)"
            slips.append((match.start(), "the launch has one number, and needs two", text))
        if name in kernels and arguments is not None and "<" not in kernels[name]:
            expected = len([p for p in kernels[name].split(",") if p.strip()])
            if arguments != expected:
                got = f"{name} takes {expected} arguments, got {arguments}"
                text = f"the kernel's parameters are ({' '.join(kernels[name].split())})"
                slips.append((match.start(), got, text))
    for match in re.finditer(rf"\bdim3\s+(\w+)\s*=\s*({PAIR})\s*;", code):
        last = match[2][1:-1].split(",")[-1].strip()
        text = f"{match[2]} is only {last} in C++; write dim3 {match[1]}{match[2]}"
        slips.append((match.start(), "a pair for dim3", text))
    for match in re.finditer(r"\b(__sync\w+)\s*;", code):
        text = f"a call has parentheses: {match[1]}();"
        slips.append((match.start(), f"{match[1]} is not called", text))
    for match in re.finditer(r"\bcudaFree\s*\(\s*&\s*(\w+)", code):
        text = f"cudaFree takes the pointer itself: cudaFree({match[1]})"
        slips.append((match.start(), "cudaFree gets the address of a variable", text))
    for match in re.finditer(r"\b(\w+)\[\s*(\w+)\s*,\s*(\w+)\s*\]", code):
        name, row, column = match.groups()
        if name in kernels or name == "auto":
            continue
        has_two = re.search(rf"\b{name}\s*\[[^\[\];]*\]\s*\[", code)
        is_declared = re.search(r"\b(?:float|int|double|unsigned)\s+(?:[^;()]*,\s*)?$", code[: match.start()])
        index = f"[{row}][{column}]" if has_two or is_declared else f"[{row} * columns + {column}]"
        text = f"{match[0]} is {name}[{column}] in C++; write {name}{index}"
        slips.append((match.start(), "a comma in an index", text))
    for match in re.finditer(r"\b__shared__\b[^;()=]*=", code):
        text = "declare it without a value; a thread assigns each element, and a barrier follows"
        slips.append((match.start(), "a __shared__ variable has no first value", text))
    for match in re.finditer(rf"{TERM}\s*<=?\s*{TERM}\s*<=?\s*{TERM}", code):
        text = "C++ compares the result of the first comparison, 0 or 1: write a <= b && b < c"
        slips.append((match.start(), f"{match[0]} compares twice", text))
    for match in re.finditer(rf"[;{{}}]\s*({TARGET}\s*,\s*{TARGET}\s*=[^=][^;]*;)", code):
        text = "C++ assigns one at a time; to exchange two, keep one in a variable: float a = ...;"
        slips.append((match.start(1), "an assignment to two at once", text))
    return slips


def _arguments(code: str, start: int) -> int | None:
    """Return how many arguments a call has whose parenthesis opens in front of ``start``."""
    depth, commas = 1, 0
    for i in range(start, len(code)):
        depth += (code[i] in "([{") - (code[i] in ")]}")
        commas += code[i] == "," and depth == 1
        if depth == 0:
            return commas + 1 if code[start:i].strip() else 0
    return None


def reason(number: int, message: str, line: str, text: str) -> str:
    """Return a reason about a source line: the message, the line, the hint."""
    shown = f"line {number}: {message}\n  {line.strip()}"
    return f"{shown}\nhint: {text}" if text else shown


def first_error(messages: str, file_name: str, lines: list[str]) -> str:
    """Return the compiler's first error, the learner's line, and a hint if there is one."""
    messages = messages.translate(QUOTES)
    error = re.search(r"^([^:\n]+):(\d+):(?:\d+:)? (?:fatal )?error: (.*)", messages, re.M)
    if not error:
        return f"the compiler failed: {messages.strip()[-300:]}"
    message, number = error[3], 0
    if Path(error[1]).name == file_name:
        number = int(error[2])
    elif near := re.search(rf"{re.escape(file_name)}:(\d+)", messages):
        number = int(near[1])
    if not 0 < number <= len(lines):
        return f"{message}. Keep the names and the parameters of the starting file"
    line, message = lines[number - 1], message.removesuffix(" [-fpermissive]")
    if message.startswith("expected"):
        message = re.sub(r"before 'weft_launch\w*'", "before the launch", message)
    if "weft_malloc" in message:
        message = "cudaMalloc gets other arguments than it takes"
    if re.search("weft_|Weft", message):
        match = LAUNCH.search(line)
        message = (
            f"the launch of {match[1]} does not fit its kernel"
            if match
            else "a call does not fit its function"
        )
        return reason(number, message, line, hint(line, message) or _types(messages))
    text = hint(line, message)
    earlier = [n for n in range(1, number) if strip_comments(lines[n - 1]).strip()]
    if not text and earlier:
        before = lines[earlier[-1] - 1]
        code = strip_comments(before).rstrip()
        if re.search(HINTS[0][0], before) and code.count("(") > code.count(")"):
            return reason(earlier[-1], message, before, HINTS[0][2])
        if re.search(r"expected .*(?:[,;]|initializer)", message) and not re.search(r"[;{}:,(]$", code):
            return reason(earlier[-1], message, before, "a statement ends with ;")
    if not text and "expected" in message and "';'" in message and not re.search(r"[;{}]\s*(?://.*)?$", line):
        text = "a statement ends with ;"
    return reason(number, message, line, text)


def _types(messages: str) -> str:
    """Return what g++ notes about types that do not fit."""
    note = re.search(r"(?:cannot convert|invalid conversion from|no known conversion)[^\n\[]*", messages)
    return note[0].strip() if note and "eft" not in note[0] else ""


def extent(name: str, count: int) -> str:
    """Return what is said of an index outside of an array.

    >>> extent("tile", 32)
    'outside of tile: it has 32 elements, 0 to 31'
    """
    return f"outside of {name}: it has {f'{count} elements, 0 to {count - 1}' if count != 1 else '1 element'}"


def outside(line: str, column: int, index: int, type_name: str) -> str:
    """Return the element and the array's size for a subscript whose ] is at a column of a source line.

    >>> outside("  tile[t] = x[t];", 9, 32, "'float [32]'")
    'tile[32], outside of tile: it has 32 elements, 0 to 31'
    >>> outside("  s += tile[lane][c];", 20, 33, "'float [33]'")
    'tile[lane][33], outside of its row: it has 33 elements, 0 to 32'
    """
    sizes = [int(n) for n in re.findall(r"\[(\d+)\]", type_name)]
    count = sizes[0] if sizes else 0
    expression = line[: column - 1] if line[column - 1 : column] == "]" else ""
    depth = 0
    for i in range(len(expression) - 1, -1, -1):
        depth += (expression[i] == "]") - (expression[i] == "[")
        if depth < 0:
            expression = expression[:i]
            break
    array = re.search(r"\w+(?:\[[^\[\]]*\])*\s*$", expression)
    if not array:
        return f"element {index} of an array, {extent('it', count)}"
    name = array[0].strip()
    element = f"{name}[{index}]"
    if "[" in name:
        return f"{element}, {extent('its row', count)}"
    if len(sizes) > 1:
        return f"{element}, outside of {name}: it has {count} rows, 0 to {count - 1}"
    return f"{element}, {extent(name, count)}"
