"""`dist-wandb report`: its output, its exit codes, and the file that it writes."""

from __future__ import annotations

import os
import re
import sys
import webbrowser
from pathlib import Path

import pytest
from record_files import write_run

from dist_wandb.cli import main

pytestmark = pytest.mark.newest  # wandb 0.31 is the first version that reads its own files


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses for which a browser is started; none can be if there is an empty one among them."""
    addresses: list[str] = []

    def open_it(address: str) -> bool:
        addresses.append(address)
        return all(addresses)

    monkeypatch.setattr(webbrowser, "open", open_it)
    return addresses


def test_a_page_of_the_wanted_metrics_is_written_and_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    assert main(["report", ".", "--open"]) == 0
    assert capsys.readouterr().out.startswith("1 run in report.html (")
    assert opened == [(tmp_path / "report.html").as_uri()]
    assert b'"run_id":"exp"' in (tmp_path / "report.html").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "wandb"]
    opened.append("")
    assert main(["report", ".", "--open", "--metric", "val/*"]) == 0
    assert "No browser could be started" in capsys.readouterr().out
    assert b'"charts":[]' in (tmp_path / "report.html").read_bytes()


def test_unreadable_files_are_reported_with_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "good")
    (write_run(tmp_path / "bad\x1b[31m", "bad") / "run-bad.wandb").write_bytes(b"")
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "a.html")]) == 1
    out = capsys.readouterr().out
    assert "run-bad.wandb" in out
    assert "\x1b" not in out
    assert (tmp_path / "a.html").exists()


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("thesis.html", "is not a dist-wandb report"),
        ("link.html", "not the expected file"),
        ("pipe.html", "not the expected file"),
        ("directory", "not the expected file"),
        ("missing/a.html", "cannot be written: No such file or directory"),
    ],
)
def test_nothing_but_an_earlier_page_is_replaced_as_is_said_before_runs_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, reason: str
) -> None:
    thesis = tmp_path / "thesis.html"
    thesis.write_text("my thesis")
    (tmp_path / "link.html").symlink_to(thesis)
    os.mkfifo(tmp_path / "pipe.html")
    (tmp_path / "directory").mkdir()
    assert main(["report", str(tmp_path), "-o", str(tmp_path / place)]) == 1
    message = capsys.readouterr().err
    assert (place in message, reason in message) == (True, True)
    assert thesis.read_text() == "my thesis"
    before = sorted(tmp_path.iterdir())
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "a.html")]) == 1
    assert "No W&B run was found below" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_without_plotly_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "a.html")]) == 1
    assert "pip install 'dist-wandb[report]'" in capsys.readouterr().err


def test_runs_of_several_directories_are_selected_as_in_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rate in {"a": 0.1, "b": 0.2, "c": 0.3}.items():
        write_run(tmp_path / name, name, config={"lr": rate})
    page = tmp_path / "a.html"

    def reported(*arguments: str) -> list[str]:
        assert main(["report", "-o", str(page), str(tmp_path / "a"), str(tmp_path / "b"), *arguments]) == 0
        return sorted(set(re.findall(r'"run_id":"(\w)"', page.read_text())))

    assert reported() == ["a", "b"]
    assert reported("--where", "lr>0.1", "--where", "loss<9") == ["b"]
    assert reported("--last") == ["b"]
    assert reported("a") == ["a"]
    capsys.readouterr()
    assert main(["report", str(tmp_path), "-o", str(page), "--where", "lr>1"]) == 2
    assert f"No run below {str(tmp_path)!r} is selected. Give other names" in capsys.readouterr().err
