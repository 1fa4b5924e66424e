"""What `make test` leaves to `make test-all`: how it is chosen, written, and obeyed."""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

import tests.conftest
from tests.kit import cover, mutations

A, B, C = "tests/gemm/test_a.py", "tests/moe/test_b.py", "tests/gemm/test_c.py"


def ran(node, cpu_s, lines, always=False):
    return node, cpu_s, {"tir/x.py": lines}, always


def measured(folder, *given):
    costs = {node: {"cpu_s": s, "always": always} for node, s, _, always in given}
    lines = {node: {"lines": made} for node, _, made, _ in given}
    (folder / "costs-1.json").write_text(json.dumps(costs | {"": {}}))
    (folder / "lines-1.json").write_text(json.dumps(lines))
    return cover.Tests(folder)


@pytest.fixture(autouse=True)
def no_killers(monkeypatch, tmp_path):
    monkeypatch.setattr(cover, "KILLERS", tmp_path / "killers.jsonl")


@pytest.fixture(autouse=True)
def worth(monkeypatch):
    monkeypatch.setattr(cover, "WORTH", 6)
    monkeypatch.setattr(cover, "LEFT", 0.02)
    monkeypatch.setattr(cover, "VARIANT_S", 1.0)


@pytest.fixture
def no_mutations(monkeypatch):
    monkeypatch.setattr(mutations, "mutations", list)


@pytest.mark.usefixtures("no_mutations")
def test_what_stays(tmp_path):
    cover.note_killer("a mutation", f"{A}::test_killer")
    cover.note_killer("another", C)  # a module that cannot be imported
    tests = measured(
        tmp_path,
        ran(f"{A}::test_cheap", 0.1, [1]),
        ran(f"{A}::test_variants[1]", 0.9, [1]),  # the cheapest of the function
        ran(f"{A}::test_variants[2]", 3.0, [1]),
        ran(f"{A}::test_variants[3]", 1.5, [*range(10, 20)]),  # lines that no cheaper test runs
        ran(f"{A}::test_long", 4.5, [*range(1, 20)]),
        ran(f"{A}::test_long_of_its_own", 7.5, [*range(1, 50)]),
        ran(f"{A}::test_same_lines", 4.0, [1, *range(20, 50)]),  # the most new lines a second
        ran(f"{A}::test_few_lines", 4.5, [*range(50, 75)]),
        ran(f"{A}::test_killer", 9.0, [1]),
        ran(f"{C}::test_minus[a]", 9.0, [1]),
        ran(f"{C}::test_minus[b]", 9.5, [1]),
        ran(f"{B}::test_always[1]", 9.0, [1], always=True),
        ran(f"{B}::test_always[2]", 8.0, [1], always=True),
    )
    assert cover.chosen(tests) == {
        f"{A}::test_cheap",
        f"{A}::test_variants[1]",
        f"{A}::test_variants[3]",
        f"{A}::test_same_lines",
        f"{A}::test_killer",
        f"{C}::test_minus[a]",
        f"{B}::test_always[2]",
    }


def test_the_most_new_lines_a_second_come_first(tmp_path, no_mutations):
    tests = measured(
        tmp_path,
        ran(f"{A}::test_all", 10.0, [*range(100)]),
        ran(f"{A}::test_half", 9.0, [*range(50)]),
        ran(f"{A}::test_other_half", 9.0, [*range(50, 100)]),
    )
    assert cover.chosen(tests) == {f"{A}::test_all"}


def test_who_needs_what_others_made_does_not_pay_for_it(tmp_path, no_mutations):
    """What stays pays for what it needs, whoever made it when it was measured."""
    costs = {
        f"{A}::test_first": {"cpu_s": 8.9, "keys": ["kernel"], "made": {"kernel": 8.0}},
        f"{A}::test_second": {"cpu_s": 0.1, "keys": ["kernel"], "made": {}},
        f"{B}::test_killer": {"cpu_s": 9.0, "keys": ["other"], "made": {"other": 8.0}},
        f"{B}::test_beside_it": {"cpu_s": 0.1, "keys": ["other"], "made": {}},
    }
    costs = {node: test | {"always": False} for node, test in costs.items()}
    (tmp_path / "costs-1.json").write_text(json.dumps(costs))
    assert cover.chosen(cover.Tests(tmp_path)) == set()  # no test is cheap with its kernel
    cover.note_killer("a mutation", f"{B}::test_killer")
    stay = {f"{B}::test_killer", f"{B}::test_beside_it"}
    assert cover.chosen(cover.Tests(tmp_path)) == stay


def test_a_few_mutations_are_left_whose_killers_cost_the_most(tmp_path, no_mutations):
    """Two of 100: a killer of many is kept, and one whose kernel another one needs, too."""
    costs = {
        f"{A}::test_long": {"cpu_s": 20.0},
        f"{A}::test_of_three": {"cpu_s": 27.0},
        f"{B}::test_shared[1]": {"cpu_s": 22.0, "keys": ["kernel"], "made": {"kernel": 20.0}},
        f"{B}::test_shared[2]": {"cpu_s": 2.0, "keys": ["kernel"]},
        f"{B}::test_next": {"cpu_s": 9.5, "keys": ["other"], "made": {"other": 9.0}},
        f"{B}::test_short": {"cpu_s": 9.0},
        f"{C}::test_cheap": {"cpu_s": 0.1},
    }
    costs = {node: test | {"always": False} for node, test in costs.items()}
    (tmp_path / "costs-1.json").write_text(json.dumps(costs))
    killed = Counter(dict.fromkeys(costs, 1)) + Counter({f"{A}::test_of_three": 2})
    killed[f"{C}::test_cheap"] = 92
    for node, count in killed.items():
        for i in range(count):
            cover.note_killer(f"{node} {i}", node)
    assert sum(killed.values()) == 100
    out = {f"{A}::test_long", f"{B}::test_next"}
    assert cover.chosen(cover.Tests(tmp_path)) == {*costs} - out
    cover.note_killer("one more", f"{B}::test_next")  # of two now, 5 seconds for each
    out = {f"{A}::test_long"}  # the next in price kills three, and one is left
    assert cover.chosen(cover.Tests(tmp_path)) == {*costs} - out


def test_who_may_kill_a_mutation_stays(tmp_path, monkeypatch):
    """The known killer; as long as there is none, all tests of the mutation's list."""
    mutated = mutations.Mutation((f"{A}::test_named[x]", f"{A}::test_function", B), "", "", "x.py")
    unfit = replace(mutated, tests=(f"{A}::test_unfit",), path=None)
    monkeypatch.setattr(mutations, "mutations", lambda: [mutated, unfit])
    names = [f"{A}::test_named[{i}]" for i in "xy"] + [f"{A}::test_function[{i}]" for i in "12"]
    names += [f"{A}::test_unfit", f"{B}::test_one", f"{B}::test_other"]
    tests = [ran(name, 9.0, [1]) for name in names]
    out = {names[1], names[4]}
    assert cover.chosen(measured(tmp_path, *tests)) == {*names} - out
    cover.note_killer(str(mutated), f"{B}::test_that_is_gone")
    assert cover.chosen(measured(tmp_path, *tests)) == {*names} - out
    cover.note_killer(str(mutated), f"{B}::test_other")
    assert cover.chosen(measured(tmp_path, *tests)) == {f"{B}::test_other"}
    cover.note_killer(str(mutated), None)  # none of them kills it: they stay for other reasons only
    assert cover.chosen(measured(tmp_path, *tests)) == set()


def test_measurements_that_are_not_there(tmp_path):
    with pytest.raises(SystemExit, match="has no measurements: run python"):
        cover.Tests(tmp_path)


@pytest.mark.usefixtures("no_mutations")
def test_lists_are_written_by_room(tmp_path, monkeypatch):
    monkeypatch.setattr(cover, "ROOT", tmp_path)
    monkeypatch.setattr(cover, "TESTS", tmp_path / "tests")
    for room in ("gemm", "moe", "tir"):
        (tmp_path / "tests" / room).mkdir(parents=True)
    (tmp_path / "tests" / "tir" / cover.LIST).write_text("test_of_before.py::test\n")
    names = [f"{A}::test_all[1]", f"{A}::test_all[2]", f"{A}::test_some[1]", f"{A}::test_some[2]"]
    tests = measured(tmp_path, *(ran(name, 9.0, [1]) for name in (*names, f"{B}::test_one")))
    cover.write(tests, {f"{A}::test_some[1]"})
    assert cover.listed() == {f"{A}::test_all", f"{A}::test_some[2]", f"{B}::test_one"}
    assert (tmp_path / "tests/gemm" / cover.LIST).read_text().startswith("# Left to make test-all")
    assert not (tmp_path / "tests/tir" / cover.LIST).exists()


class Item:
    """A test as pytest collects it."""

    def __init__(self, node):
        self.nodeid, self.marks = node, []

    def add_marker(self, mark):
        self.marks.append(mark.name)

    def get_closest_marker(self, name):
        return name if name in self.marks else None


def collected(nodes, lists, monkeypatch, **options):
    """Return what is run of the tests ``nodes``, and what is not."""
    monkeypatch.setattr(cover, "listed", lambda: set(lists))
    items, out = [*map(Item, nodes)], []
    hook = SimpleNamespace(pytest_deselected=lambda items: out.extend(i.nodeid for i in items))
    config = SimpleNamespace(getoption=lambda name: options.get(name[2:]), hook=hook)
    run = tests.conftest.pytest_collection_modifyitems(config, items)
    next(run)
    with pytest.raises(StopIteration):
        next(run)
    return [item.nodeid for item in items], out


def test_what_is_listed_is_left_out(monkeypatch):
    nodes = [f"{A}::test_all[1]", f"{A}::test_all[2]", f"{A}::test_some[1]", f"{A}::test_some[2]"]
    listed = [f"{A}::test_all", f"{A}::test_some[2]", f"{B}::test_of_another_room"]
    kept, out = nodes[2:3], [*nodes[:2], nodes[3]]
    assert collected(nodes, listed, monkeypatch) == (kept, out)
    assert collected(nodes, listed, monkeypatch, exhaustive=True) == (nodes, [])
    assert collected(nodes, listed, monkeypatch, listed=True) == (nodes, [])


def test_lists_name_functions_that_there_are():
    """Of parameters that there are no more nothing is left out: that does no harm."""
    names = {cover.function(name) for name in cover.listed()}
    assert len(names) > 50
    for name in sorted(names):
        file, _, function = name.partition("::")
        assert f"def {function}(" in (cover.ROOT / file).read_text(), f"{name} is no test any more"
