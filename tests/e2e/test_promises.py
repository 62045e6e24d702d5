"""The exchange's guarantees with real processes: the contents of rows, despite differences between ranks."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from history import (
    AFTER_BREAK,
    BEHIND,
    BREAK,
    DEGRADED,
    FLUSHED,
    LARGEST_EXACT,
    MANY,
    REJOINED,
    STEPS,
    History,
    at,
    histories,
    history,
)
from processes import Finished, clean_environment, run_job, torchrun
from ranks import rank_commands, run_ranks
from whole_rows import differences

SCRIPTS = Path(__file__).parent / "scripts"
SUPPORT = Path(__file__).parents[1] / "support"


def environment() -> dict[str, str]:
    return clean_environment(PYTHONPATH=str(SUPPORT))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """One job of two ranks that runs all scenarios of plain PyTorch, and the directory of its runs."""
    directory = tmp_path_factory.mktemp("plain")
    job = torchrun(SCRIPTS / "promises_plain.py", directory)
    return directory, run_job(*job, cwd=directory, environment=environment(), timeout=240).check()


MEANS = {step: 2.0 * step + 0.5 for step in range(STEPS)}  # of 2 * step + rank


def rows_at_steps(**columns: dict[int, Any]) -> list[dict[str, Any]]:
    """Return the rows of calls that log all of these names at the steps at which they have values."""
    steps = sorted({step for values in columns.values() for step in values})
    named = ({name: values[step] for name, values in columns.items() if step in values} for step in steps)
    return [{**row, "global_step": step} for row, step in zip(named, steps, strict=True)]


def test_logs_guarded_by_rank_do_not_block_collectives_of_the_training(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "guarded")
    own = {step: float(step) for step in range(STEPS)}
    assert found.last("guarded") == found.last("guarded_on_1") == own
    assert found.last("loss") == MEANS
    calls = [*rows_at_steps(guarded=own), *rows_at_steps(loss=MEANS), *rows_at_steps(guarded_on_1=own)]
    assert found.unlike(calls, joins=True) == []
    assert found.written("loss") == Counter(range(STEPS))
    assert not found.is_flagged


def test_logs_without_step_are_matched_by_their_count_despite_other_logs(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "guarded_without_step")
    assert found.values("loss") == list(MEANS.values())
    assert found.values("extra") == [0.0, 3.0, 6.0, 9.0]
    assert found.values("extra_on_1") == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    calls_of_0 = [step + 1 + step // 3 for step in range(STEPS)]  # rank 0's earlier calls, including extra ones
    assert [row["global_step"] for row in found.rows_with("loss")] == calls_of_0
    common = [{"loss": MEANS[step], "global_step": calls_of_0[step]} for step in range(STEPS)]
    extra = [{"extra": float(step), "global_step": calls_of_0[step] - 1} for step in range(0, STEPS, 3)]
    extra += [{"extra_on_1": float(step), "global_step": step + step // 2} for step in range(0, STEPS, 2)]
    assert found.unlike([*common, *extra]) == []
    assert not found.is_flagged


def test_with_a_step_each_call_is_one_row_on_the_axis_of_the_user_although_a_rank_is_behind(
    plain: tuple[Path, Finished],
) -> None:
    found = history(plain[0] / "behind")
    calls = [
        {"loss": 2.0 * step + 0.5, "lr": step / 8, "samples": 10 * step, "global_step": step} for step in range(BEHIND)
    ]
    assert found.unlike(calls) == []


def test_without_a_step_each_call_is_one_row_at_its_place_although_ranks_are_behind(
    plain: tuple[Path, Finished],
) -> None:
    found = history(plain[0] / "behind_without_step")
    calls = []
    for epoch in range(6):
        for batch in range(5):
            numbers = {"loss": 10.0 * epoch + 2 * batch + 0.5, "own_0": batch, "own_1": batch}
            calls.append({**numbers, "global_step": 6 * epoch + batch})
        calls.append({"accuracy": epoch + 0.25, "epoch": epoch, "global_step": 6 * epoch + 5})
    assert found.unlike(calls) == []


def test_rows_of_different_cadences_have_the_axis_of_their_call(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "cadences_on_an_axis")
    places = [row + row // 5 for row in range(BEHIND)]
    calls = [
        {"loss": 2.0 * row + 0.5, "samples": 10 * row, "global_step": place} for row, place in enumerate(places)
    ] + [{"accuracy": row + 0.25, "samples": 10 * row, "global_step": places[row] + 1} for row in range(4, BEHIND, 5)]
    assert found.unlike(calls, axis="samples") == []


def test_calls_of_one_rank_do_not_move_those_of_another(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "uneven_calls")
    calls = [{"a": float(row), "global_step": row} for row in range(8)]
    assert found.unlike([*calls, *({"b": float(call), "global_step": call} for call in range(24))]) == []


def test_rows_are_those_of_the_calls_of_the_lowest_rank(plain: tuple[Path, Finished]) -> None:
    found, half = history(plain[0] / "split_calls"), STEPS // 2
    values = [({"a": 2.0 * row + 0.5}, {"b": 4.0 * row + 0.5}) for row in range(STEPS)]
    joint = [{**a, **b, "global_step": row} for row, (a, b) in enumerate(values[:half])]
    places = range(half, half + 2 * (STEPS - half), 2)
    apart = [
        {**part, "global_step": place + index}
        for place, parts in zip(places, values[half:], strict=True)
        for index, part in enumerate(parts)
    ]
    assert found.unlike([*joint, *apart]) == []


def test_rows_of_a_rank_under_its_label_have_the_axis_of_their_call(plain: tuple[Path, Finished]) -> None:
    found = histories(plain[0] / "labels_on_an_axis", 2)
    for rank in (0, 1):
        reduced = {"loss": MEANS} if rank == 0 else {}
        own = {f"rank-{rank}/loss": {row: 2.0 * row + rank for row in range(STEPS)}}
        calls = rows_at_steps(**reduced, **own, samples={row: 10 * row for row in range(STEPS)})
        assert found[rank].unlike(calls) == []


def test_the_axis_of_the_user_is_not_reduced_and_stands_alone_only_if_it_was_logged_alone(
    plain: tuple[Path, Finished],
) -> None:
    found = history(plain[0] / "axis_alone")
    alone = [row for row in found.rows if row["global_step"] == 7]
    assert [row["samples"] for row in alone if "loss" not in row][:1] == [70]
    rows = [row for row in found.rows if row not in alone]  # rank 1's call of the axis alone may have a row, too
    sums = {row: 4.0 * row + 1 for row in range(STEPS) if row != 7}
    calls = [{"loss": total, "samples": 10 * row, "global_step": row} for row, total in sums.items()]
    assert differences(rows, calls) == []


def test_a_name_first_logged_after_many_rows_without_step_follows_them(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "burst_without_step")
    assert found.last("loss") == {step: 2.0 * step + 0.5 for step in range(100)}
    assert found.last("val") == {100: 1.0}


def test_names_in_another_order_on_each_rank_do_not_mix(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "order")
    for index in range(5):
        expected = {step: 100.0 * index + step + 0.5 for step in range(STEPS)}
        assert found.last(f"name_{index}") == expected
    assert found.names == {f"name_{index}" for index in range(5)}
    columns = {f"name_{index}": {step: 100.0 * index + step + 0.5 for step in range(STEPS)} for index in range(5)}
    assert found.unlike(rows_at_steps(**columns)) == []


def test_all_names_that_differ_between_ranks_are_written_and_no_others(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "names")
    once = {f"once_{rank}_{step}": {step: 1.0} for rank in (0, 1) for step in range(STEPS)}
    assert found.names == {"both", "own_0", "own_1", *once}
    assert {name: found.last(name) for name in once} == once
    assert found.last("own_0") == found.last("own_1") == {step: float(step) for step in range(STEPS)}
    assert found.last("both") == at(range(STEPS), 0.5)
    own = {f"own_{rank}": {step: float(step) for step in range(STEPS)} for rank in (0, 1)}
    assert found.unlike(rows_at_steps(both=at(range(STEPS), 0.5), **own, **once)) == []


def test_further_steps_of_one_rank_have_its_own_numbers(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "counts")
    alone = {step: 2.0 * step for step in range(STEPS - 4, STEPS)}
    assert found.last("loss") == {**MEANS, **alone}
    assert not found.is_flagged


def test_steps_that_restart_each_epoch_are_matched_within_their_epoch(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "backwards")
    rows = [(row["global_step"], row["val"]) for row in found.rows_with("val")]
    assert len(set(rows)) == len(rows)
    of_both = {(batch, 100.0 * epoch + 2 * batch + 0.5) for epoch in range(3) for batch in range(4)}
    of_1 = {(4, 100.0 * epoch + 9) for epoch in range(3)}
    assert set(rows) == of_both | of_1
    assert found.values("epoch") == [0, 1, 2]
    calls = [{"val": value, "global_step": batch} for batch, value in of_both | of_1]
    assert found.unlike([*calls, *({"epoch": epoch, "global_step": epoch} for epoch in range(3))], joins=True) == []


def test_numbers_of_all_types_are_reduced(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "dtypes")
    exact = ["float", "numpy_float32", "numpy_0d", "fraction", "nested.inner"]
    exact += [f"torch_{kind}" for kind in ("float32", "float64", "float16", "bfloat16", "one_element", "parameter")]
    integers = {"equal_int": 7, "largest_int": LARGEST_EXACT, "numpy_int64": 3, "torch_int64": 3}
    others = {"equal_float": 7.0, "int": 1.5, "bool": 0.5, "equal_bool": 1, "torch_bool": 1, "text": "of rank 0"}
    expected = {**dict.fromkeys(exact, 1.0), **integers, **others}
    assert {name: found.last(name)[0] for name in found.names - {"changing"}} == expected
    assert found.last("changing") == {1: 1.5}


def test_means_are_weighted(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "weights")
    expected = {"number": 2.0, "mapped": 2.0, "unmapped": 3.0, "tensor": 2.0, "none_of_1": 1.0}
    assert {name: found.last(name)[0] for name in found.names} == expected


def test_nan_and_infinities_of_one_rank_are_visible(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "not_finite")
    for name in ("x", "x_sum", "x_max"):
        nan, infinity, smallest, after = (found.last(name)[step] for step in (0, 1, 2, 4))
        assert math.isnan(nan)
        assert infinity == math.inf
        assert smallest == (1.0 if name == "x_max" else -math.inf)
        assert after == (2.0 if name == "x_sum" else 1.0)
    assert math.isnan(found.last("opposite")[3])


def test_names_are_reduced_according_to_their_pattern(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "reduce")
    added = {"tokens": None, "grad_max": 3, "grad_min": 0, "own": 0, "loss": 1.5}
    for name, more in added.items():
        expected = {step: 2 * step + 3 if more is None else step + more for step in range(STEPS)}
        assert found.last(name) == expected, name
    assert found.written("global_step") == Counter(range(STEPS)), "the names of a call are one row"


def test_without_reduction_rows_are_those_of_the_primary(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "no_reduction")
    assert found.last("loss") == {step: float(step) for step in range(STEPS)}


def test_the_spread_over_ranks_is_written_for_requested_names(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "spread")
    kinds = ("min", "max", "std", "argmax_rank")
    assert found.names == {"other", *(f"loss_{x}{y}" for x in "ab" for y in ("", *(f"/{kind}" for kind in kinds)))}
    for step in range(STEPS):
        spread_a = [found.last(f"loss_a/{kind}")[step] for kind in kinds]
        spread_b = [found.last(f"loss_b/{kind}")[step] for kind in kinds]
        assert spread_a == [step, step + 3.0, 1.5, 1]
        assert spread_b == [step - 5.0, step, 2.5, 0]


def test_a_shared_run_has_the_reduced_series_and_one_for_each_rank(plain: tuple[Path, Finished]) -> None:
    found = histories(plain[0] / "shared", 2)
    assert found[0].names == {"loss", "quiet", "rank-0/loss"}
    assert found[1].names == {"rank-1/loss"}
    assert found[0].last("loss") == MEANS
    for rank in (0, 1):
        own = {f"rank-{rank}/loss": {step: 2.0 * step + rank for step in range(STEPS)}}
        assert found[rank].last(f"rank-{rank}/loss") == own[f"rank-{rank}/loss"]
        reduced = {"loss": MEANS, "quiet": at(range(STEPS), 1)} if rank == 0 else {}
        assert found[rank].unlike(rows_at_steps(**reduced, **own)) == []


def test_separate_runs_have_the_numbers_of_their_rank(plain: tuple[Path, Finished]) -> None:
    found = histories(plain[0] / "new", 2)
    for rank in (0, 1):
        assert found[rank].names == {"loss", f"own_{rank}"}
        own = {step: 2.0 * step + rank for step in range(STEPS - 3 * rank)}
        assert found[rank].last("loss") == own
        assert found[rank].unlike(rows_at_steps(loss=own, **{f"own_{rank}": at(own, 1)})) == []


def test_invalid_input_on_one_rank_affects_only_its_own_row(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "bad_input")
    assert found.last("loss") == {**MEANS, 3: 6.0}


def test_values_that_wandb_cannot_write_become_text_without_effect_on_others(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "bad_input")
    assert found.last("object") == dict.fromkeys((5, 6), "namespace(a=1)")
    assert found.last("bytes") == dict.fromkeys((5, 6), r"b'\xff'")
    assert found.last("vector") == {5: [1, 1], 6: [1, 1]}
    assert found.last("complex").keys() == {5, 6}
    assert found.written("loss") == Counter(range(STEPS))
    assert plain[1].output.count("W&B cannot write 'object' on rank 0, of type SimpleNamespace") == 1


def test_a_session_without_any_log_ends(plain: tuple[Path, Finished]) -> None:
    assert history(plain[0] / "no_log").rows == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_logs_is_not_waited_for(plain: tuple[Path, Finished], rank: int) -> None:
    found = history(plain[0] / f"never_logs_on_{rank}")
    assert found.last("loss") == {step: float(step) for step in range(STEPS)}
    assert not found.is_flagged


def test_flush_returns_whether_everything_is_written(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "flush")  # the script checks what flush returns, and the run at that time
    assert found.last("loss") == {0: 0.5, 1: 2.5, 2: 4.5, 3: 150.0}


def test_a_rank_that_opens_its_session_late_joins_and_loses_nothing(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "opens_late")
    assert found.values("ones")[:5] == [1] * 5
    assert not found.is_flagged, "a rank without a session is not expected to contribute"
    assert found.last("ones") == at(range(15), 2)
    assert {step: found.written("ones")[step] for step in range(10, 15)} == at(range(10, 15), 1)


def test_rows_beyond_the_limit_are_written_early_and_corrected(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "bounded")
    assert found.last("ones") == at(range(400), 2)
    early = [row for row in found.rows_with("ones") if row["ones"] == 1]
    assert 300 <= len(early) < 400
    assert {row.get(DEGRADED, 0) for row in early} == {1}
    assert plain[1].output.count("more than 50 rows wait for ranks") in (1, 2)  # once on each rank that notices


def test_ten_thousand_rows_in_a_tight_loop_are_complete(plain: tuple[Path, Finished]) -> None:
    found = history(plain[0] / "many")
    assert found.values("loss") == [2.0 * step + 0.5 for step in range(MANY)]
    assert [row["global_step"] for row in found.rows_with("other")] == list(range(MANY))
    columns = {"loss": {step: 2.0 * step + 0.5 for step in range(MANY)}, "other": at(range(MANY), 1)}
    assert found.unlike(rows_at_steps(**columns)) == []
    assert not found.is_flagged


def test_two_sessions_of_one_process_do_not_mix(plain: tuple[Path, Finished]) -> None:
    one = history(plain[0] / "two_sessions_one")
    two = history(plain[0] / "two_sessions_two")
    assert one.last("loss") == {step: step + 1.0 for step in range(STEPS)}
    assert two.last("loss") == at(range(STEPS), 3)


def test_consecutive_sessions_leave_no_resources_behind(plain: tuple[Path, Finished]) -> None:
    """Without Python's cyclic garbage collector. Of 40 sessions one key each remains."""
    lines = plain[1].lines("HELD")
    assert len(lines) == 2
    for line in lines:
        descriptors, threads, keys = json.loads(line.split(" ", 2)[2])
        assert descriptors < 10, line
        assert threads < 5, line
        assert keys < 65, line


def test_rank_0_does_not_wait_if_no_other_rank_opens_a_session(plain: tuple[Path, Finished]) -> None:
    directory, finished = plain
    found = history(directory / "never_opens")
    assert found.last("loss") == {step: float(step) for step in range(STEPS)}
    assert not found.is_flagged
    assert finished.output.count("no other rank has opened a session") == 2  # here, and with a late rank
    assert finished.output.count("s after rank 0, and has joined") == 1


def break_a_rank(directory: Path, how: str) -> tuple[History, Finished]:
    """Run three ranks, of which rank 1 breaks off. The others end well, and rank 1 does if it is continued."""
    until = [0, 1, 2] if how == "continued" else [0, 2]
    commands = rank_commands(SCRIPTS / "promises_broken.py", directory, how, world_size=3)
    finished = run_ranks(commands, until=until, cwd=directory, environment=environment(), timeout=240)
    assert {finished.exit_codes[rank] for rank in until} == {0}, f"{finished.exit_codes}\n{finished.output}"
    assert finished.lines("ENDED ") == [f"ENDED {rank}" for rank in until]
    return history(directory / "runs"), finished


def check_rows_without_rank_1(found: History, finished: Finished, until: int) -> None:
    """All values of the remaining ranks are written; each last row shows whether rank 1 contributed."""
    ones, flags = found.last("ones"), found.flags("ones")
    assert list(ones) == list(range(until))
    assert {step: ones[step] for step in range(FLUSHED)} == at(range(FLUSHED), 3)
    assert {ones[step] for step in range(FLUSHED, BREAK)} <= {2, 3}
    assert {step: ones[step] for step in range(BREAK, until)} == at(range(BREAK, until), 2)
    assert {step: 3 - flags[step] for step in range(until)} == ones
    assert found.last("mean") == {step: float(step) for step in range(until)}
    assert finished.output.count("Lost rank 1 after") == 1


def check_whole_rows(found: History) -> None:
    """Every row, also one that is corrected later, has both names of its call, and none is written twice."""
    for row in found.rows:
        assert {"ones", "mean"} <= row.keys(), row
        assert row["mean"] == row["global_step"], row
    contents = [(row["global_step"], row["ones"], row.get(DEGRADED, 0)) for row in found.rows]
    assert len(set(contents)) == len(contents)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_when_one_of_three_ranks_is_lost_the_others_continue_and_report_it(tmp_path: Path, how: str) -> None:
    found, finished = break_a_rank(tmp_path, how)
    check_rows_without_rank_1(found, finished, AFTER_BREAK)
    check_whole_rows(found)


def test_a_stopped_rank_that_continues_is_included_again(tmp_path: Path) -> None:
    found, finished = break_a_rank(tmp_path, "continued")
    check_whole_rows(found)
    assert found.last("ones") == at(range(REJOINED), 3)
    assert found.flags("ones") == at(range(REJOINED), 0)
    assert {step: found.written("ones")[step] for step in range(AFTER_BREAK, REJOINED)} == at(
        range(AFTER_BREAK, REJOINED), 1
    )
    assert 1 in {row.get(DEGRADED, 0) for row in found.rows_with("ones")}  # it was missing meanwhile
    assert finished.output.count("Lost rank 1 after") == 1


def test_a_rank_that_sleeps_does_not_delay_others_and_its_rows_are_correct(tmp_path: Path) -> None:
    """Rank 1 does not continue before rank 0's loop has ended: if `log` waited for it, neither would end."""
    job = torchrun(SCRIPTS / "promises_sleeper.py", tmp_path, 20)
    run_job(*job, cwd=tmp_path, environment=environment(), timeout=240).check()
    found = history(tmp_path)
    assert found.last("loss") == MEANS
    assert found.written("loss") == Counter(range(STEPS))
    assert found.last("own_0") == found.last("own_1") == at(range(1, STEPS), 1)
    own = {f"own_{rank}": at(range(1, STEPS), 1) for rank in (0, 1)}
    assert found.unlike(rows_at_steps(loss=MEANS, **own)) == []
    assert not found.is_flagged


def test_in_worker_scope_only_ranks_of_a_node_exchange_numbers(tmp_path: Path) -> None:
    job = torchrun(SCRIPTS / "promises_nodes.py", tmp_path, nodes=2)
    run_job(*job, cwd=tmp_path, environment=environment(), timeout=240).check()
    shared = histories(tmp_path / "shared", 4)
    for rank in range(4):
        node = rank // 2
        label = f"worker-{node}-rank-{rank % 2}"
        assert shared[rank].names == ({"loss", f"{label}/loss"} if rank % 2 == 0 else {f"{label}/loss"})
        assert shared[rank].last(f"{label}/loss") == {step: 10.0 * rank + step for step in range(STEPS)}
    for node in (0, 1):
        assert shared[2 * node].last("loss") == {step: 20.0 * node + 5 + step for step in range(STEPS)}
    auto = histories(tmp_path / "auto", 2)
    assert auto[0].last("loss") == {0: 0.0, **{step: 5.0 + step for step in range(1, STEPS)}}
    assert auto[0].last("loss/argmax_rank") == {0: 0, **at(range(1, STEPS), 1)}
    assert auto[2].last("loss") == {0: 0.0, STEPS: 25.0}
    assert auto[2].last("loss/argmax_rank") == {0: 2, STEPS: 3}
    own = {f"loss_{rank}{kind}" for rank in (2, 3) for kind in ("", "/min", "/max", "/std", "/argmax_rank")}
    assert auto[2].names - auto[0].names == own
    assert not any(found.is_flagged for found in (*shared.values(), *auto.values()))


def test_accelerate_reduces_with_trackers_started_on_the_main_process_only(tmp_path: Path) -> None:
    job = torchrun(SCRIPTS / "promises_accelerate.py", tmp_path)
    run_job(*job, cwd=tmp_path, environment=environment(), timeout=240).check()
    found = history(tmp_path)
    assert found.last("train_loss") == MEANS
    assert found.last("lr") == at(range(STEPS), 0.1)
    assert found.last("validation") == {step: float(step) for step in range(0, STEPS, 3)}
    assert found.names == {"train_loss", "lr", "validation"}
    validation = {step: float(step) for step in range(0, STEPS, 3)}
    calls = rows_at_steps(train_loss=MEANS, lr=at(range(STEPS), 0.1))
    assert found.unlike([*calls, *rows_at_steps(validation=validation)], joins=True) == []


def run_lightning(directory: Path, *scenarios: str) -> Finished:
    job = torchrun(SCRIPTS / "promises_lightning.py", directory, *scenarios)
    return run_job(*job, cwd=directory, environment=environment(), timeout=240).check()


def check_no_long_wait(finished: Finished, *scenarios: str) -> None:
    """Check that no rank waited a full one-minute limit for something that never comes."""
    took = {(line.split()[1], float(line.split()[2])) for line in finished.lines("TOOK ")}
    assert {name for name, seconds in took if seconds < 45} == set(scenarios)
    assert {name for name, seconds in took if seconds >= 45} == set()


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """One job of two ranks that runs one Trainer after another, and the directory of their runs."""
    directory = tmp_path_factory.mktemp("lightning")
    return directory, run_lightning(directory, "guarded", "uneven", "weighted", "constant")


def lightning_history(directory: Path) -> History:
    return history(directory, "trainer/global_step")


def test_lightning_does_not_wait_if_ranks_log_different_names(lightning: tuple[Path, Finished]) -> None:
    check_no_long_wait(lightning[1], "guarded", "uneven", "weighted", "constant")


def test_lightning_values_logged_on_one_rank_are_written(lightning: tuple[Path, Finished]) -> None:
    found = lightning_history(lightning[0] / "guarded")
    assert found.last("loss_step") == {step: 2.0 * step + 0.5 for step in range(8)}
    assert found.last("only_on_0") == found.last("only_on_1") == {step: float(step) for step in range(8)}
    assert found.last("guarded") == {step: 10.0 + step for step in range(8)}
    for step, row in enumerate(found.rows_with("loss_step")):
        whole = {"loss_step": 2.0 * step + 0.5, "only_on_0": step, "only_on_1": step, "guarded": 10 + step, "epoch": 0}
        assert whole.items() <= row.items(), "all that Lightning logs at once is one row"
    assert not found.is_flagged


def test_lightning_validation_loaders_may_be_uneven(lightning: tuple[Path, Finished]) -> None:
    found = lightning_history(lightning[0] / "uneven")
    of_0, of_1 = [10.0 * batch for batch in range(3)] * 2, [10.0 * batch for batch in range(5)] * 2
    of_both = {step: (a + b) / 2 for step, (a, b) in enumerate(zip(of_0, of_1, strict=False))}
    assert found.last("val_step") == {**dict(enumerate(of_1)), **of_both}
    assert found.final("val_epoch") == [130.0 / 8] * 2
    assert found.last("loss_epoch") == {1: 1.0, 3: 1.0}
    assert not found.is_flagged


def test_lightning_epoch_means_are_those_of_all_samples(lightning: tuple[Path, Finished]) -> None:
    found = lightning_history(lightning[0] / "weighted")
    assert found.final("loss_epoch") == [pytest.approx(5 / 3, abs=1e-12)]
    assert found.final("val_epoch") == [pytest.approx(5 / 3, abs=1e-12)]
    assert found.values("loss_step") == [2.0]


def test_lightning_epoch_mean_of_a_constant_is_the_constant(lightning: tuple[Path, Finished]) -> None:
    found = lightning_history(lightning[0] / "constant")
    assert found.final("constant") == found.final("loss_epoch") == [1.0]


def test_lightning_throughput_monitor_on_one_rank_does_not_cause_waits(tmp_path: Path) -> None:
    finished = run_lightning(tmp_path, "throughput")
    check_no_long_wait(finished, "throughput")
    found = lightning_history(tmp_path / "throughput")
    assert found.last("loss_step") == {step: 2.0 * step + 0.5 for step in range(8)}
    assert found.final("loss_epoch") == [7.5]
    assert found.last("train/samples") == {step: 4 * (step + 1) for step in range(8)}
    assert set(found.last("train/device/batches_per_sec")) == set(range(2, 8))
    assert not found.is_flagged
