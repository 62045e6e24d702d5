"""``wandb agent`` for a sweep of the given parameters and command, in which ``PYTHON`` means this Python."""

import json
import sys
from typing import Any

import wandb
from wandb import wandb_agent
from wandb.cli.cli import cli


def main(parameters: str, *command: str) -> None:
    agent: Any = wandb_agent.Agent
    agent.POLL_INTERVAL = 0.2  # seconds, of 5
    words = [sys.executable if word == "PYTHON" else word for word in command]
    config = {"method": "grid", "parameters": json.loads(parameters), "command": [*words, "${args}"]}
    sweep = wandb.sweep(config, project="digits")
    cli(["agent", f"tester/digits/{sweep}"], standalone_mode=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
