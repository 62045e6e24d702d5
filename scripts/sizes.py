"""Check the numbers of methods and attributes of classes, statements of constructors, and lines of modules.

Run `python scripts/sizes.py`; `make lint` does. With ``--all`` it prints all sizes, else those that exceed limits.

Methods are the functions in a class body; overloads and their implementation count once. Attributes are the names that
methods assign to `self`, and the fields of a dataclass. Statements of `__init__` count at any depth, without docstring.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "dist_wandb"
LIMITS = {"methods": 15, "attributes": 10, "constructor": 20, "lines": 400}

# By class or module: the larger limits, and the reason.
EXCEPTIONS: dict[str, tuple[dict[str, int], str]] = {
    "exchange/interface.py:Exchange": ({"methods": 17}, "what a session and its end ask of any exchange"),
    "exchange/interface.py:Lifecycle": ({"attributes": 12}, "a record: what the threads of an exchange share"),
    "exchange/collective.py:CollectiveExchange": ({"methods": 24}, "an exchange, and the steps of its thread"),
    "exchange/membership/generations.py:Presence": (
        {"methods": 20, "attributes": 13},
        "what ranks tell of themselves",
    ),
    "exchange/participation.py:Participation": ({"methods": 21, "attributes": 14}, "a rank's generations and rounds"),
    "exchange/reports.py:Context": ({"methods": 17, "attributes": 13}, "a record, and the texts of all warnings"),
    "exchange/rows.py:Rows": ({"attributes": 16}, "a record: what rows are made with, and the row that is open"),
    "exchange/turns.py:Turns": ({"methods": 16, "attributes": 16}, "what a rank logs, until it is taken"),
    "exchange/writing.py:Writing": ({"attributes": 13}, "the rows of a run, open and held ones too"),
    "exchange/protocol/contributors.py:Contributors": ({"attributes": 12}, "what is known of the ranks of a unit"),
    "exchange/protocol/calls.py:Offer": ({"attributes": 12}, "a record: what a rank tells the others"),
    "exchange/protocol/plan.py:Plan": (
        {"attributes": 11, "constructor": 22},
        "a round: what it takes, and leaves",
    ),
    "exchange/protocol/memory.py:Cell": ({"attributes": 13}, "a record: the state of a cell"),
    "exchange/protocol/memory.py:Row": ({"attributes": 12}, "a record: a row to be written"),
    "exchange/protocol/rounds.py:Outcome": ({"attributes": 13}, "a record: the result of a round"),
    "cli/uploads/state.py:Sent": ({"attributes": 11}, "a record: its fields are what it is"),
    "cli/report/files.py:FileForReport": (
        {"attributes": 17, "constructor": 22},
        "what a report has of a file, in one place",
    ),
    "lightning/session_holder.py:SessionHolder": ({"methods": 16}, "what a logger knows of its session and process"),
    "runs/null_run.py:NullSummary": ({"methods": 16}, "W&B's summary, as scripts use it"),
    "runs/requested.py:LoggerArguments": ({"attributes": 20}, "a record: the arguments of wandb.init"),
    "exchange/protocol/table.py:Table": ({"attributes": 13}, "what all ranks of a unit know of its rows"),
    "runs/summary.py:SummaryWrites": ({"attributes": 18}, "what a script does between rows, in its order"),
    "runs/writer.py:RunWriter": ({"attributes": 20}, "the rows of a rank, also on another run"),
    "session/api.py:InitArguments": ({"attributes": 14}, "a record: the arguments of init"),
    "session/config/own_config.py:OwnConfig": ({"attributes": 13}, "a config as it is written, followed and published"),
    "session/config/sync.py:ConfigSync": ({"methods": 18, "attributes": 19}, "the config of a rank, in one place"),
    "session/intake.py:Intake": ({"methods": 16, "attributes": 15}, "the rows of a rank on their way, in one place"),
    "session/job_link.py:JobLink": ({"methods": 19, "attributes": 15}, "what ranks tell each other of a session"),
    "session/opener.py:SessionOpener": ({"attributes": 24}, "the arguments of a session, and what its steps find"),
    "session/own_run.py:OwnRun": ({"attributes": 16}, "what a session has of its run, in one place"),
    "session/restart.py:RestartRecord": ({"attributes": 11}, "a record: its fields are what it is"),
    "session/relay.py:Relay": ({"attributes": 13}, "a socket, its threads, and what passes through"),
    "session/sections.py:Sections": ({"attributes": 12}, "what is measured, and for which rows"),
    "session/session.py:Session": ({"methods": 36, "attributes": 14}, "hands on: most of its methods are one line"),
    "session/shutdown.py:Shutdown": ({"attributes": 12}, "the parts of a session, which it ends in order"),
    "settings/options.py:Options": ({"attributes": 13}, "a record: the arguments of all integrations"),
    "settings/plan.py:RunPlan": ({"attributes": 14}, "a record: its fields are what it is"),
    "session/stalls/verdict.py:Answer": ({"attributes": 11}, "a message of a rank: its fields are what it says"),
    "wandb_files/reading.py:StoredRun": ({"attributes": 24}, "what is read of a file, in one place"),
    "wandb_files/sidecar.py:Sidecar": ({"attributes": 14}, "a record: its fields are what it is"),
}


@dataclass(frozen=True)
class Size:
    """The size of one class or module.

    Args:
        name: Name such as ``runs/run.py`` or ``runs/run.py:NullRun``.
        counts: Sizes by kind: methods, attributes, constructor (statements), lines.
    """

    name: str
    counts: dict[str, int]

    def beyond(self) -> list[str]:
        """Return the sizes that exceed their limits, as text."""
        allowed = LIMITS | EXCEPTIONS.get(self.name, ({}, ""))[0]
        return [
            f"{count} {kind}, {allowed[kind]} allowed" for kind, count in self.counts.items() if count > allowed[kind]
        ]


def sizes() -> Iterator[Size]:
    """Yield the sizes of all modules and classes of the package."""
    for path in sorted(SOURCES.rglob("*.py")):
        name, text = path.relative_to(SOURCES).as_posix(), path.read_text(encoding="utf-8")
        yield Size(name, {"lines": text.count("\n")})
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                yield Size(f"{name}:{node.name}", _of_class(node))


def unneeded() -> list[str]:
    """Return the exceptions for missing names, and for sizes within the limits."""
    found = {size.name: size.counts for size in sizes()}
    return [
        f"{name}: {kind}"
        for name, (kinds, _) in EXCEPTIONS.items()
        for kind in kinds
        if found.get(name, {}).get(kind, 0) <= LIMITS[kind]
    ]


def main() -> int:
    """Print the sizes; return 1 if one exceeds its limit, or an exception is not needed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="print all sizes, not only those that exceed their limits")
    asked = parser.parse_args()
    is_wrong = False
    for size in sizes():
        beyond = size.beyond()
        is_wrong |= bool(beyond)
        counted = ", ".join(f"{count} {kind}" for kind, count in size.counts.items())
        if beyond or asked.all:
            sys.stdout.write(f"{size.name}: {'; '.join(beyond) or counted}\n")
    for name in unneeded():
        sys.stdout.write(f"{name}: this exception is not needed\n")
        is_wrong = True
    return int(is_wrong)


def _of_class(node: ast.ClassDef) -> dict[str, int]:
    methods = [item for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))]
    attributes = {
        part.attr
        for method in methods
        for part in ast.walk(method)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }
    attributes |= {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    constructor = [_statements(method) for method in methods if method.name == "__init__"]
    return {
        "methods": len({method.name for method in methods}),
        "attributes": len(attributes),
        "constructor": max(constructor, default=0),
    }


def _statements(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    inner = sum(isinstance(part, ast.stmt) for part in ast.walk(function)) - 1
    return inner - int(ast.get_docstring(function) is not None)


if __name__ == "__main__":
    sys.exit(main())
