"""A headless Chromium, driven over its DevTools protocol through a pipe: no package is needed for it.

Where one is: the environment's JAXTHRU_CHROMIUM, or a usual name on the PATH (Debian: `apt-get install
chromium-headless-shell`).
"""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = (
    *("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser"),
    *("google-chrome", "google-chrome-stable"),
)


def find() -> str | None:
    """Returns a Chromium, None where none is found. A variable that names no program is an error."""
    if named := os.environ.get("JAXTHRU_CHROMIUM"):
        found = shutil.which(named)
        assert found, f"JAXTHRU_CHROMIUM = {named}: no such program"
        return found
    return next((found for name in NAMES if (found := shutil.which(name))), None)


EXEC = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""A browser reads commands from its file 3 and answers on 4."""


class Page:
    """A page in a browser. errors: what went wrong on it, and every request that it made beyond itself."""

    def __init__(self, to: int, back: int):
        self._to, self._back = to, back
        self._buffer, self._number = b"", 0
        self.session: str | None = None
        self.errors: list[str] = []

    def call(self, method: str, **parameters) -> dict[str, Any]:
        """Returns the answer to a command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            got = os.read(self._back, 1 << 16)
            assert got, "Chromium ended"
            self._buffer += got
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, said = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(said["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.errors.append(str(said["args"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.errors.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not said["request"]["url"].startswith(
            ("file:", "data:")
        ):
            self.errors.append(f"a request for {said['request']['url']}")

    def show(self, path: Path, width: int, height: int = 900, scheme: str = "light") -> None:
        """Loads a file and waits for it."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Page.navigate", url=path.as_uri())
        self.run(
            "new Promise(done => document.readyState == 'complete' ? done() : addEventListener('load', done))"
        )

    def run(self, script: str) -> Any:
        """Returns what a script gives, as JSON holds it."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def point(self, x: float, y: float) -> None:
        """Moves the mouse to a place in the viewport."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        """Writes a PNG of the whole page."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def open_page(program: str, profile: Path) -> Iterator[Page]:
    """Gives an empty page; ends the browser after. profile: a folder for the browser's files."""
    down, up = os.pipe(), os.pipe()
    options = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"),
        *("--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={profile}", "about:blank"),
    )
    process = subprocess.Popen(
        [sys.executable, "-c", EXEC, str(down[0]), str(up[1]), program, *options],
        pass_fds=(down[0], up[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(down[0])
    os.close(up[1])
    try:
        page = Page(down[1], up[0])
        target = page.call("Target.createTarget", url="about:blank")["targetId"]
        page.session = page.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        yield page
    finally:
        process.terminate()
        process.wait(timeout=30)
        os.close(down[1])
        os.close(up[0])
