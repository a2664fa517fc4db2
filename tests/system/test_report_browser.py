"""The report as a reader meets it: in a real browser where there is one, and its structure in any
case.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from support.report_page import Page

from megarl.apps.runs.report import write_report
from megarl.apps.runs.report_compare import main as report_command
from megarl.observe.config import ObserveConfig
from megarl.observe.observer import Observer
from megarl.types import StepReport

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--allow-file-access-from-files",
    "--virtual-time-budget=5000",
    "--window-size=1400,1000",
    "--dump-dom",
]
TITLES = {
    *("Accuracy", "Reward", "Response length", "Time of a step", "Throughput", "Loss"),
    "Do trainer and engine agree?",
}
LONG = "1" * 3000 + "</script><script>document.documentElement.dataset.broken = 1</script>"

# The page in a frame as wide as the device: the frame's width is what the page's own rules see,
# whatever a browser's least width.
PROBE = """<!doctype html><meta charset="utf-8"><body><iframe style="border:0;width:%dpx;height:900px" src="report.html"></iframe>
<pre id="told"></pre><script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const errors = [], page = frame.contentDocument, root = page.documentElement;
  frame.contentWindow.addEventListener("error", event => errors.push(event.message));
  const tips = [...page.querySelectorAll(".plot")].map(plot => {
    const box = plot.getBoundingClientRect(), tip = plot.querySelector(".tip");
    plot.dispatchEvent(new frame.contentWindow.PointerEvent("pointermove", {clientX: box.left + box.width * .999}));
    const shown = tip.getBoundingClientRect();
    const told = {text: tip.innerText, inside: shown.left >= 0 && shown.right <= root.clientWidth, hidden: tip.hidden};
    plot.dispatchEvent(new frame.contentWindow.PointerEvent("pointerleave"));
    return {...told, gone: tip.hidden, height: box.height, width: box.width};
  });
  const overlaps = [...page.querySelectorAll(".x, .y")].filter(axis => {
    const boxes = [...axis.children].map(mark => mark.getBoundingClientRect());
    return boxes.some((a, i) => boxes.slice(i + 1).some(b =>
      a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom));
  }).length;
  const told = {errors, tips, overlaps, charts: root.dataset.charts, broken: root.dataset.broken || "", width: root.clientWidth,
    content: root.scrollWidth, titles: [...page.querySelectorAll("h3")].map(one => one.innerText),
    tiles: [...page.querySelectorAll(".tile")].map(one => one.innerText.replace(/\\s+/g, " ")),
    marks: [...page.querySelectorAll(".mark")].map(one => one.className)};
  document.getElementById("told").textContent = JSON.stringify(told);
};
</script>"""

NODE = shutil.which("node")
with_node = pytest.mark.skipif(NODE is None, reason="there is no node here")
with_browser = pytest.mark.skipif(BROWSER is None, reason="there is no browser here")
# The page's script with the least of a document: told are what it adds to each chart.
DRAW = """
const {script, steps, charts} = JSON.parse(require("fs").readFileSync(0));
class Element {
  constructor(tag) { Object.assign(this, {tag, children: [], dataset: {}}); this.style = {setProperty() {}}; }
  append(...added) { this.children.push(...added); }
  appendChild(added) { this.append(added); return added; }
  setAttribute(name, value) { this[name] = value; }
  addEventListener() {}
}
const figures = charts.map(chart => {
  const figure = new Element("figure");
  figure.querySelector = () => ({textContent: JSON.stringify(chart)});
  return figure;
});
const main = {dataset: {steps: JSON.stringify(steps)}};
const document = {documentElement: new Element("html"), querySelector: () => main, querySelectorAll: () => figures,
  createElement: tag => new Element(tag), createElementNS: (_, tag) => new Element(tag)};
new Function("document", script)(document);
const all = (from, tag) => (from.children || []).flatMap(one => one.tag === tag ? [one] : all(one, tag));
console.log(JSON.stringify(figures.map(one => ({lines: all(one, "path").map(path => [path.class, path.d]),
  labels: all(one, "span").map(span => span.textContent), legend: all(one, "li").map(li => li.children[1])}))));
"""


def learnt(step: int, accuracy: float) -> dict[str, float]:
    """The metrics that training and evaluation have in common."""
    return {
        "accuracy": accuracy, "reward/mean": 2 * accuracy - 1, "length/mean": 18 + step / 5
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run like that of the quick start: 60 steps, accuracy 0.15 to 0.99."""
    config = ObserveConfig(tensorboard=False, progress=False)
    with Observer(config, tmp_path, total_steps=60) as observer:

        def evaluate(step: int, accuracy: float) -> None:
            one = {"prompt": "347+589=", "answer": "936", "response": "#826", "tokens": 5}
            one |= {"correct": step > 0, "reward": -1.0}
            metrics = {f"eval/{name}": value for name, value in learnt(step, accuracy).items()}
            observer.evaluation(step, metrics, [one, one | {"prompt": LONG, "response": LONG}])

        evaluate(0, 0.15)
        for step in range(60):
            accuracy = 0.15 + 0.84 / (1 + math.exp(6 - step / 4))
            times = {"step": 1.2, "wait": 0.6, "train": 0.5, "publish": 0.05, "rollout": 0.9}
            metrics = learnt(step, accuracy) | {f"time/{k}_s": v for k, v in times.items()}
            metrics |= {"tokens/generated_per_s": 20e3, "tokens/trained_per_s": 25e3}
            metrics |= {"mismatch/mean_abs": 2e-6, "mismatch/max_abs": 3e-5, "loss": math.sin(step)}
            metrics["probe/max_abs"] = 1e-5 * (1 + step % 2)
            observer.step(StepReport(step, metrics))
        evaluate(60, 0.99)
    (tmp_path / "recipe.yaml").write_text(f"seed: 5\nlong: {LONG}\n")
    write_report(tmp_path, title="Three-digit sums")
    return tmp_path


def browse(folder: Path, profile: Path, width: int) -> dict[str, Any]:
    """What the probe says of the report at a width in CSS pixels."""
    (folder / "probe.html").write_text(PROBE % width)
    page = (folder / "probe.html").as_uri()
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={profile}", page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert console == []  # script errors and what the content policy refused
    found = re.search(r'<pre id="told">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(unescape(found[1]))


def check(titles: list[str], tiles: list[str], marks: list[str]) -> None:
    """What both ways of reading the page must find."""
    words = " ".join(" ".join(tiles).split())
    assert set(titles) >= TITLES and "15.0% → 99.0%" in words and "18.0 → 30.0" in words
    for told in ("Steps 60", "1 min 12 s", "20,000 tokens/s", "25,000 tokens/s"):
        assert told in words, words
    assert marks == ["mark wrong", "mark right"] * 2


def test_structure(run: Path) -> None:
    page = Page((run / "report.html").read_text(encoding="utf-8"))
    classes = [attributes.get("class") or "" for _, attributes in page.seen]
    check(list(page.charts), [page.text], [one for one in classes if one.startswith("mark")])
    for row in (row for chart in page.charts.values() for row in chart["series"]):
        assert len(row["steps"]) == len(row["values"]) > 0
        assert row["steps"] == sorted(row["steps"]) and all(0 <= at <= 60 for at in row["steps"])


def drawn_by_node(page: Page) -> dict[str, Any]:
    """{title: what the page's script adds to the chart, and is whole}"""
    (main,) = (attributes for tag, attributes in page.seen if tag == "main")
    steps = json.loads(main["data-steps"] or "")
    given = {"script": page.script, "steps": steps, "charts": list(page.charts.values())}
    done = subprocess.run(
        [str(NODE), "-e", DRAW], input=json.dumps(given), capture_output=True, text=True, check=True
    )
    drawn = dict(zip(page.charts, json.loads(done.stdout), strict=True))
    for title, one in drawn.items():
        assert one["legend"] == [row["label"] for row in page.charts[title]["series"]]
        assert len(one["lines"]) > len(one["legend"]), "a grid, and a line for each"
        for name, path in one["lines"]:
            assert re.fullmatch(r"([MLHVhz][-\d. ]*)+", path), (title, name, path[:80])
            spots = [float(at) for at in re.findall(r"[ML][\d.]+ (-?[\d.]+)", path)]
            assert spots and all(-1e-6 <= at <= 1000 + 1e-6 for at in spots), (title, name)
    return drawn


@with_node
def test_the_script_draws_what_it_is_given(run: Path) -> None:
    page = Page((run / "report.html").read_text(encoding="utf-8"))
    drawn = drawn_by_node(page)
    steps = [str(step) for step in range(0, 61, 10)]
    assert drawn["Accuracy"]["labels"] == ["0%", "20%", "40%", "60%", "80%", "100%", *steps]
    assert drawn["Throughput"]["labels"][-8] == "25k"
    gaps = drawn["Do trainer and engine agree?"]["labels"]
    assert gaps[:3] == ["1×10⁻⁶", "1×10⁻⁵", "1×10⁻⁴"]
    last = re.findall(r"[ML]([\d.]+) ([\d.]+)", drawn["Accuracy"]["lines"][2][1])[-1]
    accuracy = page.charts["Accuracy"]["series"][1]["values"][-1]
    assert float(last[0]) == pytest.approx(1000 * 60.5 / 61, abs=0.1)
    assert float(last[1]) == pytest.approx(1000 * (1 - accuracy), abs=0.1)


@with_browser
@pytest.mark.parametrize("width", [390, 820, 1280])
def test_in_a_browser(run: Path, tmp_path_factory: pytest.TempPathFactory, width: int) -> None:
    told = browse(run, tmp_path_factory.mktemp("profile"), width)
    assert told["errors"] == [] and told["broken"] == ""
    check(told["titles"], told["tiles"], told["marks"])
    assert int(told["charts"]) == len(told["titles"]) == len(told["tips"])
    assert told["width"] == width
    assert told["content"] <= width, "the page scrolls sideways"
    assert told["overlaps"] == 0, "labels of an axis overlap"
    for tip in told["tips"]:
        assert tip["text"].startswith("step ") and tip["inside"], tip
        assert not tip["hidden"] and tip["gone"], tip
        assert tip["height"] >= 180 and tip["width"] >= 250, tip
    assert "step 60" in told["tips"][0]["text"] and "99%" in told["tips"][0]["text"]


@pytest.fixture
def compared(run: Path, tmp_path: Path) -> Path:
    """The folder of a page, also named report.html, that compares the run with two seeds of another
    learning rate.
    """
    folders = [tmp_path / name for name in ("one", "two", "long_folder_name" * 4)]
    for seed, folder in enumerate(folders):
        shutil.copytree(run, folder, ignore=lambda *_: ["one", "two", "page"])
        lines = (run / "metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines[: 60 - 10 * seed]]
        changed = [one | {"accuracy": one["accuracy"] ** (1 + seed)} for one in metrics]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in changed))
        (folder / "recipe.yaml").write_text(f"seed: {seed}\nlearning_rate: {1e-4 * (seed < 2)}\n")
    (tmp_path / "page").mkdir()
    assert report_command([*map(str, folders), f"--out={tmp_path}/page/report.html"]) == 0
    return tmp_path / "page"


@with_node
def test_the_script_draws_a_band_of_seeds(compared: Path) -> None:
    page = Page((compared / "report.html").read_text(encoding="utf-8"))
    accuracy = drawn_by_node(page)["Accuracy in training"]
    bands = [path for name, path in accuracy["lines"] if name == "band"]
    assert accuracy["legend"] == ["learning_rate 0.0001 (2 runs)", "learning_rate 0.0"]
    assert len(bands) == 1, "of the two seeds"
    spots = re.findall(r"([\d.]+) ([\d.]+)", bands[0])
    assert len(spots) == 2 * 50 and spots[0][0] == spots[-1][0]
    assert all(float(spots[i][1]) <= float(spots[-1 - i][1]) for i in range(50))


@with_node
def test_the_script_draws_more_values_than_a_call_has_arguments(compared: Path) -> None:
    page = Page((compared / "report.html").read_text(encoding="utf-8"))
    one = page.charts["Accuracy in training"]
    many = one | {"series": one["series"] * 2000}
    page.charts = {"Accuracy in training": many}
    assert len(drawn_by_node(page)["Accuracy in training"]["legend"]) == 4000


@with_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_a_comparison_in_a_browser(
    compared: Path, tmp_path_factory: pytest.TempPathFactory, width: int
) -> None:
    told = browse(compared, tmp_path_factory.mktemp("profile"), width)
    assert told["errors"] == [] and int(told["charts"]) == len(told["tips"]) > 5
    assert told["content"] <= width, "the page scrolls sideways"
    assert told["overlaps"] == 0, "labels of an axis overlap"
    for tip in told["tips"]:
        assert tip["text"].startswith("step ") and tip["inside"], tip
