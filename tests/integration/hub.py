"""A stand-in for the Hugging Face hub's HTTP: repositories, private or not, and their files."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_test_token"


class Hub:
    """Repositories by name: whether each is private, its files, and its commits' messages."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, Any]] = {}
        self.objects: dict[str, bytes] = {}
        self.url = ""


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A hub on a loopback port."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self, status: int, body: Any, **headers: str) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Content-Type", "application/json")
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def repository(self) -> dict[str, Any] | None:
            parts = self.path.split("?")[0].split("/")
            return hub.repositories.get("/".join(parts[3:5]))

        def is_known(self) -> bool:
            if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                return True
            self.answer(401, {"error": "Invalid username or password."})
            return False

        def do_GET(self) -> None:
            if not self.is_known():
                return
            found = self.repository()
            if found is None:
                self.answer(404, {"error": "not found"}, X_Error_Code="RepoNotFound")
            elif "/tree/" in self.path:
                tree = [
                    {"type": "file", "path": path, "size": len(data), "oid": "0" * 40}
                    for path, data in found["files"].items()
                ]
                self.answer(200, tree)
            else:
                files = [{"rfilename": path} for path in found["files"]]
                self.answer(
                    200,
                    {
                        "id": found["name"],
                        "private": found["private"],
                        "siblings": files,
                        "sha": "a" * 40,
                    },
                )

        def do_POST(self) -> None:
            body = self.body()
            if not self.is_known():
                return
            if self.path == "/api/repos/create":
                self.create(json.loads(body))
            elif self.path == "/api/validate-yaml":
                self.answer(200, {"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                files = [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith("safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for file in json.loads(body)["files"]
                ]
                self.answer(200, {"files": files})
            elif self.path.endswith("/info/lfs/objects/batch"):
                objects = [
                    {
                        **wanted,
                        "actions": {"upload": {"href": f"{hub.url}/objects/{wanted['oid']}"}},
                    }
                    for wanted in json.loads(body)["objects"]
                ]
                self.answer(200, {"transfer": "basic", "objects": objects})
            elif "/commit/" in self.path:
                self.commit(body)
            else:
                self.answer(404, {"error": f"no {self.path}"})

        def do_PUT(self) -> None:
            data = self.body()
            assert self.path.rsplit("/", 1)[-1] == hashlib.sha256(data).hexdigest()
            hub.objects[hashlib.sha256(data).hexdigest()] = data
            self.answer(200, {})

        def create(self, wanted: dict[str, Any]) -> None:
            name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            if name in hub.repositories:
                self.answer(
                    409,
                    {"error": "You already created this model repo", "url": f"{hub.url}/{name}"},
                )
                return
            private = wanted.get("private", wanted.get("visibility") == "private")
            hub.repositories[name] = {
                "name": name,
                "private": private,
                "files": {".gitattributes": b""},
                "commits": [],
            }
            self.answer(200, {"url": f"{hub.url}/{name}", "name": name, "id": "1"})

        def commit(self, body: bytes) -> None:
            found = self.repository()
            assert found is not None
            for line in body.splitlines():
                record = json.loads(line)
                value = record["value"]
                if record["key"] == "header":
                    found["commits"].append(value["summary"])
                elif record["key"] == "file":
                    found["files"][value["path"]] = base64.b64decode(value["content"])
                elif record["key"] == "lfsFile":
                    found["files"][value["path"]] = hub.objects[value["oid"]]
                elif record["key"] == "deletedFile":
                    found["files"].pop(value["path"])
            self.answer(
                200,
                {
                    "success": True,
                    "commitOid": "b" * 40,
                    "commitUrl": f"{hub.url}/{found['name']}/commit/{'b' * 40}",
                },
            )

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
