"""Ask W&B's server who the user is.

By a query of our own, not by `wandb.Api`: that needs a key, goes through proxies also to this host, tries again beyond
any time limit, and reads answers of any size.
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
_LONGEST_ANSWER = 1024 * 1024  # bytes


@dataclass(frozen=True)
class Server:
    """What W&B's server answers.

    Args:
        answers: Whether it does.
        user: The owner of the API key; `None` if the server does not know the key.
        problem: What is wrong, as text; empty if nothing is.
    """

    answers: bool
    user: str | None = None
    problem: str = ""


def ask(base_url: str, key: str | None, timeout: float) -> Server:
    """Ask W&B's server who this is, by its GraphQL query `viewer`.

    Args:
        base_url: Address of the server.
        key: The API key, if there is one.
        timeout: How long it may take to answer, in seconds.

    Returns:
        What it answers.
    """
    query = json.dumps({"query": "query Viewer { viewer { username entity } }", "variables": {}}).encode()
    request = Request(f"{base_url.rstrip('/')}/graphql", query, {"Content-Type": "application/json"})  # noqa: S310
    if key:  # not for a host that this one may point to
        request.add_unredirected_header("Authorization", f"Basic {b64encode(f'api:{key}'.encode()).decode()}")
    # Through the proxies of the environment, but for this host, as wandb does.
    opener = build_opener(ProxyHandler({})) if is_loopback(base_url) else build_opener()
    try:
        with opener.open(request, timeout=timeout) as answer:
            text = answer.read(_LONGEST_ANSWER)
    except HTTPError as error:
        refused = error.code in _REFUSED
        problem = "it refuses this API key" if refused and key else f"it answers with {error.code} {error.reason}"
        return Server(answers=True, problem="" if refused and not key else problem)
    except URLError as error:
        return Server(answers=False, problem=str(error.reason))
    except OSError as error:
        return Server(answers=False, problem=str(error) or type(error).__name__)
    except (HTTPException, ValueError) as error:  # the text may have a part of a proxy's password in it
        problem = f"{type(error).__name__}. Are WANDB_BASE_URL, and HTTPS_PROXY where it is set, right?"
        return Server(answers=False, problem=problem)
    try:
        viewer = (json.loads(text).get("data") or {}).get("viewer") or {}
    except (ValueError, AttributeError):
        return Server(answers=True, problem="its answer is not that of a W&B server. Is WANDB_BASE_URL right?")
    user = viewer.get("username") or viewer.get("entity")
    return Server(answers=True, user=user, problem="" if user or not key else "it does not know this API key")
