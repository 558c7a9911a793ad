"""The dashboard in a real headless Chromium, with the content security policy that it is served with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.dash import make_run

sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
pytestmark = pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="no Chromium")
SAMPLES = 4000


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "one", samples=SAMPLES, steps=40, tokens=24)
    make_run(folder / "two", samples=80, steps=10, tokens=24, seed=1)
    return folder


@pytest.fixture(scope="module")
def url(made):
    command = [sys.executable, "-m", "vime.cli", "dash", str(made), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        yield server.stdout.readline().split(" at ")[1].split()[0]
        server.terminate()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(120_000)  # a busy machine is no failure
    wrong: list[str] = []
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" and "404" not in m.text else None)
    yield page
    page.close()
    assert wrong == [], "errors in the page"


def test_curves_of_two_runs(page, url, made):
    page.goto(url)
    page.wait_for_selector("#charts .main-svg")
    reward = page.locator(".chart", has_text="rollout/raw_reward")
    assert reward.locator(".scatterlayer .trace").count() == 2
    page.locator("#smooth").fill("0.9")
    reward.locator(".scatterlayer .trace").nth(3).wait_for(state="attached")
    page.get_by_role("button", name="two").click()
    reward.locator(".scatterlayer .trace").nth(2).wait_for(state="detached")
    page.locator("#log-y").check()
    page.keyboard.press("Escape")
    page.locator("#charts").click(position={"x": 1, "y": 1})
    page.keyboard.press("/")
    page.keyboard.type("grad norm")
    assert page.locator("#metric-list label").all_inner_texts() == ["grad_norm"]
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("?")
    assert page.get_by_role("dialog").is_visible()


def test_a_live_run_draws_new_steps(page, url, made):
    import fcntl

    with open(made / "two/.lock", "w") as lock, open(made / "two/metrics.jsonl", "a") as file:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page.goto(url)
        page.get_by_text("● live").wait_for()
        page.get_by_role("button", name="one").click()
        value = page.locator(".chart", has_text="rollout/raw_reward").locator("h3 span")
        file.write(json.dumps({"step": 11, "rollout/raw_reward": 0.4321}) + '\n{"step": 12, "roll')
        file.flush()
        page.wait_for_selector("text=0.4321")
        assert value.inner_text() == "0.4321"
        file.write("out\n")
        file.flush()
        page.get_by_text("1 damaged line left out").wait_for()


def test_samples_by_keyboard(page, url):
    page.goto(url + "#samples")
    page.get_by_text(f"{SAMPLES} samples", exact=True).wait_for()
    page.wait_for_selector("#list .row span:last-child:not(:empty)")
    assert page.locator("#list .row").count() < 60, "only what is in sight has elements"
    for k in "jjk":
        page.keyboard.press(k)
    page.get_by_role("heading", name=f"Sample {SAMPLES - 1}").wait_for()
    page.keyboard.press("End")
    page.get_by_role("heading", name="Sample 0 step 1").wait_for()
    page.keyboard.press("Home")
    page.keyboard.press("j")
    page.keyboard.press("ArrowLeft")
    page.get_by_role("heading", name=f"Sample {SAMPLES - 3}").wait_for()
    page.locator("#f-step").fill("3")
    page.get_by_text(f"100 of {SAMPLES} samples").wait_for()
    page.locator("#f-flag").select_option("blocked")
    page.get_by_text(f"2 of {SAMPLES} samples").wait_for()
    page.locator("#list .row").first.click()
    page.get_by_text("tests-are-read-only").first.wait_for()
    page.locator("#f-step").fill("")
    page.locator("#f-flag").select_option("")
    page.locator("#sample-search").fill("What is 7 + 40")
    page.locator("#sample-search").press("Enter")
    page.get_by_text(f"1 of {SAMPLES} samples").wait_for()


def test_tokens_are_coloured_by_the_difference_of_logprobs(page, url, made):
    row = json.loads((made / "one/samples/step_000040.jsonl").read_text().splitlines()[-1])
    trained = json.loads((made / "one/samples/step_000040.train-0.json").read_text())[str(row["uid"])]
    page.goto(url + "#samples")
    page.wait_for_selector("#list .row span:last-child:not(:empty)")
    page.keyboard.press("j")
    page.wait_for_selector("#detail .tokens span")
    tokens = page.evaluate("[...document.querySelectorAll('#detail .tokens span')].map(s => [s.token.id, s.token.diff, s.style.background])")
    assert [t[0] for t in tokens] == row["tokens"]
    expected = iter(trained)
    gaps = [next(expected) - lp if m else None for lp, m in zip(row["log_probs"], row["loss_mask"])]
    assert [t[1] for t in tokens] == pytest.approx(gaps)
    worst = max(range(len(gaps)), key=lambda i: abs(gaps[i] or 0))
    alpha = [float(t[2].rsplit(",", 1)[1].strip(" )")) if t[2] else 0.0 for t in tokens]
    assert alpha[worst] == max(alpha) > 0.5 and all(a == 0 for a, g in zip(alpha, gaps) if g is None)
    page.locator("#detail .tokens span").nth(worst).hover()
    assert f"rollout {row['log_probs'][worst]:.4f}" in page.locator("#readout").inner_text()
    page.keyboard.press("m")
    assert page.locator("#detail select").input_value() == "logprob"


def test_timeline_groups_and_engines(page, url):
    page.goto(url)
    page.keyboard.press("3")
    page.locator("#gantt .barlayer .trace").first.wait_for(state="attached")
    rows = page.locator("#shares tbody tr").all_inner_texts()
    assert [r.split()[0] for r in rows] == ["controller", *(f"worker-{i}" for i in range(4)), *(f"trainer-{i}" for i in range(4))]
    assert page.locator("#slowest tbody tr").count() == 12
    page.locator("#time-run").select_option("two")
    page.keyboard.press("4")
    page.locator("#dropped .bars path").first.wait_for(state="attached")
    assert "dropped_zero_std" in page.locator("#group-tables").inner_text()
    page.keyboard.press("5")
    page.locator("#engine-charts .main-svg").first.wait_for()
    page.get_by_text("no run answers here").wait_for()
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, button')].filter(e => !e.labels?.length && !e.ariaLabel && !e.innerText.trim()).map(e => e.outerHTML)"
    )
    assert unnamed == [], "controls without a label"
