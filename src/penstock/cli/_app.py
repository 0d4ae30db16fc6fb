"""The command line: ``penstock tune``, ``resume``, ``report``, ``trials``, ``dashboard`` and the others."""

from __future__ import annotations

import csv
import dataclasses
import io
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli._dashboard import dashboard
from penstock.cli._doctor import doctor
from penstock.cli._json import json_text
from penstock.cli._measure import measure
from penstock.cli._profile import profile
from penstock.cli._recur import recur
from penstock.cli._replay import replay
from penstock.cli._upgrade import upgrade
from penstock.core.errors import InvalidInput, PenstockError, StoreCorrupt

if TYPE_CHECKING:
    from penstock.goal import Budget
    from penstock.study import Study

app = typer.Typer(
    name="penstock",
    help="Find good hyperparameters while spending as little energy, time and hardware as possible.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

StoreArgument = Annotated[str, typer.Argument(metavar="STORE", help="A path or a postgresql:// URL.")]
StudyOption = Annotated[str | None, typer.Option("--study", help="Its name; default: the newest.")]
ViewOption = Annotated[str, typer.Option("--view", help="auto, live, lines or quiet.")]
JsonlOption = Annotated[
    str | None, typer.Option("--jsonl", help="Also write events as JSON lines; - is stdout.")
]
BudgetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--budget",
        help="NAME=NUMBER: trials, epochs, time_s, energy_wh, co2_g, cost; or finish=true|false: whether what runs "
        "when it is used up may finish.",
    ),
]
PriceOption = Annotated[
    float | None, typer.Option("--price", help="Price of a kilowatt-hour, for a budget of cost.")
]
CurrencyOption = Annotated[str | None, typer.Option("--currency", help="Currency of the price.")]


@app.command()
def tune(
    target: Annotated[
        str, typer.Argument(metavar="FILE:STUDY", help="tune.py:study or package.module:study.")
    ],
    view: ViewOption = "auto",
    jsonl: JsonlOption = None,
    budget: BudgetOption = None,
    price: PriceOption = None,
    currency: CurrencyOption = None,
) -> None:
    """Run a study that a Python file or module defines."""
    study = _load_study(target)
    if budget:
        study.budget = _budget(budget, study.budget)
    _set_price(study, price, currency)
    _run(study, view, jsonl)


@app.command()
def resume(
    store: StoreArgument,
    study: StudyOption = None,
    view: ViewOption = "auto",
    jsonl: JsonlOption = None,
    budget: BudgetOption = None,
    price: PriceOption = None,
    currency: CurrencyOption = None,
    files: Annotated[
        str | None, typer.Option("--files", help="Where its folder of checkpoints is now, if it was moved.")
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Set aside damaged records at the end first.")
    ] = False,
) -> None:
    """Go on with a study where it was left, after Ctrl-C, a crash or a used-up budget."""
    from penstock.cli._load import look_beside
    from penstock.study import Study

    if repair:
        _repair(store, study)
    look_beside(store)
    loaded = Study.load(store, study, files=files)
    if budget:
        loaded.budget = _budget(budget, loaded.budget)
    _set_price(loaded, price, currency)
    _run(loaded, view, jsonl)


@app.command()
def report(
    store: StoreArgument,
    study: StudyOption = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many of the best trials to show.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help="Write all views to report.html, .md, .json or .png instead."),
    ] = None,
) -> None:
    """What a study found and what it cost."""
    if output is not None:
        from penstock.report._static import write_report

        print(f"written to {write_report(store, output, study)}")
        return
    from penstock.report import read_journal, sm2_parameters, sm2_report, sm2_text, summarize, summary_text
    from penstock.report._static import jobs_alone

    alone = jobs_alone(store) if study is None else None
    if alone is not None:
        print(json_text(alone[1]) if as_json else alone[0])
        return
    journal = read_journal(store, study)
    sm2 = None if sm2_parameters(journal.entry.spec) is None else sm2_report(journal)
    if as_json:
        told = summarize(journal.entry.name, journal.goal, journal.state, journal.entry.spec)
        if sm2 is not None:
            told["sm2"] = {"rounds": [dataclasses.asdict(r) for r in sm2.rounds], "parity": sm2.parity}
        print(json_text(told | {"problem": journal.problem}))
    else:
        told_of = journal.entry.name, journal.goal, journal.state
        print(summary_text(*told_of, top=top, spec=journal.entry.spec, driver=journal.driver))
        if sm2 is not None:
            print(sm2_text(sm2))
    if journal.problem:
        raise StoreCorrupt(f"{journal.problem} What stands above is everything before it.")


@app.command()
def trials(
    store: StoreArgument,
    study: StudyOption = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """All trials of a study, one row each."""
    if as_csv and as_json:
        raise InvalidInput("--csv and --json are two forms of the same table: give one of them.")
    from penstock.report import read_journal, row

    journal = read_journal(store, study)
    spec = journal.entry.spec
    rows = [row(record, spec, error=as_json) for record in journal.state.trials.values()]
    names = list(dict.fromkeys(name for item in rows for name in item))
    if as_json:
        for item in rows:
            print(json_text(item))
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, names)
        writer.writeheader()
        writer.writerows(rows)
    else:
        _print_table(names, rows)
    if journal.problem:
        sys.stdout.flush()
        raise StoreCorrupt(f"{journal.problem} What stands above is everything before it.")


def _print_table(names: list[str], rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from penstock.report._format import plain

    table = Table(box=None)
    width = None if sys.stdout.isatty() else 10_000  # nobody reads a pipe by its width
    shown = [name for name in names if any(item.get(name) not in (None, "") for item in rows)]
    for name in shown:
        table.add_column(Text(plain(name)))
    for item in rows:
        cells = [item.get(name) for name in shown]
        table.add_row(
            *(Text("" if c is None else f"{c:.4g}" if isinstance(c, float) else plain(str(c))) for c in cells)
        )
    Console(width=width).print(table)


@app.command()
def simulate(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[FILE:STUDY]", help="A study to simulate; default: made-up curves."),
    ] = None,
    devices: Annotated[
        str, typer.Option("--devices", help="How many; with --jobs, of which kinds: v100=8,p100=8.")
    ] = "8",
    epoch_s: Annotated[float, typer.Option("--epoch-s", min=0.0, help="Simulated seconds per epoch.")] = 60.0,
    scheduler: Annotated[str, typer.Option("--scheduler", help="full, halving, hyperband or asha.")] = "asha",
    count: Annotated[int, typer.Option("--trials", min=1, help="Trials (not for hyperband).")] = 81,
    max_epochs: Annotated[int, typer.Option("--max-epochs", min=1)] = 27,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    jobs: Annotated[
        str | None,
        typer.Option("--jobs", help="A cluster's tuning jobs: a CSV file, or how many to make up."),
    ] = None,
    policy: Annotated[str, typer.Option("--policy", help="With --jobs: agnostic, aware or both.")] = "aware",
    rates: Annotated[
        str | None, typer.Option("--rates", help="With --jobs: a JSON table of iterations per second.")
    ] = None,
    goal: Annotated[str, typer.Option("--goal", help="With --jobs: time, energy or money.")] = "time",
    eta: Annotated[float, typer.Option("--eta", min=0.0, max=1.0, help="With --goal energy.")] = 0.5,
    learn: Annotated[
        bool, typer.Option("--learn", help="With --jobs: rates are not known at first.")
    ] = False,
    hours: Annotated[
        float, typer.Option("--hours", min=0.0, help="Over how long made-up jobs arrive.")
    ] = 1.0,
) -> None:
    """Run a study, or with --jobs a whole cluster, on simulated devices: how long, how busy, at what cost."""
    if jobs is not None:
        from penstock.cli._cluster import cluster

        found = cluster(
            jobs,
            devices,
            policy,
            rates=rates,
            goal=goal,
            eta=eta,
            learn=learn,
            hours=hours,
            seed=seed,
            as_json=as_json,
        )
        print(found)
        return
    if not (devices.isascii() and devices.isdigit() and len(devices) < 7 and int(devices)):
        raise InvalidInput(f"--devices takes a number from 1 to 999999 without --jobs, got {devices!r:.80}.")
    from penstock.cli._simulate import made_up_study, outcome, outcome_text
    from penstock.execute import Simulated

    executor = Simulated(devices=int(devices), seconds=epoch_s)
    if target is None:
        study = made_up_study(executor, scheduler, count, max_epochs, seed)
    else:
        study = _load_study(target)
        study.executor = executor
        study.keep_nothing()
    study.run()
    result = outcome(study, int(devices))
    print(json_text(result) if as_json else outcome_text(result))
    if result["best"] is None and result["failed"]:
        raise typer.Exit(1)


app.command()(dashboard)
app.command()(doctor)
app.command()(profile)
app.command()(recur)
app.command()(replay)
app.command()(upgrade)
app.command(context_settings={"ignore_unknown_options": True})(measure)


def _load_study(target: str) -> Study:
    from penstock.cli._load import call, load
    from penstock.study import Study

    found = load(target, "study")
    if callable(found) and not isinstance(found, Study):
        found = call(found, target)
    if not isinstance(found, Study):
        raise InvalidInput(
            f"{target} is not a penstock.Study (nor a function that returns one), but {found!r}."
        )
    return found


def _run(study: Study, view: str, jsonl: str | None) -> None:
    study.run(view=None if view == "quiet" else view, jsonl=jsonl)
    if jsonl != "-":
        print(study)
    closed = study.state.closed
    if closed is not None and closed.reason == "interrupted":
        if study.store_url is not None and study.name is not None:
            again = shlex.join(["penstock", "resume", study.store_url, "--study", study.name])
            print(f"Go on with: {again}", file=sys.stderr)
        raise typer.Exit({"SIGTERM": 143, "SIGHUP": 129}.get(closed.detail, 130))
    if study.best is None and study.state.counts.failed:
        raise typer.Exit(1)


def _set_price(study: Study, price: float | None, currency: str | None) -> None:
    if price is not None:
        study.price_per_kwh = price
    if currency is not None:
        study.currency = currency


def _repair(store: str, name: str | None) -> None:
    from penstock.store import open_store

    opened = open_store(store, write=True)
    try:
        entry = opened.find(name)
        opened.lock(entry.id)
        good = opened.tail_ok(entry.id)
        if good < entry.events:
            opened.cut(entry.id, keep=good)
            print(
                f"Set aside {entry.events - good} records of {entry.name!r} after record {good}.",
                file=sys.stderr,
            )
    finally:
        opened.close()


def _budget(items: list[str], base: Budget) -> Budget:
    from penstock.goal import Budget

    given: dict[str, Any] = base.to_json()
    for item in items:
        name, equals, number = item.partition("=")
        if not equals or name not in Budget.__dataclass_fields__:
            names = ", ".join(Budget.__dataclass_fields__)
            raise InvalidInput(f"--budget takes NAME=NUMBER with one of {names}, got {item!r}.")
        try:
            if name == "finish":
                given[name] = {"true": True, "false": False}[number.lower()]
                continue
            given[name] = int(number) if name in ("trials", "epochs") else float(number)
        except KeyError:
            raise InvalidInput(f"--budget finish takes true or false, got {number!r}.") from None
        except ValueError:
            raise InvalidInput(f"--budget {name} takes a number, got {number!r}.") from None
    return Budget.from_json(given)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        from penstock import __version__

        print(f"penstock {__version__}")
        raise typer.Exit


def main() -> None:
    """The ``penstock`` command: an error of the user's is one message, never a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may have letters that the terminal has not
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except PenstockError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone
        sys.exit(141)


__all__ = ["app", "main"]
