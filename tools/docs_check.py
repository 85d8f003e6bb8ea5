"""Checks the built site in a headless Chromium: `make docs-check`, or `python tools/docs_check.py` after `make docs`.

Each page is opened at 400 and at 1400 pixels, light and dark. The check fails if a link leads nowhere, if the page or a
table is wider than the window and cannot be scrolled, if the console has an error or a file is missing, or if the search
does not find a page of `SEARCHES`. `--shots FOLDER` keeps pictures.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import http.server
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from urllib.parse import unquote, urljoin

import pictures
import typer
from tornado.websocket import websocket_connect

SITE = Path(__file__).resolve().parent.parent / "build" / "site"
WIDTHS = (400, 1400)
SCHEMES = ("light", "dark")
PATIENCE = 60.0  # seconds for what a page is to come to by itself: a busy machine is slow, and not wrong
SEARCHES = {  # what people look for, and the page that is to be among the first three hits
    "AMD": "quickstart.html",
    "autocast": "modules.html",
    "CUDA graph": "graphs.html",
    "custom CUDA kernel": "index.html",
    "Docker": "shipping.html",
    "Failed to find C compiler": "troubleshooting.html",
    "fine-tune": "models.html",
    "FAQ": "faq.html",
    "flash attention": "attention.html",
    "fused": "operators/fused_linear_cross_entropy.html",
    "generate": "generate.html",
    "GitHub Actions": "ci.html",
    "illegal memory access": "troubleshooting.html",
    "inference": "attention.html",
    "install": "quickstart.html",
    "Jupyter": "notebooks.html",
    "Kernel": "api/kernels.html",
    "KV cache": "attention.html",
    "layer_norm": "operators/layer_norm.html",
    "load_inline": "coming_from.html",
    "mixed precision": "modules.html",
    "multi-GPU": "distributed.html",
    "NumPy": "arrays.html",
    "out of memory": "troubleshooting.html",
    "race condition": "index.html",
    "segfault": "troubleshooting.html",
    "teaching": "teach.html",
    "torch.compile": "compile.html",
    "Triton": "coming_from.html",
    "Windows": "quickstart.html",
}

WIDE = """(() => {
  const wide = [];
  const root = document.scrollingElement;
  if (root.scrollWidth > window.innerWidth + 1) wide.push(`the page is ${root.scrollWidth} wide`);
  const held = (e) => {  // by something that scrolls or clips
    for (let up = e.parentElement; up && up !== document.body; up = up.parentElement)
      if (getComputedStyle(up).overflowX !== "visible") return up;
    return null;
  };
  for (const e of document.querySelectorAll("article table, article img, article pre")) {
    const box = e.getBoundingClientRect();
    if (box.right > window.innerWidth + 1 && !held(e)) wide.push(`${e.tagName} ends at ${Math.round(box.right)}`);
    const by = held(e);
    if (window.innerWidth > 1000 && e.tagName === "TABLE" && by && by.scrollWidth > by.clientWidth + 1)
      wide.push(`a table of ${e.rows[0].cells.length} columns is cut: ${e.rows[0].innerText.slice(0, 60)}`);
  }
  return wide;
})()"""
FORGET = "Storage.prototype.setItem = () => {}"
SCHEME = """({default: "light", slate: "dark"})[document.body.dataset.mdColorScheme]"""
BROKEN = '[...document.images].filter(i => i.complete && !i.naturalWidth && i.getAttribute("src")).map(i => i.src)'
BOX = """(document.activeElement.shadowRoot ?? document).activeElement?.tagName === 'INPUT'"""
# a click that comes before the button is listened to is lost: once a second another
OPEN = f"""((now) => {{
  if (!({BOX}) && now - (window.clicked ?? -1000) >= 1000) {{
    window.clicked = now;
    document.querySelector("button.md-search__button")?.click();
  }}
  return {BOX};
}})(performance.now())"""
TYPE = """((text) => {
  const box = (document.activeElement.shadowRoot ?? document).activeElement;
  if (box?.tagName !== "INPUT") return `no search box, but ${document.activeElement.outerHTML.slice(0, 200)}`;
  box.value = text;
  box.dispatchEvent(new Event("input", {bubbles: true}));
  return "";
})"""
HITS = """[...(document.activeElement.shadowRoot ?? document).querySelectorAll("a")]
  .map((a) => a.href + " " + a.innerText.replace(/\\s+/g, " ")).slice(0, 3)"""


class Links(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {name for name in (given.get("id"), given.get("name")) if name}
        self.links += [link for link in (given.get("href"), given.get("src")) if link]


def broken_links(site: Path) -> Iterator[str]:
    """Links within the site that lead nowhere, anchors among them."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path.relative_to(site).as_posix()] = links = Links()
        links.feed(path.read_text(encoding="utf-8"))
    for name, page in pages.items():
        for link in page.links if name != "404.html" else []:
            if ":" in link.split("/")[0] or link.startswith("//"):
                continue
            place = unquote(urljoin(f"http://site/{name}", link)).removeprefix("http://site/")
            target, _, anchor = place.partition("#")
            target = target.partition("?")[0] or "index.html"
            if not (site / target).exists():
                yield f"{name}: {link} leads nowhere"
            elif anchor and target in pages and anchor not in pages[target].anchors | {"__search", "__drawer"}:
                yield f"{name}: {link} has no such anchor"


class Browser:
    """A page of Chromium, by its DevTools protocol."""

    def __init__(self, connection: Any, patience: float = PATIENCE) -> None:
        self.connection, self.patience, self.numbers = connection, patience, itertools.count(1)
        self.events: list[dict[str, Any]] = []

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command; what arrives before it is kept in `events`."""
        number = next(self.numbers)
        await self.connection.write_message(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(await self.connection.read_message())
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return dict(message["result"])
            self.events.append(message)

    async def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = await self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    async def until(self, expression: str) -> bool:
        """Wait until an expression is true in the page; False if patience ends before."""
        end = time.monotonic() + self.patience
        while not (true := bool(await self.js(expression))) and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return true

    async def open(self, url: str, width: int, scheme: str) -> list[str]:
        """Open a page; return the errors of its console and its requests."""
        # a navigation is answered before the page before it is gone, and what is emulated then may be for that one
        await self.ask("Page.navigate", url="about:blank")
        await self.until("location.href === 'about:blank'")
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        await self.ask("Emulation.setDeviceMetricsOverride", **size)
        await self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await self.until(f"matchMedia('(prefers-color-scheme: {scheme})').matches && window.innerWidth === {width}")
        self.events.clear()
        await self.ask("Page.navigate", url=url)
        if not await self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'"):
            return [*self.complaints(), f"it is not complete after {self.patience:g} s"]
        return list(self.complaints())

    def complaints(self) -> Iterator[str]:
        for event in self.events:
            about = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                details = about["exceptionDetails"]
                yield str(details.get("exception", {}).get("description", details["text"]))
            elif event.get("method") == "Log.entryAdded" and about["entry"]["level"] == "error":
                yield f"{about['entry']['text']} {about['entry'].get('url', '')}"

    async def shot(self, path: Path) -> None:
        """A picture of the whole page, or of the first ten windows of it."""
        width, height = await self.js("[window.innerWidth, document.scrollingElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, 10_000), "scale": 1}
        answer = await self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))

    async def hits(self, base: str, text: str) -> list[str]:
        """The first three hits of the search."""
        await self.open(f"{base}/index.html", 1400, "light")
        await self.until(OPEN)
        if problem := await self.js(f"{TYPE}({json.dumps(text)})"):
            return [problem]
        await self.until(f"{HITS}.length > 0")
        found = None
        while found != (now := list(await self.js(HITS) or [])):  # until they stay as they are
            found = now
            await asyncio.sleep(0.3)
        return now


def serve(site: Path) -> tuple[http.server.ThreadingHTTPServer, str]:
    """The site on a free port of this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}"


async def look(port: int, base: str, disk: str, pages: list[str], shots: Path | None, patience: float) -> list[str]:
    """The faults of the pages and of the search, by the browser that listens on `port`."""
    target = json.loads(await fetch(f"http://127.0.0.1:{port}/json/new?about:blank"))
    browser = Browser(await websocket_connect(target["webSocketDebuggerUrl"], max_message_size=1 << 28), patience)
    for domain in ("Page", "Runtime", "Log"):
        await browser.ask(f"{domain}.enable")
    # a page stores its scheme; one that is left does so again when it sees the scheme change, while the next one begins
    await browser.ask("Page.addScriptToEvaluateOnNewDocument", source=FORGET)
    found = []
    for page, width, scheme in itertools.product(pages, WIDTHS, SCHEMES):
        where = f"{page} at {width}, {scheme}"
        found += [f"{where}: {text}" for text in await browser.open(f"{base}/{page}", width, scheme)]
        if not await browser.until(f"[{json.dumps(scheme)}, undefined].includes({SCHEME})"):
            found.append(f"{where}: the page is shown in the other scheme")
        if scheme == "light":
            found += [f"{where}: {text}" for text in await browser.js(WIDE)]
            found += [f"{where}: {url} shows nothing" for url in await browser.js(BROKEN)]
        if shots is not None:
            await asyncio.sleep(0.3)
            await browser.shot(shots / f"{page.removesuffix('.html').replace('/', '_')}_{width}_{scheme}.png")
    for where, (text, wanted) in [*((base, one) for one in SEARCHES.items()), (disk, ("layer_norm", "layer_norm"))]:
        hits = await browser.hits(where, text)
        if not any(wanted in hit for hit in hits):
            found.append(f"the search for {text} in {where} finds first: {hits}")
        if shots is not None:
            await browser.shot(shots / f"search_{text}.png")
    return found


async def fetch(url: str) -> str:
    """The answer to a PUT request to the browser's own interface."""
    from tornado.httpclient import AsyncHTTPClient

    answer = await AsyncHTTPClient().fetch(url, method="PUT", body=b"")
    return str(answer.body.decode())


def in_browser(
    chromium: str, site: Path, pages: list[str], shots: Path | None = None, patience: float = PATIENCE
) -> list[str]:
    """The faults that a browser finds in pages of a site."""
    server, base = serve(site)
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"]
        process = subprocess.Popen([chromium, *options, f"--user-data-dir={profile}"], stderr=subprocess.DEVNULL)
        try:
            note = Path(profile, "DevToolsActivePort")
            end = time.monotonic() + PATIENCE
            while not (note.exists() and note.read_text(encoding="utf-8").count("\n")) and time.monotonic() < end:
                time.sleep(0.05)
            port = int(note.read_text(encoding="utf-8").splitlines()[0])
            return asyncio.run(look(port, base, site.as_uri(), pages, shots, patience))
        finally:
            process.terminate()
            process.wait(timeout=30)
            server.shutdown()


def check(
    pages: Annotated[list[str] | None, typer.Argument(help="Pages such as speed.html; without any, all.")] = None,
    shots: Annotated[Path | None, typer.Option(help="A folder for pictures of each page.")] = None,
    site: Annotated[Path, typer.Option(help="The built site.")] = SITE,
) -> None:
    """Look at the site; exit code 1 where something is wrong."""
    found = list(broken_links(site))
    chromium = pictures.browser()
    if chromium is None:
        print("No Chromium was found, so links alone were checked: install it, as with `apt-get install chromium`.")
    else:
        if shots is not None:
            shots.mkdir(parents=True, exist_ok=True)
        every = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")
        found += in_browser(chromium, site, pages or every, shots)
    print(*found, sep="\n")
    print(f"{len(found)} faults" if found else "No faults.")
    sys.exit(bool(found))


if __name__ == "__main__":
    typer.run(check)
