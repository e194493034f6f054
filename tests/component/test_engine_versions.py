"""The connector under vLLM's own scheduler and configuration, with the sources of each version that is known; no engine.

``scripts/tiers.py versions`` runs this with the newer version's sources, ``component`` with the installed one.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import vllm
from scheduled_engines import BLOCK, Scheduled, decode_leg, prefill_leg, until, vllm_config
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin
from vllm_hellos import hello, recorded
from vllm_places import MODULE, VERSION

from xpyd_sidecar.engine import compat
from xpyd_sidecar.engine.compat import KVConnectorBase_V1, SupportsHMA
from xpyd_sidecar.engine.connector import XpydConnector
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv import peers
from xpyd_sidecar.kv.keys import Outcome

pytestmark = pytest.mark.timeout(300)  # vLLM looks at the model in a process of its own, once
SINCE_033 = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Scheduled]]:
    made: list[Scheduled] = []

    def build(name: str, **options: Any) -> Scheduled:
        made.append(Scheduled(name, tmp_path, **options))
        return made[-1]

    yield build
    for one in made:
        one.stop()


def tokens(length: int, prompt: int = 1) -> list[int]:
    return [3 + (prompt * 31 + at * 7) % 400 for at in range(length)]


# --- hooks ---


def test_every_hook_of_ours_is_one_of_this_version() -> None:
    own = {name for name, value in vars(XpydConnector).items()
           if not name.startswith("_") and (callable(value) or isinstance(value, classmethod | property))}
    unknown = own - set(dir(KVConnectorBase_V1)) - set(dir(SupportsHMA)) - {"scheduler", "worker"}
    assert unknown == (SINCE_033 if MODULE == "v032" else set())


def test_every_hook_that_must_be_there_is_there() -> None:
    assert not XpydConnector.__abstractmethods__


def test_sleep_mode_is_refused_by_name_before_an_engine_starts() -> None:
    config = vllm_config()
    config.model_config.enable_sleep_mode = True
    if MODULE != "v032":
        with pytest.raises(ValueError, match="XpydConnector does not support sleep mode"):
            config._verify_kv_transfer_compat()
    with pytest.raises(ConfigError, match="sleep mode is not supported"):
        compat.check_model(config, None)


def test_blocks_are_not_given_up_and_a_wake_up_changes_nothing(make: Callable[..., Scheduled]) -> None:
    engine = make("d")
    with pytest.raises(ConfigError, match="sleep mode is not supported"):
        engine.worker.unregister_kv_caches()
    engine.worker.restore_kv_caches()
    before = engine.known()
    engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): engine.worker.get_handshake_metadata()})
    assert engine.known() == before
    answer = engine.ask(tokens(70), None)
    until(lambda: answer.over, engine)
    assert (len(answer.tokens), answer.wrong, answer.computed) == (4, 0, 70)


# --- prompts that are handed over ---


@pytest.mark.parametrize("runner", ["v1", "deferred"])
def test_prompts_of_all_lengths_are_handed_over_whole(make: Callable[..., Scheduled], runner: str) -> None:
    p, d = make("p", runner=runner), make("d", runner=runner)
    for prompt, length in enumerate((1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1, 300)):
        transfer = uuid.uuid4().hex
        ours = d.ask(tokens(length, prompt), decode_leg(transfer))
        theirs = p.ask(tokens(length, prompt), prefill_leg(transfer, d.known()), most=1)
        until(lambda one=ours, other=theirs: one.over and other.over, p, d)  # type: ignore[misc]
        assert (ours.wrong, len(ours.tokens), theirs.wrong) == (0, 4, 0), length
        assert ours.computed <= 1, "the last token alone is computed again"
    until(lambda: not p.scheduler.has_requests() and not d.scheduler.has_requests(), p, d)


def test_nothing_of_a_step_whose_forward_failed_is_handed_over(
        make: Callable[..., Scheduled], monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in the blocks then is not of the prompt, and vLLM's V1 runner calls all hooks of a whole step."""
    p, d = make("p"), make("d", load_timeout_s=5.0)
    transfer = uuid.uuid4().hex
    ours = d.ask(tokens(70), decode_leg(transfer))
    p.ask(tokens(70), prefill_leg(transfer, d.known()), most=1)
    d.step()
    step = p.scheduler.schedule()
    monkeypatch.setattr(mixin, "get_kv_transfer_group", lambda: p.worker)
    monkeypatch.setattr(mixin, "get_forward_context", lambda: None)
    with (pytest.raises(RuntimeError, match="no compiler"),
          mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(step)):
        raise RuntimeError("no compiler")
    until(lambda: ours.over, d)
    assert (ours.computed, ours.wrong, len(ours.tokens)) == (70, 0, 4), "decode has computed the prompt itself"


def test_many_at_once_with_a_cache_of_prefixes_and_prompts_in_chunks(make: Callable[..., Scheduled]) -> None:
    p, d = make("p"), make("d")
    asked = []
    for prompt in range(8):
        transfer = uuid.uuid4().hex
        prefix = tokens(2 * BLOCK) if prompt % 2 else []
        whole = prefix + tokens(100 + 20 * prompt, prompt)
        if prompt % 3:
            asked.append(d.ask(whole, decode_leg(transfer)))
        asked.append(p.ask(whole, prefill_leg(transfer, d.known()), most=1))
        if prompt % 3 == 0:
            p.step()
            asked.append(d.ask(whole, decode_leg(transfer)))
    until(lambda: all(one.over for one in asked), p, d)
    assert [one.wrong for one in asked] == [0] * 16
    until(lambda: not p.scheduler.has_requests() and not d.scheduler.has_requests(), p, d)


def test_kv_of_other_weights_is_refused_by_name_and_of_the_same_is_taken(
        make: Callable[..., Scheduled], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    p, d = make("p"), make("d")
    monkeypatch.setattr(logging.getLogger("xpyd_sidecar"), "propagate", True)  # it does as vLLM's own

    def handed(prompt: int) -> int:
        """Tokens that decode has computed itself."""
        transfer = uuid.uuid4().hex
        ours = d.ask(tokens(70, prompt), decode_leg(transfer))
        theirs = p.ask(tokens(70, prompt), prefill_leg(transfer, d.known()), most=1)
        until(lambda: ours.over and theirs.over, p, d)
        assert (ours.wrong, theirs.wrong) == (0, 0)
        return ours.computed

    assert handed(1) == 1
    d.core.set_weight_version("step 7")
    assert handed(2) == 70
    p.core.set_weight_version("step 7")
    assert handed(3) == 1
    until(lambda: not p.scheduler.has_requests() and not d.scheduler.has_requests(), p, d)
    assert "weights: version 'step 7' here, 'default' there" in caplog.text


# --- two versions ---


def test_the_recorded_frame_of_this_version_is_what_its_sources_say(make: Callable[..., Scheduled]) -> None:
    assert recorded()[VERSION] == hello(make("p")), "record it anew for each version: tests/support/vllm_hellos.py"


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
@pytest.mark.parametrize("alike", [True, False])
def test_versions_pair_exactly_where_they_write_kv_alike(make: Callable[..., Scheduled], version: str, alike: bool) -> None:
    """By frames of both versions: nothing else of what they say differs."""
    theirs, own = recorded()[version], hello(make("d"))
    if alike:
        theirs = msgspec.structs.replace(
            theirs, fingerprint=msgspec.structs.replace(theirs.fingerprint, kv_abi=own.fingerprint.kv_abi))
    ours = peers.Self(own.instance, theirs.expects, own.fingerprint, own.parallel, own.geometry)
    met = peers.meet(ours, theirs)
    if alike or version == VERSION:
        assert (met.refused, met.ranks, len(met.plan)) == (None, 1, 1)
    else:
        assert met.refused == (Outcome.INCOMPATIBLE, f"fingerprint: kv_abi: '{VERSION}' here, '{version}' there")


def test_while_a_service_rolls_each_version_pairs_with_itself_and_nothing_is_lost(
        make: Callable[..., Scheduled], monkeypatch: pytest.MonkeyPatch) -> None:
    """Old and new prefill with old and new decode, as if no router had looked at fingerprints first."""
    prefill, decode = {}, {}
    for age in ("old", "new"):
        monkeypatch.setattr(vllm, "__version__", f"{VERSION}+{age}")
        prefill[age], decode[age] = make(f"p-{age}"), make(f"d-{age}")
    every = (*prefill.values(), *decode.values())
    for n, (one, other) in enumerate(itertools.product(prefill, decode)):
        transfer = uuid.uuid4().hex
        ours = decode[other].ask(tokens(100, n), decode_leg(transfer))
        theirs = prefill[one].ask(tokens(100, n), prefill_leg(transfer, decode[other].known(f"d-{other}")), most=1)
        until(lambda ours=ours, theirs=theirs: ours.over and theirs.over, *every)  # type: ignore[misc]
        assert (ours.wrong, len(ours.tokens)) == (0, 4)
        assert ours.computed == (1 if one == other else 100)
