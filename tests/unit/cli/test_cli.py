"""The command line, and `dist-wandb plan`."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import run_python
from record_files import write_run

from dist_wandb import __version__
from dist_wandb.cli import main
from dist_wandb.cli.command import sparkline

MODES = json.loads((Path(__file__).parents[1] / "modes.json").read_text())

Capture = pytest.CaptureFixture[str]


def refusal(argv: list[str], capsys: Capture) -> str:
    """Return the message on stderr for arguments that argparse or dist-wandb refuses with exit code 2."""
    try:
        code: object = main(argv)
    except SystemExit as leaving:
        code = leaving.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    return captured.err


# --- the command itself -----------------------------------------------------------------------------------------------


def test_version_usage_and_completions(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"dist-wandb {__version__}\n"
    assert "usage: dist-wandb" in refusal([], capsys)
    assert refusal(["show", "--rwos", "loss"], capsys).startswith("usage: dist-wandb show [-h]")
    asked: list[str] = []
    argcomplete = SimpleNamespace(autocomplete=lambda parser: asked.append(parser.format_usage()))
    monkeypatch.setitem(sys.modules, "argcomplete", argcomplete)
    with pytest.raises(SystemExit):
        main([])
    assert asked[0].startswith("usage: dist-wandb ")


@pytest.mark.slow
def test_only_a_terminal_is_told_of_work() -> None:
    code = "from dist_wandb.cli.command import working\nwith working('reading'): {}"
    command = [sys.executable, "-c", code.format("input()")]
    ours, theirs = os.openpty()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"}) as told:
        shown = b""
        while b"reading ..." not in shown:
            shown += os.read(ours, 1000)
        told.communicate(b"\n", timeout=120)
    assert told.returncode == 0
    command = [sys.executable, "-c", code.format("pass")]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert done.stdout == done.stderr == b""


def test_the_command_line_imports_neither_torch_nor_wandb() -> None:
    code = "import sys, dist_wandb.cli; print({'torch', 'wandb', 'lightning', 'accelerate'} & set(sys.modules))"
    assert run_python(code) == "set()"


@pytest.mark.slow
@pytest.mark.parametrize("extra", [["--all"], ["--json"]])
def test_a_closed_pipe_causes_no_traceback(extra: list[str]) -> None:
    command = [sys.executable, "-m", "dist_wandb", "plan", "--layout", "3000", *extra]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan --layout 2 --json", "doctor --timeout 0", "show ."])
def test_output_that_cannot_be_written_is_reported_in_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_run(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dist_wandb", *command.split()],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "dist-wandb: the output could not be written: No space left on device.\n"


def test_a_command_works_without_standard_output() -> None:
    closing = f"import os; os.close(1); os.execv({sys.executable!r}, [{sys.executable!r}, '-m', 'dist_wandb', 'plan'])"
    done = subprocess.run([sys.executable, "-c", closing], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# --- plan -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", MODES, ids=lambda case: f"{case['layout']}-{case['run_mode']}-{case['rank_scope']}")
def test_the_plan_matches_the_mode_table(case: dict[str, Any], capsys: Capture) -> None:
    layout = ",".join(map(str, case["ranks_per_node"]))
    argv = ["plan", "--layout", layout, "--run-mode", case["run_mode"], "--rank-scope", case["rank_scope"], "--json"]
    assert main(argv) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [{key: rank[key] for key in case["ranks"][0]} for rank in plan["ranks"]] == case["ranks"]
    writers = [rank for rank in case["ranks"] if rank["opens_run"]]
    assert (
        plan.items()
        >= {"layout": case["ranks_per_node"], **{key: case[key] for key in ("run_mode", "rank_scope")}}.items()
    )
    assert plan["runs"] == len({rank["run_id"] for rank in writers})
    assert plan["groups"] == len({rank["group"] for rank in writers if rank["group"]})
    assert plan["writers"] == len(writers)


def test_the_plan_of_a_large_job_is_a_summary_with_warnings_unless_all_ranks_are_requested(capsys: Capture) -> None:
    argv = ["plan", "--nodes", "2048", "--procs-per-node", "8", "--run-mode"]
    assert main([*argv, "shared"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[2:4] == [
        ["0", "1", "exp", "worker-0-rank-0", "shared", "run,", "primary"],
        ["1-16383", "16,383", "exp", "worker-0-rank-1", "…", "worker-2047-rank-7", "shared", "run"],
    ]
    assert lines[5] == ["16384", "ranks", "on", "2048", "nodes:", "1", "run,", "no", "groups,", "16384", "writers"]
    assert " ".join(lines[6]).startswith('! run_mode="shared" opens a run with 16,384 writers, but W&B has tested')
    assert main([*argv, "auto", "--rank-scope", "worker", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["ranks"]) == 16_384
    assert [warning[:60] for warning in found["warnings"]] == [
        'run_mode="auto" with rank_scope="worker" opens 2,048 runs at'
    ]
    assert main(["plan", "--layout", "65"]) == 0
    assert capsys.readouterr().out.splitlines()[3].split() == ["1-64", "64", "-", "nothing"]
    assert main(["plan", "--layout", "65", "--all"]) == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if "nothing" in line]) == 64


def test_id_group_and_name_can_be_given_and_are_not_cut_in_a_pipe(capsys: Capture) -> None:
    run_id = "x" * 128
    argv = ["plan", "--layout", "1,2", "--run-mode", "new", "--id", run_id, "--group", "sweep", "--name", "night"]
    assert main([*argv, "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["name"] for rank in ranks] == ["night-rank-0", "night-rank-1", "night-rank-2"]
    assert {rank["group"] for rank in ranks} == {"sweep"}
    assert main(argv) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[3:6] == [f"{run_id}-rank-0", "night-rank-0", "sweep"]


def test_the_plan_of_a_mesh_counts_the_replicas_of_the_primary(capsys: Capture) -> None:
    argv = ["plan", "--mesh", "pp=2,dp=2,tp=2", "--nodes", "2", "--run-mode", "shared", "--primary-rank", "-1"]
    assert main([*argv, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [rank["global_rank"] for rank in plan["ranks"] if rank["opens_run"]] == [5, 7]
    assert [rank["global_rank"] for rank in plan["ranks"] if rank["primary"]] == [7]
    assert [rank["numbers"] for rank in plan["ranks"]] == ["left out"] * 5 + ["counted", "left out", "counted"]
    assert plan["layout"] == [4, 4]
    assert main([*argv, "--unit", "dp,tp"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "counted" in line] == ["4", "5", "6", "7"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layout", "3,x"], "'x' is not a whole number of at least 1, in '3,x'"),
        (["--layout", "3,0"], "'0' is not a whole number of at least 1, in '3,0'"),
        (["--nodes", "0"], "argument --nodes: '0' is not a whole number of at least 1"),
        (["--procs-per-node", "-1"], "argument --procs-per-node"),
        (["--procs-per-node", "1.5"], "'1.5' is not a whole number"),
        (["--layout", "3", "--nodes", "2"], "Give either --layout or those two"),
        (["--layout", "3", "--procs-per-node", "2"], "Give either --layout or those two"),
        (["--run-mode", "share"], "run_mode='share' is unknown. Allowed: 'auto', 'shared', 'new'. Did you mean"),
        (["--rank-scope", "node"], "rank_scope='node' is unknown. Allowed: 'global', 'worker'."),
        (["--id", "a/b"], "--id 'a/b'"),
        (["--mesh", "dp=2,dp=4"], "does not name each dimension once"),
        (["--mesh", "dp"], "'' is not a whole number of at least 1"),
        (["--mesh", "dp=2", "--layout", "3"], "--mesh has 2 ranks, but the job has 3"),
        (["--mesh", "dp=3", "--nodes", "2"], "3 ranks, which cannot be divided equally among --nodes 2"),
        (["--mesh", "dp=2,tp=2", "--unit", "pp"], "The mesh has no dimension 'pp'. Its dimensions are 'dp', 'tp'."),
        (["--unit", "dp"], "Give --mesh, such as dp=4,tp=2"),
        (["--layout", "4", "--primary-rank", "4"], "primary_rank=4 is not a rank of this job of 4"),
        (["--layout", "4", "--primary-rank", "-5"], "primary_rank=-5 is not a rank of this job of 4"),
    ],
)
def test_arguments_that_cannot_be_planned_are_refused(arguments: list[str], message: str, capsys: Capture) -> None:
    assert message in refusal(["plan", *arguments], capsys)


@pytest.mark.parametrize(
    ("arguments", "ids", "message"),
    [
        (["--layout", "2"], ["t7", None], ""),
        (["--layout", "2", "--run-mode", "shared"], ["t7", "t7"], ""),
        (["--layout", "2", "--rank-scope", "worker"], ["t7", None], ""),
        (
            ["--layout", "2", "--run-mode", "new", "--rank-scope", "worker"],
            ["t7", "t7-rank-1"],
            "of rank 0. The runs of the other ranks have ids derived from it and the trial's values, and are in its",
        ),
        (["--nodes", "2", "--rank-scope", "worker"], ["t7", "t7-worker-1"], "the run 't7' of node 0. The runs of the"),
        (
            ["--nodes", "2", "--run-mode", "new", "--rank-scope", "worker"],
            ["t7", "t7-worker-1-rank-0"],
            "and the trial's values, but are not part",
        ),
    ],
)
def test_the_plan_of_a_trial_has_the_id_from_the_agent(
    arguments: list[str], ids: list[str | None], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert main(["plan", *arguments, "--sweep", "--id", "t7", "--json"]) == 0
    asked_for = json.loads(capsys.readouterr().out)
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    monkeypatch.setenv("WANDB_RUN_ID", "t7")
    assert main(["plan", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == asked_for
    assert [rank["run_id"] for rank in asked_for["ranks"]] == ids
    assert message in "".join(asked_for["warnings"])
    assert len(asked_for["warnings"]) == bool(message)
    assert main(["plan", *arguments]) == 0
    assert ("! An agent of a sweep has started this job" in capsys.readouterr().out) is bool(message)


def test_a_sparkline_scales_between_the_extremes() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5, 5], 8) == "▄▄▄"
    assert sparkline([math.nan, 1, math.inf, 2], 8) == "·▁·█"
    assert sparkline([math.nan] * 3, 8) == "···"
    assert sparkline([], 8) == ""
    assert sparkline([-1.7e308, 0, 1.7e308], 8) == "▁▅█"
    assert sparkline([0, 5e-324], 8) == "▄▄"


@given(st.lists(st.floats()), st.integers(1, 64))
def test_a_sparkline_of_any_series_has_its_width(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    assert set(line) <= set("▁▂▃▄▅▆▇█·")
