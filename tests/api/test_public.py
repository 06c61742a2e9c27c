import inspect
import random
import subprocess
import sys

import autopar


def test_the_public_list_is_what_we_export():
    for name in autopar.__all__:
        assert getattr(autopar, name) is not None
    exported = {
        n
        for n, value in vars(autopar).items()
        if not n.startswith("_") and n != "TYPE_CHECKING" and (n == "checkpoint" or not inspect.ismodule(value))
    }
    assert exported == set(autopar.__all__)


def test_a_name_that_is_not_public_is_an_attribute_error():
    assert not hasattr(autopar, "complie")
    assert set(autopar.__all__) <= set(dir(autopar))


def test_no_subpackage_hides_a_public_function():
    code = (
        "import importlib, pkgutil, autopar\n"
        "for each in pkgutil.iter_modules(autopar.__path__):\n"
        "    importlib.import_module(f'autopar.{each.name}')\n"
        "print(*(n for n in autopar.__all__ if n[0].islower() and not callable(getattr(autopar, n))))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert found == ["checkpoint"]


def test_everything_public_is_documented():
    for name in autopar.__all__:
        assert inspect.getdoc(getattr(autopar, name)), name


def test_errors_for_people_are_value_errors():
    people = [getattr(autopar, n) for n in autopar.__all__ if n.endswith("Error") and n != "PeerError"]
    assert people and all(issubclass(error, ValueError) for error in people)


def test_checkpoints_are_imported_by_their_public_name():
    from autopar.checkpoint import save_checkpoint
    from autopar.runtime.checkpoint import checkpoint

    assert save_checkpoint is autopar.checkpoint.save_checkpoint is checkpoint.save_checkpoint
    assert autopar.checkpoint.__all__ == checkpoint.__all__


def test_a_name_that_is_imported_late_draws_nothing_from_python(tmp_path, monkeypatch):
    (tmp_path / "drawing.py").write_text("import random\nfound = random.random()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(autopar._HOMES, "found", "drawing")
    random.seed(0)
    assert autopar.found == random.Random(0).random() == random.random()
    del autopar.found
