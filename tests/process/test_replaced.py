from types import SimpleNamespace

from hpcdist.process.replaced import Replaced


def test_what_is_replaced_comes_back_unless_others_have_replaced_it():
    owner, table, replaced = SimpleNamespace(a=1, b=2), {"c": 3}, Replaced()
    for value in (10, 11):  # twice: the first value comes back
        replaced.set(owner, "a", value)
    replaced.set(owner, "b", 20)
    replaced.set(table, "c", 30)
    assert (owner.a, owner.b, table) == (11, 20, {"c": 30})
    owner.b = "theirs"
    assert replaced.put_back() == ["b"]
    assert (owner.a, owner.b, table) == (1, "theirs", {"c": 3})
    assert replaced.put_back() == []
