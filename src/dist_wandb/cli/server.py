"""Ask W&B's server for the owner of the API key.

`wandb.Api` is not used: it needs a key, uses proxies even for this host, retries beyond any time limit, and reads
answers of any size.
"""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import dataclass
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from dist_wandb.runs.destination import is_loopback

_REFUSED = (401, 403)
_NOT_ACCEPTED = "authentication failed: run `wandb login` or set WANDB_API_KEY"
_LONGEST_ANSWER = 1024 * 1024  # bytes


@dataclass(frozen=True)
class Server:
    """The answer of W&B's server."""

    answers: bool
    user: str | None = None  # owner of the API key; `None` if the server does not accept the key
    problem: str = ""


def ask(base_url: str, key: str | None, timeout: float) -> Server:
    """Ask W&B's server for the owner of the API key, by its GraphQL query `viewer`, within `timeout` seconds."""
    query = json.dumps({"query": "query Viewer { viewer { username entity } }", "variables": {}}).encode()
    request = Request(f"{base_url.rstrip('/')}/graphql", query, {"Content-Type": "application/json"})  # noqa: S310
    if key:  # not sent to the target of a redirect
        request.add_unredirected_header("Authorization", f"Basic {b64encode(f'api:{key}'.encode()).decode()}")
    # As wandb does: through the proxies of the environment, except for this host.
    opener = build_opener(ProxyHandler({})) if is_loopback(base_url) else build_opener()
    try:
        with opener.open(request, timeout=timeout) as answer:
            text = answer.read(_LONGEST_ANSWER)
    except HTTPError as error:
        refused = error.code in _REFUSED
        problem = _NOT_ACCEPTED if refused and key else f"it answers with {error.code} {error.reason}"
        return Server(answers=True, problem="" if refused and not key else problem)
    except URLError as error:
        return Server(answers=False, problem=str(error.reason))
    except OSError as error:
        return Server(answers=False, problem=str(error) or type(error).__name__)
    except (HTTPException, ValueError) as error:  # their texts may contain parts of a proxy's password
        problem = f"{type(error).__name__}. Are WANDB_BASE_URL, and HTTPS_PROXY where it is set, right?"
        return Server(answers=False, problem=problem)
    try:
        viewer = (json.loads(text).get("data") or {}).get("viewer") or {}
    except (ValueError, AttributeError):
        return Server(answers=True, problem="it does not answer like a W&B server. Is WANDB_BASE_URL right?")
    user = viewer.get("username") or viewer.get("entity")
    return Server(answers=True, user=user, problem="" if user or not key else _NOT_ACCEPTED)
