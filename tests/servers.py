"""A server on loopback for real clients (plain files, a Hugging Face Hub, Weights & Biases), and what loggers hold."""
import base64
import http.server
import importlib.util
import json
import struct
import threading

import pytest


def needs(package):
    """Mark of a test that the real `package` takes part in."""
    return pytest.mark.skipif(not importlib.util.find_spec(package), reason=f"{package} is not installed")


class Server:
    """HTTP on loopback. `files`: {path: bytes}; `asked`: [(method, path, headers, body), ...]; `fail`: status for all.

    POST and PUT answer as a Hugging Face Hub does, which keeps what it gets in `stored`, {name: bytes}, and POST
    /graphql as Weights & Biases, of one run, abc, with these files.
    """

    def __init__(self):
        self.files, self.asked, self.fail, self.stored = {}, [], None, {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def respond(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.asked.append((self.command, self.path, dict(self.headers), body))
                status, reply = outer.reply(self.command, self.path, body)
                reply = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(reply)))
                self.send_header("Content-Type", "application/json" if self.command == "POST" else "text/plain")
                self.end_headers()
                self.wfile.write(reply)

            do_GET = do_POST = do_PUT = respond
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()

    def reply(self, method, path, body):
        """(status, bytes or JSON value)"""
        if self.fail:
            return self.fail, {"error": "no"}
        if method == "GET":
            return (200, self.files[path]) if path in self.files else (404, b"")
        if method == "PUT":
            self.stored[path.removeprefix("/lfs/")] = body
            return 200, b""
        if path == "/graphql":
            return 200, self.graphql(json.loads(body))
        if path == "/api/repos/create":
            return 200, {"url": f"{self.url}/me/prior"}
        if "/preupload/" in path:  # small ones go into the commit, as they are, and others to the large file store
            return 200, {"files": [{"path": file["path"], "shouldIgnore": False,
                                    "uploadMode": "lfs" if file["path"].endswith(".pt") else "regular"}
                                   for file in json.loads(body)["files"]]}
        if path.endswith("/objects/batch"):
            return 200, {"transfer": "basic", "objects": [
                {**item, "actions": {"upload": {"href": f"{self.url}/lfs/{item['oid']}"}}}
                for item in json.loads(body)["objects"]]}
        for line in map(json.loads, body.decode().splitlines()) if "/commit/" in path else ():
            value = line["value"]
            if line["key"] == "file":
                self.stored[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.stored[value["path"]] = self.stored[value["oid"]]
        return 200, {"commitUrl": f"{self.url}/me/prior/commit/0", "commitOid": "0" * 40}

    def graphql(self, request):
        given = request.get("variables", {})
        names = [name for name in given.get("fileNames") or [] if f"/{name}" in self.files]
        nodes = [{"node": {"id": name, "name": name, "url": f"{self.url}/{name}", "directUrl": f"{self.url}/{name}",
                           "sizeBytes": str(len(self.files[f"/{name}"])), "mimetype": "", "updatedAt": None, "md5": ""},
                  "cursor": "0"} for name in names]
        facts = ("id", "displayName", "sweepName", "group", "jobType", "commit", "readOnly", "createdAt", "heartbeatAt",
                 "description", "notes", "historyKeys")
        run = {**dict.fromkeys(facts), **dict.fromkeys(("config", "systemMetrics", "summaryMetrics"), "{}"),
               "name": "abc", "state": "finished", "tags": [], "historyLineCount": 0, "projectId": 1,
               "fileCount": len(nodes), "user": {"name": "me", "username": "me"},
               "files": {"edges": nodes, "pageInfo": {"endCursor": "0", "hasNextPage": False}}}
        return {"data": {"project": {"internalId": "1", "run": run if given.get("name", "abc") == "abc" else None},
                         "viewer": {"id": "1", "entity": "me", "username": "me", "email": "", "flags": "{}",
                                    "teams": {"edges": []}}}}


def records_of(folder):
    """Scalars that a logger has of a run, read back: {name: [(step, value), ...]}, and {name of a sample: how many}."""
    if (folder / "tensorboard").exists():
        from tensorboard.backend.event_processing.event_accumulator import AUDIO, IMAGES, SCALARS, EventAccumulator
        found = EventAccumulator(str(folder / "tensorboard"), {SCALARS: 0, IMAGES: 0, AUDIO: 0}).Reload()
        tags = found.Tags()
        media = {name: len(found.Images(name)) for name in tags["images"]} | {
            name: len(found.Audio(name)) for name in tags["audio"]}
        return {name: [(e.step, e.value) for e in found.Scalars(name)] for name in tags["scalars"]}, media
    import wandb
    wandb.teardown()  # its process is at it a little longer than `finish` waits
    rows, media, curves = {}, {}, {}
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for history in histories(path.read_bytes()):  # of a row that comes again, the real server keeps one
            rows[history.step.num] = {tuple(item.nested_key) or (item.key,): json.loads(item.value_json)
                                      for item in history.item}
    for _, row in sorted(rows.items()):
        for (name, *part), value in row.items():
            if part == ["_type"]:
                media[name] = media.get(name, 0) + 1
            elif not part:
                curves.setdefault(name, []).append((row["step",], value))
    return curves, media


def histories(data):
    """The logged rows, as the package's own records, in a file of wandb offline.

    It is a log in the format of LevelDB (blocks of 32 KiB, in which a record may be cut) of protobuf records.
    """
    from wandb.proto.wandb_internal_pb2 import Record
    at, record = 7, b""
    while at + 7 <= len(data):
        size, kind = struct.unpack_from("<HB", data, at + 4)  # after a checksum; 1 whole, 2 first, 3 middle, 4 last
        left = 32768 - at % 32768  # of the block, whose end is padded with zeros
        if left < 7 or not kind:
            at += left
            continue
        record += data[at + 7:at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            found, record = Record.FromString(record), b""
            if found.WhichOneof("record_type") == "history":
                yield found.history
