from sim.near_names import did_you_mean


def test_the_hint_is_the_closest_name_or_all_of_them() -> None:
    assert did_you_mean("rando", ["random", "annealing"]) == "did you mean 'random'?"
    assert did_you_mean("zzz", ["b", "a"]) == "known: a, b"
    assert did_you_mean("zzz", []) == "none is known"
