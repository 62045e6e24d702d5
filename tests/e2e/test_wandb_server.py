"""The stand-in for the W&B server. With the real wandb as client, every job that runs online shows what it records."""

from __future__ import annotations

import json
from http.client import HTTPConnection

from wandb_server import WandbServer


def test_unsupported_requests_are_errors_and_recorded() -> None:
    with WandbServer() as server:
        for path, body in (("/graphql", {"query": "query Nonsense { x }"}), ("/nowhere", {})):
            connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
            connection.request("POST", path, json.dumps(body))
            assert connection.getresponse().status in (400, 404)
            connection.close()
        assert [text.split(":")[0] for text in server.unknown] == ["Nonsense", "POST /nowhere"]
