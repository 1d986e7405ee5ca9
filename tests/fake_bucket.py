"""A bucket of Google Cloud Storage within this process: for tests, without a network.

TensorStore, which reads and writes arrays, asks a server here by HTTP; fsspec, by which all else is read and
written, looks into the same memory.
"""

import http.server
import itertools
import json
import os
import threading
import urllib.parse

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem


class Bucket(MemoryFileSystem):
    """What fsspec sees of gs://."""

    protocol = ("gcs", "gs")
    store: dict = {}  # noqa: RUF012 - as its base has them
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        path = str(path).removeprefix("gs://").removeprefix("gcs://")
        return "/" + path.strip("/") if path.strip("/") else ""


class Server(http.server.BaseHTTPRequestHandler):
    """The part of the service's JSON interface that TensorStore uses."""

    protocol_version = "HTTP/1.1"
    generations: dict = {}  # noqa: RUF012
    numbers = itertools.count(1)
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
        return asked, f"/{words[at + 1]}/{name or asked.get('name', '')}", body

    def answer(self, code: int, body: bytes | dict = b"", **headers) -> None:
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def generation(self, key: str) -> str:
        if key not in Bucket.store:
            return "0"
        return str(self.generations.setdefault(key, next(self.numbers)))

    def about(self, key: str) -> dict:
        size = len(Bucket.store[key].getvalue())
        name = key.split("/", 2)[2]
        return {"name": name, "size": str(size), "generation": self.generation(key)}

    def do_GET(self):
        asked, key, _ = self.asked()
        with self.lock:
            if key.count("/") == 2 and key.endswith("/"):
                start = key + asked.get("prefix", "")
                found = [self.about(each) for each in sorted(Bucket.store) if each.startswith(start)]
                return self.answer(200, {"items": found})
            if key not in Bucket.store:
                return self.answer(404)
            content, generation = Bucket.store[key].getvalue(), self.generation(key)
            about = self.about(key)
        if asked.get("alt") != "media":
            return self.answer(200, about)
        if asked.get("ifGenerationNotMatch") == generation:
            return self.answer(304)
        headers = {"x_goog_generation": generation}
        if not (wanted := self.headers.get("Range")):
            return self.answer(200, content, **headers)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, len(content) - int(last))
        stop = min(len(content), int(last) + 1) if first and last else len(content)
        headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        return self.answer(206, content[start:stop], **headers)

    def do_POST(self):
        asked, key, body = self.asked()
        key = f"{key.rstrip('/')}" if key.endswith(asked["name"]) else f"{key}{asked['name']}"
        with self.lock:
            if asked.get("ifGenerationMatch") not in (None, self.generation(key)):
                return self.answer(412, {"error": {"code": 412}})
            Bucket.store[key] = MemoryFile(None, key, body)
            self.generations[key] = next(self.numbers)
            return self.answer(200, self.about(key))

    def do_DELETE(self):
        _, key, _ = self.asked()
        with self.lock:
            Bucket.store.pop(key, None)
        self.answer(204)


def begin() -> type[Bucket]:
    """Starts the server and has all that is asked of gs:// in this process go to memory."""
    for name in ("gcs", "gs"):
        fsspec.register_implementation(name, Bucket, clobber=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["TENSORSTORE_GCS_HTTP_URL"] = f"http://127.0.0.1:{server.server_port}"
    os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "of a test"
    return Bucket
