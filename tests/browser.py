"""Chromium without a screen, over the DevTools protocol on two pipes: nothing but the standard library.

Device widths below a window's least, media features and console messages are out of reach of
--screenshot and --dump-dom.
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SECONDS = 60.0
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip

# It reads commands from its descriptor 3 and answers on 4; until then those may be anybody's.
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)


class Browser:
    """One tab. `messages`: what the console, the log and failed requests said since `open`."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """Load a file into a viewport of that many CSS pixels and wait until it is there."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=scale, mobile=width < 600)  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.messages, self.requests, self._loaded = [], [], False
        self.call("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._event()

    def evaluate(self, expression: str) -> Any:
        """The value of a script. DevTools may run one where the page's policy forbids all."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        request: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            request["sessionId"] = self._session
        data = json.dumps(request).encode() + b"\0"
        while data:
            data = data[os.write(self._writing, data) :]
        while True:
            message = self._event()
            if message.get("id") == self._number:
                if "error" in message:
                    raise AssertionError(f"{method}: {message['error']}")
                return message["result"]

    def _event(self) -> dict[str, Any]:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self._reading, 1 << 20) if ready else b""
            if not data:
                raise AssertionError("chromium ended or did not answer")
            self._buffer += data
        first, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, parameters: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(f"console: {parameters['args']}")
        elif method == "Runtime.exceptionThrown":
            self.messages.append(f"exception: {parameters['exceptionDetails']}")
        elif method == "Log.entryAdded":
            self.messages.append(f"log: {parameters['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    inside = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (commands, answers)]
    os.close(commands)
    os.close(answers)

    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, inside), CHROMIUM, *FLAGS,
             f"--user-data-dir={profile}"],
            pass_fds=inside, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in inside:
            os.close(fd)
        try:
            yield Browser(from_browser, to_browser)
        finally:
            process.kill()
            process.wait()
            os.close(from_browser)
            os.close(to_browser)
