"""The documentation's site as a reader with a phone meets it, in a real browser."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.util
import json
import queue
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import BROWSER, FLAGS, with_browser
from support.commands import python

OPTIONS = [
    *FLAGS,
    # A request to another machine fails, and the console says so.
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
PAGES = (
    *("index.html", "source/index.html", "tutorials/own_reward.html", "howto/read_run_folder.html"),
    *("concepts/system.html", "reference/rl.html", "results/layouts.html", "404.html"),
)
# Each page in a frame as wide as a phone; what is found there is posted to the server.
PROBE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><body><script>
const until = async found => {
  for (let i = 0; i < 200 && !found(); i++) await new Promise(done => setTimeout(done, 50));
  return found();
};
const look = async page => {
  const frame = document.createElement("iframe");
  frame.style = "border:0;width:390px;height:844px";
  frame.src = page;
  await new Promise(done => { frame.onload = done; document.body.append(frame); });
  const inside = frame.contentDocument, root = inside.documentElement;
  const all = (what, of = inside) => [...of.querySelectorAll(what)];
  const links = () => all(".md-sidebar--primary a[href]")
    .filter(one => getComputedStyle(one).visibility === "visible").length;
  const boxes = all(".md-typeset__scrollwrap").filter(one => one.scrollWidth > one.clientWidth);
  const menu = inside.querySelector("header [for=__drawer]");
  await until(() => menu.tabIndex === 0 && boxes.every(one => one.tabIndex === 0));
  const told = {width: root.clientWidth, content: root.scrollWidth, menu: menu.tabIndex, closed: links(),
    unreached: boxes.filter(one => one.tabIndex !== 0).length, boxes: boxes.length,
    broken: [...inside.images].filter(one => !one.naturalWidth).map(one => one.src),
    outside: frame.contentWindow.performance.getEntriesByType("resource").map(one => one.name)
      .filter(one => !one.startsWith(location.origin) && !one.startsWith("data:"))};
  if (page === "index.html") {
    const asked = inside.querySelector(".md-search__input");
    asked.focus();
    asked.value = "staleness";
    asked.dispatchEvent(new frame.contentWindow.KeyboardEvent("keyup"));
    await until(() => all(".md-search-result__item a").length);
    told.found = all(".md-search-result__item a").map(one => one.href);
    asked.blur();
  }
  menu.click();
  told.open = links();
  frame.remove();
  return told;
};
(async () => {
  const told = {};
  for (const page of %s) told[page] = await look(page);
  return told;
})().catch(error => ({error: String(error)}))
  .then(told => fetch("told", {method: "POST", body: JSON.stringify(told)}));
</script>"""


class Site(http.server.SimpleHTTPRequestHandler):
    """Serves the built pages; what the probe posts is put into `told`."""

    def __init__(self, *given: Any, told: queue.Queue[Any], **named: Any) -> None:
        self.told = told
        super().__init__(*given, **named)

    def do_POST(self) -> None:
        self.told.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """No line for each request."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[str, queue.Queue[Any]]]:
    """The address of a server of `folder`, and what is posted to it."""
    told = queue.Queue[Any]()
    handler = functools.partial(Site, directory=str(folder), told=told)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", told
        server.shutdown()


@pytest.mark.nightly
@with_browser
@pytest.mark.skipif(
    importlib.util.find_spec("material") is None,
    reason="mkdocs-material is not installed: bash launch/env.sh",
)
def test_pages_at_390_pixels(tmp_path: Path) -> None:
    site, errors = tmp_path / "site", tmp_path / "errors.txt"
    done = python("-m", "mkdocs", "build", "-f", "tools/mkdocs.yml", "-d", str(site))
    assert done.returncode == 0, done.stderr
    (site / "probe.html").write_text(PROBE % json.dumps(PAGES))
    with served(site) as (address, posted), errors.open("w") as console:
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        browser = subprocess.Popen(
            [str(BROWSER), *OPTIONS, profile, f"{address}probe.html"], stderr=console
        )
        try:
            told = posted.get(timeout=60)
        except queue.Empty:
            pytest.fail(errors.read_text()[-3000:])
        finally:
            browser.terminate()
            browser.wait(timeout=20)
    assert [line for line in errors.read_text().splitlines() if "CONSOLE" in line] == []
    assert tuple(told) == PAGES, told
    assert "concepts/weights.html" in str(told["index.html"]["found"])
    assert told["reference/rl.html"]["boxes"] > 3, "its tables are wider than a phone"
    for page, one in told.items():
        assert one["content"] <= one["width"] <= 390, f"{page} scrolls sideways"
        assert one["broken"] == one["outside"] == [], page
        assert one["menu"] == 0 and one["unreached"] == 0, f"{page}: not reached by the keyboard"
        assert one["closed"] == 0 and one["open"] > 1, (
            f"{page}: links of the menu are hidden with it"
        )
