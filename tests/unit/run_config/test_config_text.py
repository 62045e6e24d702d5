"""A config as text, updated piece by piece."""

from __future__ import annotations

import json

from dist_wandb.run_config.ends import ConfigText


def test_the_text_is_the_config_as_json_in_order() -> None:
    text = ConfigText()
    assert str(text) == "{}"
    assert text.renew({"b": (1, 2), "a": 'say "x"', "o": {1: object}})
    assert not text.renew({"b": [1, 2]})
    assert text.renew({"a": None, "c": 0.5})
    pairs = {"__dist_wandb_pairs__": [[1, "<class 'object'>"]]}
    assert list(json.loads(str(text)).items()) == [("b", [1, 2]), ("a", None), ("o", pairs), ("c", 0.5)]
