"""A small Hugging Face Hub on localhost, with the API that the real client needs."""

import base64
import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_thisIsASecret"


class Hub(ThreadingHTTPServer):
    """A server with repositories in memory; a context manager. `url` is its address.

    `faults` are tuples (method, part of the path, fault). The next matching request is answered
    with the status `fault`, or its connection is closed within its body if `fault` is `cut`.
    While `gate` is cleared, commits wait.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repos: dict[str, dict] = {}  # id -> private, commits: list of (sha, files)
        self.blobs: dict[str, bytes] = {}
        self.faults: list[tuple[str, str, int | str]] = []
        self.requests: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.gate.set()
        self.shutdown()
        self.server_close()

    def files(self, repo_id: str) -> dict[str, bytes]:
        """Returns the newest files of a repository."""
        return self.repos[repo_id]["commits"][-1][1]

    def revision(self, repo_id: str, name: str):
        commits = self.repos[repo_id]["commits"]
        if name == "main":
            return commits[-1]
        name = self.repos[repo_id].get("tags", {}).get(name, name)
        return next((commit for commit in commits if commit[0] == name), None)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        fault = self.take_fault(path)
        if fault == "cut":
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
            self.close_connection = True
            self.connection.close()
            return
        if fault:
            return self.answer(fault, {"error": f"made to fail with {fault}"})
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path.startswith("/lfs/") and self.command == "PUT":
            self.server.blobs[path.removeprefix("/lfs/")] = body
            return self.answer(200, {})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid username or password."})
        for pattern, handle in ROUTES:
            if match := re.fullmatch(pattern, path):
                return handle(self, body, *match.groups())
        self.answer(404, {"error": f"no route {path}"})

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def take_fault(self, path):
        for fault in self.server.faults:
            if fault[0] == self.command and fault[1] in path:
                self.server.faults.remove(fault)
                return fault[2]

    def answer(self, status, value, headers=()):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, content in headers:
            self.send_header(name, content)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def not_found(self, code):
        self.answer(404, {"error": code}, [("X-Error-Code", code)])

    def create(self, body):
        request = json.loads(body)
        repo_id = f"{request['organization']}/{request['name']}"
        url = f"{self.server.url}/{repo_id}"
        if repo_id in self.server.repos:
            return self.answer(409, {"error": "exists", "url": url})
        sha = hashlib.sha1(repo_id.encode()).hexdigest()
        private = request.get("private") or request.get("visibility") == "private"
        self.server.repos[repo_id] = {"private": private, "commits": [(sha, {})]}
        self.answer(200, {"url": url})

    def preupload(self, body, repo_id, _revision):
        files = []
        for path in (file["path"] for file in json.loads(body)["files"]):
            mode = "lfs" if path.endswith(".safetensors") else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False})
        self.answer(200, {"files": files})

    def lfs_batch(self, body, _repo_id):
        objects = []
        for item in json.loads(body)["objects"]:
            if item["oid"] not in self.server.blobs:
                item["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{item['oid']}"}}
            objects.append(item)
        self.answer(200, {"objects": objects, "transfer": "basic"})

    def commit(self, body, repo_id, _revision):
        self.server.gate.wait(30)
        commits = self.server.repos[repo_id]["commits"]
        files = dict(commits[-1][1])
        for line in body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
            elif entry["key"] == "deletedFile":
                files.pop(value["path"])
        sha = hashlib.sha1(f"{commits[-1][0]}{time.time_ns()}".encode()).hexdigest()
        commits.append((sha, files))
        url = f"{self.server.url}/{repo_id}/commit/{sha}"
        self.answer(200, {"success": True, "commitUrl": url, "commitOid": sha})

    def tag(self, body, repo_id, name):
        tags = self.server.repos[repo_id].setdefault("tags", {})
        if self.command == "DELETE":
            if name not in tags:
                return self.not_found("RevisionNotFound")
            del tags[name]
            return self.answer(200, {})
        new = json.loads(body)["tag"]
        if new in tags:
            return self.answer(409, {"error": "exists"})
        tags[new] = name
        self.answer(200, {})

    def info(self, _body, repo_id, revision=None):
        if repo_id not in self.server.repos:
            return self.not_found("RepoNotFound")
        commit = self.server.revision(repo_id, revision or "main")
        if commit is None:
            return self.not_found("RevisionNotFound")
        sha, files = commit
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
        self.answer(200, {"id": repo_id, "sha": sha, "siblings": siblings, "tags": []})

    def tree(self, _body, repo_id, revision, folder=None):
        folder = folder or ""
        _, files = self.server.revision(repo_id, revision)
        below = {n: data for n, data in files.items() if n.startswith(folder and f"{folder}/")}
        entries = [entry(name, data) for name, data in below.items()]
        if "recursive=true" not in self.path.lower():
            depth = folder.count("/") + bool(folder)
            folders = {name.rsplit("/", 1)[0] for name in below if name.count("/") == depth + 1}
            entries = [item for item in entries if item["path"].count("/") == depth]
            entries += [
                {"type": "directory", "path": name, "oid": "0", "size": 0} for name in folders
            ]
        self.answer(200, entries)

    def resolve(self, _body, repo_id, revision, path):
        if repo_id not in self.server.repos:
            return self.not_found("RepoNotFound")
        sha, files = self.server.revision(repo_id, revision)
        if path not in files:
            return self.not_found("EntryNotFound")
        data = files[path]
        self.answer_file(data, [("ETag", f'"{blob_id(data)}"'), ("X-Repo-Commit", sha)])

    def answer_file(self, data, headers=()):
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not match:
            return self.answer(200, data, headers)
        start = int(match[1])
        end = int(match[2] or len(data) - 1) + 1
        place = f"bytes {start}-{end - 1}/{len(data)}"
        self.answer(206, data[start:end], [("Content-Range", place)])

    def resolve_parquet(self, body, repo_id, path):
        self.resolve(body, repo_id, "main", path)


def entry(name: str, data: bytes) -> dict:
    """Returns the description of a file in a repository."""
    return {"type": "file", "path": name, "size": len(data), "oid": blob_id(data)}


def blob_id(data: bytes) -> str:
    """Returns the id of a file's content in git."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


REPO = r"([^/]+/[^/]+)"
API = rf"/api/(?:models|datasets)/{REPO}"
ROUTES = [
    (r"/api/validate-yaml", lambda self, body: self.answer(200, {"errors": [], "warnings": []})),
    (r"/api/repos/create", Handler.create),
    (rf"{API}/preupload/([^/]+)", Handler.preupload),
    (rf"(?:/datasets)?/{REPO}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    (rf"{API}/commit/([^/]+)", Handler.commit),
    (rf"{API}/tag/([^/]+)", Handler.tag),
    (API, Handler.info),
    (rf"{API}/revision/([^/]+)", Handler.info),
    (rf"{API}/tree/([^/]+)(?:/(.+))?", Handler.tree),
    (rf"/datasets/{REPO}/resolve/refs/convert/parquet/(.+)", Handler.resolve_parquet),
    (rf"(?:/datasets)?/{REPO}/resolve/([^/]+)/(.+)", Handler.resolve),
]
