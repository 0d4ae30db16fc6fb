# Run with: make bench-dashboard   (--images also takes the pictures of README and docs; --trials 500 for a quick look)
"""The dashboard at 5,000 trials and 500,000 reports: first paint, reading, every view, and frames while it grows."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _bench
import penstock as pk
from penstock.core import (
    Ended,
    Event,
    Measurement,
    Noted,
    Reported,
    Segment,
    SessionOpened,
    Share,
    Source,
    Started,
    Submitted,
    Trial,
    TrialStatus,
)
from penstock.goal import memory_bytes, power_w
from penstock.store import open_store
from penstock.testing.browser import chromium, resize

IMAGES = Path(__file__).parent.parent / "docs" / "images"
VIEWS = (
    "overview",
    "history",
    "curves",
    "table",
    "pareto",
    "importance",
    "parallel",
    "devices",
    "limits",
    "log",
)
EPOCHS = 100
SPACE = {
    "domains": [
        ["lr", {"kind": "float", "low": 1e-4, "high": 1.0, "log": True}],
        ["width", {"kind": "int", "low": 16, "high": 512, "log": True}],
        ["dropout", {"kind": "float", "low": 0.0, "high": 0.5}],
        ["optimizer", {"kind": "choice", "values": ["sgd", "adam", "lamb"]}],
    ]
}


def spec(trials: int) -> dict[str, Any]:
    return {
        "goal": [{"metric": "loss", "maximize": False}],
        "space": SPACE,
        "scheduler": {"name": "ASHA", "max_epochs": EPOCHS, "eta": 3, "trials": trials},
        "sampler": {"name": "TPE"},
        "executor": "Local",
        "region": "DE",
        "price_per_kwh": 0.3,
        "limits": [(power_w <= 90).to_json(), (memory_bytes <= "2GB").to_json()],
    }


class Made:
    """Events of trials on eight devices, one after another on each; ``epochs`` says how long each trains."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._free = [1_750_000_000.0] * 8
        self.first = SessionOpened(self._free[0], "bench", 1)

    def trial(self, number: int, epochs: int, *, whole: int = EPOCHS) -> list[Event]:
        draw = self._draw
        device = min(range(8), key=self._free.__getitem__)
        now = self._free[device]
        lr, width = 10 ** draw.uniform(-4, 0), round(16 * 32 ** draw.random())
        config = {"lr": lr, "width": width, "dropout": 0.5 * draw.random()}
        config["optimizer"] = draw.choice(["sgd", "adam", "lamb"])
        floor = 0.05 + 0.12 * abs(math.log10(lr) + 2) ** 1.5 + 0.08 * abs(math.log(width / 160))
        floor += {"sgd": 0.06, "adam": 0.0, "lamb": 0.03}[config["optimizer"]] + 0.1 * config["dropout"]
        watts = 40 + width / 8 + draw.gauss(0, 2)
        predicted = {"power_w": [watts + draw.gauss(0, 3), 3.0], "memory_bytes": [4e6 * width, 1e7]}
        name = f"cuda:{device}"
        events: list[Event] = [
            Submitted(now, 1, (Segment(Trial(number, config, number), until=epochs, last=epochs == whole),)),
            Noted(now, "prediction", predicted, number),
            Started(now, number, 0, (Share(name),)),
        ]
        took = 2 + width / 200
        for epoch in range(1, epochs + 1):
            now += took
            loss = floor + 1.5 * math.exp(-epoch / (8 + 20 * draw.random())) + abs(draw.gauss(0, 0.01))
            energy = Measurement(watts * took, "J", Source.MEASURED, 0.05)
            metrics = {"loss": loss, "accuracy": 1 - loss / 2.5}
            if epoch == epochs:
                metrics["power_w"] = watts
            events.append(Reported(now, number, epoch, metrics, took, energy))
        status = TrialStatus.COMPLETED if epochs == whole else TrialStatus.STOPPED
        if draw.random() < 0.01:
            status = TrialStatus.FAILED
        error = "torch.OutOfMemoryError: CUDA out of memory" if status is TrialStatus.FAILED else ""
        why = error or ("" if status is TrialStatus.COMPLETED else "not promoted")
        events.append(Ended(now, number, status, epochs, why, error and f"Traceback ...\n{error}"))
        self._free[device] = now + 0.5 + 4 * draw.random() * (draw.random() < 0.1)
        return events


def write(path: Path, trials: int, epochs: Any, seed: int = 0) -> Made:
    made = Made(seed)
    events = [event for number in range(trials) for event in made.trial(number, epochs(number))]
    events.sort(key=lambda event: event.time_s)  # as eight devices would write them, side by side
    with open_store(path, write=True) as store:
        entry = store.create("resnet", spec(trials), None)
        store.lock(entry.id)
        store.append(entry.id, [made.first])
        for at in range(0, len(events), 5000):
            store.append(entry.id, events[at : at + 5000])
    return made


@contextmanager
def server(path: Path):
    began = time.perf_counter()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from penstock.cli import main; main()",
            "dashboard",
            str(path),
            "--port",
            "0",
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    address = process.stdout.readline().split()[-1]
    try:
        yield address, process.pid, time.perf_counter() - began
    finally:
        process.terminate()
        process.wait(30)


def fetch(address: str) -> tuple[float, int, Any]:
    began = time.perf_counter()
    with urllib.request.urlopen(address, timeout=300) as answer:
        body = answer.read()
    return time.perf_counter() - began, len(body), json.loads(body)


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return float("nan")


def wait_drawn(driver: Any, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if driver.execute_script("return document.documentElement.dataset.drawn === location.hash"):
            return
        time.sleep(0.02)
    raise TimeoutError("the view was not drawn")


FRAMES = """
window.gaps = []; let last = performance.now();
const run = (window.run = {}), step = (now) => {
  if (window.run !== run) return;
  window.gaps.push(now - last); last = now; requestAnimationFrame(step);
};
requestAnimationFrame(step);
"""
FIRSTS = {
    "first_data_s": "document.querySelector('.card') !== null",
    "first_figure_s": "document.documentElement.dataset.drawn !== undefined",  # Plotly's script is loaded then
}
GROWING = ("overview", "history", "curves", "table", "pareto", "parallel", "devices", "limits", "log")


def measure(trials: int) -> dict[str, Any]:
    results: dict[str, Any] = {"trials": trials, "reports": trials * EPOCHS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.db"
        made = write(path, trials, lambda number: EPOCHS)
        with server(path) as (address, pid, started_s), chromium() as driver:
            results["server_up_s"] = started_s
            results["load_before"] = os.getloadavg()[0]
            paints = []
            began, cpu_before_s = time.perf_counter(), cpu_s(pid)
            for _ in range(5):  # the first while the journal is being read
                driver.get("about:blank")
                driver.get(address)
                if "first_data_s" not in results:
                    for what, code in FIRSTS.items():
                        while not driver.execute_script(f"return {code}"):
                            time.sleep(0.01)
                        results[what] = driver.execute_script("return performance.now()") / 1000
                time.sleep(1.0)
                code = (
                    "return performance.getEntriesByName('first-contentful-paint').map(e => e.startTime)[0]"
                )
                paints.append(driver.execute_script(code) / 1000)
            results["first_paint_s"] = {"while_reading": paints[0], **_bench.spread(paints)}
            while True:
                _, _, told = fetch(f"{address}api/study/1/overview")
                if told["trials"]["total"] == trials and told["epochs"] == trials * EPOCHS:
                    break
                time.sleep(1.0)
            results["all_read_s"] = time.perf_counter() - began
            results["all_read_cpu_s"] = cpu_s(pid) - cpu_before_s
            results["memory_mb"] = memory_mb(pid)
            results["views"] = {}
            for view in VIEWS:
                # A parameter that changes nothing and is in no cache yet, so that each is made anew.
                times = [fetch(f"{address}api/study/1/{view}?job=fresh{n}") for n in range(3)]
                took = [each[0] for each in times]
                results["views"][view] = {
                    "server_s": statistics.median(took),
                    "server_first_s": took[0],
                    "kb": times[0][1] / 1024,
                }
            for view in VIEWS:
                driver.get(f"{address}#study=1&view=overview")
                wait_drawn(driver)
                began = time.perf_counter()
                driver.execute_script("location.hash = arguments[0]", f"#study=1&view={view}")
                wait_drawn(driver)
                results["views"][view]["drawn_s"] = time.perf_counter() - began
            results["growing"] = grow(path, made, trials, driver, address)
            results["memory_at_end_mb"] = memory_mb(pid)
            results["load_after"] = os.getloadavg()[0]
    return results


def grow(path: Path, made: Made, trials: int, driver: Any, address: str) -> dict[str, Any]:
    """Frames of the page in each view while some twenty trials a second come in, two thousand reports."""
    stop = threading.Event()

    def more() -> None:
        with open_store(path, write=True) as store:
            store.lock(1)
            number = trials
            while not stop.wait(0.05):
                store.append(1, made.trial(number, EPOCHS))
                number += 1

    found: dict[str, Any] = {}
    thread = threading.Thread(target=more)
    thread.start()
    try:
        for view in GROWING:
            driver.get(f"{address}#study=1&view={view}")
            wait_drawn(driver)
            time.sleep(1.0)
            driver.execute_script(FRAMES)
            time.sleep(6)
            gaps = sorted(driver.execute_script("return window.gaps"))
            found[view] = {
                "frames": len(gaps),
                "median_ms": statistics.median(gaps),
                "p99_ms": gaps[int(0.99 * len(gaps))],
                "max_ms": gaps[-1],
                "above_100_ms": sum(gap > 100 for gap in gaps),
            }
    finally:
        stop.set()
        thread.join()
    return found


def train(run: pk.Run) -> None:
    """A small network on scikit-learn's digits."""
    import torch
    from sklearn.datasets import load_digits

    torch.manual_seed(run.seed)
    data = load_digits()
    x = torch.tensor(data.data / 16, dtype=torch.float32)
    y = torch.tensor(data.target)
    config = run.config
    layers = [torch.nn.Linear(64, config["width"]), torch.nn.ReLU(), torch.nn.Dropout(config["dropout"])]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(config["width"], 10))
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    optimizer = kinds[config["optimizer"]](net.parameters(), lr=config["lr"])
    state = run.load()
    if state is not None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
    for _ in run.epochs():
        net.train()
        for batch in torch.randperm(1400).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            out = net(x[1400:])
        loss = torch.nn.functional.cross_entropy(out, y[1400:])
        accuracy = (out.argmax(1) == y[1400:]).float().mean()
        run.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
        run.report(loss=loss.item(), accuracy=accuracy.item())


def study(path: str) -> None:
    """The study of the pictures: a real one."""
    space = pk.Space(
        lr=pk.Float(1e-4, 1, log=True),
        width=pk.Int(16, 256, log=True),
        dropout=pk.Float(0, 0.5),
        optimizer=pk.Choice("sgd", "adam"),
    )
    scheduler = pk.ASHA(max_epochs=27, trials=120)
    pk.Study(
        train,
        space,
        minimize="loss",
        scheduler=scheduler,
        store=path,
        name="digits",
        region="DE",
        price_per_kwh=0.3,
    ).run()


def images() -> None:
    """The pictures of README and docs: a study of 120 trials while it runs, at 1280 and 390 pixels."""
    IMAGES.mkdir(exist_ok=True)
    shots = [("overview", "light", 1280), ("curves", "dark", 1280), ("overview", "dark", 390)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.db"
        with subprocess.Popen([sys.executable, __file__, "--study", str(path)]) as running:
            while not path.exists():
                time.sleep(0.2)
            with server(path) as (address, _, _), chromium() as driver:
                while running.poll() is None:
                    told = (
                        fetch(f"{address}api/study/1/overview")[2]["trials"] if running.poll() is None else {}
                    )
                    if told.get("completed", 0) + told.get("stopped", 0) >= 60:
                        break
                    time.sleep(0.5)
                for view, theme, width in shots:
                    resize(driver, width, 860)
                    driver.get(address)
                    driver.execute_script("localStorage.setItem('penstock-theme', arguments[0])", theme)
                    best = fetch(f"{address}api/study/1/overview")[2]["best"]["trial"]
                    driver.get("about:blank")
                    more = f"&trial={best}" if view == "curves" else ""
                    driver.get(f"{address}#study=1&view={view}{more}")
                    wait_drawn(driver)
                    time.sleep(2.5)
                    name = (
                        "dashboard" if (view, theme) == ("overview", "light") else f"dashboard-{view}-{width}"
                    )
                    driver.save_screenshot(str(IMAGES / f"{name}.png"))
                    print(f"{name}.png: {(IMAGES / f'{name}.png').stat().st_size / 1024:.0f} kB", flush=True)
            running.terminate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=5000)
    parser.add_argument("--save", action="store_true", help="also with another number of trials than 5000")
    parser.add_argument("--images", action="store_true")
    parser.add_argument("--study", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.study:
        study(arguments.study)
    elif arguments.images:
        images()
    else:
        told = measure(arguments.trials)
        print(json.dumps(told, indent=2))
        if arguments.save or arguments.trials == 5000:
            _bench.save(
                "dashboard", "python benchmarks/dashboard.py", told, ("starlette", "uvicorn", "plotly")
            )
