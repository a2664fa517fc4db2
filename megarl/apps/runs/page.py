"""The HTML page of the report with inline style and script: one file that loads nothing.

A content security policy allows only this script, by its SHA-256 digest. Model output that slipped
through the escaping could neither run as a script nor load anything.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape

STYLE = """
:root{color-scheme:light dark;--page:#f6f6f3;--card:#fff;--ink:#16171a;--soft:#5c5f66;--line:#e3e3de;--grid:#e9e9e4;
--c1:#2468c9;--c2:#d9591c;--c3:#128a5f;--c4:#7d4bc4;--c5:#a3a59f;--c6:#c79a00;--c7:#8c2d04;--c8:#00868f;--c9:#c2408c;--c10:#4f5b66;--good:#0f7a4f;--bad:#b93222;--goodbg:#e3f4ec;--badbg:#fbe9e6;
--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono","DejaVu Sans Mono",monospace}
@media (prefers-color-scheme:dark){:root{--page:#121316;--card:#1b1d21;--ink:#eceef1;--soft:#a3a7af;--line:#303339;--grid:#2a2d32;
--c1:#67a8ff;--c2:#f58d55;--c3:#3ccf97;--c4:#b693f5;--c5:#73767c;--c6:#e8c34a;--c7:#c9673a;--c8:#47c4cc;--c9:#ee85bd;--c10:#93a1ad;--good:#5fd6a3;--bad:#ff8f80;--goodbg:#15332a;--badbg:#3c1f1c}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",
Arial,sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1080px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:28px;line-height:1.2;letter-spacing:-.015em;margin:0;overflow-wrap:anywhere}
h2{font-size:19px;letter-spacing:-.01em;margin:44px 0 4px}
h3{font-size:15px;margin:0}
p{margin:0}.lead,.soft,figcaption p{color:var(--soft)}.lead{margin-top:6px}section>.soft{max-width:72ch}
.tiles{display:grid;grid-template-columns:repeat(12,1fr);gap:12px;margin:26px 0 0}
.tile{grid-column:span 3;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px}
.tile.main{grid-column:span 6}
.tile dt{color:var(--soft);font-size:13px}.tile dd{margin:2px 0 0;font-size:21px;font-weight:600;letter-spacing:-.01em}
.tile.main dd{font-size:32px;line-height:1.25}.tile .from{color:var(--soft);font-weight:500}

.tile dd.note,.tile.main dd.note{font-size:13px;line-height:1.4;font-weight:400;color:var(--soft);letter-spacing:0}
.tile small{font-size:13px;font-weight:400;color:var(--soft);letter-spacing:0}
.charts{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px;margin-top:14px}
.chart{margin:0;min-width:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px 18px 12px;
display:flex;flex-direction:column}
.chart.wide,.chart.last{grid-column:1/-1}
figcaption p{font-size:13px}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:6px 0 15px;padding:0;font-size:13px;color:var(--soft)}
.legend li{display:flex;align-items:center;gap:7px}
.key{display:inline-block;flex:none;width:16px;height:0;border-top:2.5px solid var(--c)}
.key.faint{opacity:.45;border-top-width:1.5px}.key.dashed{border-top-style:dashed}
.key.points,.key.rings,.key.bars{width:9px;height:9px;border:0;border-radius:50%;background:var(--c)}
.key.rings{background:transparent;border:2px solid var(--c)}.key.bars{border-radius:2px}
.frame{display:grid;grid-template-columns:auto minmax(0,1fr);margin:auto 14px 0 0;font-size:12px;line-height:1;color:var(--soft)}
.y{position:relative;width:46px}.y span{position:absolute;right:9px;transform:translateY(-50%);white-space:nowrap}
.plot{position:relative;height:190px;border-bottom:1px solid var(--soft);outline-offset:4px;touch-action:pan-y;cursor:crosshair}
.wide .plot{height:300px}
.plot svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
.x{grid-column:2;position:relative;height:14px;margin-top:8px}.x span{position:absolute;transform:translateX(-50%)}
.unit{grid-column:2;text-align:center;padding-top:4px}
.cursor{position:absolute;top:0;bottom:0;width:0;border-left:1px solid var(--soft);pointer-events:none}
.tip{position:absolute;top:0;z-index:2;pointer-events:none;background:var(--card);color:var(--ink);border:1px solid var(--line);
border-radius:8px;box-shadow:0 4px 18px rgb(0 0 0/.16);padding:8px 10px;line-height:1.45;max-width:min(260px,94%)}
.tip b,.tip em{display:block;font-style:normal}.tip .row{display:flex;align-items:center;gap:7px;color:var(--soft)}
.tip .row span{flex:1}.tip .row strong{color:var(--ink);padding-left:8px;white-space:nowrap}
[hidden]{display:none}
.problem{background:var(--card);border:1px solid var(--line);border-radius:10px;margin-top:12px;overflow:hidden}
.problem header{padding:12px 16px;border-bottom:1px solid var(--line);display:flex;flex-wrap:wrap;gap:4px 20px;
align-items:baseline}
.problem header pre{flex:1 1 auto;font-weight:600}.problem header>.soft{font-size:13px;overflow-wrap:anywhere;min-width:0}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,320px),1fr));gap:1px;background:var(--line)}
.side{padding:12px 16px;background:var(--card);min-width:0}
.side>div{display:flex;flex-wrap:wrap;gap:2px 12px;align-items:center;font-size:13px;color:var(--soft);margin-bottom:6px}
pre{margin:0;font:13px/1.55 var(--mono);white-space:pre-wrap;overflow-wrap:anywhere;max-height:340px;overflow-y:auto;min-width:0}
.mark{font-weight:600;border-radius:999px;padding:1px 9px}
.turn{border-left:3px solid var(--c1);padding:2px 0 2px 10px;margin-top:6px}.turn.read{border-color:var(--c5);color:var(--soft)}
.turn small{font-size:12px;color:var(--soft)}
.mark.right{color:var(--good);background:var(--goodbg)}.mark.wrong{color:var(--bad);background:var(--badbg)}
.moves{border-collapse:collapse;margin-top:12px;font-size:14px}.moves th,.moves td{padding:5px 16px 5px 0;text-align:right}
.moves th{font-weight:400;color:var(--soft)}.moves th:first-child{text-align:left}.moves td{font-weight:600}
.moves tr+tr{border-top:1px solid var(--line)}
.lanes{margin:14px 0 0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px 18px 12px}
.lanes .grid{display:grid;grid-template-columns:auto minmax(0,1fr);gap:4px 10px;font-size:12px;color:var(--soft)}
.lanes .lane{height:18px;background:var(--grid);border-radius:3px;overflow:hidden}.lanes svg{display:block;width:100%;height:100%}
.lanes .steps{position:relative;height:16px}.lanes .steps span{position:absolute;white-space:nowrap}
.lanes .idle{margin:10px 0 0;padding-left:18px;font-size:13px;color:var(--soft)}
details{background:var(--card);border:1px solid var(--line);border-radius:10px;margin-top:12px}
summary{cursor:pointer;padding:12px 16px;font-weight:600}details pre{padding:0 16px 16px;max-height:none}
footer{margin-top:40px;font-size:13px;color:var(--soft)}
@media (max-width:720px){main{padding:24px 14px 40px}h1{font-size:23px}.charts{grid-template-columns:minmax(0,1fr)}
.tile,.tile.main{grid-column:span 6}.tile.main{grid-column:span 12}.tile.main dd{font-size:27px}.tile dd{font-size:18px}
.tile{padding:11px 13px}.side>div{gap:2px 8px;font-size:12px}.chart{padding:14px 12px 10px}.wide .plot{height:240px}
.y{width:44px}}
@media print{body{background:none}.chart,.problem,.tile{break-inside:avoid}}
"""
"""Style sheet of the page."""

SCRIPT = """
"use strict";
const charts = document.querySelectorAll("figure.chart");
for (const figure of charts) {
  const rows = JSON.parse(figure.querySelector("script").textContent);
  const plot = figure.querySelector(".plot"), cursor = plot.querySelector(".cursor"), tip = plot.querySelector(".tip");
  const places = [...new Set(rows.flatMap(row => row.points.map(point => point[0])))].sort((a, b) => a - b);
  const near = (list, x, of) => list.reduce((best, one) => Math.abs(of(one) - x) < Math.abs(of(best) - x) ? one : best);
  // Points of thinned lines stand at different steps; the nearest of each is shown if no farther than the lines' own pitch.
  const pitch = Math.max(...rows.map(row => row.kind === "points" || row.kind === "rings" ? 0 :
    Math.max(0, ...row.points.slice(1).map((point, i) => point[0] - row.points[i][0])))) / 2;
  let at = null;
  const node = (tag, text, name) => {
    const made = document.createElement(tag);
    made.textContent = text;
    if (name) made.className = name;
    return made;
  };
  const show = x => {
    at = near(places, x, place => place);
    const lines = [];
    let step = null;
    for (const row of rows) {
      if (!row.points.length) continue;
      const point = near(row.points, at, one => one[0]);
      const single = row.kind === "points" || row.kind === "rings";
      if (Math.abs(point[0] - at) > (single ? 1e-4 : Math.max(pitch, 1e-4))) continue;
      if (step === null || point[0] === at) step = point[2];
      const line = node("div", "", "row"), key = node("i", "", "key " + row.kind);
      key.style.setProperty("--c", "var(--c" + row.colour + ")");
      line.append(key, node("span", row.label), node("strong", point[3]));
      lines.push(line);
    }
    tip.replaceChildren(node("b", step), ...lines);
    cursor.style.left = 100 * at + "%";
    cursor.hidden = tip.hidden = false;
    const room = plot.clientWidth, wide = tip.offsetWidth, from = at * room;
    tip.style.left = Math.max(0, Math.min(room - wide, from + 12 + wide <= room ? from + 12 : from - 12 - wide)) + "px";
  };
  const hide = () => { at = null; cursor.hidden = tip.hidden = true; };
  const follow = event => { const box = plot.getBoundingClientRect(); show((event.clientX - box.left) / box.width); };
  plot.addEventListener("pointermove", follow);
  plot.addEventListener("pointerdown", follow);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", event => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!move) return;
    event.preventDefault();
    const now = at === null ? (move > 0 ? -1 : places.length) : places.indexOf(at);
    show(places[Math.max(0, Math.min(places.length - 1, now + move))]);
  });
}
document.documentElement.dataset.charts = charts.length;
"""
"""Script of the page: tooltips of the charts."""

_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
"""Control characters, which HTML forbids, mapped to visible symbols."""


def safe_html(text: object) -> str:
    """Untrusted text as safe HTML: escaped, control characters visible, text direction isolated."""
    return "<bdi>" + _escaped(text) + "</bdi>"


def _escaped(text: object) -> str:
    """Text as safe HTML without isolating its direction."""
    return escape(str(text).replace("\r\n", "\n").translate(_CONTROLS))


def page(title: str, body: str) -> str:
    """The whole HTML document with this title and `body`."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri"
        " 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_escaped(title)}</title><style>{STYLE}</style></head>\n"
        f"<body>{body}<script>{SCRIPT}</script></body></html>\n"
    )
