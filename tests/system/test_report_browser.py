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
from support.browser import BROWSER, FLAGS, with_browser
from support.report_page import Page

from megarl.apps.runs.report import main as report_command
from megarl.apps.runs.report import write_report
from megarl.observe.observer import Observer
from megarl.settings.observe import ObserveConfig
from megarl.types import StepReport

OPTIONS = [
    *FLAGS,
    "--hide-scrollbars",
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

# The page in frames as wide as a device: a frame's width is what the page's own rules see, whatever
# a browser's least width. The last frame runs no script.
PROBE = """<!doctype html><meta charset="utf-8"><body><pre id="told"></pre><script>
const facts = frame => {
  const page = frame.contentDocument, inside = frame.contentWindow, root = page.documentElement;
  const all = (names, from = page) => [...from.querySelectorAll(names)], texts = names => all(names).map(one => one.innerText);
  const tips = all(".plot").map(plot => {
    const box = plot.getBoundingClientRect(), tip = plot.querySelector(".tip");
    plot.dispatchEvent(new inside.PointerEvent("pointermove", {clientX: box.left + box.width * .999}));
    const shown = tip.getBoundingClientRect();
    const told = {text: tip.innerText, inside: shown.left >= 0 && shown.right <= root.clientWidth, hidden: tip.hidden};
    plot.dispatchEvent(new inside.PointerEvent("pointerleave"));
    return {...told, gone: tip.hidden, height: box.height, width: box.width};
  });
  const overlaps = all(".x, .y, .steps").filter(axis => {
    const boxes = [...axis.children].map(mark => mark.getBoundingClientRect());
    return boxes.some((a, i) => boxes.slice(i + 1).some(b =>
      a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom));
  }).length;
  const wide = all(".chart, .problem, .tools, .y span").filter(one => {
    const box = one.getBoundingClientRect();
    return box.left < 0 || box.right > root.clientWidth;
  }).length;
  inside.focus();
  const unseen = all("a, button, input, select, summary, [tabindex]").filter(one => {
    one.focus();
    const style = inside.getComputedStyle(one);
    return one.checkVisibility() && !(page.activeElement === one && style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2);
  }).map(one => one.outerHTML.slice(0, 99));
  return {tips, overlaps, wide, unseen, charts: root.dataset.charts, broken: root.dataset.broken || "", width: root.clientWidth,
    content: root.scrollWidth, loaded: inside.performance.getEntriesByType("resource").length, titles: texts("h3"),
    tiles: texts(".tile").map(one => one.replace(/\\s+/g, " ")), marks: all(".pair .mark").map(one => one.className)};
};

// What a reader does: smooths, chooses steps by the fields and with the mouse, chooses rollouts.
const acts = frame => {
  const page = frame.contentDocument, inside = frame.contentWindow, told = {};
  const [legend, axis, plot] = [".legend", ".x", ".plot"].map(name => page.querySelector("figure.chart " + name));
  const set = (name, value, kind) => {
    const field = page.querySelector(`[aria-label="${name}"]`);
    field.value = value;
    field.dispatchEvent(new inside.Event(kind, {bubbles: true}));
  };
  const steps = () => [...axis.children].map(one => one.innerText);
  told.smooth = legend.innerText;
  set("smoothing", "11", "change");
  told.smoother = legend.innerText;
  set("smoothing", "1", "change");
  told.raw = legend.innerText;
  set("first step shown", "10", "change");
  set("last step shown", "20", "change");
  told.few = steps();
  page.querySelector("#tools button").click();
  told.all = steps();
  const box = plot.getBoundingClientRect(), mouse = (kind, part) => plot.dispatchEvent(new inside.PointerEvent(kind,
    {clientX: box.left + part * box.width, pointerType: "mouse", button: 0, pointerId: 1}));
  plot.setPointerCapture = () => {};  // there is no such pointer
  mouse("pointerdown", .5);
  mouse("pointermove", .75);
  mouse("pointerup", .75);
  told.dragged = steps();
  plot.dispatchEvent(new inside.MouseEvent("dblclick"));
  told.again = steps();
  const list = [...page.querySelectorAll(".browse")].at(-1), said = () => list.querySelector("output").innerText;
  const shown = () => [...list.querySelectorAll(".problem")].filter(one => !one.hidden).map(one => one.querySelector("small").innerText);
  const choose = (name, value) => {
    const field = list.querySelector(`[aria-label="${name}"]`);
    if (!field) return;
    field.value = value;
    field.dispatchEvent(new inside.Event("input", {bubbles: true}));
  };
  if (!list) return told;
  told.first = [said(), shown()];
  list.querySelector(".more").click();
  told.more = said();
  for (const [name, value] of [["step, at least", 30], ["step, at most", 31], ["source", "b"]]) choose(name, value);
  told.chosen = [said(), shown()];
  for (const name of ["step, at least", "step, at most", "source"]) choose(name, "");
  choose("order", "-2");
  told.highest = shown()[0];
  choose("text that the item contains", "#591");
  told.found = said();
  return told;
};

const view = (width, sandbox) => new Promise(done => {
  const frame = document.createElement("iframe");
  Object.assign(frame.style, {border: 0, width: width + "px", height: "900px"});
  if (sandbox) frame.sandbox = sandbox;
  frame.onload = () => done(frame);
  frame.src = "report.html";
  document.body.append(frame);
});
(async () => {
  const told = {errors: []};
  for (const width of WIDTHS) {
    const frame = await view(width);
    frame.contentWindow.addEventListener("error", event => told.errors.push(event.message));
    told[width] = facts(frame);
    if (width === WIDTHS.at(-1)) told.acts = acts(frame);
  }
  const plain = (await view(390, "allow-same-origin")).contentDocument;
  told.plain = {text: plain.body.innerText, content: plain.documentElement.scrollWidth, lists: [...plain.querySelectorAll(".browse")].map(list =>
    [list.offsetHeight, [...list.querySelectorAll(".problem")].filter(one => one.checkVisibility()).length])};
  document.getElementById("told").textContent = JSON.stringify(told);
})();
</script>"""

NODE = shutil.which("node")
with_node = pytest.mark.skipif(NODE is None, reason="there is no node here")
# The page's script with the least of a document: told are what it adds to each chart.
DRAW = """
const {script, steps, charts} = JSON.parse(require("fs").readFileSync(0));
class Element {
  constructor(tag) { Object.assign(this, {tag, children: [], dataset: {}}); this.style = {setProperty() {}}; }
  append(...added) { this.children.push(...added); }
  appendChild(added) { this.append(added); return added; }
  replaceChildren() { this.children = []; }
  setAttribute(name, value) { this[name] = value; }
  addEventListener() {}
}
const figures = charts.map(chart => {
  const figure = new Element("figure");
  figure.querySelector = () => ({textContent: JSON.stringify(chart)});
  return figure;
});
const main = {dataset: {steps: JSON.stringify(steps)}};
const document = {documentElement: new Element("html"), querySelector: name => name === "main" ? main : null,
  querySelectorAll: name => name === "figure.chart" ? figures : [],
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


def said(response: str, reward: float) -> dict[str, Any]:
    """A rollout of a transcript."""
    return {"response": response, "reward": reward, "correct": reward > 300, "tokens": 9}


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
            metrics |= {"probe/max_abs": 1e-5 * (1 + step % 2), "own/idea": step / 60}
            observer.step(StepReport(step, metrics))
            rollouts = [said(f"#{step}{one}", step * 10 + one) for one in range(2)]
            for source in "ab":
                group = {"ordinal": step, "prompt": "1+1=", "answer": "2", "environment": source}
                observer.transcripts(step, [group | {"rollouts": rollouts}])
        evaluate(60, 0.99)
    (tmp_path / "recipe.yaml").write_text(f"seed: 5\nlong: {LONG}\n")
    write_report(tmp_path, title="Three-digit sums")
    return tmp_path


def browse(folder: Path, profile: Path, widths: list[int]) -> dict[str, Any]:
    """What the probe says of the report at these widths in CSS pixels, and of what a reader does at
    the last one.
    """
    (folder / "probe.html").write_text(PROBE.replace("WIDTHS", json.dumps(widths)))
    page = (folder / "probe.html").as_uri()
    command = [str(BROWSER), *OPTIONS, f"--user-data-dir={profile}", page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    # What the frame without scripts says of that is no error of the page.
    console = [line for line in console if "the document's frame is sandboxed" not in line]
    assert console == []  # script errors and what the content policy refused
    found = re.search(r'<pre id="told">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    told = json.loads(unescape(found[1]))
    assert told["errors"] == []
    for width in widths:
        one = told[str(width)]
        assert one["width"] == width and one["broken"] == "" and one["loaded"] == 0
        assert one["content"] <= width and one["wide"] == 0, "the page scrolls sideways"
        assert one["overlaps"] == 0, "labels of an axis overlap"
        assert one["unseen"] == [], "the keyboard's focus is not seen"
        assert int(one["charts"]) == len(one["tips"]) > 5
        for tip in one["tips"]:
            assert tip["text"].startswith("step ") and tip["inside"], tip
            assert not tip["hidden"] and tip["gone"], tip
            assert tip["height"] >= 180 and tip["width"] >= 240, tip
    assert told["plain"]["content"] <= 390
    return told


def check(titles: list[str], tiles: list[str], marks: list[str]) -> None:
    """What both ways of reading the page must find."""
    words = " ".join(" ".join(tiles).split())
    assert set(titles) >= TITLES and "15.0% → 99.0%" in words and "18.0 → 30.0" in words
    for told in ("Steps 60", "1 min 12 s", "20,000 tokens/s", "25,000 tokens/s"):
        assert told in words, words
    assert marks == ["mark wrong", "mark right"] * 2, marks


def colours(page: str) -> list[dict[str, str]]:
    """The page's colours, {name: #rrggbb}, by day and by night."""
    found = [dict(re.findall(r"--([a-z]+\d*):(#[0-9a-f]+)", part)) for part in page.split("@media")]
    whole = [{k: "#" + "".join(c * (6 // (len(v) - 1)) for c in v[1:]) for k, v in one.items()}
             for one in found if "page" in one]  # fmt: skip
    assert len(whole) == 2
    return whole


def contrast(one: str, other: str) -> float:
    """Contrast of two colours by WCAG 2, 1 to 21."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return sum(map(math.prod, zip(linear, (0.2126, 0.7152, 0.0722), strict=True)))

    low, high = sorted(luminance(colour) + 0.05 for colour in (one, other))
    return high / low


def test_the_contrast_of_texts_and_fields(run: Path) -> None:
    """AA of WCAG 2: 4.5 for texts, 3 for the edges of fields and the focus."""
    for by in colours((run / "report.html").read_text(encoding="utf-8")):
        for text in ("ink", "soft"):
            assert min(contrast(by[text], by[behind]) for behind in ("page", "card")) >= 4.5, text
        assert contrast(by["good"], by["goodbg"]) >= 4.5 <= contrast(by["bad"], by["badbg"])
        assert min(contrast(by["c1"], by[behind]) for behind in ("page", "card")) >= 3


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
        labels = [row["label"] for row in page.charts[title]["series"]]
        kept = (text for text in one["legend"] if not text.endswith(", each step"))
        assert [re.sub(r", mean of \d+ steps$", "", text) for text in kept] == labels
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
    accuracy = page.charts["Accuracy"]["series"][0]["rows"][0]
    accuracy = sum(accuracy[-2:]) / 2  # a mean of 3 steps, of which one is missing
    assert float(last[0]) == pytest.approx(1000 * 60.5 / 61, abs=0.1)
    assert float(last[1]) == pytest.approx(1000 * (1 - accuracy), abs=0.1)


@pytest.mark.nightly
@with_browser
def test_in_a_browser(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    told = browse(run, tmp_path_factory.mktemp("profile"), [390, 820, 1280])
    for width in ("390", "820", "1280"):
        one = told[width]
        check(one["titles"], one["tiles"], one["marks"])
        accuracy = next(tip["text"] for tip in one["tips"] if "held out, greedy" in tip["text"])
        assert "step 60" in accuracy and "99%" in accuracy
    acts = told["acts"]
    assert acts["smooth"].split("\n") == ["training, each step", "training, mean of 3 steps"]
    assert "mean of 11 steps" in acts["smoother"] and acts["raw"] == "training"
    assert acts["few"] == ["10", "12", "14", "16", "18", "20"]
    assert acts["all"] == acts["again"] == [str(step) for step in range(0, 61, 10)]
    assert acts["dragged"] == ["30", "35", "40", "45"]
    said, first = acts["first"]
    assert said == "10 of 240 shown" and len(first) == 10 and acts["more"] == "20 of 240 shown"
    assert first[0] == "step 1 · a · reward +0.00 · 9 tokens"
    said, chosen = acts["chosen"]
    assert said == "4 of 4 shown, of 240 in all"
    assert {one.rpartition(" · reward")[0] for one in chosen} == {"step 30 · b", "step 31 · b"}
    assert acts["highest"].startswith("step 60 · ") and "reward +591.00" in acts["highest"]
    assert acts["found"] == "2 of 2 shown, of 240 in all"
    plain = told["plain"]
    assert "1 min 12 s" in plain["text"] and "step 60" in plain["text"]
    assert [count for _, count in plain["lists"]] == [2, 240]
    assert max(height for height, _ in plain["lists"]) <= 720


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
    accuracy = drawn_by_node(page)["Accuracy: rollouts"]
    bands = [path for name, path in accuracy["lines"] if name == "band"]
    assert accuracy["legend"] == ["learning_rate 0.0001 (2 runs)", "learning_rate 0.0"]
    assert len(bands) == 1, "of the two seeds"
    spots = re.findall(r"([\d.]+) ([\d.]+)", bands[0])
    assert len(spots) == 2 * 50 and spots[0][0] == spots[-1][0]
    assert all(float(spots[i][1]) <= float(spots[-1 - i][1]) for i in range(50))


@with_node
def test_the_script_draws_more_values_than_a_call_has_arguments(compared: Path) -> None:
    page = Page((compared / "report.html").read_text(encoding="utf-8"))
    one = page.charts["Accuracy: rollouts"]
    many = one | {"series": one["series"] * 2000}
    page.charts = {"Accuracy: rollouts": many}
    assert len(drawn_by_node(page)["Accuracy: rollouts"]["legend"]) == 4000


@pytest.mark.nightly
@with_browser
def test_a_comparison_in_a_browser(
    compared: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    told = browse(compared, tmp_path_factory.mktemp("profile"), [390, 1280])
    assert told["acts"]["smoother"] == told["acts"]["raw"], "a line of each group"
    assert told["acts"]["few"] == ["10", "12", "14", "16", "18", "20"]
