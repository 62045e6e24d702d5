"""Queries by which clients find, use and download the artifacts recorded by a stand-in for the W&B server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from wandb_records import ENTITY, PROJECT, RecordedArtifact, Records

_Variables = Mapping[str, Any]
_Data = dict[str, Any]
_TIME = "2026-01-01T00:00:00"


class ArtifactQueries:
    """Answers the GraphQL operations that read artifacts from `records`; their uses are recorded there."""

    def __init__(self, records: Records, url: Callable[[], str]) -> None:
        self._records = records
        self._url = url
        self.answers: dict[str, Callable[[_Variables, str], _Data]] = {
            "ArtifactMembershipByName": self._membership_by_name,
            "UseArtifact": self._use,
            "FetchArtifactManifest": self._manifest,
            "GetArtifactMembershipFileUrls": self._file_urls,
            # used only by wandb 0.19
            "ProbeServerArtifact": lambda *_: {"ArtifactInfoType": {"fields": [{"name": "aliases"}]}},
            "ArtifactByID": self._by_id,
            "ArtifactByIDShort": self._by_id,
        }

    def version_of(self, artifact: RecordedArtifact) -> int:
        return self._versions(artifact.project, artifact.name).index(artifact)

    def _versions(self, project: str, name: str) -> list[RecordedArtifact]:
        found = self._records.artifacts.values()
        return [artifact for artifact in found if (artifact.project, artifact.name) == (project, name)]

    def _find(self, variables: _Variables, name: str, alias: str) -> RecordedArtifact | None:
        project = f"{variables.get('entity') or ENTITY}/{variables.get('project') or PROJECT}"
        versions = [artifact for artifact in self._versions(project, name) if artifact.committed]
        named = [artifact for artifact in versions if alias in (*artifact.aliases, f"v{self.version_of(artifact)}")]
        return named[-1] if named else None  # an alias belongs to the version that received it last

    def _membership_by_name(self, variables: _Variables, _client: str) -> _Data:
        name, _, alias = variables["name"].partition(":")
        artifact = self._find(variables, name, alias or "latest")
        membership = None if artifact is None else self._membership(artifact)
        return {"project": {"artifactCollectionMembership": membership}}

    def _membership(self, artifact: RecordedArtifact) -> _Data:
        entity, project = artifact.project.split("/")
        of_project = {"id": artifact.project, "internalId": artifact.project, "name": project}
        collection = {"name": artifact.name, "project": {**of_project, "entity": {"name": entity}}}
        version = self.version_of(artifact)
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

    def _by_id(self, variables: _Variables, _client: str) -> _Data:
        artifact = self._records.artifacts[variables["id"]]
        entity, project = artifact.project.split("/")
        collection = {"name": artifact.name, "project": {"entityName": entity, "name": project}}
        aliases = [{"alias": alias, "artifactCollection": collection} for alias in artifact.aliases]
        manifest = {"file": {"directUrl": self._download_url("manifest", artifact.artifact_id, "wandb_manifest.json")}}
        replaced = {"artifactSequence": collection, "aliases": aliases, "currentManifest": manifest}
        return {"artifact": {**self._membership(artifact)["artifact"], **replaced}}

    def _use(self, variables: _Variables, _client: str) -> _Data:
        given = variables.get("input") or variables
        artifact = self._records.artifacts[given["artifactID"]]
        artifact.used_by.append(f"{given['entityName']}/{given['projectName']}/{given['runName']}")
        return {"useArtifact": {"artifact": {"id": artifact.artifact_id}}}

    def _manifest(self, variables: _Variables, _client: str) -> _Data:
        url = self._download_url("manifest", variables["id"], "wandb_manifest.json")
        file = {"directUrl": url}
        return {"artifact": {"currentManifest": {"__typename": "DeferredArtifactManifest", "file": file}}}

    def _file_urls(self, variables: _Variables, _client: str) -> _Data:
        artifact = self._find(variables, variables["collection"], variables["alias"])
        if artifact is None:
            raise KeyError(variables["collection"])
        nodes = [
            {
                "__typename": "File",
                "name": name,
                "directUrl": self._download_url("artifact", artifact.artifact_id, name),
            }
            for name in artifact.files
        ]
        page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
        files = {"pageInfo": page, "edges": [{"node": node} for node in nodes]}
        collection = {"__typename": "ArtifactSequence", "artifactMembership": {"files": files}}
        return {"project": {"artifactCollection": collection}}

    def _download_url(self, kind: str, owner: str, name: str) -> str:
        return f"{self._url()}/storage/{kind}/{quote(owner, safe='')}/{quote(name, safe='')}"
