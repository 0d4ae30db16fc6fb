"""What every benchmark shares: repeats, medians and spreads, and results with the facts that made them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Every process that is started would compile its imports anew, which is told of as slowness of whoever starts more.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

RESULTS = Path(os.environ.get("PENSTOCK_RESULTS") or Path(__file__).parent / "results")
"""Where results are kept: a rehearsal (``python -m benchmarks.all --rehearse``) has a folder of its own."""

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BEGAN_S = time.time()  # this is imported as the benchmark starts

Document = dict[str, Any]
NOT_RECORDED = dict.fromkeys(("penstock", "committed", "dirty"), "not recorded")
_clock_s = time.monotonic()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "repeats": len(values),
    }


def text(values: Sequence[float], unit: str = "") -> str:
    s = spread(values)
    return f"{s['median']:.4g}{unit} ({s['min']:.4g}..{s['max']:.4g})"


def interleave(contenders: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run all contenders in turn, ``repeats`` times: a noisy moment hits all of them alike."""
    results: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats):
        for name, contender in contenders.items():
            value = contender()
            results[name].append(value)
            print(f"  repeat {repeat + 1}: {name} {value:.4g}", flush=True)
    return results


def versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": _processor(),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def git(folder: Path, *arguments: str) -> str | None:
    """What git says of a folder; None where it has nothing to say."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *arguments], capture_output=True, text=True
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def package() -> Path | None:
    """The folder of the Penstock that is imported here."""
    found = importlib.util.find_spec("penstock")
    return Path(found.origin).parent if found is not None and found.origin else None


def penstock() -> dict[str, Any]:
    """Which Penstock that is: git's hash of its folder, when that was committed, and whether it is dirty.

    Dirty is also what isn't committed of the benchmarks. Without git, or of a Penstock that is in no repository, all
    is ``"unknown"``.
    """
    folder = package()
    tree = folder and git(folder, "rev-parse", "HEAD:./")
    if not folder or not tree:
        return dict.fromkeys(("penstock", "committed", "dirty"), "unknown")
    changed = git(folder, "status", "--porcelain", "."), git(HERE, "status", "--porcelain", ".", ":!results")
    committed = git(folder, "log", "-1", "--format=%cI", "--", ".")
    return {"penstock": tree, "committed": committed, "dirty": any(each != "" for each in changed)}


def fingerprint(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else "missing"


def own_code() -> dict[str, str]:
    """The benchmark's own files, which are those imported here of benchmarks and examples, without this one."""
    files = {
        Path(file).resolve()
        for each in list(sys.modules.values())
        if (file := getattr(each, "__file__", None))
    }
    own = [
        each for each in files if any(each.is_relative_to(ROOT / name) for name in ("benchmarks", "examples"))
    ]
    return {
        each.relative_to(ROOT).as_posix(): fingerprint(each)
        for each in sorted(own)
        if each != HERE / "_bench.py"
    }


def source() -> dict[str, Any]:
    """What makes results here: Penstock and the benchmark's own code. What was changed meanwhile counts as dirty."""
    found = penstock() | {"benchmark": own_code()}
    files = [*(package() or HERE).rglob("*.py"), *(ROOT / name for name in found["benchmark"])]
    if found["dirty"] is False and any(each.exists() and each.stat().st_mtime > BEGAN_S for each in files):
        found["dirty"] = True
    return found


def told(arguments: Sequence[str]) -> list[str]:
    """Arguments as they are kept: where the data is, is this machine's own matter."""
    data = os.environ.get("PENSTOCK_DATA")
    return [each.replace(data, "PENSTOCK_DATA") if data else each for each in arguments]


def made_by(now: Mapping[str, Any], document: Mapping[str, Any], arguments: Sequence[str]) -> bool:
    """Whether the Penstock of now, the benchmark as it is now and these arguments made all of a document, all clean.

    A benchmark that wrote it and then failed has not.
    """
    sources = document.get("sources", [])
    return (
        not document.get("exit_code")
        and document.get("arguments") == told(arguments)
        and len(sources) == 1
        and sources[0]["penstock"] == now["penstock"]
        and sources[0]["dirty"] is now["dirty"] is False
        and all(fingerprint(ROOT / name) == its for name, its in sources[0]["benchmark"].items())
    )


def earlier(name: str) -> Document | None:
    """The result that is there, for a benchmark that puts a part into it."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def unfinished(name: str) -> Document | None:
    """What a run that was broken off has saved, if it was by this very source and with these arguments."""
    found = earlier(f"unfinished/{name}")
    return found if found is not None and made_by(penstock(), found, sys.argv[1:]) else None


def failed(name: str, code: int) -> None:
    """Keep with a result that the benchmark which wrote it has failed, with this exit code: it is to run again."""
    document = earlier(name)
    if document is not None:
        _write(RESULTS / f"{name}.json", document | {"exit_code": code})


def _write(path: Path, document: Document) -> None:
    written = RESULTS / "unfinished" / f"{path.stem}.part"
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_text(json.dumps(document, indent=2) + "\n")
    written.replace(path)  # at once, so that no Ctrl-C leaves half a file


def save(
    name: str,
    command: str,
    results: Mapping[str, Any],
    packages: Sequence[str] = (),
    *,
    kept: Document | None = None,
    whole: bool = True,
) -> None:
    """Write results with the command, the machine, the versions, the date, the source and the seconds taken.

    Args:
        name: Of the file.
        command: That makes them.
        results: The figures.
        packages: Whose versions are told.
        kept: An earlier document, parts of which are in these results: its sources are theirs too, its seconds add up.
        whole: False while parts are to come: these go to results/unfinished, and the result stays what it was.
    """
    global _clock_s
    own = source()
    own_s = time.monotonic() - _clock_s
    before = [] if kept is None else kept.get("sources", [NOT_RECORDED])
    before_s = 0.0 if kept is None else kept.get("seconds")
    document = {
        "benchmark": name,
        "command": told([command])[0],
        "date": time.strftime("%Y-%m-%d"),
        "sources": [own, *(each for each in before if each != own)],
        "arguments": told(sys.argv[1:]),
        "seconds": None if before_s is None else round(own_s + before_s, 1),
        "machine": machine(),
        "versions": versions("penstock", *packages),
        "results": results,
    }
    part = RESULTS / "unfinished" / f"{name}.json"
    path = RESULTS / f"{name}.json" if whole else part
    _write(path, document)
    if whole:
        part.unlink(missing_ok=True)
        _clock_s = time.monotonic()  # one benchmark may write several
    print(f"written to {path}", file=sys.stderr)
