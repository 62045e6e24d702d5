"""The state of an upload, from logs in the format of wandb 0.31: confirmed, refused, unknown, killed at any time."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from limits import Limit

from dist_wandb.cli.uploads.state import Sent, read_attempt, read_log
from dist_wandb.errors import ReadError
from dist_wandb.wandb_files import debug_log

STREAM = "http://server/files/team/digits/exp/file_stream"
CONFIRMED: dict[str, Any] = {"level": "INFO", "msg": "filestream: request sent", "status": "200 OK"}
CLOSED: dict[str, Any] = {"level": "INFO", "msg": "sender: closed"}
GIVING_UP = (
    f"filestream: fatal error: filestream: error making HTTP request: POST {STREAM} giving up after 2 attempt(s): "
)
GAVE_UP = 'POST http://server/graphql giving up after 7 attempt(s)\nwhile retrying: HTTP 409: {"error": "deleted"}'
REFUSED_CONNECTION = f'Post "{STREAM}": dial tcp 1.2.3.4:443: connect: connection refused'
BROKEN_CONNECTION = f'Post "{STREAM}": EOF'


def sending(**lines: Any) -> dict[str, Any]:
    return {"level": "INFO", "msg": "filestream: sending request", "total_files": 1, **lines}


def history(offset: int, lines: int, **more: Any) -> dict[str, Any]:
    return sending(history_offset=offset, history_lines=lines, **more)


def retrying(status: object) -> dict[str, Any]:
    return {"level": "INFO", "msg": "api: retrying HTTP error", "status": status, "url": STREAM}


def retrying_after(error: str) -> dict[str, Any]:
    return {"level": "INFO", "msg": "api: retrying error", "error": error}


def refused(status: int, url: str = STREAM, method: str = "POST") -> dict[str, Any]:
    return {"level": "ERROR", "msg": "api: HTTP error", "status": status, "method": method, "url": url}


def fatal(text: str) -> dict[str, Any]:
    return {"level": "ERROR+4", "msg": text}


def read(directory: Path, *entries: dict[str, Any], cut: int = 0) -> Sent:
    log = directory / "debug-sync.1.log"
    content = "".join(f"{json.dumps({'time': 'now', **entry})}\n" for entry in entries)
    log.write_text(content[: len(content) - cut])
    return read_log(log)


def test_confirmed_lines_add_up_and_a_console_line_that_is_sent_again_counts_once(tmp_path: Path) -> None:
    requests = (
        sending(events_offset=0, events_lines=2),
        history(7, 5, console_offset=10, console_lines=3),
        sending(console_offset=12, console_lines=1),
        history(12, 1, events_offset=2, events_lines=1, console_offset=12, console_lines=2, complete=True, exit_code=0),
    )
    sent = read(tmp_path, *(entry for request in requests for entry in (request, CONFIRMED)), CLOSED)
    assert sent == Sent(6, 3, 4, completed=True, attempts=1, ended=True)


def test_an_answer_that_is_retried_is_known_while_it_is_and_at_the_end(tmp_path: Path) -> None:
    tries = [{**retrying(409), "url": "http://server/graphql?x=1"}] * 7
    assert read(tmp_path, *tries).retried == "HTTP 409 for requests to /graphql"
    gave_up = {"level": "ERROR", "msg": "runupserter: failed to init run", "error": GAVE_UP}
    assert read(tmp_path, *tries, gave_up).problems == ("HTTP 409 for /graphql, 7 times",)
    assert "refused" in read(tmp_path, retrying_after(REFUSED_CONNECTION)).retried


@pytest.mark.parametrize(("status", "is_final"), [(404, True), (409, True), (410, True), (429, False), (502, False)])
def test_an_answer_that_refuses_the_run_is_final_before_anything_was_sent(
    tmp_path: Path, status: int, is_final: bool
) -> None:
    tries = [{**retrying(status), "url": "http://server/graphql"}] * 2
    found = read(tmp_path, *tries)
    assert (found.refused, found.tries) == (is_final, 2)
    assert not read(tmp_path, history(0, 3), CONFIRMED, *tries).refused  # an artifact's, for example


@pytest.mark.parametrize("cut", [0, 4], ids=["no answer", "an incomplete line"])
def test_requests_in_flight_at_the_end_of_the_log_are_uncertain(tmp_path: Path, cut: int) -> None:
    sent = read(tmp_path, history(0, 5), CONFIRMED, history(5, 3), *([CONFIRMED] if cut else []), cut=cut)
    assert sent == Sent(5, unsure=3, attempts=1)


NOT_FOUND = fatal("filestream: fatal error: filestream: failed to upload: 404 Not Found")
SURELY_NOT_THERE: dict[str, list[dict[str, Any]]] = {
    "refused": [refused(404), NOT_FOUND],
    "rate limited too often": [retrying(429), retrying(429), fatal(f"{GIVING_UP}\nwhile retrying: HTTP 429: x")],
    "refused, while other requests broke": [
        retrying_after('Post "http://server/graphql": EOF'),
        refused(404),
        NOT_FOUND,
    ],
    "never reached": [*[retrying_after(REFUSED_CONNECTION)] * 2, fatal(GIVING_UP + REFUSED_CONNECTION)],
    "given up while waiting for the next try": [
        retrying_after(REFUSED_CONNECTION),
        fatal(
            "filestream: fatal error: filestream: error making HTTP request: context canceled\n"
            f"while retrying: {REFUSED_CONNECTION}. got response: <nil>"
        ),
    ],
}
PERHAPS_THERE: dict[str, list[dict[str, Any]]] = {
    "no answer": [retrying_after(BROKEN_CONNECTION), fatal(GIVING_UP + BROKEN_CONNECTION)],
    "no answer at first": [
        retrying_after(BROKEN_CONNECTION),
        retrying_after(REFUSED_CONNECTION),
        fatal(GIVING_UP + REFUSED_CONNECTION),
    ],
    "an error of the server's": [retrying(500), refused(404), fatal("filestream: fatal error: x")],
    "given up while it was sent": [
        retrying_after(REFUSED_CONNECTION),
        fatal(f'{GIVING_UP}Post "{STREAM}": context canceled'),
    ],
    "killed while it was tried again": [retrying_after(REFUSED_CONNECTION)],
    "without a reason": [fatal("filestream: fatal error: something new")],
    **{
        f"an invalid status {status!r}": [retrying(status), fatal("filestream: fatal error: x")]
        for status in ("teapot", math.inf, None, [404])
    },
}


@pytest.mark.parametrize("why", [*SURELY_NOT_THERE, *PERHAPS_THERE])
def test_refused_rows_may_be_sent_again_and_those_that_may_have_arrived_are_reported(tmp_path: Path, why: str) -> None:
    is_refused = why in SURELY_NOT_THERE
    entries = [*SURELY_NOT_THERE[why], CLOSED] if is_refused else PERHAPS_THERE[why]
    sent = read(tmp_path, history(0, 5), CONFIRMED, history(5, 3), *entries)
    assert (sent.history, sent.unsure, sent.ended) == (5, 0 if is_refused else 3, is_refused)
    assert sent.problems or not is_refused


def test_errors_of_other_requests_do_not_concern_the_rows(tmp_path: Path) -> None:
    sent = read(
        tmp_path,
        history(0, 5),
        refused(404, "http://server/storage/run/config.yaml?signature=secret", "PUT"),
        refused(404, "http://server/storage/run/config.yaml?signature=secret", "PUT"),
        retrying_after('Post "http://server/graphql": EOF'),
        CONFIRMED,
        CLOSED,
    )
    assert sent == Sent(5, attempts=1, ended=True, problems=("HTTP 404 for PUT /storage/run/config.yaml",))


def test_a_problem_is_reported_once_and_without_the_errors_that_follow(tmp_path: Path) -> None:
    sent = read(
        tmp_path,
        {"level": "ERROR", "msg": "runupserter: failed to init run", "error": "dial tcp: refused\nwhile retrying: so"},
        {"level": "ERROR", "msg": "runsync: didn't print run URL, handle never became ready"},
        {"level": "ERROR", "msg": "runreader: init error: dial tcp: refused"},
        CLOSED,
    )
    assert (sent.has_lines, sent.unsure, sent.problems) == (False, 0, ("dial tcp: refused",))


FIRST = Sent(5, 1, 1, unsure=3, attempts=1)


@pytest.mark.parametrize(
    ("later", "unsure"),
    [
        (Sent(attempts=1, ended=True, problems=("HTTP 401",)), 3),
        (Sent(events=4, attempts=1), 3),
        (Sent(3, attempts=1, ended=True), 0),
        (Sent(unsure=2, attempts=1), 2),
    ],
    ids=["sent nothing", "sent no rows", "sent them", "is not known to have sent them"],
)
def test_rows_stay_unknown_until_they_are_sent_again(later: Sent, unsure: int) -> None:
    both = FIRST.followed_by(later)
    assert (both.unsure, both.attempts) == (unsure, 2)
    assert (both.history, both.events, both.console) == (5 + later.history, 1 + later.events, 1 + later.console)
    assert (both.ended, both.problems) == (later.ended, later.problems)


# --- malformed logs ---------------------------------------------------------------------------------------------------


def test_values_of_other_types_are_skipped(tmp_path: Path) -> None:
    log = tmp_path / "debug-sync.1.log"
    odd = ('"3"', "null", "1e400", "-1", "1.5", "true", "[]", "9007199254740993", "9" * 5000)
    lines = [
        f'{{"msg": "filestream: sending request", "history_lines": {value}, "events_lines": {value}, '
        f'"console_offset": {value}, "console_lines": {value}, "complete": "no"}}\n{json.dumps(CONFIRMED)}\n'
        for value in odd
    ]
    others = ('{"msg": 3, "level": []}\n', '{"msg": "api: HTTP error", "level": "ERROR", "status": "teapot"}\n')
    log.write_text("".join(lines) + "".join(others))
    sent = read_log(log)
    assert sent == Sent(attempts=1, problems=("HTTP without a status for a request ",))


def test_a_log_that_cannot_be_read_or_takes_too_long_is_refused(tmp_path: Path, limit: Limit) -> None:
    with pytest.raises(ReadError, match="File name too long, so it is unknown what the server has confirmed"):
        read_log(tmp_path / ("x" * 300))
    log = tmp_path / "debug-sync.1.log"
    log.touch()
    os.truncate(log, 2**40)
    limit(debug_log, LONGEST_LOG=2**24)
    with pytest.raises(ReadError, match=r"debug-sync.1.log: is longer than 16777216 bytes"):
        read_log(log)
    log.write_text('{"msg": "x"}\n' * 10_000)
    limit(debug_log, _LONGEST_TIME=0.001)
    with pytest.raises(ReadError, match=r"takes more than 0 s of processor time, so it is not read to its end"):
        read_log(log)


def test_only_the_last_log_of_an_upload_is_read_and_none_among_the_copied_files(tmp_path: Path) -> None:
    """A copied one remains if everything is killed before W&B's uploader writes its own."""
    content = "".join(f"{json.dumps(entry)}\n" for entry in (history(0, 5), CONFIRMED))
    (tmp_path / "copy" / "files").mkdir(parents=True)
    (tmp_path / "copy" / "files" / "debug-sync.1.log").write_text(content)
    assert read_attempt(tmp_path) == Sent(attempts=1)
    (tmp_path / "wandb" / "logs").mkdir(parents=True)
    for number, text in ((1, content + content), (2, content)):
        (tmp_path / "wandb" / "logs" / f"debug-sync.{number}.log").write_text(text)
    assert read_attempt(tmp_path).history == 5
