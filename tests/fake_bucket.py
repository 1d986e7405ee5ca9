"""Buckets of Google Cloud Storage in a folder of this host: for tests, without a network.

TensorStore, which reads and writes arrays, asks a server here by HTTP; fsspec, by which all else is read and
written, looks into the same folder. As in a bucket there are no folders: what has nothing below it is not
there, and a file is whole or not there.
"""

import http.server
import io
import json
import os
import threading
import urllib.parse
import uuid
from pathlib import Path

import fsspec

FOLDER = "FAKE_BUCKET"
"""Variable of the environment: where the objects lie, each a file whose name is its key, quoted."""


class Store:
    """The objects. Their keys are BUCKET/NAME."""

    def _path(self, key: str) -> Path:
        return Path(os.environ[FOLDER]) / urllib.parse.quote(key.strip("/"), safe="")

    def names(self) -> list[str]:
        names = (path.name for path in Path(os.environ[FOLDER]).iterdir())
        return sorted(urllib.parse.unquote(name) for name in names if name[0] != ".")

    def read(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, key: str, content: bytes) -> None:
        path = Path(os.environ[FOLDER]) / f".{uuid.uuid4().hex}"
        path.write_bytes(content)
        path.rename(self._path(key))

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def generation(self, key: str) -> str:
        """Returns what tells this content of a key from others, 0 for none."""
        try:
            return str(self._path(key).stat().st_mtime_ns)
        except FileNotFoundError:
            return "0"

    def clear(self) -> None:
        for key in self.names():
            self.delete(key)


store = Store()


class Writing(io.BytesIO):
    """A file that is there once it is closed."""

    def __init__(self, key: str):
        super().__init__()
        self._key = key

    def close(self) -> None:
        if not self.closed:
            store.write(self._key, self.getvalue())
        super().close()


class Bucket(fsspec.AbstractFileSystem):
    """What fsspec sees of gs://."""

    protocol = ("gcs", "gs")
    cachable = False

    def ls(self, path, detail=True, **_):
        path = self._strip_protocol(path)
        found = {}
        for key in store.names():
            if key == path or key.startswith(f"{path}/"):
                name = "/".join(key.split("/")[: path.count("/") + 2])
                kind = "file" if key == name else "directory"
                content = store.read(key) if kind == "file" else b""
                found[name] = {"name": name, "type": kind, "size": len(content or b"")}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)

    def info(self, path, **_):
        path = self._strip_protocol(path)
        if (content := store.read(path)) is not None:
            return {"name": path, "type": "file", "size": len(content)}
        self.ls(path)
        return {"name": path, "type": "directory", "size": 0}

    def mkdir(self, path, create_parents=True, **_):
        """There are none."""

    makedirs = rmdir = mkdir

    def rm_file(self, path):
        store.delete(self._strip_protocol(path))

    def cp_file(self, path1, path2, **_):
        if (content := store.read(self._strip_protocol(path1))) is not None:
            store.write(self._strip_protocol(path2), content)

    def _open(self, path, mode="rb", **_):
        path = self._strip_protocol(path)
        if mode == "wb":
            return Writing(path)
        if (content := store.read(path)) is None:
            raise FileNotFoundError(path)
        return io.BytesIO(content)


class Server(http.server.BaseHTTPRequestHandler):
    """The part of the service's JSON interface that TensorStore uses."""

    protocol_version = "HTTP/1.1"
    lock = threading.Lock()

    def log_message(self, *_):
        pass

    def asked(self) -> tuple[dict, str, bytes]:
        url = urllib.parse.urlparse(self.path)
        words = url.path.split("/")
        at = words.index("b")
        name = urllib.parse.unquote("/".join(words[at + 3 :]))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = dict(urllib.parse.parse_qsl(url.query))
        return asked, f"{words[at + 1]}/{name or asked.get('name', '')}", body

    def answer(self, code: int, body: bytes | dict = b"", **headers) -> None:
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def about(self, key: str) -> dict:
        size, name = len(store.read(key) or b""), key.partition("/")[2]
        return {"name": name, "size": str(size), "generation": store.generation(key)}

    def do_GET(self):
        asked, key, _ = self.asked()
        with self.lock:
            if key.endswith("/"):
                start = key + asked.get("prefix", "")
                found = [self.about(each) for each in store.names() if each.startswith(start)]
                return self.answer(200, {"items": found})
            content, about = store.read(key), self.about(key)
        if content is None:
            return self.answer(404)
        if asked.get("alt") != "media":
            return self.answer(200, about)
        if asked.get("ifGenerationNotMatch") == about["generation"]:
            return self.answer(304)
        headers = {"x_goog_generation": about["generation"]}
        if not (wanted := self.headers.get("Range")):
            return self.answer(200, content, **headers)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, len(content) - int(last))
        stop = min(len(content), int(last) + 1) if first and last else len(content)
        headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        return self.answer(206, content[start:stop], **headers)

    def do_POST(self):
        asked, key, body = self.asked()
        with self.lock:
            if asked.get("ifGenerationMatch") not in (None, store.generation(key)):
                return self.answer(412, {"error": {"code": 412}})
            store.write(key, body)
            return self.answer(200, self.about(key))

    def do_DELETE(self):
        _, key, _ = self.asked()
        with self.lock:
            store.delete(key)
        self.answer(204)


def join() -> None:
    """Has all that this process asks of gs:// by fsspec go to the folder."""
    for name in ("gcs", "gs"):
        fsspec.register_implementation(name, Bucket, clobber=True)


def begin(folder: Path) -> Store:
    """Starts the server, and has all that is asked of gs:// in this process, and in those that it starts, go
    to a folder."""
    os.environ[FOLDER] = str(folder)
    join()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["TENSORSTORE_GCS_HTTP_URL"] = f"http://127.0.0.1:{server.server_port}"
    os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "of a test"
    return store
