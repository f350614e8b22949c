"""A Hub on the loopback interface: just what huggingface_hub asks of the real one when it uploads a folder, lists it
and reads from it.
"""

import base64
import contextlib
import hashlib
import json
from collections.abc import Iterator
from threading import Event
from urllib.parse import unquote

import httpx2
from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils._http import default_client_factory

from eval.release import hub as asking
from tests.loopback import Handler, Loopback

HEAD = "a" * 40  # the commit that it says it has


class Hub(Loopback):
    """A fake Hub: ``with Hub() as hub: ... hub.url; hub.files`` (path -> content, after a commit); token: `token`.

    `commits`: the paths that each changed. `faults`: part of a request's path -> the response to it: a status, "hang"
    (nothing), "html" (a web page, status 200), "drop" (the connection is closed) or "cut" (closed amid what is sent).
    `exists`: the repository exists. `private`: its visibility in responses; None: left out.
    """

    def __init__(self, token: str = "hf_test", exists: bool = False, private: bool | None = True):
        self.files: dict[str, bytes] = {}
        self.large: set[str] = set()  # of them, those that came as objects of their own (LFS)
        self.commits: list[list[str]] = []
        self.faults: dict[str, int | str] = {}
        self.exists, self.private, self._over = exists, private, Event()
        self.created: list[dict] = []
        self.requests: list[str] = []
        self.token, self._objects = token, {}
        super().__init__()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        super().__exit__()

    def blob(self, name: str) -> str:
        """The file's id in git."""
        content = self.files[name]
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def handler(hub):
        class HubHandler(Handler):
            def is_faulty(self) -> bool:
                """Answers with the fault that this request is to have, if any."""
                fault = next((fault for part, fault in hub.faults.items() if part in self.path), None)
                if fault == "hang":
                    hub._over.wait()
                elif fault == "html":
                    self.answer("<html>Welcome</html>", kind="text/html")
                elif fault == "drop":
                    self.close_connection = True
                elif fault == "cut":
                    self.rfile.read(10)
                    self.close_connection = True
                elif fault is not None:
                    self.answer({"error": "as the test wants it"}, fault)
                return fault is not None

            def do_GET(self) -> None:
                hub.requests.append(f"GET {self.path}")
                visibility = {} if hub.private is None else {"private": hub.private}
                if self.is_faulty():
                    return
                if not hub.exists:
                    self.answer({"error": "Repository not found"}, 404)
                elif "/tree/" in self.path:
                    self.answer([self.entry(name) for name in sorted(hub.files)])
                elif "/resolve/" in self.path:
                    self.give(unquote(self.path.partition("/resolve/")[2].partition("/")[2]))
                else:
                    files = [{"rfilename": name} for name in sorted(hub.files)]
                    self.answer({"id": "me/draft", "sha": HEAD, "siblings": files, **visibility})

            def do_HEAD(self) -> None:
                self.do_GET()

            def entry(self, name: str) -> dict:
                content = hub.files[name]
                entry = {"type": "file", "path": name, "size": len(content), "oid": hub.blob(name)}
                lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
                return entry | ({"lfs": lfs} if name in hub.large else {})

            def give(self, name: str) -> None:
                """A file, or the part of it that is asked for."""
                if name not in hub.files:
                    self.answer({"error": "Entry not found"}, 404)
                    return
                first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
                content = hub.files[name][int(first) : int(last) + 1 if last else None]
                self.send_response(206 if "Range" in self.headers else 200)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("ETag", f'"{hub.blob(name)}"')
                self.send_header("X-Repo-Commit", HEAD)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

            def do_PUT(self) -> None:
                hub.requests.append(f"PUT {self.path}")
                if self.is_faulty():
                    return
                hub._objects[self.path.removeprefix("/store/")] = self.body()
                self.answer({})

            def do_POST(self) -> None:
                body = self.body()
                hub.requests.append(f"POST {self.path}")
                if self.is_faulty():
                    return
                if self.path != "/api/validate-yaml" and self.headers.get("Authorization") != f"Bearer {hub.token}":
                    self.answer({"error": "Invalid credentials"}, 401)
                elif self.path == "/api/repos/create":
                    if hub.exists:
                        self.answer({"error": "You already created this model repo", "url": f"{hub.url}/me/draft"}, 409)
                        return
                    hub.created.append(json.loads(body))
                    hub.exists = True
                    self.answer({"url": f"{hub.url}/me/draft", "id": "me/draft", "name": "me/draft"})
                elif self.path == "/api/validate-yaml":
                    self.answer({"errors": [], "warnings": []})
                elif "/preupload/" in self.path:
                    self.answer({"files": [self.mode(file) for file in json.loads(body)["files"]]})
                elif self.path.endswith("/info/lfs/objects/batch"):
                    self.answer(
                        {"transfer": "basic", "objects": [self.lfs(item) for item in json.loads(body)["objects"]]}
                    )
                elif "/commit/" in self.path:
                    self.commit(body)
                else:
                    self.answer({"error": f"not taught: {self.path}"}, 404)

            def mode(self, file: dict) -> dict:
                large = file["path"].endswith((".safetensors", ".png", ".arrow"))
                oid = hub.blob(file["path"]) if file["path"] in hub.files and not large else None
                mode = "lfs" if large else "regular"
                return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}

            def lfs(self, item: dict) -> dict:
                if item["oid"] in hub._objects:  # it is there already
                    return {"oid": item["oid"], "size": item["size"]}
                upload = {"href": f"{hub.url}/store/{item['oid']}"}
                return {"oid": item["oid"], "size": item["size"], "actions": {"upload": upload}}

            def commit(self, body: bytes) -> None:
                hub.commits.append([])
                for line in body.decode().splitlines():
                    entry = json.loads(line)
                    value = entry["value"]
                    hub.commits[-1] += [value["path"]] if "path" in value else []
                    if entry["key"] == "deletedFile":
                        del hub.files[value["path"]]
                        hub.large.discard(value["path"])
                    elif entry["key"] == "file":
                        hub.files[value["path"]] = base64.b64decode(value["content"])
                    elif entry["key"] == "lfsFile":
                        content = hub._objects[value["oid"]]
                        assert hashlib.sha256(content).hexdigest() == value["oid"]
                        hub.files[value["path"]] = content
                        hub.large.add(value["path"])
                sha = "1" * 40
                self.answer({"commitUrl": f"{hub.url}/me/draft/commit/{sha}", "commitOid": sha, "success": True})

        return HubHandler


@contextlib.contextmanager
def reached(monkeypatch, hub: Hub, **settings: object) -> Iterator[Hub]:
    """This process asks it, with its token; `settings` are others of huggingface_hub."""
    reach(monkeypatch, hub.url)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    try:
        yield hub
    finally:
        set_client_factory(default_client_factory)  # which refuses what is offline, also for other tests


def reach(monkeypatch, url: str) -> None:
    """Replace huggingface_hub's settings, which it reads once, by those of this test; it does not wait between
    retries.
    """
    settings = {"ENDPOINT": url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": False}
    settings["HUGGINGFACE_CO_URL_TEMPLATE"] = url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    hurry(monkeypatch, 60)


def hurry(monkeypatch, seconds: float) -> None:
    """So long an answer is waited for: short only where none will come."""
    monkeypatch.setattr(asking, "TIMEOUT", httpx2.Timeout(seconds, connect=5))
