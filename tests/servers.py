"""A server on loopback for real clients: plain files, a Hugging Face Hub, and Weights & Biases."""
import base64
import contextlib
import hashlib
import http.server
import importlib.util
import json
import threading

import pytest


def needs(package):
    """Mark of a test that the real `package` takes part in."""
    return pytest.mark.skipif(not importlib.util.find_spec(package), reason=f"{package} is not installed")


class Server:
    """HTTP on loopback. `files`: {path: bytes}; `asked`: [(method, path, headers, body), ...]; `fail`: status for all.

    GET knows ranges, versions and breaking off after `cut` bytes; POST and PUT answer as a Hugging Face Hub does, and
    POST /graphql as Weights & Biases, of one run with these files.
    """

    def __init__(self):
        self.files, self.asked, self.fail, self.cut, self.stored = {}, [], None, None, {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def answer(self, status, body=b"", **headers):
                body = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {"Content-Length": len(body), **headers}.items():
                    self.send_header(name.replace("_", "-"), str(value))
                self.end_headers()
                self.wfile.write(body if outer.cut is None or self.command != "GET" else body[:outer.cut])
                if outer.cut is not None and self.command == "GET":
                    self.close_connection = True

            def do_GET(self):
                outer.take(self, b"")
                if outer.fail:
                    return self.answer(outer.fail)
                body = outer.files.get(self.path)
                if body is None:
                    return self.answer(404)
                version = f'"{hashlib.sha256(body).hexdigest()[:8]}"'
                begin = self.headers.get("Range", "")
                if self.headers.get("If-None-Match") == version:
                    return self.answer(304)
                if begin and self.headers.get("If-Range") == version:
                    at = int(begin.removeprefix("bytes=").rstrip("-"))
                    return self.answer(206, body[at:], ETag=version) if at < len(body) else self.answer(
                        416, Content_Range=f"bytes */{len(body)}")
                return self.answer(200, body, ETag=version)

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.take(self, body)
                if outer.fail:
                    return self.answer(outer.fail, {"error": "no"})
                self.answer(200, outer.reply(self.path, body), Content_Type="application/json")

            def do_PUT(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.take(self, body)
                outer.stored[self.path.removeprefix("/lfs/")] = body
                self.answer(200)
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def take(self, request, body):
        self.asked.append((request.command, request.path, dict(request.headers), body))

    def reply(self, path, body):
        if path == "/graphql":
            return self.graphql(body)
        if path == "/api/repos/create":
            return {"url": f"{self.url}/me/prior"}
        if "/preupload/" in path:  # small ones go into the commit, as they are, and others to the large file store
            return {"files": [{"path": file["path"], "shouldIgnore": False,
                               "uploadMode": "lfs" if file["path"].endswith((".pt", ".safetensors")) else "regular"}
                              for file in json.loads(body)["files"]]}
        if path.endswith("/objects/batch"):
            return {"transfer": "basic", "objects": [
                {**one, "actions": {"upload": {"href": f"{self.url}/lfs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]]}
        if "/commit/" in path:
            for line in map(json.loads, body.decode().splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.stored[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.stored[value["path"]] = self.stored[value["oid"]]
            return {"commitUrl": f"{self.url}/me/prior/commit/0", "commitOid": "0" * 40}
        return {}

    def graphql(self, body):
        with contextlib.suppress(ValueError):
            asked = json.loads(body)
            names = [name for name in asked.get("variables", {}).get("fileNames") or [] if f"/{name}" in self.files]
            nodes = [{"node": {"id": name, "name": name, "url": f"{self.url}/{name}", "directUrl": f"{self.url}/{name}",
                               "sizeBytes": str(len(self.files[f"/{name}"])), "mimetype": "", "updatedAt": None,
                               "md5": ""}, "cursor": "0"} for name in names]
            facts = ("id", "name", "displayName", "sweepName", "state", "config", "group", "jobType", "commit",
                     "readOnly", "createdAt", "heartbeatAt", "description", "notes", "systemMetrics", "summaryMetrics",
                     "historyLineCount", "historyKeys", "projectId")
            run = {**dict.fromkeys(facts), "name": "abc", "state": "finished", "tags": [], "fileCount": len(nodes),
                   **dict.fromkeys(("config", "systemMetrics", "summaryMetrics"), "{}"), "historyLineCount": 0,
                   "projectId": 1,
                   "user": {"name": "me", "username": "me"},
                   "files": {"edges": nodes, "pageInfo": {"endCursor": "0", "hasNextPage": False}}}
            known = asked.get("variables", {}).get("name", "abc") == "abc"
            return {"data": {"project": {"internalId": "1", "run": run if known else None},
                             "viewer": {"id": "1", "entity": "me", "username": "me", "email": "", "flags": "{}",
                                        "teams": {"edges": []}}}}
        return {}
