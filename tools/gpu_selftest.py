"""Run the selftest on every GPU of this machine, one part on each, and write one report of all.

    python3 tools/gpu_selftest.py --save FILE [--jobs N] [--seconds S] [SELFTEST ARGUMENTS...]

Each GPU judges every n-th mutant of each kind (``weft selftest --shard``) with ``--jobs`` at once. After
``--seconds`` the parts are interrupted and the report has what was judged until then. The exit code is 1 if a
part failed. ``--device cpu`` runs one part on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from gpu_tests import ONE_CORE, ROOT, visible_gpus

WEFT = [sys.executable, "-m", "weft", "selftest"]
SAVE_SECONDS = 60.0  # for an interrupted part to end its workers and to write its report


def merge(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one report of the parts: numbers are added, lists joined, the machine is the first part's."""
    merged = dict(reports[0])
    for report in reports[1:]:
        for name, value in report.items():
            if name == "by_check":
                merged[name] = dict(Counter(merged[name]) + Counter(value))
            elif name == "by_operator":
                for operator, counts in value.items():
                    total = Counter(merged[name].get(operator, {}))
                    total.update(counts)
                    merged[name] = merged[name] | {operator: dict(total)}
            elif isinstance(value, bool) or name not in merged:
                merged[name] = merged.get(name) or value
            elif isinstance(value, int | list):
                merged[name] = merged[name] + value
    return merged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--save", type=Path, required=True, help="file of the report of all parts")
    parser.add_argument("--jobs", type=int, default=12, help="mutants judged at once on a GPU [default: 12]")
    parser.add_argument("--seconds", type=float, default=3600.0, help="interrupt the parts after this long")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options, arguments = parser.parse_known_args()
    gpus = visible_gpus() if options.device == "cuda" else [""]
    start, runs = time.monotonic(), []
    base = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with tempfile.TemporaryDirectory() as folder:
        for i, gpu in enumerate(gpus):
            file, output = Path(folder) / f"{i}.json", (Path(folder) / f"{i}.txt").open("w+")
            part = ["--device", options.device, "--shard", f"{i}/{len(gpus)}", "--jobs", str(options.jobs)]
            environment = ONE_CORE | base | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
            command = [*WEFT, *part, "--save", str(file), *arguments]
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            runs.append((gpu or "cpu", process, output, file))
        codes = []
        for _, process, _, _ in runs:
            try:
                process.wait(max(0.0, start + options.seconds - time.monotonic()))
            except subprocess.TimeoutExpired:
                for _, other, _, _ in runs:
                    if other.poll() is None:
                        other.send_signal(signal.SIGINT)
                process.wait(SAVE_SECONDS)
            codes.append(process.returncode)
        reports = []
        for name, _, output, file in runs:
            output.seek(0)
            print(f"\n== part on {name}\n{output.read()}", flush=True)
            output.close()
            if file.is_file():
                reports.append(json.loads(file.read_text()))
    if not reports:
        print("no part wrote a report")
        return 1
    report = merge(reports)
    options.save.write_text(json.dumps(report, indent=1) + "\n")
    print(
        f"== {len(reports)} of {len(gpus)} parts in {time.monotonic() - start:.0f} s, exit codes {codes}: "
        f"killed {report['killed']} of {report['planted']} that ran; {report['controls_passed']} of "
        f"{report['controls']} controls passed; {len(report['not_run'])} not run; "
        f"{len(report['inconclusive'])} inconclusive; survivors {report['survivors']}; "
        f"false alarms {[a['id'] for a in report['false_alarms']]}; "
        f"other checks {[(u['id'], u['killed_by']) for u in report['unexpected']]}"
    )
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
