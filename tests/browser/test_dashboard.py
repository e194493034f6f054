"""The dashboard in a real browser, before a real router and scripted engines: what a person sees."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING

from beats import beat, bye
from dashboard_stage import TOKEN, Stage, stage
from scripted_engine import Play

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.membership import Drafts

if TYPE_CHECKING:
    from conftest import Page


async def enter(page: Page, s: Stage, token: str = TOKEN) -> None:
    """Open the page and give the token."""
    await page.open(s.url)
    await page.wait("#need", bool, "the page asks for a token")
    await page.type("#token", token)


async def test_the_page_asks_for_a_token_once_and_keeps_it_in_the_tab(page: Page) -> None:
    async with stage(1, 1) as s:
        await page.open(s.url)
        assert "asks for its admin token" in await page.wait("#need", bool, "what is needed")
        assert await page.text("#board") == ""
        await page.type("#token", "wrong")
        await page.wait("#wrong", lambda text: "does not know this token" in text, "a refusal")
        assert await page.run("return sessionStorage.length") == 0
        await page.type("#token", TOKEN)
        await page.wait("#shape", lambda text: text == "1P1D", "the board")
        await page.open(s.url)
        await page.wait("#shape", lambda text: text == "1P1D", "the board again, without asking")
        await page.click("#leave")
        await page.wait("#need", bool, "the page asks again")
        assert await page.run("return sessionStorage.length") == 0
        assert TOKEN not in await page.run("return document.documentElement.innerHTML")
        assert await page.faults() == []


async def test_a_client_key_does_not_open_it(page: Page, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("client-key-1\n")
    async with stage(1, 1, api_key_file=str(keys)) as s:
        await page.open(s.url)
        assert "client key" not in await page.wait("#need", bool, "what is needed")
        await page.type("#token", "client-key-1")
        await page.wait("#wrong", lambda text: "does not know this token" in text, "a refusal")
        assert await page.text("#board") == ""
        await page.type("#token", TOKEN)
        await page.wait("#shape", lambda text: text == "1P1D", "the board")


async def test_what_is_accepted_of_drafts_is_shown_of_engines_that_speculate(page: Page) -> None:
    async with stage(1, 2) as s:
        s.drafts = {"p0": Drafts(), "d1": Drafts(200, 75, 400)}
        await enter(page, s)
        await page.wait('[data-instance="d1"] dl', lambda text: "accepted 38 %" in " ".join(text.split()), "the share")
        await page.wait('[data-instance="p0"] dl', lambda text: "none yet" in text, "nothing was drafted")
        assert "accepted" not in await page.text('[data-instance="d0"] dl')
        title = await page.run("""return document.querySelector('[data-instance="d1"]').title""")
        assert "drafts accepted since its start: 38 %" in title
        assert await page.faults() == []


async def test_instances_flows_and_figures_after_requests(page: Page) -> None:
    async with stage(2, 3) as s:
        s.kept["d1"] = 0.5
        await enter(page, s)
        await page.wait("#shape", lambda text: text == "2P3D", "the board")
        assert await page.text("#state") == "serving"
        assert await page.texts('[data-role="prefill"] .name') == ["p0", "p1"]
        assert await page.texts('[data-role="decode"] .name') == ["d0", "d1", "d2"]
        assert "No KV went" in await page.text("#pairs")
        assert await page.texts("path.flow") == []
        await s.load(rate=25, seconds=4)
        await page.wait("#pairs", lambda text: "p0" in text and "d2" in text, "pairs")
        await page.wait_texts("text.rate", lambda texts: len(texts) == 6 and all(
            float(text.removesuffix("/s")) > 0 for text in texts), "KV from each to each")
        assert all("handover" in text for text in await page.texts("path.flow"))
        assert re.search(r"\d+ ms", await page.text('[data-name="TTFT"] strong'))
        assert re.search(r"[\d.]+ m?s", await page.text('[data-name="Handover"] strong'))
        assert float((await page.text('[data-name="Requests"] strong')).removesuffix("/s")) > 0
        assert await page.text('[data-name="Failed"] strong') == "0 %"
        drawn = await page.run("""return document.querySelector('[data-name="TTFT"] .curve').getAttribute('d')""")
        assert "L" in drawn, "a line through the seconds in which streams began"
        meter = await page.run("""return document.querySelector('[data-instance="d1"] [role=meter]').ariaValueNow""")
        assert 50 <= int(meter) <= 60
        assert await page.faults() == []


async def test_requests_that_run_are_seen_on_their_instances(page: Page) -> None:
    async with stage(1, 1) as s:
        await enter(page, s)
        hold = asyncio.Event()
        s.fleet.d[0].default = Play(chunks=2, hold_after=(1, hold))
        loading = [asyncio.create_task(s.load(rate=50, seconds=0.1)) for _ in range(2)]
        try:
            some = re.compile(r"in flight\s+[1-9]")
            await page.wait('[data-instance="d0"] dl', lambda text: some.search(text) is not None, "open legs")
            await page.wait('[data-name="In flight"] strong', lambda text: text.isdigit() and text != "0", "requests")
        finally:
            hold.set()
        await asyncio.gather(*loading)
        await page.wait('[data-name="In flight"] strong', lambda text: text == "0", "none in flight")


async def test_an_instance_that_goes_away_and_one_that_is_suspended(page: Page) -> None:
    async with stage(1, 3) as s:
        await enter(page, s)
        await page.wait("#shape", lambda text: text == "1P3D", "the board")
        s.silent.add("d2")
        s.fleet.context.watch.on_message(bye("d2"))
        await page.wait("#shape", lambda text: text == "1P2D", "one less")
        assert await page.texts('[data-role="decode"] .name') == ["d0", "d1"]
        await page.wait("#changes", lambda text: "d2" in text and "said goodbye" in text, "the change")
        s.silent.add("d1")
        await s.fleet.d[1].stop()
        loading = asyncio.create_task(s.load(rate=5, seconds=30))
        await page.wait('[data-instance="d1"]', lambda text: "suspended" in text and "cannot connect" in text, "why", 30)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        assert await page.text("#shape") == "1P1D"
        assert "bad" in await page.run("""return document.querySelector('[data-instance="d1"]').className""")


async def test_a_failure_is_shown_with_its_reason(page: Page) -> None:
    async with stage(1, 1, failover="error") as s:
        await enter(page, s)
        await page.wait("#failures", lambda text: "No request yet" in text, "no failure yet")
        s.fleet.d[0].default = Play(error_after=1)
        await s.load(rate=20, seconds=0.3)
        seen = await page.wait("#failures", lambda text: "engine core died" in text, "the reason")
        assert "broken 200" in seen
        assert "p0 → d0" in seen
        await page.wait('[data-name="Failed"] strong', lambda text: text == "100 %", "the share that failed")
        await s.fleet.d[0].stop()
        s.fleet.d[0].refuse()
        await s.load(rate=20, seconds=0.3)
        await page.wait("#failures", lambda text: "unavailable 503" in text or "failed 50" in text, "another failure")


async def test_states_without_instances_and_without_a_router(page: Page) -> None:
    async with stage(0, 0) as s:
        await enter(page, s)
        assert "No instance is known" in await page.wait("#fleet", bool, "the empty state")
        assert await page.text("#state") in {"nobody decodes", "waiting for agents"}
        s.fleet.context.watch.on_message(beat("d7"))
        await page.wait('[data-role="decode"]', lambda text: "d7" in text, "the first instance")
        assert "No prefill instance" in await page.text('[data-role="prefill"]')
        assert await page.text("#notice") == ""
    await page.wait("#notice", lambda text: "cannot be reached" in text, "a notice")
    assert "d7" in await page.text("#fleet"), "the last picture stays"
    assert await page.run("return document.body.classList.contains('stale')")


async def test_names_and_reasons_are_shown_as_text_and_never_run(page: Page) -> None:
    evil = '<img src=x onerror="window.hit=1"><script>window.hit=2</script>'
    async with stage(0, 0) as s:
        await enter(page, s)
        # The roster refuses such names; should one get through some day, the page must not run it.
        member = s.fleet.context.roster
        s.fleet.context.watch.on_message(beat("d0"))
        s.fleet.context.watch.on_message(beat("p0", Role.PREFILL))
        found = {each.name: each for each in member.members()}
        found["d0"].name = evil
        found["d0"].suspended = evil
        found["p0"].model = evil
        observer = s.fleet.context.observer
        observer.on_refused("chat", evil, "unavailable", 503, evil)
        observer.history.on_changed(1.0, evil, evil)
        await page.wait("#failures", lambda text: evil in text, "the reason as text")
        await page.wait("#changes", lambda text: evil in text, "the change as text")
        await page.wait("#fleet", lambda text: evil in text, "the name as text")
        await page.wait("#about", lambda text: evil in text, "the model as text")
        script = "return [typeof window.hit, document.querySelectorAll('#board img, #board script').length]"
        assert await page.run(script) == ["undefined", 0]


async def test_many_instances_stay_readable(page: Page) -> None:
    async with stage(0, 0) as s:
        await enter(page, s)
        for number in range(90):
            s.fleet.context.watch.on_message(beat(f"d{number}"))
        for number in range(20):
            s.fleet.context.watch.on_message(beat(f"p{number}", Role.PREFILL))
        await page.wait("#shape", lambda text: text == "20P90D", "all of them")
        assert len(await page.texts('[data-role="decode"] .dense')) == 60
        assert "and 30 more" in await page.text('[data-role="decode"]')
        assert len(await page.texts('[data-role="prefill"] .dense')) == 20


async def test_it_fits_a_phone_and_both_colours(page: Page) -> None:
    async with stage(2, 2) as s:
        await asyncio.to_thread(page.driver.set_window_size, 500, 800)
        await asyncio.to_thread(page.driver.execute_cdp_cmd, "Emulation.setDeviceMetricsOverride",
                                {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True})
        await enter(page, s)
        await page.wait("#shape", lambda text: text == "2P2D", "the board")
        await s.load(rate=20, seconds=1)
        await page.wait("#pairs", lambda text: "p0" in text, "pairs")
        wide = await page.run("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert wide[0] <= wide[1] == 360
        colours = set()
        for name in ("Dark", "Light"):
            await page.click("#theme")
            assert await page.text("#theme") == name
            colours.add(await page.run("return getComputedStyle(document.body).backgroundColor"))
        assert len(colours) == 2
