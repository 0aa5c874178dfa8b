"""What is imported before a model is loaded is kept out of garbage collections."""

import gc
import sys

from service.worker.model.garbage import importing


def test_a_first_import_is_not_collected_and_kept_out_of_later_collections(tmp_path, monkeypatch):
    (tmp_path / "quire_large_library.py").write_text("made = [[] for _ in range(1000)]")
    monkeypatch.syspath_prepend(tmp_path)
    frozen = gc.get_freeze_count()
    try:
        with importing("quire_large_library"):
            assert not gc.isenabled()
            import quire_large_library  # type: ignore[import-not-found]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= frozen + 1000
        assert len(quire_large_library.made) == 1000
    finally:
        sys.modules.pop("quire_large_library", None)


def test_what_was_made_since_the_import_is_still_collected():
    frozen = gc.get_freeze_count()
    with importing("gc"):
        assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen
