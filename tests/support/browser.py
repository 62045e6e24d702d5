"""Headless Chromium, controlled by its DevTools protocol over two pipes, without a port, driver program or package."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_MISSING = (
    "Chromium is not installed, and tests of the report need it. Install it (Debian, Ubuntu: `apt-get install "
    "chromium`), or name its program in CHROMIUM."
)
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-default-apps",
        "--disable-extensions",
    ),
    *("--disable-dev-shm-usage", "--metrics-recording-only", "--mute-audio", "--remote-debugging-pipe"),
)
_LIMIT = 60.0  # seconds


def find_chromium() -> str:
    """Return the path of Chromium. A test that needs it fails if it is not installed."""
    named = os.environ.get("CHROMIUM")
    found = named or next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        raise AssertionError(_MISSING)
    return found


class Page:
    """One tab."""

    def __init__(self, send: int, receive: int) -> None:
        self.requests: list[str] = []
        """Addresses that the page requested, except its own and what it holds itself: data URIs and blobs."""
        self.errors: list[str] = []
        """Errors and warnings of the console, and uncaught exceptions."""
        self._send, self._receive = send, receive
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self._buffer = b""
        self._messages: deque[dict[str, Any]] = deque()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        for answer in self._answers():
            if answer.get("id") == number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)
        raise AssertionError(f"{method}: the browser has ended")

    def open(self, path: Path, ready: str = "document.documentElement.dataset.ready === 'yes'") -> None:
        """Open a file and wait until the page is ready."""
        self._own = path.resolve().as_uri()
        self.call("Page.navigate", url=self._own)
        self.wait(ready)

    def run(self, expression: str) -> Any:
        """Evaluate an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Poll an expression until it is true."""
        deadline = time.monotonic() + _LIMIT
        while time.monotonic() < deadline:
            with suppress(AssertionError):  # the page may be loading
                if found := self.run(expression):
                    return found
            time.sleep(0.02)
        raise AssertionError(f"not within {_LIMIT} s: {expression}; errors: {self.errors}")

    def size(self, width: int, height: int, *, mobile: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def prefer(self, scheme: str) -> None:
        """Emulate the system's preference for light or dark colors."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def key(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39}
        code = {"ArrowDown": 40, **codes}.get(key, ord(key[0].upper()))
        typed = key if len(key) == 1 else "\r" if key == "Enter" else ""
        down = {"type": "keyDown", "key": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", **down, **({"text": typed} if typed else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    _own = ""

    def _answers(self) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + _LIMIT
        while True:
            while self._messages:
                yield self._messages.popleft()
            if not select.select([self._receive], [], [], max(0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"the browser did not answer within {_LIMIT} s")
            chunk = os.read(self._receive, 1 << 20)
            if not chunk:
                return
            *ended, self._buffer = (self._buffer + chunk).split(b"\0")
            self._messages.extend(map(json.loads, ended))

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if url.partition("#")[0] != self._own and not url.startswith(("data:", "about:", "blob:")):
                self.requests.append(url)
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", params)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@contextmanager
def chromium() -> Iterator[Page]:
    """Start Chromium with an empty profile. All its processes are killed at the end."""
    program = find_chromium()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        commands, send = os.pipe()
        receive, answers = os.pipe()
        # Chromium reads commands from descriptor 3, and writes to descriptor 4.
        script = f'exec 3<&{commands} 4>&{answers}; exec "$@"'
        process = subprocess.Popen(
            ["/bin/bash", "-c", script, "chromium", program, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands)
        os.close(answers)
        try:
            yield Page(send, receive)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(send)
            os.close(receive)
