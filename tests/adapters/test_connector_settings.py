"""What a user may set, and the one line that a wrong key or value is told with."""

from __future__ import annotations

from typing import Any

import pytest

from engine_adapter.paged.settings import MAX_DEADLINE_MS, ConnectorSettings, LoadMode, SavePolicy
from kvstore.block.codec import CODECS
from kvstore.block.errors import BadInput
from kvstore.config import kinds_of
from workbench import one_line
from wrong_values import wrong_values

URL = {"url": "unix:/run/kvstore/kvstore.sock"}


def test_the_url_is_all_that_is_needed() -> None:
    settings = ConnectorSettings.of(URL)
    assert settings == ConnectorSettings(URL["url"])
    assert (settings.codec, settings.save, settings.load, settings.audit) == ("auto", "all", "auto", 0.001)


@pytest.mark.parametrize(
    "given",
    [{"codec": codec} for codec in ("auto", *CODECS)]
    + [{"save": policy} for policy in ("all", "prompt", "none")]
    + [{"load": mode} for mode in ("auto", "async", "sync", "layerwise")]
    + [
        {"match_deadline_ms": 0},
        {"match_deadline_ms": MAX_DEADLINE_MS},
        {"lease_deadline_ms": 0.5},
        {"model": "abc"},
        {"weights_epoch": 1 << 62},
        {"block_tokens": 784},
        {"load_threads": 16},
        {"save_bytes": 0},
        {"save_patience_ms": 0},
        {"cost_model": False},
        {"without_prefix_caching": True},
        {"traces": True},
        {"audit": 1},
        {"audit": 0.0},
        {"ttl": None},
        {"ttl": 0.5},
        {"priority": -100},
    ],
)
def test_what_is_allowed_is_taken_as_it_is(given: dict[str, Any]) -> None:
    settings = ConnectorSettings.of({**URL, **given})
    for name, value in given.items():
        assert getattr(settings, name) == value
    assert isinstance(settings.save, SavePolicy) and isinstance(settings.load, LoadMode)


@pytest.mark.parametrize(("given", "codec"), [({"codec": "int8-th"}, "int8-kc64"), ({"sketch_every": 100}, "auto")])
def test_what_was_removed_is_taken_with_one_warning(
    given: dict[str, Any], codec: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert ConnectorSettings.of({**URL, **given}).codec == codec
    assert len(caplog.records) == 1 and "was removed" in caplog.text


URLS = ("", "/run/kv.sock", "embedded:./kv", 5, None)
WRONG = [("url", value) for value in URLS] + [
    (name, value) for name, kind in kinds_of(ConnectorSettings).items() for value in wrong_values(kind)
]


def test_a_wrong_value_is_one_line_that_names_it() -> None:
    assert {name for name, _ in WRONG} == {*kinds_of(ConnectorSettings)}
    for name, value in WRONG:
        with pytest.raises(BadInput) as caught:
            ConnectorSettings.of({**URL, name: value})
        assert one_line(caught.value, f"kv_connector_extra_config: {name}={value!r}; give "), (name, value)


def test_a_key_that_is_not_known_is_named_with_those_that_are() -> None:
    with pytest.raises(BadInput) as caught:
        ConnectorSettings.of({**URL, "path": 1, "Codec": "raw"})
    assert one_line(caught.value, "path is not a setting", "known: url, codec, save, load")
    with pytest.raises(BadInput) as caught:
        ConnectorSettings.of({})
    assert one_line(caught.value, "url is missing; give a sidecar's socket", '"unix:/run/kvstore/kvstore.sock"')
