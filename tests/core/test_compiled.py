# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""How loops are compiled and kept."""

import warnings

import pytest
from numba.core import caching

from pyro_nmm.compiled import loops


@pytest.mark.parametrize("disk", ["full", "read-only"])
def test_a_disk_that_cannot_be_written(disk, monkeypatch):
    """Loops are compiled all the same, and one warning names the cure."""

    def save(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "save", save)
    if disk == "read-only":
        monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    loops._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one, two = loops._compiled(lambda x: x + 1), loops._compiled(lambda x: x + 2)
        assert (one(1), two(1)) == (2, 3)
    (text,) = (str(warning.message) for warning in caught)
    assert "set NUMBA_CACHE_DIR to a folder that can be written" in text
    assert ("No space left" if disk == "full" else "no locator") in text
