"""The document of tenants: taken whole, or refused with the entry at fault; and digests that stand for keys."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import pytest

from xpyd_sidecar.contract import tenants
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.tenants import DocumentFault, PriorityRange, Tenant, decode

SERVICE = ServiceKey(bytes(range(32)))
D1, D2 = "sha256:" + "1" * 64, "hmac-sha256:" + "2" * 64


def document(*entries: Any) -> str:
    return json.dumps({"tenants": list(entries)})


def entry(**fields: Any) -> dict[str, Any]:
    return {"name": "a", "digests": [D1], **fields}


def test_a_whole_document() -> None:
    said = entry(tokensPerMinute=100, tokensPerDay=5000, inFlight=4, models=["m", "org/x"], weight=3, cachedWeight=0.1,
                 priority={"least": -8, "most": 2}, isolation="tenant")
    found = decode("\ufeff \n" + document(said, {"name": "b.c-D_9", "digests": [D2, "sha256:" + "3" * 64]}))
    assert found == (
        Tenant("a", (D1,), 100, 5000, 4, ("m", "org/x"), PriorityRange(-8, 2), 3, 0.1, "tenant"),
        Tenant("b.c-D_9", (D2, "sha256:" + "3" * 64)))
    assert (found[0].isolated, found[1].isolated) == (True, False)
    assert [found[0].may_use(model) for model in ("m", "org/x", "other", None)] == [True, True, False, False]
    assert found[1].may_use(None)
    assert decode(document(json.loads(tenants.encode(found[0])))) == found[:1]
    assert json.loads(tenants.encode(found[1])) == {"name": "b.c-D_9", "digests": list(found[1].digests)}


@pytest.mark.parametrize(("text", "words"), [
    ('{"tenants": [\n{"name": }]}', "line 2, column 10: it is no JSON"),
    ("{" * 100_000, "JSON|nested too deep"),
    ('{"tenants": ' + "[" * 100_000, "JSON|nested too deep"),
    ("{}", 'no list "tenants"'), ('{"tenants": {}}', 'no list "tenants"'), ("[]", 'no list "tenants"'),
    ('{"tenants": []}', "there is none"), ('{"tenants": [1]}', r"tenants\[0\]: Expected `object`"),
    ('{"tenants": [{}], "tenant": 1}', "unknown field 'tenant'"),
    ('{"tenants": [{"name": "a", "weight": 1, "weight": 2}]}', "'weight' stands there twice in the entry 'a'"),
    ('{"tenants": [], "tenants": []}', "'tenants' stands there twice"),
    (document({"digests": [D1]}), r"tenants\[0\]: .*`name`"),
    (document({"name": "a"}), r"tenants\[0\] \('a'\): .*`digests`"),
    (document(entry(), entry(name="b", rpm=1, digests=[D2])), r"tenants\[1\] \('b'\): .*unknown field `rpm`"),
    (document(entry(), entry(digests=[D2])), r"tenants\[1\] \('a'\): tenants\[0\] has this name"),
    (document(entry(), entry(name="b")), r"tenants\[1\] \('b'\): digest sha256:1+…: 'a' has it, too"),
    (document(entry(digests=[D1, D1])), "it has it twice"),
    (document(entry(digests=[])), "digests: 1 to 8, not 0"),
    (document(entry(digests=[f"sha256:{number:064x}" for number in range(9)])), "digests: 1 to 8, not 9"),
    (document(entry(digests=[D1[:-1]])), "of 70 characters is no digest"),
    (document(entry(digests=[D1 + "0"])), "of 72 characters is no digest"),
    (document(entry(digests=[D1.replace("1", "G")])), "is no digest"),
    (document(entry(digests=["md5:" + "1" * 64])), "is no digest"),
    (document(entry(digests=["my-secret-key"])), "is no digest"),
    (document(entry(tokensPerMinute=0)), r"\('a'\): tokensPerMinute is 0: it may send nothing"),
    (document(entry(tokensPerDay=0)), "tokensPerDay is 0: it may send nothing"),
    (document(entry(inFlight=-1)), "inFlight is -1: it may send nothing"),
    (document(entry(tokensPerDay=10**15 + 1)), "at most"), (document(entry(tokensPerMinute=1e9)), "Expected `int"),
    (document(entry(tokensPerMinute="5")), "tokensPerMinute"), (document(entry(inFlight=True)), "inFlight"),
    (document(entry(weight=0)), "weight is 0"), (document(entry(weight=101)), "weight is 101"),
    (document(entry(cachedWeight=1.5)), "cachedWeight is 1.5"),
    (document(entry(cachedWeight=float("nan"))), "cachedWeight is nan"),
    (document(entry(priority={"least": 3, "most": 2})), "not 3 to 2"),
    (document(entry(priority={"least": -9})), "not -9 to 8"), (document(entry(priority={"low": 1})), "unknown field `low`"),
    (document(entry(models=["m", "m"])), "each once"), (document(entry(models=[""])), "none empty"),
    (document(entry(isolation="none")), "isolation|none"),
    (document(entry(name="")), "name: letters"), (document(entry(name="a" * 64)), "name: letters"),
    (document(entry(name="_other")), "name: letters"), (document(entry(name="a b")), "name: letters"),
    (document(entry(name="ä")), "name: letters"), (document(entry(name='a"\n')), "name: letters"),
    (document(*[entry(name=f"t{number}", digests=[f"sha256:{number:064x}"]) for number in range(10_001)]),
     "10001, at most 10000"),
])
def test_a_bad_document_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(DocumentFault, match=words):
        decode(text)


def test_a_bad_document_never_shows_what_may_be_a_key() -> None:
    key = "sk-" + "s3cret" * 10
    with pytest.raises(DocumentFault) as told:
        decode(document(entry(digests=[key])))
    assert key[:8] not in str(told.value)
    assert str(len(key)) in str(told.value)


@pytest.mark.parametrize(("text", "right"), [
    ('{"tenants": []}', True), (" \n\t{", True), ("\ufeff{}", True), ("key\n{", False), ("", False), ("# {\n", False)])
def test_a_document_is_told_from_lines(text: str, right: bool) -> None:
    assert tenants.is_document(text) is right


def test_keys_that_are_made_have_256_bits_and_a_form() -> None:
    made = {tenants.new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(tenants.was_made(key.encode()) and len(key) == 46 for key in made)
    for other in (b"", b"xk-", b"xk-" + b"a" * 42, b"xk-" + b"a" * 44, b"xk-" + b"a" * 42 + b"+", b"a" * 46):
        assert not tenants.was_made(other)


def test_a_plain_digest_is_for_keys_that_nobody_can_guess() -> None:
    key = tenants.new_key()
    assert tenants.digest_of(key) == tenants.digest_of(key, SERVICE) == "sha256:" + hashlib.sha256(key.encode()).hexdigest()
    with pytest.raises(ValueError, match=r"was not made by .xpyd keys new"):
        tenants.digest_of("letmein")
    said = tenants.digest_of("letmein", SERVICE)
    assert said == "hmac-sha256:" + hmac.new(tenants.pepper(SERVICE), b"letmein", "sha256").hexdigest()
    assert said != tenants.digest_of("letmein", ServiceKey(bytes(32)))
    for digest, plain in ((tenants.digest_of(key), True), (said, False)):
        assert decode(document(entry(digests=[digest])))[0].digests == (digest,)
        assert tenants.digest_bytes(digest) == (plain, bytes.fromhex(digest.partition(":")[2]))
