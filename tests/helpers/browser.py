"""A headless Chromium, spoken to over a pipe (DevTools protocol): no driver, no package."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--disable-dev-shm-usage --remote-debugging-pipe"
).split()

NAVIGATED = "Inspected target navigated or closed"


class Browser:
    """One page of a running Chromium."""

    def __init__(self, requests: int, answers: int) -> None:
        self.requests, self.answers = requests, answers
        self.number, self.left, self.session = 0, b"", ""
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.requests, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(found["params"]["exceptionDetails"]))
            if found.get("method") == "Log.entryAdded":
                self.problems.append(found["params"]["entry"]["text"])
            if found.get("id") == self.number:
                if found.get("error", {}).get("message") == NAVIGATED:
                    return {"result": {}}  # asked while one page gave way to the next: no value
                assert "error" not in found, found["error"]
                return found["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.left:
            more = os.read(self.answers, 2**16)
            assert more, "the browser has ended"
            self.left += more
        message, self.left = self.left.split(b"\0", 1)
        return json.loads(message)

    def open(self, address: str, width: int = 1366, height: int = 768, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.navigate", url=address)

    def evaluate(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 60) -> None:
        """Until the script says true."""
        end = time.monotonic() + seconds
        while not self.evaluate(script):
            said = self.evaluate("document.getElementById('status')?.textContent")
            assert time.monotonic() < end, f"waited in vain for {script}: {said} {self.problems}"
            time.sleep(0.05)

    def drag(self, name: str, points: list[tuple[float, float]]) -> None:
        """Press, move and release the mouse at shares of an element's width and height."""
        script = (
            f"(({{left, top, width, height}}) => [left, top, width, height])"
            f"(document.getElementById('{name}').getBoundingClientRect())"
        )
        left, top, width, height = self.evaluate(script)
        pixels = [(left + width * x, top + height * y) for x, y in points]
        for index, (x, y) in enumerate(pixels):
            kind = "mouseMoved" if index else "mousePressed"
            self._mouse(kind, x, y)
        self._mouse("mouseReleased", *pixels[-1])

    def point(self, name: str, x: float, y: float) -> None:
        self.drag(name, [(x, y), (x, y)])

    def _mouse(self, kind: str, x: float, y: float) -> None:
        self.call(
            "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1, buttons=1
        )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    assert CHROMIUM is not None
    # Away from 3 and 4, where the browser expects its two ends.
    child_reads, we_write = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in os.pipe())
    we_read, child_writes = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in os.pipe())

    def connect() -> None:
        os.dup2(child_reads, 3)
        os.dup2(child_writes, 4)

    process = subprocess.Popen(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
        preexec_fn=connect,
        pass_fds=(3, 4),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(child_reads)
    os.close(child_writes)
    try:
        yield Browser(we_write, we_read)
    finally:
        process.terminate()
        process.wait(20)
        os.close(we_write)
        os.close(we_read)
