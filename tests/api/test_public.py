import inspect

import autopar


def test_the_public_list_is_what_we_export():
    exported = {
        n for n in vars(autopar) if not n.startswith("_") and not inspect.ismodule(vars(autopar)[n])
    }
    assert exported == set(autopar.__all__)


def test_everything_public_is_documented():
    for name in autopar.__all__:
        assert inspect.getdoc(getattr(autopar, name)), name


def test_errors_for_people_are_value_errors():
    people = [
        getattr(autopar, n) for n in autopar.__all__ if n.endswith("Error") and n != "PeerError"
    ]
    assert people and all(issubclass(error, ValueError) for error in people)
