"""Pure helpers of `ray._private` and `ray._common` that other packages call."""

from __future__ import annotations

import pytest

from hpcray.compat.names.util import convert_string_to_type


def test_texts_become_numbers_and_truth_values():
    assert convert_string_to_type("3", int) == 3 and convert_string_to_type("false", bool) is False
    with pytest.raises(ValueError, match="Failed to convert"):
        convert_string_to_type("maybe", bool)
