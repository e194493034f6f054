"""The CRDs in crds/ are those of the structs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml

from xpyd_operator.api.crds import crds, to_yaml

FOLDER = Path(__file__).parents[2] / "crds"
CRDS = crds()


@pytest.mark.parametrize("name", CRDS)
def test_the_file_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text() == to_yaml(CRDS[name]), "run `xpyd render crds`"


def test_no_other_file_is_there() -> None:
    assert sorted(path.name for path in FOLDER.glob("*.yaml")) == sorted(CRDS)


@pytest.mark.parametrize("name", CRDS)
def test_the_text_is_the_object(name: str) -> None:
    assert yaml.safe_load(to_yaml(CRDS[name])) == CRDS[name]
    assert to_yaml(CRDS[name]) == to_yaml(crds()[name])


@pytest.mark.parametrize("name", CRDS)
def test_as_it_goes_to_the_api_server_it_stays_small(name: str) -> None:
    assert len(msgspec.json.encode(CRDS[name])) < 128 * 1024


def test_names() -> None:
    service, pool = (CRDS[name]["spec"] for name in ("disaggservices.yaml", "disaggpools.yaml"))
    assert service["names"]["shortNames"] == ["dsvc"]
    assert pool["names"]["shortNames"] == ["dpool"]
    for name, crd in CRDS.items():
        spec = crd["spec"]
        assert crd["metadata"]["name"] == f"{spec['names']['plural']}.{spec['group']}" == f"{Path(name).stem}.xpyd.dev"
        assert [(version["name"], version["served"], version["storage"]) for version in spec["versions"]] == [
            ("v1beta1", True, True)
        ]
        assert spec["conversion"] == {"strategy": "None"}


def test_subresources() -> None:
    names = ("disaggservices.yaml", "disaggpools.yaml")
    service, pool = (CRDS[name]["spec"]["versions"][0]["subresources"] for name in names)
    assert service == {"status": {}}
    assert pool["status"] == {}
    assert pool["scale"]["labelSelectorPath"] == ".status.selector"


@pytest.mark.parametrize("name", CRDS)
def test_columns_and_scale_point_to_fields(name: str) -> None:
    version = CRDS[name]["spec"]["versions"][0]
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    paths += version["subresources"].get("scale", {}).values()
    for path in paths:
        node = version["schema"]["openAPIV3Schema"]
        for part in path.strip(".").split("[")[0].split("."):
            if part == "metadata":
                break
            node = node["properties"][part]
        else:
            assert node["type"] in ("string", "integer", "array"), path


def test_kubectl_shows_model_wanted_serving_ready_reason_url_age() -> None:
    columns = CRDS["disaggservices.yaml"]["spec"]["versions"][0]["additionalPrinterColumns"]
    assert [column["name"] for column in columns] == ["Model", "Wanted", "Serving", "Ready", "Reason", "URL", "Age"]


def described(name: str) -> str:
    """What is said of the types of conditions."""
    status = CRDS[name]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    text: str = status["properties"]["conditions"]["items"]["properties"]["type"]["description"]
    return text


def test_the_conditions_of_each_kind_are_described_by_their_own_text() -> None:
    service, pool = described("disaggservices.yaml"), described("disaggpools.yaml")
    kinds = ("Ready", "Progressing", "Degraded", "Compatible", "Valid", "Stalled", "Suspended")
    assert all(f"`{kind}`" in service for kind in kinds)
    assert all(f"`{kind}`" in pool for kind in ("Ready", "Limited"))
    assert "Compatible" not in pool
    assert "Limited" not in service


def test_a_column_says_why_a_service_is_not_ready() -> None:
    columns = CRDS["disaggservices.yaml"]["spec"]["versions"][0]["additionalPrinterColumns"]
    assert {column["name"]: column["jsonPath"] for column in columns}["Reason"] == (
        ".status.conditions[0].reason"), "of Ready, or of Suspended: what is said first"
