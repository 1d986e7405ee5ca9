"""report.html says what the ledger says, from one file, and looks right in a browser."""

import dataclasses
import functools
import itertools
import json
import re
from html.parser import HTMLParser

import browser
import markupsafe
import pytest
import sample

from jaxthru.profile.account.ledger import LINES, Advice, Ledger, Line, Matmul, Run, Window
from jaxthru.profile.explain.advice import with_advice
from jaxthru.profile.explain.breakdown import figures, step_parts
from jaxthru.profile.explain.settings import TITLES
from jaxthru.profile.explain.unit import Unit
from jaxthru.profile.show import html as page_
from jaxthru.profile.show.html import plot, report


def full() -> Ledger:
    return with_advice(sample.with_lint(sample.ledger(), "float32_matmuls", 0.006), sample.config())


def slow() -> Ledger:
    return with_advice(sample.slow(), sample.config())


def cpu() -> Ledger:
    return with_advice(sample.cpu(), sample.config(precision__compute="float32"))


def bare() -> Ledger:
    """What is known at least: one CPU, nothing but the lines."""
    run = Run("quickstart", "cpu", 1, 1, "cpu", {}, 4096.0, 100.0)
    lines = (Line("matmul", 0.004, 0.8), Line("data_wait", 0.001, 0.2))
    return Ledger(run, Window(5, 1, 0.005), lines, Matmul(1e9, 1e9))


def crowded() -> Ledger:
    """Long names and numbers, many devices, a step of minutes."""
    ledger = full()
    run = dataclasses.replace(
        ledger.run,
        config="a_configuration_with_a_name_" * 4,
        devices=1024,
        processes=128,
        tokens_per_step=2.5e9,
    )
    line = {name: 600 * seconds for name, seconds in sample.SECONDS.items() if name != "matmul"}
    slow = sample.ledger(**line, ideal=100.0, recomputation=20.0, frequency=30.0, inefficiency=40.0)
    spans = tuple((i / 4, (i + 1) / 4, LINES[i % len(LINES)]) for i in range(2000))
    devices = tuple(dataclasses.replace(ledger.devices[0], device=f"d{i}", strip=spans) for i in range(9))
    lint = tuple(dataclasses.replace(ledger.lint[0], scope="jit(a)/" * 30 + str(i)) for i in range(9))
    kernels = tuple(dataclasses.replace(each, name="k" * 200) for each in ledger.kernels)
    return dataclasses.replace(
        slow,
        run=run,
        window=dataclasses.replace(slow.window, attribution_seconds=300.0, noise=0.0),
        devices=devices,
        lint=lint,
        kernels=kernels,
        advice=ledger.advice,
    )


class Text(HTMLParser):
    """The words of a page, and its elements that are left open."""

    EMPTY = ("meta", "link")

    def __init__(self):
        super().__init__()
        self.words, self.open, self.addresses = [], [], []

    def handle_starttag(self, tag, attributes):
        self.addresses += [value for name, value in attributes if name in ("src", "href")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)


def test_a_clock_above_reference_goes_back():
    page = report(sample.ledger(frequency=-0.02))
    assert "-20.0\N{NO-BREAK SPACE}ms" in page
    assert not re.search(r"(left|width):-", page)


@pytest.mark.parametrize("make", [full, bare, slow, cpu, crowded])
def test_page_is_whole_and_needs_no_network(make):
    page = Text()
    page.feed(report(make()))
    assert page.open == []
    assert page.addresses[0] == "data:,"
    assert {address.partition("#")[0] for address in page.addresses[1:]} == {page_.LEDGER.as_uri()}
    assert "url(" not in TEMPLATE_CSS
    assert not re.search(r"\bNone\b|\bnan\b", " ".join(page.words))


TEMPLATE_CSS = report(bare())


def test_page_says_what_the_ledger_says():
    ledger = full()
    text = Text()
    text.feed(report(ledger))
    said = " ".join(text.words).replace("\N{NO-BREAK SPACE}", " ")
    for name, seconds in step_parts(ledger).items():
        assert TITLES[name][0].lower() in said.lower(), name
        if seconds:
            assert f"{1e3 * seconds:.1f} ms" in said, name
    found = figures(ledger)
    assert f"{found.tokens_per_second:,.0f}" in said
    assert f"{found.mfu:.1%}" in said
    assert f"{found.mfu_at_clock:.1%}" in said
    for each in ledger.advice:
        assert each.text.replace("`", "").split(".")[0] in re.sub(r"\s+", " ", said), each
    assert "--set precision.matmul=fp8" in said
    assert ledger.kernels[0].name in said
    assert "float32 matmuls" in said


def words(ledger: Ledger) -> str:
    """Returns what a page says, its spaces as one."""
    text = Text()
    text.feed(report(ledger))
    return re.sub(r"\s+", " ", " ".join(text.words))


def test_all_numbers_are_of_one_step_and_the_runs_others_are_named_once():
    ledger = cpu()
    said, step = words(ledger), ledger.window.step_seconds
    assert "Of a step of 3,702.1 ms" in said
    assert re.search(r"a step +3,702.1 ms +mean of 2 profiled", said)
    assert "the mean of the profiled steps is 3,702.1 ms" in said
    assert re.search(r"Observed step +3,702.1 ms +100.0%", said)
    assert f"{ledger.run.tokens_per_step / step:,.0f} of all devices, in profiled steps" in said
    assert said.count("3,202.5 ms") == 1
    assert "took 16% more time than the median of the run's others (3,202.5 ms)" in said
    assert "device 0, step 17, 3,751.7 ms" in said  # the band is of one step: it says which


def test_without_a_peak_none_is_claimed():
    said, of_gpu = words(cpu()), words(full())
    assert "Where the observed step went" in said
    assert "From the peak" not in said
    assert "MFU" not in said
    assert "its speed is not judged" in said
    assert "matmuls 67.0% of the step" in said
    assert "From the peak to the observed step" in of_gpu
    assert "Where the observed step went" not in of_gpu
    for ledger in (full(), cpu(), bare()):
        figures_shown = re.findall(r'<div class="figure">.*?<b>(.*?)</b>', report(ledger))
        assert figures_shown and all(re.match(r"[\d.,]+", value) for value in figures_shown)


@pytest.mark.parametrize("part", TITLES)
def test_each_part_leads_to_its_heading_in_the_docs(part, monkeypatch, tmp_path):
    heading = page_.anchor(TITLES[part][0])
    headings = re.findall(r"^#+ (.+)$", page_.LEDGER.read_text(), re.MULTILINE)
    assert [page_.anchor(each) for each in headings].count(heading) == 1
    assert page_.manual(part) == f"{page_.LEDGER.as_uri()}#{heading}"
    monkeypatch.setattr(page_, "LEDGER", tmp_path / "docs" / "ledger.md")
    assert page_.manual(part) == ""


def test_without_a_checkout_the_page_names_the_docs(monkeypatch, tmp_path):
    monkeypatch.setattr(page_, "LEDGER", tmp_path / "docs" / "ledger.md")
    text = Text()
    text.feed(report(full()))
    assert text.addresses == ["data:,"]
    assert "docs/ledger.md, Dependency" in text.words


def test_a_finding_says_why_it_has_no_advice():
    said = words(cpu())
    assert "No setting is expected to win more than the noise of this run, 1,184.7 ms (32.0%" in said
    assert "No advice on copies: another layout is expected to win 291.0 ms a step at most, below" in said
    assert "Found in the program" in said
    quiet = dataclasses.replace(cpu(), window=dataclasses.replace(cpu().window, noise=0.004))
    said = words(with_advice(quiet, sample.config(precision__compute="float32")))
    assert "No setting is expected" not in said
    assert "No advice on copies" not in said
    assert "layout , above" in said


def test_figures_are_those_of_the_definition():
    """MFU by hand: 6 × matmul parameters and attention, over the data sheet's peak."""
    ledger, model = sample.ledger(), sample.config()["model"]
    layer = model["embed"] * (2 * 32 * 128 + 2 * 8 * 128 + 3 * 14336)
    per_token = 6 * (8 * layer + 4096 * 128256) + 6 * 8 * 32 * 128 * 1100
    step = ledger.window.step_seconds
    found = figures(ledger)
    assert found.mfu == pytest.approx(32768 * per_token / step / (2 * 989.5e12))
    assert found.flops_per_second == pytest.approx(found.mfu * 989.5e12)
    assert found.mfu_at_clock == pytest.approx(found.mfu * 1830 / 1540)
    assert found.tokens_per_second == pytest.approx(32768 / step)
    assert figures(bare()).mfu is None


def test_what_is_beyond_the_program_is_not_its_peak():
    memory = sample.ledger().memory
    beyond = memory.categories | {"fragmentation": 3.9e9}
    found = dataclasses.replace(sample.ledger(), memory=dataclasses.replace(memory, categories=beyond))
    text = Text()
    text.feed(report(found))
    at = text.words.index("program's peak")
    assert text.words[at + 1 : at + 3] == ["57.30\N{NO-BREAK SPACE}GB", "93.6%"]


PLANT = """<b>"'&</b><script>$title{{title}}</script>"""


def planted(value, plant: str, found: dict[str, str], at: str = ""):
    """Returns a ledger with `plant` behind each of its names; `found` is told where each stands."""
    again = functools.partial(planted, plant=plant, found=found)
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return type(value)(**{name: again(item, at=f"{at}.{name}") for name, item in fields.items()})
    if isinstance(value, tuple):
        return tuple(again(item, at=at) for item in value)
    if isinstance(value, dict):
        return {again(key, at=at): again(item, at=at) for key, item in value.items()}
    own = value in LINES or (at == ".advice.key" and value.startswith("precision."))  # the report's own words
    if not isinstance(value, str) or own:
        return value
    mark = f"{value}{plant}{len(found)}."
    found[mark] = at.removeprefix(".")
    return mark


def structure(page: str) -> list[tuple[str, list[str]]]:
    """Returns the elements of a page and the names of their attributes."""
    found = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: found.append((tag, [name for name, _ in attributes]))
    parser.feed(page)
    return found


def test_no_name_can_break_the_page():
    """Whatever a trace, a program's text, a configuration or a host calls a thing, in the page it is text."""
    ledger, found = full(), {}
    many = tuple(dataclasses.replace(ledger.lint[0], scope=f"scope {number}") for number in range(2))
    in_words = Advice("copies", "a key", "some words", 0.1, 0.2, "a `name` in code")
    ledger = dataclasses.replace(ledger, lint=ledger.lint + many, advice=(*ledger.advice, in_words))
    page = report(planted(ledger, PLANT, found))
    harmless = report(planted(ledger, "name", {}))
    assert structure(page) == structure(harmless)  # not one element or attribute more
    assert {at for mark, at in found.items() if str(markupsafe.escape(mark)) in page} == {
        *("run.config", "run.device_kind", "run.versions", "clock.source", "clock.cap_reasons"),
        *("scopes.layer", "scopes.phase", "kernels.name", "kernels.scope", "kernels.source"),
        *("collectives.name", "collectives.kind", "collectives.last", "devices.device"),
        *("memory.categories", "memory.buffers.scope", "memory.buffers.source", "memory.buffers.category"),
        *("lint.rule", "lint.scope", "lint.text", "lint.remedy"),
        *("advice.key", "advice.value", "advice.text"),
    }


def test_charts_carry_what_they_show():
    """What the page's script reads: JSON within attributes."""
    ledger, charts = full(), []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tag == "svg" and charts.append(dict(attributes))
    parser.feed(report(ledger))
    strips = [chart for chart in charts if chart["class"] == "strip"]
    for device, chart in zip(ledger.devices, strips, strict=True):
        assert json.loads(chart["data-spans"]) == [[round(a, 7), round(b, 7), c] for a, b, c in device.strip]
        used = {line for *_, line in device.strip}
        assert json.loads(chart["data-names"]) == {line: TITLES[line][0] for line in used}
    drawn = [json.loads(chart["data-points"]) for chart in charts if chart["class"] == "series"]
    clock, memory = ledger.clock, ledger.memory
    curve = [(at, count / 1e9) for at, count in memory.curve]
    expected = [[[round(a, 6), round(b, 3)] for a, b in plot] for plot in (clock.samples, clock.power, curve)]
    assert drawn == expected


def test_units_suit_the_step():
    assert Unit.of(0.49)(0.1234) == "123.4\N{NO-BREAK SPACE}ms"
    assert Unit.of(0.005)(0.00123) == "1.23\N{NO-BREAK SPACE}ms"
    assert Unit.of(30.0)(12.345) == "12.35\N{NO-BREAK SPACE}s"


@pytest.mark.parametrize("levels", [(0.0, 0.0), (690.0, 690.0), (-3.0, 5.0), (1e9, 1.2e9)])
def test_plots_stay_in_their_frame(levels):
    drawn = plot("x", list(enumerate(levels)), "W", "#", ["a", "b"], mark=(4.0, "four"))
    assert all(0 <= float(point.split(",")[1]) <= 100 for point in drawn["line"].split())
    assert 0 <= drawn["mark"][0] <= 100


CHROMIUM = browser.find()
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no Chromium on the PATH or in JAXTHRU_CHROMIUM (apt-get install chromium-headless-shell)",
)

BOXES = """
((all, place = new Map(all.map((each, at) => [each, at]))) => all.flatMap((element) => {
  // What holds words of its own, and every drawing.
  const words = [...element.childNodes].some((node) => node.nodeType == 3 && node.data.trim());
  if (!(words || ["svg", "IMG"].includes(element.tagName) || element.classList.contains("track"))) return [];
  const inside = element.closest("svg");
  if (inside && inside !== element) return [];
  if (element.closest("details:not([open])") && !element.closest("summary")) return [];
  const clip = element.closest(".clip"); // what it cuts off is not seen, and is its title
  const boxes = [...(clip ?? element).getClientRects()].filter((box) => box.width > 0 && box.height > 0);
  return boxes.map((box) => ({
    path: (element.className.baseVal ?? element.className) + " " + element.tagName,
    text: element.textContent.trim().slice(0, 40),
    left: box.left, right: box.right, top: box.top + scrollY, bottom: box.bottom + scrollY,
    holds: element.querySelectorAll("*").length,
    id: place.get(element),
    parents: (function up(node) {
      return node ? [place.get(node) ?? -1, ...up(node.parentElement)] : [];
    })(element.parentElement),
    clipped: !(clip && clip.title == clip.textContent) &&
      element.scrollWidth > Math.ceil(element.clientWidth) + 1 && element.clientWidth > 0,
  }));
}))([...document.querySelectorAll("body *")])
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser.open_page(CHROMIUM, tmp_path_factory.mktemp("chromium")) as found:
        yield found


@needs_chromium
@pytest.mark.parametrize("make", [full, bare, slow, cpu, crowded])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 768, 390])
def test_nothing_overlaps_in_a_browser(page, tmp_path, width, scheme, make):
    path = tmp_path / "report.html"
    path.write_text(report(make()))
    page.show(path, width, scheme=scheme)
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true })")
    boxes = page.run(BOXES)
    page.screenshot(tmp_path / f"{width}-{scheme}.png")
    assert len(boxes) > (20 if make is bare else 100)
    assert page.run("document.documentElement.scrollWidth") <= width
    for box in boxes:
        assert box["left"] >= 0, box
        assert box["right"] <= width, box
        assert not box["clipped"], box
    for a, b in itertools.combinations(boxes, 2):
        if a["id"] in b["parents"] or b["id"] in a["parents"] or a["id"] == b["id"]:
            continue
        across = min(a["right"], b["right"]) - max(a["left"], b["left"])
        down = min(a["bottom"], b["bottom"]) - max(a["top"], b["top"])
        # Lines of one paragraph may share a pixel or two of their leading.
        assert across <= 1 or down <= 2, (a, b)
    assert page.errors == []


CARDS = """
[...document.querySelectorAll("section, .figure")].flatMap((card) => {
  const style = getComputedStyle(card), box = card.getBoundingClientRect();
  const left = box.left + parseFloat(style.paddingLeft), right = box.right - parseFloat(style.paddingRight);
  const walker = document.createTreeWalker(card, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT), out = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    // Words by themselves: those too long for their element lie outside of its box.
    const words = node.nodeType == 3, parent = words ? node.parentElement : node;
    if (parent.closest(".clip > *, svg > *, .track > *") || (words && parent.closest(".clip"))) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const rect of words ? range.getClientRects() : [node.getBoundingClientRect()]) {
      const cell = words && parent.closest(".number, .part, .said, td, th");
      const own = cell ? cell.getBoundingClientRect() : box;
      const beyond = Math.max(
        left - rect.left, rect.right - right, own.left - rect.left, rect.right - own.right
      );
      if (rect.width > 0 && beyond > 1) out.push([node.textContent.slice(0, 40), beyond]);
    }
  }
  return out;
})
"""
"""What leaves the room within its card's padding, or its column, and by how many pixels."""


@needs_chromium
@pytest.mark.parametrize("make", [full, bare, slow, cpu, crowded])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_leaves_its_card(page, tmp_path, width, make):
    path = tmp_path / "report.html"
    path.write_text(report(make()))
    page.show(path, width)
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true })")
    assert page.run("document.querySelectorAll('section, .figure').length") > 3
    assert page.run(CARDS) == []


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_what_leaves_its_card_is_noticed(page, tmp_path, width):
    path = tmp_path / "report.html"
    path.write_text(report(cpu()).replace("3,702.1", "3,702.1" * 30))
    page.show(path, width)
    assert page.run(CARDS) != []


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_ticks_stand_under_their_instants(page, tmp_path, width):
    path = tmp_path / "report.html"
    path.write_text(report(slow()))
    page.show(path, width)
    seen = page.run(
        "[...document.querySelector('.timeline .axis').children].map((each) => {"
        "const box = each.getBoundingClientRect(), band = each.parentElement.getBoundingClientRect();"
        "return [box.width, (box.left - band.left) / band.width, (box.right - band.left) / band.width]; })"
    )
    places = {i / 4: (left, right) for i, (wide, left, right) in enumerate(seen) if wide}
    assert list(places) == ([0, 0.25, 0.5, 0.75, 1] if width > 640 else [0, 0.5, 1])
    assert places.pop(0)[0] == pytest.approx(0, abs=0.01)
    assert places.pop(1)[1] == pytest.approx(1, abs=0.01)
    for place, (left, right) in places.items():
        assert (left + right) / 2 == pytest.approx(place, abs=0.01)


@needs_chromium
def test_pointing_reads_values_off_the_charts(page, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(report(full()))
    page.show(path, 1280)
    for kind, expected in (("strip", r"ms: .+, for [\d.]+ ms"), ("series", r"after [\d.]+ s: [\d,.]+ MHz")):
        chart = f"document.querySelector('svg.{kind}')"
        page.run(f"{chart}.scrollIntoView({{block: 'center'}})")
        box = page.run(f"(({chart}).getBoundingClientRect()).toJSON()")
        page.point(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2)
        readout = f"{chart}.closest('.timeline, figure').querySelector('.readout').textContent"
        assert re.search(expected, page.run(readout)), page.run(readout)
    assert page.errors == []


@needs_chromium
def test_numbers_are_aligned_at_the_right(page, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(report(full()))
    page.show(path, 1280)
    kinds = page.run(
        "[...document.querySelectorAll('.number')].map((each) => getComputedStyle(each).textAlign)"
    )
    assert len(kinds) > 50
    assert set(kinds) == {"right"}
    edge = "(row) => row.children[2].getBoundingClientRect().right"
    edges = page.run(f"[...document.querySelectorAll('.fall .row')].map({edge})")
    assert len(set(edges)) == 1


@needs_chromium
def test_errors_are_noticed(page, tmp_path):
    """The test above would see a script that fails and a file that is fetched."""
    path = tmp_path / "broken.html"
    path.write_text(
        "<script>null.x</script><script>console.error('bad')</script><img src='http://127.0.0.1:9/'>"
    )
    page.show(path, 600)
    found, page.errors[:] = list(page.errors), []
    assert any("null" in error for error in found)
    assert any("bad" in error for error in found)
    assert any("127.0.0.1" in error for error in found)


def test_tokens_of_each_expert_are_a_picture():
    """A cell for each, shaded by its share of the layer's mean; of a model without experts none."""
    counts = (4, 4, 4, 4), (0, 0, 0, 16)
    page = report(dataclasses.replace(full(), expert_tokens=counts))
    (drawn,) = re.findall(r'<svg class="experts".*?</svg>', page, re.DOTALL)
    assert 'viewBox="0 0 4 2"' in drawn
    cells = {
        cell: float(shade)
        for path, shade in re.findall(r'<path d="([^"]*)"[^>]*fill-opacity="([^"]*)"', drawn)
        for cell in re.findall(r"M(\d+ \d+)h1v1h-1z", path)
    }
    assert len(cells) == 8
    assert {cells[f"{x} 0"] for x in range(4)} == {0.562} and (cells["3 1"], cells["0 1"]) == (0.938, 0.062)
    assert "has 4.00 times the mean" in page and "Tokens of each expert" not in report(full())
