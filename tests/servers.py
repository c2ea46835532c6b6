"""A server on loopback for real clients, and readers for the loggers' files.

The server acts as a file server, a Hugging Face Hub, and Weights & Biases.
"""
import base64
import http.server
import importlib.util
import json
import struct
import threading

import pytest


def needs(package):
    """A mark that skips tests if the real `package` is not installed."""
    missing = not importlib.util.find_spec(package)
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


class Server:
    """An HTTP server on loopback.

    GET serves `files`, {path: bytes}. `asked` lists all requests, (method, path, headers, body).
    POST answers as a Hugging Face Hub does, and keeps uploads in `stored`, {name: bytes}. HEAD
    tells whether a name is stored. POST /graphql answers as Weights & Biases does for a run named
    abc that has these `files`.
    """

    def __init__(self):
        self.files = {}
        self.asked = []
        self.stored = {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                """Print nothing."""

            def respond(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.asked.append((self.command, self.path, dict(self.headers), body))
                status, content = outer.reply(self.command, self.path, body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Content-Type", "application/json")
                if status == 404:
                    self.send_header("X-Error-Code", "EntryNotFound")
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_HEAD = do_POST = respond

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()

    def reply(self, method, path, body):
        """The reply to a request: (status, body)."""
        if method == "POST":
            return 200, json.dumps(self.post(path, body)).encode()
        if method == "HEAD":
            stored = path.partition("/resolve/main/")[2] in self.stored
            return (200 if stored else 404), b""
        if path not in self.files:
            return 404, b""
        return 200, self.files[path]

    def post(self, path, body):
        """The reply to a POST request, as a JSON value."""
        request = json.loads(body.strip().rpartition(b"\n")[2] or "{}")
        if "/commit/" in path:  # the last line of the request is the file
            self.stored[request["value"]["path"]] = base64.b64decode(request["value"]["content"])
            return {"commitUrl": f"{self.url}/me/prior/commit/0", "commitOid": "0" * 40}
        if path == "/graphql":
            return self.graphql()
        if "/preupload/" in path:
            mode = {"shouldIgnore": False, "uploadMode": "regular"}
            return {"files": [{"path": file["path"], **mode} for file in request["files"]]}
        return {"url": f"{self.url}/me/prior"}  # of a new repository

    def graphql(self):
        nodes = []
        for path, content in self.files.items():
            url = self.url + path
            file = {"name": path[1:], "url": url, "directUrl": url, "sizeBytes": str(len(content))}
            nodes.append({"node": file, "cursor": "0"})
        files = {"edges": nodes, "pageInfo": {"endCursor": "0", "hasNextPage": False}}
        run = {"name": "abc", "state": "finished", "files": files}
        project = {"internalId": "1", "run": run}
        return {"data": {"project": project, "viewer": {"id": "1", "entity": "me"}}}


def records_of(folder):
    """Read a run back from the files of its logger.

    Returns ({name of a scalar: [(step, value), ...]}, {name of a sample: number of samples}).
    """
    if (folder / "tensorboard").exists():
        return tensorboard_of(folder)
    return wandb_of(folder)


def tensorboard_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    found = EventAccumulator(str(folder / "tensorboard")).Reload()
    tags = found.Tags()
    samples = {name: len(found.Images(name)) for name in tags["images"]}
    samples |= {name: len(found.Audio(name)) for name in tags["audio"]}
    curves = {}
    for name in tags["scalars"]:
        curves[name] = [(event.step, event.value) for event in found.Scalars(name)]
    return curves, samples


def wandb_of(folder):
    import wandb
    wandb.teardown()  # its process runs a little longer than `finish` waits
    rows = {}
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for history in histories(path.read_bytes()):
            row = {tuple(item.nested_key) or (item.key,): item.value_json for item in history.item}
            rows[history.step.num] = row  # like the real server, keep the last row of a step
    curves = {}
    samples = {}
    for step, row in sorted(rows.items()):
        for (name, *part), value in row.items():
            if part == ["_type"]:
                samples[name] = samples.get(name, 0) + 1
            elif not part and name[0] != "_":  # the package's own names begin with _
                curves.setdefault(name, []).append((step, json.loads(value)))
    return curves, samples


def histories(content):
    """Yield the logged rows in a file of wandb's offline mode, as wandb's protobuf records.

    The file is a LevelDB log of protobuf records. It has blocks of 32 KiB, and a record that does
    not fit into one is split.
    """
    from wandb.proto.wandb_internal_pb2 import Record
    place = 7
    record = b""
    while place + 7 <= len(content):
        # Skip the checksum. Kinds of record parts: 1 whole, 2 first, 3 middle, 4 last.
        size, kind = struct.unpack_from("<HB", content, place + 4)
        left = 32768 - place % 32768  # rest of the block, whose end is padded with zeros
        if left < 7 or not kind:
            place += left
            continue
        record += content[place + 7:place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            found = Record.FromString(record)
            record = b""
            if found.WhichOneof("record_type") == "history":
                yield found.history
