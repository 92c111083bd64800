"""A browser for tests: Debian's chromium without a window, told what to do through two pipes (the DevTools protocol).

The pipe needs no port, no driver and no package. What the page prints to the console and asks of the network is noted.
"""

import base64
import io
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

FOUND = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-gpu",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
)


class Chromium:
    """A running browser with one tab."""

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="nomax-chromium-", ignore_cleanup_errors=True)
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # which chromium refuses to root
        command = [str(FOUND), *FLAGS, *sandbox, f"--user-data-dir={self._home.name}", "about:blank"]
        self._log = Path(self._home.name, "stderr.txt")
        with self._log.open("wb") as log:
            # The browser reads from 3 and writes to 4; what it prints must not come between.
            self._process = subprocess.Popen(
                ["sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >&2', "sh", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "HOME": self._home.name},
            )
        self._unread = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def close(self) -> None:
        """End the browser, and wait until it has ended."""
        try:
            self._session = None
            self.ask("Browser.close")
        except (OSError, EOFError):
            pass  # it was faster than its answer
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._home.cleanup()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol, and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        self._process.stdin.flush()
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, path: Path, width: int, height: int = 900, dark: bool = False, media: str = "") -> None:
        """Show a page in a window of this size, and wait until it is there."""
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.events.clear()
        self.ask("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())
        self.evaluate("Promise.all(Array.from(document.images, (image) => image.decode())).then(() => true)")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def click(self, element: str) -> None:
        """Click with the mouse on the middle of what a JavaScript expression gives."""
        self.evaluate(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.evaluate(f"{element}.getBoundingClientRect().toJSON()")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key and let it go."""
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def picture(self, whole: bool = False) -> bytes:
        """What is seen of the page, or all of it, as PNG."""
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])

    def pdf(self) -> bytes:
        """The page as it is printed on A4."""
        size = {"paperWidth": 210 / 25.4, "paperHeight": 297 / 25.4}
        return base64.b64decode(self.ask("Page.printToPDF", printBackground=False, **size)["data"])

    def complaints(self) -> list[str]:
        """What the console has had to say about the page since it was opened."""
        self.evaluate("null")  # so that what was said until now has arrived
        found = []
        for event in self.events:
            content = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(content["exceptionDetails"]))
            elif event.get("method") == "Runtime.consoleAPICalled":
                found.append(str(content["args"]))
            elif event.get("method") == "Log.entryAdded":
                found.append(content["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """The addresses that the page has asked for since it was opened."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def _read(self) -> dict[str, Any]:
        pipe = self._process.stdout
        assert isinstance(pipe, io.BufferedReader)
        while b"\0" not in self._unread:
            more = pipe.read1(1 << 20)
            if not more:
                raise EOFError(f"chromium has ended: {self._log.read_text(errors='replace')[-2000:]}")
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
