"""Errors: what a message says, and that every one of ours can be caught as a ValueError."""

import inspect
import pickle

import pytest

from compiled_adv import errors
from compiled_adv.errors import AdvantageWarning, CompiledAdvError, UnknownKey, nearest, suggest

CLASSES = [x for x in vars(errors).values() if inspect.isclass(x) and issubclass(x, CompiledAdvError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_of_ours_is_a_value_error_and_says_which_mistake_it_is(cls):
    error = cls("something is wrong")
    assert isinstance(error, ValueError)
    assert str(error) == f"{cls.__name__}: something is wrong"


def test_a_message_says_what_where_what_was_found_and_what_would_work():
    error = UnknownKey("unknown key 'estimater'", at="actor.advantage (a.yaml:9)", found="estimater", hint="estimator")
    assert str(error).splitlines() == [
        "UnknownKey: unknown key 'estimater'",
        "  at    actor.advantage (a.yaml:9)",
        "  found estimater",
        "  try   estimator",
    ]


def test_a_falsy_finding_is_still_printed():
    assert "  found 0" in str(UnknownKey("wrong", found=0))


def test_an_error_survives_the_way_from_a_worker_to_its_driver():
    error = UnknownKey("unknown", at="here", found=3, hint="there")
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), back.hint) == (UnknownKey, str(error), "there")


def test_the_nearest_name_is_found_whatever_its_case():
    assert nearest("Token_GEA", ["turn_gae", "token_gae"]) == "token_gae"
    assert nearest("scaleoutcome", ["ScaleOutcome"]) == "ScaleOutcome"


def test_nothing_is_nearest_to_a_name_unlike_all_others():
    assert nearest("zzz", ["token_gae"]) is None


def test_a_suggestion_lists_the_known_names_even_without_a_nearest():
    assert suggest("zzz", ["a", "b"]) == "known: a, b"
    assert suggest("gvpp", ["additive", "gvpo"]) == "gvpo   (known: additive, gvpo)"


def test_the_warning_category_is_a_user_warning():
    assert issubclass(AdvantageWarning, UserWarning)
