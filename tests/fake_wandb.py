"""A small server that speaks as much of wandb's protocol as its client needs to send a run, and remembers all of it.

It takes what it is sent at its word. What a real server makes of it, above all how it draws it, cannot be seen here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

API_KEY = "0123456789abcdef0123456789abcdef01234567"
ENTITY = "team"
MAX_TAIL_LINES = 10
TIMESTAMP = "2026-01-01T00:00:00Z"


@dataclass
class ReceivedRun:
    """One run, as it arrived."""

    id: str
    project: str
    creation_variables: dict[str, Any] = field(default_factory=dict)
    """The variables of its creation: name, group, job type, tags, notes."""
    config: dict[str, Any] = field(default_factory=dict)
    history: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By line."""
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    complete: bool = False
    preempting: bool = False


@dataclass
class Artifact:
    """One artifact, as it arrived."""

    name: str
    type: str
    run: str
    files: dict[str, bytes] = field(default_factory=dict)
    committed: bool = False


@dataclass
class FakeWandb:
    """What a server was asked, and what it keeps."""

    url: str = ""
    runs: dict[str, ReceivedRun] = field(default_factory=dict)
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    """Files of runs, by ``run/name``."""
    projects: list[str] = field(default_factory=list)
    views: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Saved views (workspaces and reports), by id."""
    alerts: list[dict[str, Any]] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    unknown_requests: list[str] = field(default_factory=list)
    """What it has no answer for."""
    is_silent: bool = False
    """Take requests, and answer none of them."""
    silent_after: tuple[str, int] | None = None
    """Fall silent when an operation was asked for so many times."""
    rejects_key: bool = False
    """Answer that the key is not valid."""

    def count_operation(self, operation: str) -> int:
        """How often something was asked."""
        return self.operations.count(operation)


class FakeWandbServer(ThreadingHTTPServer):
    """Answers many at once, and does not mind that one of them has hung up."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@contextlib.contextmanager
def fake_wandb() -> Iterator[FakeWandb]:
    """A server on this machine, until the context ends."""
    state = FakeWandb()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.send_answer()

        def do_GET(self) -> None:
            state.unknown_requests.append(self.path)
            self.send_answer()

        def do_PUT(self) -> None:
            store_file(state, self.path, self.read_body())
            self.send_answer()

        def do_POST(self) -> None:
            body = self.read_body()
            while state.is_silent:
                time.sleep(0.1)
            if state.rejects_key:
                self.send_answer(b'{"errors":[{"message":"invalid API key"}]}', 401)
            elif self.path == "/graphql":
                self.send_answer(json.dumps(answer_graphql(state, json.loads(body))).encode())
            elif self.path.endswith("/file_stream"):
                store_run_lines(state, self.path.split("/")[-2], json.loads(body))
                self.send_answer(b"{}")
            else:
                state.unknown_requests.append(self.path)
                self.send_answer(b"{}")

        def read_body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def send_answer(self, body: bytes = b"", code: int = 200) -> None:
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = FakeWandbServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield state
    finally:
        state.is_silent = False
        server.shutdown()
        server.server_close()


def store_run_lines(state: FakeWandb, run_id: str, sent: dict[str, Any]) -> None:
    """Take what a run streams: lines of history, the summary, its end."""
    run = state.runs[run_id]
    for name, part in (sent.get("files") or {}).items():
        lines = [json.loads(line) for line in part["content"]]
        if name == "wandb-history.jsonl":
            run.history |= {part["offset"] + number: line for number, line in enumerate(lines)}
        elif name == "wandb-summary.json" and lines:
            run.summary = lines[-1]
    run.preempting = run.preempting or bool(sent.get("preempting"))
    run.complete = run.complete or bool(sent.get("complete"))
    run.exit_code = sent.get("exitcode", run.exit_code)


def store_file(state: FakeWandb, path: str, body: bytes) -> None:
    """Take a file of a run or of an artifact, where it was told to go."""
    _, kind, owner, name = path.split("/", 3)
    if kind == "artifact":
        state.artifacts[owner].files[name] = body
    else:
        state.files[f"{owner}/{name}"] = body


def answer_graphql(state: FakeWandb, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a query."""
    match = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])
    operation = match[1] if match else request["query"][:80]
    state.operations.append(operation)
    if state.silent_after is not None and state.count_operation(state.silent_after[0]) >= state.silent_after[1]:
        state.is_silent = True
    handler = OPERATION_HANDLERS.get(operation)
    if handler is None:
        state.unknown_requests.append(operation)
        return {"data": None, "errors": [{"message": f"{operation} is unknown to the fake server"}]}
    return {"data": handler(state, request.get("variables") or {})}


Variables = dict[str, Any]
OperationHandler = Callable[[FakeWandb, Variables], dict[str, Any]]
OPERATION_HANDLERS: dict[str, OperationHandler] = {}


def handles_operation(operation: str) -> Callable[[OperationHandler], OperationHandler]:
    """Mark what answers an operation."""

    def register(function: OperationHandler) -> OperationHandler:
        OPERATION_HANDLERS[operation] = function
        return function

    return register


def describe_project(name: str) -> dict[str, Any]:
    """A project as queries show it."""
    entity = {"id": f"entity-{ENTITY}", "name": ENTITY, "isTeam": True}
    return {"id": f"project-{name}", "internalId": f"internal-{name}", "name": name, "entity": entity}


@handles_operation("ServerFeaturesQuery")
def server_features_query(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    return {"serverInfo": {"features": []}}


@handles_operation("Viewer")
def viewer(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    teams = {"edges": [{"node": {"name": ENTITY}}]}
    return {
        "viewer": {
            **{"id": "viewer", "entity": ENTITY, "username": "somebody", "email": "", "flags": "{}", "admin": False},
            **{"teams": teams, "name": "Somebody"},
        }
    }


@handles_operation("TypeFields")
def type_fields(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    return {"TypeInfo": {"fields": []}}


@handles_operation("InputFields")
def input_fields(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    return {"TypeInfo": {"inputFields": []}}


@handles_operation("RunResumeStatus")
def run_resume_status(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    run = state.runs.get(variables["name"])
    if run is None:
        return {"model": None}
    tail = [json.dumps(run.history[line]) for line in sorted(run.history)[-MAX_TAIL_LINES:]]
    bucket = {
        "id": f"bucket-{run.id}",
        "name": run.id,
        "displayName": run.creation_variables.get("displayName"),
        "summaryMetrics": json.dumps(run.summary),
        "config": json.dumps(run.config),
        "historyLineCount": len(run.history),
        "historyTail": json.dumps(tail),
        "eventsLineCount": 0,
        "eventsTail": "[]",
        "logLineCount": 0,
        "tags": run.creation_variables.get("tags") or [],
        "notes": run.creation_variables.get("notes"),
        "wandbConfig": json.dumps({"t": 1}),
        "runInfo": {"args": []},
    }
    return {"model": {**describe_project(run.project), "bucket": bucket}}


@handles_operation("UpsertBucket")
def upsert_bucket(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    already_exists = variables["name"] in state.runs
    run = state.runs.setdefault(variables["name"], ReceivedRun(variables["name"], variables.get("project") or ""))
    run.creation_variables |= {key: value for key, value in variables.items() if value is not None}
    if variables.get("config"):
        run.config = json.loads(variables["config"])
    bucket = {
        "id": f"bucket-{run.id}",
        "name": run.id,
        "displayName": run.creation_variables.get("displayName"),
        "description": None,
        "sweepName": None,
        "project": describe_project(run.project),
        "historyLineCount": len(run.history),
    }
    return {"upsertBucket": {"bucket": bucket, "inserted": not already_exists}}


@handles_operation("RunStoppedStatus")
def run_stopped_status(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    return {"project": {"run": {"stopped": False}}}


@handles_operation("CreateRunFiles")
def create_run_files(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    run = variables["run"]
    files = [{"name": name, "uploadUrl": f"{state.url}/run/{run}/{name}"} for name in variables["files"]]
    return {"createRunFiles": {"runID": f"bucket-{run}", "uploadHeaders": [], "files": files}}


@handles_operation("CreateArtifact")
def create_artifact(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    artifact_input = variables.get("input") or variables
    artifact_id = f"artifact-{len(state.artifacts)}"
    state.artifacts[artifact_id] = Artifact(
        artifact_input["artifactCollectionName"],
        artifact_input["artifactTypeName"],
        artifact_input.get("runName") or "",
    )
    sequence = {"latestArtifact": None}
    return {"createArtifact": {"artifact": {"id": artifact_id, "state": "PENDING", "artifactSequence": sequence}}}


@handles_operation("CreateArtifactManifest")
def create_artifact_manifest(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    artifact_input = variables.get("input") or variables
    return {"createArtifactManifest": {"artifactManifest": describe_manifest(state, artifact_input["artifactID"])}}


@handles_operation("UpdateArtifactManifest")
def update_artifact_manifest(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    artifact_id = variables["artifactManifestID"].removeprefix("manifest-")
    return {"updateArtifactManifest": {"artifactManifest": describe_manifest(state, artifact_id)}}


def describe_manifest(state: FakeWandb, artifact_id: str) -> dict[str, Any]:
    """The manifest of an artifact, and where it is to go."""
    file = {
        "id": f"file-{artifact_id}",
        "uploadUrl": f"{state.url}/artifact/{artifact_id}/manifest",
        "uploadHeaders": [],
    }
    return {"id": f"manifest-{artifact_id}", "file": file}


@handles_operation("CreateArtifactFiles")
def create_artifact_files(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    nodes = [
        {
            "storagePath": f"stored/{file['artifactID']}/{file['name']}",
            "uploadUrl": f"{state.url}/artifact/{file['artifactID']}/{file['name']}",
            "uploadHeaders": [],
            "uploadMultipartUrls": None,
            "artifact": {"id": file["artifactID"]},
        }
        for file in variables["input"]["artifactFiles"]
    ]
    return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}


@handles_operation("CommitArtifact")
def commit_artifact(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    state.artifacts[variables["artifactID"]].committed = True
    return {"commitArtifact": {"artifact": {"id": variables["artifactID"], "digest": ""}}}


@handles_operation("NotifyScriptableRunAlert")
def notify_scriptable_run_alert(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    state.alerts.append(variables)
    return {"notifyScriptableRunAlert": {"success": True}}


@handles_operation("ArtifactType")
def artifact_type(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    return {"project": {"artifact": None, "artifactType": {"id": "type", "name": "record"}}}


@handles_operation("GetDefaultEntity")
def get_default_entity(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    return {"viewer": {"id": "viewer", "entity": ENTITY}}


@handles_operation("GetProjects")
def get_projects(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    common_fields = {
        "__typename": "Project",
        "entityName": ENTITY,
        "createdAt": TIMESTAMP,
        "isBenchmark": False,
        "user": None,
    }
    edges = [{"node": {**common_fields, "id": f"project-{name}", "name": name}} for name in state.projects]
    return {"models": {"pageInfo": {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}, "edges": edges}}


@handles_operation("CreateProject")
def create_project(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    name = variables["input"]["name"]
    state.projects.append(name)
    return {"upsertModel": {"project": describe_project(name), "model": describe_project(name), "inserted": True}}


@handles_operation("ProjectInternalId")
def project_internal_id(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    name = variables["projectName"]
    return {"project": describe_project(name) if name in state.projects else None}


@handles_operation("View")
def view(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    nodes = [saved_view for saved_view in state.views.values() if saved_view["name"] == variables["viewName"]]
    return {"project": {"allViews": {"edges": [{"node": node} for node in nodes]}}}


@handles_operation("ProjectViews")
def project_views(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    kind = variables.get("viewType") or "runs"
    edges = [
        {"node": saved_view, "cursor": view_id}
        for view_id, saved_view in state.views.items()
        if saved_view["type"] == kind
    ]
    return {"project": {"allViews": {"edges": edges, "pageInfo": {"endCursor": None, "hasNextPage": False}}}}


@handles_operation("UpsertView2")
@handles_operation("upsertView")
def upsert_view(state: FakeWandb, variables: Variables) -> dict[str, Any]:
    view_id = variables.get("id") or f"VIEW{len(state.views)}"
    inserted = view_id not in state.views
    state.views[view_id] = {
        **{name: variables.get(name) for name in ("name", "displayName", "description", "type", "spec")},
        **{"id": view_id, "createdAt": TIMESTAMP, "updatedAt": TIMESTAMP, "user": None},
        "project": {"id": "project", "name": variables["projectName"], "entityName": variables["entityName"]},
    }
    return {"upsertView": {"view": state.views[view_id], "inserted": inserted}}


# --- A machine on which nobody is logged in to wandb, or somebody is to the fake server.


def remove_wandb_login(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """A home without a login, and none of wandb's variables."""
    for name in list(os.environ):
        if name.startswith("WANDB_") or name == "NETRC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))


def add_wandb_login(monkeypatch: pytest.MonkeyPatch, server: FakeWandb | str) -> None:
    """A login at a server, given by its address if it is not there."""
    monkeypatch.setenv("WANDB_BASE_URL", server if isinstance(server, str) else server.url)
    monkeypatch.setenv("WANDB_API_KEY", API_KEY)
