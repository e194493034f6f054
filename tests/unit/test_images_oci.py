from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import image_parts  # noqa: F401 (brings `images` onto the path)
import pytest
from images import oci
from images.platforms import PLATFORMS, Platform
from images.tools import ImageError
from images.tree import Tree

AMD64, ARM64 = PLATFORMS


def image(folder: Path, platform: Platform, content: bytes = b"1") -> Path:
    folder.mkdir(exist_ok=True)
    tree = Tree()
    tree.file("a", content)
    layer = oci.Layers(folder).add("own", tree)
    archive = folder / f"{platform.name}.tar"
    oci.Image(platform, {"User": "65532:65532"}, [layer]).write(archive, "localhost/it:1")
    return archive


def files(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        opened = {name: tar.extractfile(name) for name in tar.getnames()}
        return {name: file.read() for name, file in opened.items() if file is not None}


def blob(found: dict[str, bytes], described: dict[str, Any]) -> Any:
    data = found[f"blobs/{described['digest'].replace(':', '/')}"]
    assert len(data) == described["size"]
    return json.loads(data)


def test_the_same_files_make_the_same_archive(tmp_path: Path) -> None:
    first, second = (image(tmp_path / name, AMD64) for name in ("one", "two"))
    assert first.read_bytes() == second.read_bytes()
    assert oci.digest_of(first) == oci.digest_of(second)
    assert oci.digest_of(image(tmp_path / "three", AMD64, b"2")) != oci.digest_of(first)


def test_everything_has_the_digest_that_it_is_called_by(tmp_path: Path) -> None:
    found = files(image(tmp_path / "one", ARM64))
    blobs = {name: data for name, data in found.items() if name.startswith("blobs/")}
    assert len(blobs) == 3
    assert all(hashlib.sha256(data).hexdigest() == name.rpartition("/")[2] for name, data in blobs.items())
    (described,) = json.loads(found["index.json"])["manifests"]
    assert described["annotations"] == {"io.containerd.image.name": "localhost/it:1",
                                        "org.opencontainers.image.ref.name": "localhost/it:1"}
    config = blob(found, blob(found, described)["config"])
    assert (config["architecture"], config["os"], config["config"]["User"]) == ("arm64", "linux", "65532:65532")
    assert len(config["rootfs"]["diff_ids"]) == len(config["history"]) == 1


def test_an_index_has_both_platforms_and_all_of_their_blobs(tmp_path: Path) -> None:
    parts = [image(tmp_path / "a", AMD64), image(tmp_path / "b", ARM64)]
    both = tmp_path / "both.tar"
    oci.index(both, "localhost/it:both", parts)
    found = files(both)
    (described,) = json.loads(found["index.json"])["manifests"]
    assert described["mediaType"] == "application/vnd.oci.image.index.v1+json"
    assert described["annotations"]["org.opencontainers.image.ref.name"] == "localhost/it:both"
    index = blob(found, described)
    assert [entry["platform"] for entry in index["manifests"]] == [
        {"architecture": "amd64", "os": "linux"}, {"architecture": "arm64", "os": "linux"}]
    for entry, part in zip(index["manifests"], parts, strict=True):
        assert entry["digest"] == oci.digest_of(part)
        config = blob(found, blob(found, entry)["config"])
        assert config["architecture"] == entry["platform"]["architecture"]
        assert {name for name in files(part) if name.startswith("blobs/")} <= set(found)
    before = both.read_bytes()
    oci.index(both, "localhost/it:both", parts)
    assert both.read_bytes() == before


def test_an_index_of_two_images_for_one_platform_is_refused(tmp_path: Path) -> None:
    parts = [image(tmp_path / "a", AMD64), image(tmp_path / "b", AMD64, b"2")]
    with pytest.raises(ImageError, match="two images for one platform"):
        oci.index(tmp_path / "both.tar", "localhost/it:both", parts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_what_is_no_archive_is_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w"):
        pass
    with pytest.raises(ImageError, match=r"no index\.json in"):
        oci.digest_of(tmp_path / "x.tar")


def test_a_layer_is_kept_by_its_name(tmp_path: Path) -> None:
    layers, tree = oci.Layers(tmp_path), Tree()
    tree.file("a/b", b"1")
    assert layers.find("base-1") is None
    made = layers.add("base-1", tree)
    found = layers.find("base-1")
    assert found is not None
    assert found[0] == made
    assert list(found[1]) == list(tree)
    layers.add("base-2", tree)
    layers.prune_oldest(1)
    assert (layers.find("base-1") is None) != (layers.find("base-2") is None)
    assert len(list(layers.folder.iterdir())) == 2
