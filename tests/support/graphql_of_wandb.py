"""The GraphQL operations that wandb 0.31 and 0.19 send for runs, artifacts and sweeps, answered from records."""

# ruff: noqa: N802  # methods have the names of the operations

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import yaml  # type: ignore[import-untyped]  # also used by wandb itself
from wandb_records import ENTITY, EVENTS, HISTORY, PROJECT, RecordedArtifact, RecordedRun, RecordedSweep, Records

_Data = dict[str, Any]
_Given = Mapping[str, Any]

_TIME = "2026-01-01T00:00:00"
_FEATURES = ("CLIENT_IDS", "LARGE_FILENAMES", "ARTIFACT_TAGS", "STRUCTURED_CONSOLE_LOGS")
_ABOUT_ME = {"id": "viewer", "entity": ENTITY, "username": ENTITY, "email": "tester@example.com", "flags": "{}"}
_VIEWER = {
    "viewer": {**_ABOUT_ME, "teams": {"edges": [{"node": {"name": ENTITY}}]}},
    "serverInfo": {"cliVersionInfo": {"max_cli_version": "1.0.0"}},
}
_PROBED = {"Query": ["serverInfo"], "Mutation": [], "ServerInfo": ["cliVersionInfo"]}
_ALWAYS: dict[str, _Data] = {
    "Viewer": _VIEWER,
    "GetDefaultEntity": _VIEWER,
    "ServerFeaturesQuery": {"serverInfo": {"features": [{"name": name, "isEnabled": True} for name in _FEATURES]}},
    "OrganizationCoreWeaveOrganizationID": {"entity": {"organization": None}},
    "FetchArtifactDigestAlgorithm": {"project": {"artifactType": None}},
    "XXHashDigestsEnabled": {"entity": {"xxhashDigestsEnabled": False}},
    "ArtifactType": {"project": {"artifact": None}},
    "NotifyScriptableRunAlert": {"notifyScriptableRunAlert": {"success": True}},
    # used only by wandb 0.19
    "ProbeServerCapabilities": {
        f"{kind}Type": {"fields": [{"name": name} for name in names]} for kind, names in _PROBED.items()
    },
    "ProbeServerArtifact": {"ArtifactInfoType": {"fields": [{"name": "aliases"}]}},
    "InputFields": {"TypeInfo": {"inputFields": []}},
    "RunStoppedStatus": {"project": {"run": {"stopped": False}}},
}


def operation_name(message: Mapping[str, Any]) -> str:
    """Return the name of the operation in a GraphQL request."""
    found = re.search(r"\b(?:query|mutation)\s+(\w+)", message["query"])
    return message.get("operationName") or (found[1] if found else "unnamed")


class GraphQL:
    """Answers GraphQL operations from `records`, and adds to them; `url` returns the address for files."""

    def __init__(self, records: Records, url: Callable[[], str]) -> None:
        self._records = records
        self._url = url
        self._client = ""  # that has sent the operation
        self._agents: dict[str, RecordedSweep] = {}

    def answer(self, operation: str, given: _Given, client: str) -> _Data:
        """Return the data of the answer to one operation with variables; KeyError if it is not known."""
        self._client = client
        data: _Data = _ALWAYS.get(operation) or vars(GraphQL)[operation](self, given)
        return data

    def _url_of(self, kind: str, owner: str, name: str) -> str:
        return f"{self._url()}/storage/{kind}/{quote(owner, safe='')}/{quote(name, safe='')}"

    # Runs

    def UpsertBucket(self, given: _Given) -> _Data:
        run, is_new = self._records.upsert(given, self._client)
        return {"upsertBucket": {"bucket": _stored(run), "inserted": is_new}}

    def RunResumeStatus(self, given: _Given) -> _Data:
        entity, project = given.get("entity") or ENTITY, given.get("project") or PROJECT
        run = self._records.runs.get(f"{entity}/{project}/{given['name']}")
        return {"model": {**_project(project, entity), "bucket": None if run is None else _resumed(run)}}

    def RewindRun(self, given: _Given) -> _Data:
        entity, project = given.get("entity") or ENTITY, given.get("project") or PROJECT
        run = self._records.runs[f"{entity}/{project}/{given['runName']}"]
        run.rewind(given["metricValue"])
        return {"rewindRun": {"rewoundRun": _stored(run)}}

    def CreateRunFiles(self, given: _Given) -> _Data:
        key = f"{given['entity']}/{given['project']}/{given['run']}"
        files = [{"name": name, "uploadUrl": self._url_of("run", key, name)} for name in given["files"]]
        return {"createRunFiles": {"runID": key, "uploadHeaders": [], "files": files}}

    # Artifacts that runs log

    def CreateArtifact(self, variables: _Given) -> _Data:
        given = variables["input"]
        artifact = RecordedArtifact(
            artifact_id=f"artifact-{len(self._records.artifacts)}",
            run=f"{given['entityName']}/{given['projectName']}/{given['runName']}",
            client=self._client,
            name=given["artifactCollectionName"],
            kind=given["artifactTypeName"],
            aliases=tuple(alias["alias"] for alias in given.get("aliases") or ()),
            digest=given["digest"],
            metadata=given.get("metadata"),
        )
        self._records.artifacts[artifact.artifact_id] = artifact
        created = {"id": artifact.artifact_id, "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
        return {"createArtifact": {"artifact": created}}

    def CreateArtifactManifest(self, given: _Given) -> _Data:
        return {"createArtifactManifest": {"artifactManifest": self._manifest(given["artifactID"], given)}}

    def UpdateArtifactManifest(self, given: _Given) -> _Data:
        return {"updateArtifactManifest": {"artifactManifest": self._manifest(given["artifactManifestID"], given)}}

    def _manifest(self, artifact_id: str, given: _Given) -> _Data:
        upload = {"uploadUrl": self._manifest_url(artifact_id), "uploadHeaders": []} if given["includeUpload"] else {}
        return {"id": artifact_id, "file": {"id": f"{artifact_id}-manifest", **upload}}

    def _manifest_url(self, artifact_id: str) -> str:
        return self._url_of("manifest", artifact_id, "wandb_manifest.json")

    def CreateArtifactFiles(self, given: _Given) -> _Data:
        nodes: list[_Data] = [
            {
                "storagePath": f"{spec['artifactID']}/{spec['name']}",
                "uploadUrl": self._url_of("artifact", spec["artifactID"], spec["name"]),
                "uploadHeaders": [],
                "uploadMultipartUrls": None,
                "artifact": {"id": spec["artifactID"]},
            }
            for spec in given.get("input", given)["artifactFiles"]  # wandb 0.19 passes it without "input"
        ]
        return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}

    def CommitArtifact(self, given: _Given) -> _Data:
        artifact = self._records.artifacts[given["artifactID"]]
        artifact.committed = True
        return {"commitArtifact": {"artifact": {"id": artifact.artifact_id, "digest": "unchecked"}}}

    # Artifacts that runs find, use and download

    def ArtifactMembershipByName(self, given: _Given) -> _Data:
        name, _, alias = given["name"].partition(":")
        artifact = self._find(given, name, alias or "latest")
        return {"project": {"artifactCollectionMembership": None if artifact is None else self._membership(artifact)}}

    def _find(self, given: _Given, name: str, alias: str) -> RecordedArtifact | None:
        project = f"{given.get('entity') or ENTITY}/{given.get('project') or PROJECT}"
        versions = enumerate(self._records.versions(project, name))
        named = [one for number, one in versions if one.committed and alias in (*one.aliases, f"v{number}")]
        return named[-1] if named else None  # an alias belongs to the version that received it last

    def _membership(self, artifact: RecordedArtifact) -> _Data:
        entity, project = artifact.project.split("/")
        of_project = {"id": artifact.project, "internalId": artifact.project, "name": project}
        collection = {"name": artifact.name, "project": {**of_project, "entity": {"name": entity}}}
        version = self._records.versions(artifact.project, artifact.name).index(artifact)
        aliases = [{"__typename": "ArtifactAlias", "id": alias, "alias": alias} for alias in artifact.aliases]
        return {
            "__typename": "ArtifactCollectionMembership",
            "id": f"{artifact.artifact_id}-membership",
            "versionIndex": version,
            "createdAt": _TIME,
            "aliases": aliases,
            "artifactCollection": {"__typename": "ArtifactSequence", **collection},
            "artifact": {
                "__typename": "Artifact",
                "id": artifact.artifact_id,
                "artifactSequence": {"__typename": "ArtifactSequence", **collection},
                "versionIndex": version,
                "artifactType": {"name": artifact.kind},
                "description": None,
                "metadata": artifact.metadata,
                "ttlDurationSeconds": -2,
                "ttlIsInherited": True,
                "tags": [],
                "historyStep": None,
                "state": "COMMITTED",
                "size": sum(map(len, artifact.files.values())),
                "digest": artifact.digest,
                "commitHash": None,
                "fileCount": len(artifact.files),
                "createdAt": _TIME,
                "updatedAt": _TIME,
                "aliases": [],
            },
        }

    def ArtifactByID(self, given: _Given) -> _Data:
        """Describe an artifact for wandb 0.19."""
        artifact = self._records.artifacts[given["id"]]
        entity, project = artifact.project.split("/")
        collection = {"name": artifact.name, "project": {"entityName": entity, "name": project}}
        aliases = [{"alias": alias, "artifactCollection": collection} for alias in artifact.aliases]
        manifest = {"file": {"directUrl": self._manifest_url(artifact.artifact_id)}}
        replaced = {"artifactSequence": collection, "aliases": aliases, "currentManifest": manifest}
        return {"artifact": {**self._membership(artifact)["artifact"], **replaced}}

    ArtifactByIDShort = ArtifactByID

    def UseArtifact(self, variables: _Given) -> _Data:
        given = variables.get("input") or variables
        artifact = self._records.artifacts[given["artifactID"]]
        artifact.used_by.append(f"{given['entityName']}/{given['projectName']}/{given['runName']}")
        return {"useArtifact": {"artifact": {"id": artifact.artifact_id}}}

    def FetchArtifactManifest(self, given: _Given) -> _Data:
        manifest = {"__typename": "DeferredArtifactManifest", "file": {"directUrl": self._manifest_url(given["id"])}}
        return {"artifact": {"currentManifest": manifest}}

    def GetArtifactMembershipFileUrls(self, given: _Given) -> _Data:
        artifact = self._find(given, given["collection"], given["alias"])
        if artifact is None:
            raise KeyError(given["collection"])
        urls = {name: self._url_of("artifact", artifact.artifact_id, name) for name in artifact.files}
        edges = [{"node": {"__typename": "File", "name": name, "directUrl": url}} for name, url in urls.items()]
        page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
        membership = {"files": {"pageInfo": page, "edges": edges}}
        return {"project": {"artifactCollection": {"__typename": "ArtifactSequence", "artifactMembership": membership}}}

    # Sweeps: `wandb.sweep` makes one, an agent starts, reports its running trials, and receives its next commands

    def UpsertSweep(self, given: _Given) -> _Data:
        sweep = RecordedSweep(f"sweep{len(self._records.sweeps)}", yaml.safe_load(given["config"]))
        self._records.sweeps[sweep.name] = sweep
        about = {"name": sweep.name, "project": _project(given.get("projectName") or PROJECT, ENTITY)}
        return {"upsertSweep": {"sweep": about, "configValidationWarnings": []}}

    def SweepWithRuns(self, given: _Given) -> _Data:
        sweep = self._records.sweeps[given["sweep"]]
        about = {"id": sweep.name, "name": sweep.name, "method": "grid", "state": "RUNNING", "runs": {"edges": []}}
        return {"project": {"sweep": {**about, "config": yaml.safe_dump(sweep.config)}}}

    def CreateAgent(self, given: _Given) -> _Data:
        name = f"agent-{len(self._agents)}"
        self._agents[name] = self._records.sweeps[given["sweep"]]
        return {"createAgent": {"agent": {"id": name}}}

    def Heartbeat(self, given: _Given) -> _Data:
        name = given["id"]
        commands = self._agents[name].commands(name, json.loads(given["runState"]))
        return {"agentHeartbeat": {"agent": {"id": name}, "commands": json.dumps(commands)}}


def _project(project: str, entity: str) -> _Data:
    return {"id": project, "name": project, "entity": {"id": entity, "name": entity}}


def _stored(run: RecordedRun) -> _Data:
    """Return a run as W&B's answers describe it."""
    return {
        "id": run.key,
        "name": run.run_id,
        "displayName": run.display_name or run.run_id,
        "description": None,
        "config": json.dumps(run.stored_config),
        "sweepName": run.sweep,
        "project": _project(run.project, run.entity),
        "historyLineCount": run.line_count(HISTORY),
    }


def _resumed(run: RecordedRun) -> _Data:
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
        "historyTail": json.dumps(run.lines(HISTORY)[-1:]),  # JSON in JSON
        "eventsTail": json.dumps(run.lines(EVENTS)[-1:]),
        "config": json.dumps(run.stored_config),
        "tags": list(run.tags),
        "notes": run.notes,
        "wandbConfig": json.dumps(started),
    }
