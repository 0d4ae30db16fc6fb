"""Reading traces in the published format, whatever is in them."""

from __future__ import annotations

import math

import pytest

from penstock.core.errors import InvalidInput
from penstock.recurring import read_workloads
from penstock.recurring._overlap import read_arrivals


def test_paper_workloads_get_table_1_and_others_are_derived(traces):
    paper, other = read_workloads(*traces)
    assert (paper.name, paper.optimizer, paper.target, paper.default) == ("cifar100", "adadelta", 0.6, 1024)
    assert paper.batch_sizes == (128, 256, 512, 1024)  # 64 and 2048 are in one trace alone
    assert paper.max_power_w == 190.0
    assert paper.recurrences == 2 * 4 * 3
    assert any("64" in note and "2048" in note for note in paper.notes)
    # 0.9 is out of reach for most sizes; 0.8 is the hardest that most reach in every run, 16 the largest that does.
    assert (other.name, other.target, other.default) == ("my-data", 0.8, 16)
    assert other.epochs[32] == (28, None, 28)
    assert other.max_epochs == 90


def test_failures_count_in_the_expected_epochs(traces):
    other = read_workloads(*traces, names=["mydata"])[0]
    assert other.mean_epochs(32) == pytest.approx((28 + 90 + 28) / 2)
    size, limit, cost = other.optimum(0.5)
    brute = min(
        (other.mean_epochs(b) * t * (0.5 * p + 0.5 * 190.0), b, w)
        for b in other.batch_sizes
        for w, (t, p) in other.power[b].items()
    )
    assert (cost, size, limit) == pytest.approx(brute)


def test_targets_and_defaults_can_be_given(traces):
    one = read_workloads(*traces, names=["CIFAR-100"], targets={"cifar100": 0.5}, defaults={"cifar100": 256})[
        0
    ]
    assert (one.target, one.default) == (0.5, 256)
    with pytest.raises(InvalidInput, match="recorded are"):
        read_workloads(*traces, names=["cifar100"], targets={"cifar100": 0.55})


def test_a_default_that_does_not_fit_the_gpu_gives_way(traces):
    train, power = traces
    kept = [line for line in power.read_text().splitlines() if ",1024," not in line]
    power.write_text("\n".join(kept))
    one = read_workloads(train, power, ["cifar100"])[0]
    assert one.default == 512
    assert any("1024" in note for note in one.notes)


def test_columns_in_another_order_spaces_and_duplicates_are_fine(traces):
    train, power = traces
    rows = [line.split(",") for line in power.read_text().split()]
    twice = rows[1].copy()
    rows.append(twice)
    power.write_text("\ufeff" + "\n".join(", ".join(reversed(row)) for row in rows) + "\n")
    assert read_workloads(train, power)[0].batch_sizes == (128, 256, 512, 1024)


def test_missing_cells_are_left_out(traces):
    train, power = traces
    lines = power.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("cifar100,shufflenetv2,256,adadelta,90"))
    lines[at] = "cifar100,shufflenetv2,256,adadelta,90,nan,"
    power.write_text("\n".join(lines))
    one = read_workloads(train, power, ["cifar100"])[0]
    assert set(one.power[256]) == {140.0, 190.0}
    assert one.limits_w == (90.0, 140.0, 190.0)


def test_several_learning_rates_take_the_scaled_one(traces):
    train, power = traces
    text = train.read_text()
    text += "".join(
        f"cifar100,shufflenetv2,256,adadelta,{lr},{n},0.6,999\n" for lr in (1, 1e-6) for n in range(9)
    )
    train.write_text(text)
    # Square-root scaling from 0.1 at 1024 asks for 0.05 at 256: 0.1 is the nearest recorded.
    assert all(e is not None and e < 100 for e in read_workloads(train, power, ["cifar100"])[0].epochs[256])


@pytest.mark.parametrize(
    ("names", "match"),
    [(["imagenet"], "they both have cifar100, my-data"), (["cifar100", "x"], "No workload x")],
)
def test_unknown_workloads_are_named(traces, names, match):
    with pytest.raises(InvalidInput, match=match):
        read_workloads(*traces, names=names)


def test_broken_files_are_named(traces, tmp_path):
    train, power = traces
    with pytest.raises(InvalidInput, match="Can't read"):
        read_workloads(tmp_path / "none.csv", power)
    bad = tmp_path / "bad.csv"
    bad.write_text("dataset,network\na,b\n")
    with pytest.raises(InvalidInput, match="lacks the column"):
        read_workloads(train, bad)
    bad.write_text(power.read_text().splitlines()[0] + "\n")
    with pytest.raises(InvalidInput, match="no rows"):
        read_workloads(train, bad)


def test_a_target_nobody_reaches_has_no_optimum(traces):
    one = read_workloads(*traces, names=["my-data"], targets={"my-data": 0.9}, defaults={"my-data": 4})[0]
    assert one.optimum(0.5)[0] == 4
    assert math.isinf(one.mean_epochs(8))


@pytest.mark.parametrize(
    ("file", "column", "cell", "match"),
    [
        (0, "batch_size", "0", "batch_size must be a whole number of at least 1, got '0'"),
        (0, "batch_size", "nan", "batch_size must be a finite number, got 'nan'"),
        (1, "batch_size", "x", "batch_size must be a finite number, got 'x'"),
        (1, "batch_size", "2.5", "batch_size must be a whole number"),
        (0, "target_metric", "zz", "target_metric must be a finite number, got 'zz'"),
        (0, "target_metric", "inf", "target_metric must be a finite number"),
        (0, "target_epoch", "0.5", "target_epoch must be a whole number .* got '0.5'"),
        (1, "power_limit", "nan", "power_limit must be a finite number, got 'nan'"),
        (1, "power_limit", "-90", "power_limit must be greater than 0"),
    ],
)
@pytest.mark.parametrize("row", [1, -1])  # a workload of the paper's, and another
def test_bad_cells_are_named_with_their_line(traces, file, column, cell, match, row):
    path = traces[file]
    lines = [line for line in path.read_text().splitlines() if line]
    at = lines[0].split(",").index(column)
    cells = lines[row].split(",")
    cells[at] = cell
    lines[row] = ",".join(cells)
    path.write_text("\n".join(lines))
    line = 2 if row == 1 else len(lines)
    with pytest.raises(InvalidInput, match=rf"{path.name}, line {line}: {match}"):
        read_workloads(*traces)


def test_targets_and_defaults_of_unknown_workloads_are_named(traces):
    with pytest.raises(InvalidInput, match=r"target was given for mnist: .* cifar100, my-data"):
        read_workloads(*traces, targets={"mnist": 0.5})
    with pytest.raises(InvalidInput, match=r"default batch size was given for mnist"):
        read_workloads(*traces, defaults={"mnist": 8})
    with pytest.raises(InvalidInput, match=r"at least 1, got 0"):
        read_workloads(*traces, defaults={"cifar100": 0})
    # One that was not asked for is known all the same.
    assert read_workloads(*traces, names=["my-data"], defaults={"CIFAR-100": 256})[0].name == "my-data"


def test_a_binary_file_is_no_trace(traces, tmp_path):
    for content in (b"\xff\xfe\x00\x01" * 50, traces[1].read_bytes() + b"\x00\x80\n"):
        bad = tmp_path / "bad.csv"
        bad.write_bytes(content)
        with pytest.raises(InvalidInput, match=r"bad\.csv is not a CSV file of text"):
            read_workloads(traces[0], bad)
        with pytest.raises(InvalidInput, match=r"bad\.csv is not a CSV file of text"):
            read_arrivals(bad)


def test_arrivals_need_a_finite_length(tmp_path):
    path = tmp_path / "arrivals.csv"
    head = "group,start_time,end_time\n"
    path.write_text(head + "a,0,10\na,5,5\nb,7,3\n")
    assert [(a.group, a.runtime_s) for a in read_arrivals(path)] == [("a", 10.0)]
    path.write_text(head + "a,5,5\n")
    with pytest.raises(InvalidInput, match="no arrivals whose end_time is after"):
        read_arrivals(path)
    for row in ("a,0,inf", "a,nan,5", "a,0,x", "a,0"):
        path.write_text(head + "a,0,10\n" + row + "\n")
        with pytest.raises(InvalidInput, match="line 3"):
            read_arrivals(path)
    path.write_text(head)
    with pytest.raises(InvalidInput, match="no arrivals"):
        read_arrivals(path)
