"""A stand-in for the W&B server: the real wandb runs online against it, and it records all requests.

Example:
    A test starts clients with `server.environment(directory)`, and inspects the records afterwards::

        with WandbServer() as server:
            fault = server.fail("file_stream", count=3, status=500)
            run_job([sys.executable, script], cwd=directory, environment=server.environment(directory))
            run = server.run("exp")
            assert [row["loss"] for row in run.rows] == [0.0, 1.0, 2.0]
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from graphql_of_wandb import GraphQL, operation_name
from processes import clean_environment, free_port
from wandb_records import PLAIN, RecordedArtifact, RecordedRun, Records, Trial

if TYPE_CHECKING:
    from typing_extensions import Self

# Variables with which wandb measures the machine at once, and writes that into the run's file at once.
MEASURED = {"WANDB_X_STATS_SAMPLING_INTERVAL": "0.1", "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "0.1"}
_HOST = "127.0.0.1"
_API_KEY = "0123456789" * 4


@dataclass(frozen=True)
class Request:
    """A request from a client."""

    scope: str  # ``"graphql"``, ``"file_stream"``, ``"files"`` (uploads and downloads), or ``"other"``
    operation: str  # name of the GraphQL operation, else method and path
    client: str  # the shared writer that sent the request, or `PLAIN`
    path: str
    message: Mapping[str, Any] = field(default_factory=dict)  # decoded body of GraphQL and file stream requests
    content: bytes = b""  # body of other requests


@dataclass(frozen=True)
class Answer:
    """The response to a request."""

    status: int | None  # HTTP status; `None` if the connection was closed without a response
    body: Mapping[str, Any] = field(default_factory=dict)  # sent as JSON
    content: bytes | None = None  # content of a file, sent instead of `body`
    headers: Mapping[str, str] = field(default_factory=dict)  # further headers


@dataclass(eq=False)
class Fault:
    """An injected failure of requests, active until it is stopped."""

    scope: str  # scope of the affected requests, or the name of one GraphQL operation
    count: int | None = None  # number of affected requests; `None` for all until the fault is stopped
    status: int | None = None  # HTTP status of the response; `None` lets requests pass, unless `drop` is set
    drop: bool = False  # whether the connection is closed without a response
    delay: float = 0.0  # seconds to wait first, or until it is stopped
    processed: bool = False  # whether the server records the requests anyway, so that only the response is lost
    only: Callable[[Request], bool] | None = None  # selects the affected requests; `None` for all of the scope
    message: str = "injected by the test"  # the error in the response
    headers: Mapping[str, str] = field(default_factory=dict)  # further headers of the response
    hits: int = 0  # number of requests affected so far
    stopped: bool = False

    def stop(self) -> None:
        """Let all further requests pass."""
        self.stopped = True

    def concerns(self, request: Request) -> bool:
        """Return whether the fault affects a request."""
        spent = self.stopped or (self.count is not None and self.hits >= self.count)
        named = self.scope in (request.scope, request.operation)
        return named and not spent and (self.only is None or self.only(request))


class WandbServer:
    """A W&B server on loopback, in threads of this process, for the duration of a ``with`` block."""

    def __init__(self) -> None:
        self._records = Records()
        self._changed = threading.Condition(threading.RLock())
        self._faults: list[Fault] = []
        self._answered: list[tuple[Request, int | None]] = []
        self._unknown: list[str] = []
        self._http: _HttpServer | None = None
        self._reserved = socket.socket()  # keeps the port while the server is stopped
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.port = 0  # set on entering the context
        self.stopped_runs: set[str] = set()  # ids of runs whose Stop button was pressed on W&B's page
        self._graphql = GraphQL(self._records, lambda: self.url)

    def __enter__(self) -> Self:
        self.port = free_port()
        self._reserved.bind((_HOST, self.port))
        self.restart()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
        self._reserved.close()

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    def environment(self, directory: Path, **extra: str) -> dict[str, str]:
        """Return the environment of a client process, whose caches and settings are in `directory`."""
        places = {
            f"WANDB_{name}_DIR": str(directory / f"wandb-{name.lower()}")
            for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT")
        }
        retries = {
            f"WANDB_X_{client}_RETRY_WAIT_{bound}_SECONDS": "1"
            for client in ("GRAPHQL", "FILE_STREAM", "FILE_TRANSFER")
            for bound in ("MIN", "MAX")
        }
        places["XDG_STATE_HOME"] = str(directory / "state")
        online = {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": _API_KEY, "WANDB_MODE": "online"}
        # wandb-core accepts whole seconds: below one second it uses its defaults, 2 to 60 s and 15 s
        interval = {"WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "1"}
        variables = clean_environment(**{**online, **places, **retries, **interval, **extra})
        if "WANDB_MODE" not in extra:
            del variables["WANDB_MODE"]
        return variables

    def fail(self, scope: str, **how: Any) -> Fault:
        """Make requests of a scope, or of one GraphQL operation, fail, as the fields of `Fault` describe."""
        fault = Fault(scope, **how)
        with self._changed:
            self._faults.append(fault)
        return fault

    def stop(self) -> None:
        """Simulate a dead server: stop listening, and close open connections. The records are kept."""
        if self._http is not None:
            self._http.end()
            self._http = None

    def restart(self) -> None:
        if self._http is None:
            self._http = _HttpServer(self, self.port)
            self._http.begin()

    @property
    def runs(self) -> dict[str, RecordedRun]:
        """A copy of the runs recorded so far, by ``entity/project/id``."""
        with self._changed:
            return copy.deepcopy(self._records.runs)

    def run(self, run_id: str) -> RecordedRun:
        with self._changed:
            (found,) = [run for run in self._records.runs.values() if run.run_id == run_id]
            return copy.deepcopy(found)

    def trials(self, sweep: str) -> list[Trial]:
        with self._changed:
            return copy.deepcopy(self._records.sweeps[sweep].trials)

    def stop_trial(self, sweep: str, number: int) -> None:
        """Make the agent of a trial stop it at its next heartbeat, as early stopping and W&B's web pages do."""
        with self._changed:
            self._records.sweeps[sweep].trials[number].is_stopped = True

    @property
    def artifacts(self) -> list[RecordedArtifact]:
        with self._changed:
            return copy.deepcopy(list(self._records.artifacts.values()))

    @property
    def answered(self) -> list[tuple[Request, int | None]]:
        """All requests, with the status of the response; `None` for requests without a response."""
        with self._changed:
            return list(self._answered)

    @property
    def unknown(self) -> list[str]:
        """Requests that this server does not support. Should be empty."""
        with self._changed:
            return list(self._unknown)

    def wait_until(self, condition: Callable[[], bool], *, within: float = 30.0) -> None:
        """Wait until the records satisfy a condition, which is checked after each request; fail on a timeout."""
        with self._changed:
            assert self._changed.wait_for(condition, within), f"not within {within:g} s; {self._status()}"

    def _status(self) -> str:
        last = [(request.operation, status) for request, status in self._answered[-10:]]
        return f"runs {list(self._records.runs)}, unknown {self._unknown}, last requests {last}"

    def answer(self, request: Request, is_over: threading.Event) -> Answer:
        """Record a request, unless a fault affects it, and return the response."""
        with self._changed:
            fault = next((fault for fault in self._faults if fault.concerns(request)), None)
            if fault is not None:
                fault.hits += 1
        if fault is not None and fault.delay:
            deadline = time.monotonic() + fault.delay
            while time.monotonic() < deadline and not (fault.stopped or is_over.wait(0.05)):
                pass
        with self._changed:
            answer = Answer(None) if is_over.is_set() else self._faulty_answer(request, fault)
            self._answered.append((request, answer.status))
            self._changed.notify_all()
        return answer

    def _faulty_answer(self, request: Request, fault: Fault | None) -> Answer:
        if fault is None or (fault.status is None and not fault.drop):
            return self._right_answer(request)
        if fault.processed:
            self._right_answer(request)
        is_query = request.scope == "graphql"
        body = {"errors": [{"message": fault.message}]} if is_query else {"error": fault.message}
        return Answer(None if fault.drop else fault.status, body, headers=fault.headers)

    def _right_answer(self, request: Request) -> Answer:
        try:
            if request.scope == "graphql":
                variables = request.message.get("variables") or {}
                return Answer(200, {"data": self._graphql.answer(request.operation, variables, request.client)})
            if request.scope == "file_stream":
                _, _, entity, project, run_id, _ = map(unquote, request.path.split("/"))
                self._records.stream(f"{entity}/{project}/{run_id}", request.client, request.message)
                is_stopped = run_id in self.stopped_runs or self._records.is_stopped(run_id)
                return Answer(200, {"limits": {}, "stopped": is_stopped})
            if request.scope == "files":
                _, _, kind, owner, name = map(unquote, request.path.split("/"))
                if request.operation.startswith("GET "):
                    return Answer(200, content=self._records.get(kind, owner, name))
                self._records.put(kind, owner, name, request.content)
                return Answer(200)
        except (KeyError, ValueError, TypeError) as error:
            self._unknown.append(f"{request.operation}: {error!r} in {request.message or request.content[:1000]!r}")
            return Answer(400, {"errors": [{"message": f"not understood: {error!r}"}]})
        self._unknown.append(request.operation)
        return Answer(404, {"error": "unknown path"})


class _HttpServer(ThreadingHTTPServer):
    """The part that can be stopped: it closes connections, and joins their threads."""

    daemon_threads = False
    block_on_close = True

    def __init__(self, owner: WandbServer, port: int) -> None:
        self.owner = owner
        self.is_over = threading.Event()
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="wandb-server", daemon=True)
        super().__init__((_HOST, port), _Handler)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self.is_over.set()
        self.shutdown()
        self._thread.join()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # the client was faster
                    connection.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do not report broken connections: tests kill clients."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _HttpServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # as the base class
        """Print nothing: tests inspect `answered`."""

    def do_GET(self) -> None:
        answer = self.server.owner.answer(self._request(), self.server.is_over)
        if answer.status is None:
            self.close_connection = True
            return
        body = json.dumps(answer.body).encode() if answer.content is None else answer.content
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_PUT = do_GET  # noqa: N815  # http.server's names

    def _request(self) -> Request:
        body = self._body()
        client = self.headers.get("X-WANDB-ASYNC-CLIENT-ID") or self.headers.get("X-WANDB-CLIENT-ID") or PLAIN
        line = f"{self.command} {self.path}"
        if self.command == "POST" and self.path == "/graphql":
            message = json.loads(body)
            return Request("graphql", operation_name(message), client, self.path, message)
        if self.command == "POST" and self.path.endswith("/file_stream"):
            return Request("file_stream", line, client, self.path, json.loads(body))
        scope = "files" if self.command in ("PUT", "GET") and self.path.startswith("/storage/") else "other"
        return Request(scope, line, client, self.path, content=body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self._chunk, b""))
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _chunk(self) -> bytes:
        size = int(self.rfile.readline().partition(b";")[0], 16)
        chunk = self.rfile.read(size)
        self.rfile.readline()
        return chunk
