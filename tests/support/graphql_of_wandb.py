"""The GraphQL operations that wandb 0.31 and 0.19 send for runs, artifacts and sweeps, answered from records."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from wandb_artifacts import ArtifactQueries
from wandb_records import ENTITY, EVENTS, HISTORY, PROJECT, RecordedArtifact, RecordedRun, Records
from wandb_sweeps import SweepQueries

_PROBED = {"Query": ["serverInfo"], "Mutation": [], "ServerInfo": ["cliVersionInfo"]}
_FEATURES = ("CLIENT_IDS", "LARGE_FILENAMES", "ARTIFACT_TAGS", "STRUCTURED_CONSOLE_LOGS")

_Variables = Mapping[str, Any]
_Data = dict[str, Any]


class UnknownOperationError(Exception):
    """A client sent an operation that this server does not support."""


def operation_name(message: Mapping[str, Any]) -> str:
    """Return the name of the operation in a GraphQL request."""
    found = re.search(r"\b(?:query|mutation)\s+(\w+)", message["query"])
    return message.get("operationName") or (found[1] if found else "unnamed")


class GraphQL:
    """Answers GraphQL operations from `records`, and adds to them; `url` returns the address for uploads."""

    def __init__(self, records: Records, url: Callable[[], str]) -> None:
        self._records = records
        self._url = url
        self.sweeps = SweepQueries()
        self._answers: dict[str, Callable[[_Variables, str], _Data]] = {
            "Viewer": self._viewer,
            "GetDefaultEntity": self._viewer,
            "ServerFeaturesQuery": self._server_features,
            "OrganizationCoreWeaveOrganizationID": lambda *_: {"entity": {"organization": None}},
            "UpsertBucket": self._upsert_bucket,
            "RunResumeStatus": self._run_resume_status,
            "RewindRun": self._rewind_run,
            "CreateRunFiles": self._create_run_files,
            "FetchArtifactDigestAlgorithm": lambda *_: {"project": {"artifactType": None}},
            "XXHashDigestsEnabled": lambda *_: {"entity": {"xxhashDigestsEnabled": False}},
            "ArtifactType": lambda *_: {"project": {"artifact": None}},
            "CreateArtifact": self._create_artifact,
            "CreateArtifactManifest": self._create_artifact_manifest,
            "UpdateArtifactManifest": self._update_artifact_manifest,
            "CreateArtifactFiles": self._create_artifact_files,
            "CommitArtifact": self._commit_artifact,
            **ArtifactQueries(records, url).answers,
            **self.sweeps.answers,
            "NotifyScriptableRunAlert": lambda *_: {"notifyScriptableRunAlert": {"success": True}},
            # used only by wandb 0.19
            "ProbeServerCapabilities": lambda *_: {
                f"{kind}Type": {"fields": [{"name": name} for name in names]} for kind, names in _PROBED.items()
            },
            "InputFields": lambda *_: {"TypeInfo": {"inputFields": []}},
            "RunStoppedStatus": lambda *_: {"project": {"run": {"stopped": False}}},
        }

    def answer(self, operation: str, variables: _Variables, client: str) -> _Data:
        """Return the data of the answer to one operation.

        Raises:
            UnknownOperationError: This server does not support the operation.
        """
        if operation not in self._answers:
            raise UnknownOperationError(operation)
        return self._answers[operation](variables, client)

    def _viewer(self, _variables: _Variables, _client: str) -> _Data:
        teams = {"edges": [{"node": {"name": ENTITY}}]}
        viewer = {"id": "viewer", "entity": ENTITY, "username": ENTITY, "email": "tester@example.com", "flags": "{}"}
        return {"viewer": {**viewer, "teams": teams}, "serverInfo": {"cliVersionInfo": {"max_cli_version": "1.0.0"}}}

    def _server_features(self, _variables: _Variables, _client: str) -> _Data:
        return {"serverInfo": {"features": [{"name": name, "isEnabled": True} for name in _FEATURES]}}

    def _upsert_bucket(self, variables: _Variables, client: str) -> _Data:
        run, is_new = self._records.upsert(variables, client)
        project = {"id": run.project, "name": run.project, "entity": {"id": run.entity, "name": run.entity}}
        bucket = _stored(run, project, run.line_count(HISTORY))
        return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}

    def _run_resume_status(self, variables: _Variables, _client: str) -> _Data:
        entity, project = variables.get("entity") or ENTITY, variables.get("project") or PROJECT
        run = self._records.runs.get(f"{entity}/{project}/{variables['name']}")
        bucket = None if run is None else _resume_bucket(run)
        return {"model": {"id": project, "name": project, "entity": {"id": entity, "name": entity}, "bucket": bucket}}

    def _rewind_run(self, variables: _Variables, _client: str) -> _Data:
        entity, project = variables.get("entity") or ENTITY, variables.get("project") or PROJECT
        run = self._records.runs[f"{entity}/{project}/{variables['runName']}"]
        run.rewind(variables["metricValue"])
        owner = {"id": project, "name": project, "entity": {"id": entity, "name": entity}}
        data = _stored(run, owner, run.line_count(HISTORY))
        return {"rewindRun": {"rewoundRun": data}}

    def _create_run_files(self, variables: _Variables, _client: str) -> _Data:
        key = f"{variables['entity']}/{variables['project']}/{variables['run']}"
        files = [{"name": name, "uploadUrl": self._upload_url("run", key, name)} for name in variables["files"]]
        return {"createRunFiles": {"runID": key, "uploadHeaders": [], "files": files}}

    def _create_artifact(self, variables: _Variables, client: str) -> _Data:
        given = variables["input"]
        artifact = RecordedArtifact(
            artifact_id=f"artifact-{len(self._records.artifacts)}",
            run=f"{given['entityName']}/{given['projectName']}/{given['runName']}",
            client=client,
            name=given["artifactCollectionName"],
            kind=given["artifactTypeName"],
            aliases=tuple(alias["alias"] for alias in given.get("aliases") or ()),
            digest=given["digest"],
            metadata=given.get("metadata"),
        )
        self._records.artifacts[artifact.artifact_id] = artifact
        created = {"id": artifact.artifact_id, "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
        return {"createArtifact": {"artifact": created}}

    def _create_artifact_manifest(self, variables: _Variables, _client: str) -> _Data:
        manifest = self._manifest(variables["artifactID"], with_upload=variables["includeUpload"])
        return {"createArtifactManifest": {"artifactManifest": manifest}}

    def _update_artifact_manifest(self, variables: _Variables, _client: str) -> _Data:
        manifest = self._manifest(variables["artifactManifestID"], with_upload=variables["includeUpload"])
        return {"updateArtifactManifest": {"artifactManifest": manifest}}

    def _manifest(self, artifact_id: str, *, with_upload: bool) -> _Data:
        url = self._upload_url("manifest", artifact_id, "wandb_manifest.json")
        upload = {"uploadUrl": url, "uploadHeaders": []} if with_upload else {}
        return {"id": artifact_id, "file": {"id": f"{artifact_id}-manifest", **upload}}

    def _create_artifact_files(self, variables: _Variables, _client: str) -> _Data:
        nodes: list[_Data] = [
            {
                "storagePath": f"{spec['artifactID']}/{spec['name']}",
                "uploadUrl": self._upload_url("artifact", spec["artifactID"], spec["name"]),
                "uploadHeaders": [],
                "uploadMultipartUrls": None,
                "artifact": {"id": spec["artifactID"]},
            }
            for spec in variables.get("input", variables)["artifactFiles"]  # wandb 0.19 passes it without "input"
        ]
        return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}

    def _commit_artifact(self, variables: _Variables, _client: str) -> _Data:
        artifact = self._records.artifacts[variables["artifactID"]]
        artifact.committed = True
        return {"commitArtifact": {"artifact": {"id": artifact.artifact_id, "digest": "unchecked"}}}

    def _upload_url(self, kind: str, owner: str, name: str) -> str:
        return f"{self._url()}/storage/{kind}/{quote(owner, safe='')}/{quote(name, safe='')}"


def _stored(run: RecordedRun, project: _Data, lines: int) -> _Data:
    """Return a run as W&B's answers describe it."""
    return {
        "id": run.key,
        "name": run.run_id,
        "displayName": run.display_name or run.run_id,
        "description": None,
        "config": json.dumps(run.stored_config),
        "sweepName": run.sweep,
        "project": project,
        "historyLineCount": lines,
    }


def _resume_bucket(run: RecordedRun) -> _Data:
    """Return the data about a run for a client that resumes it; `wandbConfig` shows that it was started before."""
    started = {"t": run.own_config["t"]} if "t" in run.own_config else {}
    return {
        "id": run.key,
        "name": run.run_id,
        "summaryMetrics": json.dumps(run.summary),
        "displayName": run.display_name or run.run_id,
        "logLineCount": run.line_count("output.log"),
        "historyLineCount": run.line_count(HISTORY),
        "eventsLineCount": run.line_count(EVENTS),
        "historyTail": _tail(run, HISTORY),
        "eventsTail": _tail(run, EVENTS),
        "config": json.dumps(run.stored_config),
        "tags": list(run.tags),
        "notes": run.notes,
        "wandbConfig": json.dumps(started),
    }


def _tail(run: RecordedRun, name: str) -> str:
    """Return a list of the last line, in JSON; the line itself is JSON, too."""
    line = run.tail(name)
    return json.dumps([] if line is None else [line])
