"""The page, in a real browser: Debian's chromium, driven by playwright. Without a browser these tests are skipped."""

import base64
import io
import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

import cnmm
from cnmm.ladder import read_ladder
from cnmm.serve.page import PAGE, read_page
from tests.helpers import made_up_ladder, trained
from tests.runtime.ladders import CLASSES, POINTS, SIZE, make_ladder, write
from tests.serve.servers import served

MOST_BYTES = 60_000
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
    *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
)
PATIENCE_MS = 30_000
HOSTILE = "<img src=x onerror=alert(1)>"
DROP = """([bytes, type]) => {
  const data = new DataTransfer();
  data.items.add(new File([Uint8Array.from(atob(bytes), one => one.charCodeAt(0))], "image", { type }));
  return data;
}"""

NO_ANSWERS = """{
  const own = window.fetch;
  window.fetch = (url, asked) => !String(url).endsWith("/infer") ? own(url, asked) : new Promise((_, fail) => {
    asked.signal.addEventListener("abort", () => fail(new Error("given up")));
  });
}"""


# Without a browser


def test_the_page_is_small_and_needs_nothing_else():
    text = PAGE.read_text("utf-8")
    assert len(text.encode()) < MOST_BYTES
    assert not set(re.findall(r"https?://[^\s\"')]+", text)) - {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"(?:src|href)=\"(?!#|data:|/)", text)
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", " style=", " onclick="):
        assert forbidden not in text


def test_the_policy_allows_one_script_and_one_style():
    policy = read_page().headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("sha256-") == 2


# With one


@pytest.fixture(scope="module")
def chromium():
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no chromium; install it with: apt-get install chromium")
    driver.expect.set_options(timeout=PATIENCE_MS)
    with driver.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(timed_ladder):
    with served(timed_ladder, "--cores", 1, "--runtime", "onnx", "--target-ms", 2000) as server:
        yield server


class Visit:
    """A page that was opened, with all that went wrong on it."""

    def __init__(self, context, url):
        self.page = context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.url, self.wrong = url, []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self.wrong.append(message.text))
        self.page.on("request", lambda request: request.url.startswith((url, "data:", "blob:")) or self.alien(request))
        self.page.goto(url)
        self.expect("#link").to_have_text("connected")

    def alien(self, request):
        self.wrong.append(f"asks {request.url}")

    def expect(self, place):
        from playwright.sync_api import expect

        return expect(self.page.locator(place))

    def drop(self, data, kind="image/png"):
        dropped = self.page.evaluate_handle(DROP, [base64.b64encode(data).decode(), kind])
        self.page.dispatch_event("#drop", "drop", {"dataTransfer": dropped})


@pytest.fixture
def visit(chromium, server):
    context = chromium.new_context()
    visit = Visit(context, server.url)
    yield visit
    context.close()
    assert not visit.wrong


def picture(seed=0):
    return np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), np.uint8)


def png(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return file.getvalue()


def test_drop_an_image_and_move_the_slider(visit, timed_ladder):
    """Answer, exit, macs, lattice and frontier follow the budget, and are those of a session."""
    image, page = picture(), visit.page
    visit.expect("#top").to_have_text("Give it an image")
    visit.drop(png(image))
    visit.expect("#line").to_contain_text("of 3")
    visit.expect("#budget-text").to_contain_text("auto")
    page.focus("#budget")
    edges = {"e1c0": 2, "e2c3": 3, "e3c0": 5}
    with cnmm.Session(timed_ladder, threads=1) as session:
        for name, exit, macs, quality in POINTS:
            page.keyboard.press("ArrowRight")
            visit.expect("#badges").to_contain_text(f"point {name}")
            (((label, p), *_),) = session.predict(image[None], point=name).top(4)
            visit.expect("#top").to_have_text(f"{label}{p:.2f}")
            line = rf"^exit {exit} of 3, {macs // 1000} k macs, [\d.]+ ms, waited [\d.]+$"
            visit.expect("#line").to_have_text(re.compile(line))
            visit.expect("#lattice path.on").to_have_count(edges[name])
            visit.expect("#lattice text.on").to_have_text(f"exit {exit}")
            visit.expect("#lattice-note").to_have_text(f"{edges[name]} of 7 edges, exit {exit}")
            visit.expect("#dot").to_have_attribute("data-at", f"{macs} {quality:g}")
            visit.expect("#plot .pt.on").to_have_attribute("data-name", name)
            visit.expect("#budget").to_have_attribute("aria-valuetext", re.compile(f"^{macs // 1000} k macs"))
            visit.expect("#curl").to_contain_text(f"/predict?budget={macs}'")
            visit.expect("#triton").to_contain_text(f'parameters={{"budget": "{macs}"}}')
            visit.expect("#bars li").to_have_count(len(CLASSES))
    page.keyboard.press("Home")
    visit.expect("#budget-text").to_contain_text("auto")
    visit.expect("#curl").to_contain_text("/predict'")


def test_choose_and_paste(visit, tmp_path):
    page = visit.page
    (tmp_path / "a.png").write_bytes(png(picture(1)))
    page.set_input_files("#file", tmp_path / "a.png")
    visit.expect("#line").to_contain_text("exit")
    visit.expect("#hint").to_be_hidden()
    visit.expect("#view").to_be_visible()
    with page.expect_response("**/predict*") as answered:
        page.evaluate(
            f"""([bytes, type]) => document.dispatchEvent(
                new ClipboardEvent("paste", {{ clipboardData: ({DROP})([bytes, type]) }}))""",
            [base64.b64encode(png(picture(2))).decode(), "image/png"],
        )
    assert answered.value.request.post_data_buffer == picture(2).tobytes()


def test_what_is_no_image_is_said(visit):
    visit.drop(b"none", "text/plain")
    visit.expect("#top").to_have_text("Your browser cannot read this file as an image")
    visit.drop(png(picture()))
    visit.expect("#top").not_to_contain_text("read")
    visit.expect("#said").not_to_have_class(re.compile("bad"))


def test_images_are_scaled_and_cropped_at_the_centre(visit):
    """A wide image with red sides and a blue centre: the network sees the blue."""
    wide = np.full((3 * SIZE, 9 * SIZE, 3), (255, 0, 0), np.uint8)
    wide[:, 3 * SIZE : 6 * SIZE] = (0, 0, 255)
    with visit.page.expect_request("**/predict*") as asked:
        visit.drop(png(wide))
    sent = np.frombuffer(asked.value.post_data_buffer, np.uint8).reshape(SIZE, SIZE, 3)
    assert (sent[:, 1:-1] == (0, 0, 255)).all()


def test_grey_models_see_grey(chromium, tmp_path):
    """As Pillow makes it, which reads files for the server."""
    make_ladder(tmp_path / "grey", channels=1)
    with served(tmp_path / "grey", "--cores", 1, "--runtime", "onnx") as server:
        context = chromium.new_context()
        visit = Visit(context, server.url)
        with visit.page.expect_request("**/predict*") as asked:
            visit.drop(png(picture()))
        assert asked.value.post_data_buffer == Image.fromarray(picture()).convert("L").tobytes()
        visit.expect("#line").to_contain_text("exit")
        context.close()


def test_the_camera_answers_until_it_is_stopped(visit):
    visit.page.click("#camera")
    visit.expect("#camera").to_have_attribute("aria-pressed", "true")
    visit.expect("#line").to_contain_text("exit")
    visit.expect("#said").to_have_attribute("aria-live", "off")
    visit.expect("#view").to_be_visible()
    visit.page.click("#camera")
    visit.expect("#video").to_be_hidden()
    visit.expect("#said").to_have_attribute("aria-live", "polite")


def test_live_figures_come_in(visit):
    visit.drop(png(picture()))
    visit.expect("#counts").to_contain_text(re.compile(r"[1-9]\d* answered · \d+ refused · \d+ waiting"))
    visit.expect(".chart path:not(.grid):not(.limit)").to_have_count(5)
    visit.expect(".chart:nth-child(4) .now").to_contain_text("80.0 %")


@pytest.mark.slow
def test_a_burst(visit):
    """It runs for eight seconds, everybody has an answer, and the figures say so."""
    page = visit.page
    page.select_option("#load", "0.7")
    page.click("#burst")
    visit.expect("#burst").to_be_disabled()
    visit.expect("#burst-note").to_contain_text(re.compile(r"\d+ requests of \d+ images, \d+ per second"))
    visit.expect("#dot").to_be_visible()
    visit.expect("#burst").to_be_enabled(timeout=4 * PATIENCE_MS)
    names, values = (page.locator(f"#figures {tag}").all_inner_texts() for tag in ("dt", "dd"))
    shown = dict(zip(names, values, strict=True))
    assert set(shown) == {"answered in time", "p99, seen here", "refused", "mean expected accuracy", "at its best"}
    assert shown["at its best"] == "80.0 %"
    assert 50 <= float(shown["mean expected accuracy"].split()[0]) <= 80
    visit.wrong[:] = [line for line in visit.wrong if "503" not in line]  # refusals, on a busy machine


@pytest.mark.slow
def test_a_burst_leaves_a_browser_alive_that_gets_no_answers(visit):
    visit.page.add_init_script(NO_ANSWERS)
    visit.page.reload()
    visit.expect("#link").to_have_text("connected")
    visit.page.select_option("#load", "6")
    visit.page.click("#burst")
    visit.expect("#burst").to_be_enabled(timeout=4 * PATIENCE_MS)
    names, values = (visit.page.locator(f"#figures {tag}").all_inner_texts() for tag in ("dt", "dd"))
    shown = dict(zip(names, values, strict=True))
    sent = int(re.match(r"([\d,]+) requests", visit.page.inner_text("#burst-note"))[1].replace(",", ""))
    assert int(shown["not sent by this browser"]) == sent - 500
    assert shown["answered in time"].startswith("0")


def test_refusals_are_shown_in_one_line(visit):
    said = {"error": "too many requests: not even the cheapest answer would be in time", "retry_after_ms": 70}
    visit.page.route("**/predict*", lambda route: route.fulfill(status=503, body=json.dumps(said)))
    visit.drop(png(picture()))
    visit.expect("#top").to_have_text("Too many requests: not even the cheapest answer would be in time")
    visit.wrong[:] = [line for line in visit.wrong if "503" not in line]


def test_dark_and_light(chromium, server):
    for scheme, other in (("dark", "light"), ("light", "dark")):
        context = chromium.new_context(color_scheme=scheme)
        visit = Visit(context, server.url)
        visit.expect("html").to_have_attribute("data-theme", scheme)
        visit.page.click("#theme")
        visit.expect("html").to_have_attribute("data-theme", other)
        visit.page.reload()
        visit.expect("html").to_have_attribute("data-theme", other)
        context.close()


def test_it_fits_a_telephone(chromium, server):
    context = chromium.new_context(viewport={"width": 360, "height": 740})
    visit = Visit(context, server.url)
    visit.drop(png(picture()))
    visit.expect("#line").to_contain_text("exit")
    assert visit.page.evaluate("() => document.documentElement.scrollWidth") <= 360
    context.close()


def test_names_are_text(chromium, timed_ladder, tmp_path):
    """Class and model names with markup are shown as they are, and a ladder of an earlier version has no lattice."""
    folder = shutil.copytree(timed_ladder, tmp_path / "ladder")
    manifest = json.loads((folder / "ladder.json").read_text())
    manifest |= {"classes": [HOSTILE] * len(CLASSES), "model": HOSTILE, "lattice": None}
    write(folder, manifest)
    with served(folder, "--cores", 1, "--runtime", "onnx") as server:
        context = chromium.new_context()
        visit = Visit(context, server.url)
        visit.drop(png(picture()))
        visit.expect("#top").to_contain_text(HOSTILE)
        visit.expect("#model").to_have_text(HOSTILE)
        visit.expect("#lattice-card").to_be_hidden()
        visit.expect("#bars li >> nth=0").to_contain_text(HOSTILE)
        assert visit.page.locator("img").count() == 0
        assert not visit.wrong
        context.close()


def test_labels_of_pixels(chromium, tmp_path):
    """The label map is laid over the image, in the classes' colours, with a legend."""
    model = trained("cnmm_seg_tiny", num_classes=5, input_size=(32, 48))
    ladder = read_ladder(made_up_ladder(tmp_path / "ladder", model, ("e1c0", "e2c0"), cascade="e2a0"))
    about, best = ladder.preprocessing, "e2c0"
    image = np.random.default_rng(3).integers(0, 256, (*about.size, 3), np.uint8)
    with served(ladder.folder, "--cores", 1, "--runtime", "onnx", "--target-ms", 2000) as server:
        context = chromium.new_context()
        visit = Visit(context, server.url)
        visit.drop(png(image))
        visit.page.focus("#budget")
        visit.page.keyboard.press("End")
        visit.expect("#badges").to_contain_text(f"point {best}")
        with cnmm.Session(ladder.folder, threads=1) as session:
            (labels,) = session.predict(image[None], point=best).labels
        shares = np.bincount(labels.ravel(), minlength=len(about.classes)) / labels.size
        visit.expect("#top").to_contain_text(about.classes[int(shares.argmax())])
        visit.expect("#bars li").to_have_count(min(8, int((shares > 0).sum())))
        visit.expect("#overlay").to_be_visible()
        drawn = visit.page.evaluate(
            """() => { const layer = document.getElementById("overlay");
                return [...layer.getContext("2d").getImageData(0, 0, layer.width, layer.height).data]; }"""
        )
        found = np.array(drawn, np.uint8).reshape(*about.size, 4)[..., :3]
        assert (found == np.array(about.palette, np.uint8)[labels]).mean() > 0.999
        assert not visit.wrong
        context.close()
