from pathlib import Path

import pytest

from xpyd_sidecar.contract import duty
from xpyd_sidecar.contract.duty import EngineRole
from xpyd_sidecar.contract.ids import Role


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert duty.read(tmp_path) is None
    duty.write(tmp_path, EngineRole(Role.DECODE, 1))
    duty.write(tmp_path, EngineRole(Role.PREFILL, 2, draining=True))
    assert duty.read(tmp_path) == EngineRole(Role.PREFILL, 2, draining=True)
    assert [path.name for path in tmp_path.iterdir()] == [duty.FILE]


def test_fields_of_tomorrow_are_ignored_and_wrong_ones_named(tmp_path: Path) -> None:
    (tmp_path / duty.FILE).write_text('{"role": "decode", "epoch": 3, "mood": "good"}')
    assert duty.read(tmp_path) == EngineRole(Role.DECODE, 3)
    (tmp_path / duty.FILE).write_text('{"role": "router", "epoch": 3}')
    with pytest.raises(ValueError, match=r"duty\.json: Invalid enum value 'router' - at `\$\.role`"):
        duty.read(tmp_path)
