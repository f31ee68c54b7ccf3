"""`raysearch matmul` as people and programs ask it."""

import json
from subprocess import CompletedProcess

import pytest

CASE_3 = "A[I, J_X] B[J_X, K] -> C[I, K]"


def test_a_product_is_drawn_from_its_operands_to_its_result(raysearch) -> None:
    ran: CompletedProcess[str] = raysearch("matmul", CASE_3, "--mesh", "X=4", "--set", "sizes=I=64,J=128,K=32")
    assert ran.returncode == 0, ran.stderr
    for text in ("A[I, J_X]   64 x 32 per device", "C[I, K] {U_X}", "all-reduce over X", "us in all, with 90 %"):
        assert text in ran.stdout


def test_programs_get_the_same_figures(raysearch) -> None:
    ran = raysearch(
        "matmul", CASE_3, "--mesh", "X=4,Y=2", "--hardware", "tpu_v5p", "--set", "objective=bytes", "--json"
    )
    found = json.loads(ran.stdout)
    assert (found["mesh"], found["sizes"]) == ({"X": 4, "Y": 2}, {"I": 8192, "J": 8192, "K": 8192})
    best, others = found["best"], found["others"]
    assert all(best["sent_bytes_per_device"] <= other["sent_bytes_per_device"] for other in others)
    moves = [move for tensor in best["moves"].values() for move in tensor]
    assert sum(move["sent_bytes"] for move in moves) == pytest.approx(best["sent_bytes_per_device"])
    assert sum(move["time_s"] for move in moves) == pytest.approx(best["communication_s"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("A[I, J_X]", "--mesh", "X=4"), "expected a product such as"),
        ((CASE_3, "--mesh", "X=0"), "--mesh: expected names with counts from 1 to 10,000, as in X=4,Y=8, got 'X=0'"),
        ((CASE_3, "--mesh", "X=2,X=2"), "--mesh: X is given twice"),
        ((CASE_3, "--mesh", "X=2,Y=2,Z=2,W=2"), "expected at most 3 axes, got 4"),
        (("A[a,b,c,d,i,j] B[a,b,c,d,j,k] -> C[a,b,c,d,i,k]", "--mesh", "X=2"), "expected at most 5 dims, got 7"),
        ((CASE_3, "--mesh", "Y=2"), "names axis 'X'; the mesh has Y"),
        ((CASE_3, "--mesh", "X=2", "--set", "sizes=L=2"), "a size of L is given; the dims are I, J, K"),
        ((CASE_3, "--mesh", "X=2", "--set", "dtype=nvfp4"), "--set dtype: unknown format 'nvfp4'"),
        ((CASE_3, "--mesh", "X=2", "--hardware", "tpu_v5"), "did you mean 'tpu_v5p'"),
    ],
)
def test_a_mistake_is_one_error(raysearch, arguments: tuple[str, ...], expected: str) -> None:
    ran = raysearch("matmul", *arguments)
    assert ran.returncode == 2
    assert expected in ran.stderr
    assert ran.stderr.count("\n") == 1
